package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
)

func (c *command) delete() *cobra.Command {
	var force, dryRun bool
	cmd := &cobra.Command{
		Use:   "delete FILE",
		Short: "Delete the topology if it is empty and unused",
		Long: `Delete the topology: bindings, then queues, then exchanges. delete refuses, and prints
every reason, if a queue has messages or consumers, or if a resource outside FILE needs
the topology, such as another team's work queue that shares the delay queues. This
check needs the HTTP API.

--force deletes without the check, and loses all messages in the queues.

--dry-run deletes nothing, and shows what would be deleted: "-" marks queues, exchanges,
and bindings between other resources, with the messages in them, "!" the reasons to
refuse, and "?" what isn't known.
The exit code is 1 if delete would refuse. With --force, the reasons show what would be
lost or broken.`,
		Example: `  hopback topology delete --dry-run topology.yaml
  hopback topology delete topology.yaml
  hopback topology delete --force topology.yaml`,
		Args:              files(1, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, args, func(ctx context.Context, b *broker, in input) error {
				if b.api == nil && !force {
					return usage("delete needs the HTTP API to check who else uses these resources, or --force; %s", b.noAPI)
				}
				if err := b.connect(ctx); err != nil {
					return err
				}
				if dryRun {
					return c.deleteDry(ctx, b, in.topology, force)
				}
				return c.deleteNow(ctx, b, in.topology, force)
			})
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "delete even if in use, with all messages")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only show what would be deleted")
	c.outputFlag(cmd, "what was done")
	return cmd
}

func (c *command) deleteNow(ctx context.Context, b *broker, t declare.Topology, force bool) error {
	p := c.progress("deleting from " + b.shown)
	var report declare.Report
	var err error
	if force {
		report, err = declare.Delete(ctx, b.conn.Management(), t)
	} else {
		report, err = b.deleteIf(ctx, t, b.sources())
	}
	p.end()
	err = timedOut(ctx, err)
	if len(report.Steps) == 0 && err != nil {
		if errors.Is(err, declare.ErrInUse) {
			err = errors.Join(err, coded(No, errors.New("nothing was deleted; --force deletes without the check")))
		}
		return err
	}
	return errors.Join(c.printReport(report, err), err)
}

func (b *broker) deleteIf(ctx context.Context, t declare.Topology, src check.Sources) (declare.Report, error) {
	s, err := check.Read(ctx, check.Sources{HTTP: b.api}, declare.Topology{})
	if err == nil {
		err = b.same(s)
	}
	if err != nil {
		return declare.Report{}, err
	}
	return audit.DeleteUnused(ctx, src, t)
}

// keeping is a Requester that reads, but doesn't delete. So a dry run takes the same steps as
// delete itself.
type keeping struct{ declare.Requester }

func (k keeping) Request(ctx context.Context, method, path string, body any) (int, any, error) {
	if method == "DELETE" {
		return 200, map[string]any{"message_count": uint64(0)}, nil
	}
	return k.Requester.Request(ctx, method, path, body)
}

// deletion is what delete would do.
type deletion struct {
	Steps []deletionStep `json:"steps"`
	// InUse are the reasons for which delete would refuse without --force.
	InUse []string `json:"in_use,omitempty"`
}

type deletionStep struct {
	Resource declare.Resource `json:"resource"`
	// Result is "would delete", "absent", or "unknown": AMQP doesn't show whether an exchange exists.
	Result string `json:"result"`
	// Messages are all messages that would be lost with a queue.
	Messages  uint64 `json:"messages,omitempty"`
	Consumers uint64 `json:"consumers,omitempty"`
}

// deleteDry shows what delete would do.
func (c *command) deleteDry(ctx context.Context, b *broker, t declare.Topology, force bool) error {
	p := c.progress("reading " + b.shown)
	d, err := b.deletion(ctx, t)
	p.end()
	if err != nil {
		return timedOut(ctx, err)
	}
	if c.structured() {
		err = c.printStructured(d)
	} else {
		err = c.stdout.lines(d.text(force), diffMarks...)
	}
	if err == nil && len(d.InUse) > 0 && !force {
		err = exit(No)
	}
	return err
}

func (b *broker) deletion(ctx context.Context, t declare.Topology) (deletion, error) {
	var d deletion
	s, err := b.readBoth(ctx, t)
	if err != nil {
		return d, err
	}
	if b.api != nil {
		src := b.sources()
		src.AMQP = keeping{src.AMQP}
		_, err := b.deleteIf(ctx, t, src)
		switch {
		case errors.Is(err, declare.ErrInUse):
			for line := range strings.Lines(plainText(err)) {
				d.InUse = append(d.InUse, strings.TrimPrefix(strings.TrimSpace(line), "delete "))
			}
		case err != nil:
			return d, err
		}
	}
	planned, err := declare.Delete(ctx, keeping{b.conn.Management()}, t)
	if err != nil {
		return d, err
	}
	kinds := map[declare.Resource]string{}
	for _, change := range audit.Compare(s, t).Changes {
		kinds[change.Resource] = change.Kind
	}
	queues := map[string]declare.QueueInfo{}
	for _, q := range s.Queues {
		queues[q.Name] = q
	}
	for _, step := range planned.Steps {
		one := deletionStep{Resource: step.Resource, Result: "would delete"}
		switch kinds[step.Resource] {
		case "create":
			one.Result = "absent"
		case "unknown":
			one.Result = "unknown"
		}
		if step.Resource.Kind == "queue" && one.Result == "would delete" {
			// Counts of ready messages and consumers over AMQP are current, unlike those of the HTTP API.
			now, err := declare.Inspect(ctx, b.conn.Management(), step.Resource.Name)
			switch {
			case errors.Is(err, declare.ErrNotFound):
				one.Result = "absent"
			case err != nil:
				return d, err
			default:
				q := queues[step.Resource.Name]
				one.Messages, one.Consumers = now.Messages+q.MessagesUnacknowledged+q.MessagesDelayed+q.MessagesDeadLettering, now.Consumers
			}
		}
		d.Steps = append(d.Steps, one)
	}
	return d, nil
}

func (d deletion) text(force bool) string {
	var b strings.Builder
	counts, messages := map[string]int{}, uint64(0)
	for _, step := range d.Steps {
		counts[step.Result]++
		messages += step.Messages
		switch step.Result {
		case "unknown":
			fmt.Fprintf(&b, "? %s: only the HTTP API shows whether it exists\n", step.Resource)
		case "would delete":
			fmt.Fprintf(&b, "- %s", step.Resource)
			if step.Resource.Kind == "queue" {
				fmt.Fprintf(&b, ": %s, %s", count(step.Messages, "message"), count(step.Consumers, "consumer"))
			}
			b.WriteByte('\n')
		}
	}
	for _, why := range d.InUse {
		fmt.Fprintf(&b, "! %s\n", clean(why))
	}
	fmt.Fprintf(&b, "%d would be deleted, with %s; %d unknown, %d absent. Nothing was deleted.\n", counts["would delete"], count(messages, "message"), counts["unknown"], counts["absent"])
	if len(d.InUse) > 0 && !force {
		b.WriteString("delete would refuse, for the reasons marked with !; --force deletes without the check.\n")
	}
	return b.String()
}
