package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
)

const partitionHelp = `Show which workers have the partitions of a group (package partition), pause it, and
change their number.

NAME is the group's name: that of the exchange that its publishers use.

Exit codes:
  0    done
  1    no: there is no such group, or nothing to move it to
  2    unknown: the broker can't be reached or refuses the user, or the timeout expired
  64   the command line is wrong; nothing was sent
  130  interrupted`

func (c *command) partition() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "partition",
		Short: "Show the owners of partitions, pause them, and change their number",
		Long:  partitionHelp,
		Example: `  hopback partition show orders
  hopback partition pause orders --for 1h --why "the bank is down"
  hopback partition reshard orders`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command; 0 means none")
	groups := pausing{"partition", "group", "NAME", c.partitionGroups(), pause.PauseGroup, pause.ResumeGroup, pause.OfGroup}
	cmd.AddCommand(c.partitionShow(), c.pause(groups), c.resume(groups), c.partitionReshard())
	return cmd
}

// shownGroup is a group as JSON.
type shownGroup struct {
	Name       string            `json:"name"`
	Generation int               `json:"generation"`
	Partitions int               `json:"partitions"`
	Window     int               `json:"window"`
	Next       int               `json:"next_partitions,omitempty"`
	Paused     *pause.State      `json:"paused,omitempty"`
	States     []partition.State `json:"states,omitempty"`

	hidesPause bool // the user may not read whether it is paused
}

func (c *command) partitionShow() *cobra.Command {
	var watch time.Duration
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Show the owner of each partition, and how many messages wait",
		Long: `Show the owner of each partition, and how many messages wait in its queue. The workers
answer within a moment; if a partition has no owner, the command waits for 2 s. An
owner is shown by its Config.Worker. --watch repeats that until ^C.`,
		Example: `  hopback partition show orders
  hopback partition show orders --watch=5s
  hopback partition show orders -o json`,
		Args:              takes(1, 1, "NAME"),
		ValidArgsFunction: firstOnly(c.partitionGroups()),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkWatch(cmd, watch, args); err != nil {
				return err
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				take := func(ctx context.Context) snapshot {
					g, err := inspectGroup(ctx, b, args[0])
					if err != nil {
						return snapshot{err: timedOut(ctx, err)}
					}
					return snapshot{value: g, text: g.text}
				}
				if watch > 0 {
					return c.watch(ctx, watch, take)
				}
				s := take(ctx)
				if s.err != nil {
					return s.err
				}
				return c.result(s.value, nil, s.text, "")
			})
		},
	}
	watchFlag(cmd, &watch)
	c.outputFlag(cmd, "the partitions")
	return cmd
}

func inspectGroup(ctx context.Context, b *broker, name string) (shownGroup, error) {
	now, next, err := partition.Find(ctx, b.conn, name)
	if err != nil {
		return shownGroup{}, err
	}
	g := shownGroup{Name: now.Name, Generation: now.Generation, Partitions: now.Partitions, Window: now.Window, Next: next.Partitions}
	s, paused, err := pause.OfGroup(ctx, b.conn, name)
	switch g.hidesPause = errors.Is(err, client.ErrUnauthorized); {
	case err != nil && !g.hidesPause:
		return shownGroup{}, err
	case paused:
		g.Paused = &s
	}
	g.States, err = partition.Inspect(ctx, b.conn, now)
	return g, err
}

func (g shownGroup) text(text *strings.Builder) {
	shares := map[string]int{}
	waiting, free, earlier := uint64(0), 0, uint64(0)
	table := tabwriter.NewWriter(text, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "queue\towner\twaiting")
	for _, s := range g.States {
		owner := printable(s.Owner)
		if s.Generation != g.Generation {
			earlier += s.Waiting
			_, _ = fmt.Fprintf(table, "%s\t(generation %d)\t%d\n", s.Queue, s.Generation, s.Waiting)
			continue
		}
		if s.Owner == "" {
			owner, free = "-", free+1
		} else {
			shares[s.Owner]++
		}
		waiting += s.Waiting
		_, _ = fmt.Fprintf(table, "%s\t%s\t%d\n", s.Queue, owner, s.Waiting)
	}
	_ = table.Flush()
	_, _ = fmt.Fprintf(text, "%s in generation %d, window %d: %s, %d without an owner; %s waiting\n",
		count(g.Partitions, "partition"), g.Generation, g.Window, count(len(shares), "owner"), free, count(int(waiting), "message"))
	switch {
	case g.Paused != nil:
		_, _ = fmt.Fprintf(text, "All of them are %s\n", g.Paused)
	case g.hidesPause:
		_, _ = fmt.Fprintln(text, "The user may not read whether they are paused.")
	}
	if earlier > 0 {
		_, _ = fmt.Fprintf(text, "%s waiting in queues of earlier generations: perhaps old definitions were imported. The owner of the first partition moves them.\n", count(int(earlier), "message"))
	}
	if g.Next > 0 {
		_, _ = fmt.Fprintf(text, "The next generation, with %s, waits for \"hopback partition reshard %s\".\n", count(g.Next, "partition"), g.Name)
	}
}

func (c *command) partitionReshard() *cobra.Command {
	var late time.Duration
	cmd := &cobra.Command{
		Use:   "reshard NAME",
		Short: "Move a group to its next generation, with another number of partitions",
		Long: `Move a group to its next generation, which has another number of partitions or
another window. Before that, apply the topology of the next generation, and start its
workers, which wait. Publishers and all workers continue to run.

RabbitMQ routes new messages to the new partitions from the first moment on. Their
workers begin when those of the old partitions have completed all messages. So the
order by key is kept, except for messages that are longer than --late on their way
inside RabbitMQ. Keys that are blocked, or wait for a long delay, don't block
others: the command ends when they are finished, too. You can interrupt it, and run it
again. There is no time limit unless --timeout is set.`,
		Example:           `  hopback partition reshard orders`,
		Args:              takes(1, 1, "NAME"),
		ValidArgsFunction: firstOnly(c.partitionGroups()),
		RunE: func(cmd *cobra.Command, args []string) error {
			if late < 0 {
				return usage("--late can't be negative")
			}
			if limit := cmd.Flag("timeout"); !limit.Changed {
				if err := limit.Value.Set("0s"); err != nil {
					return err
				}
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				return c.reshard(ctx, b, args[0], late)
			})
		},
	}
	c.outputFlag(cmd, "the result")
	durationVar(cmd.Flags(), &late, "late", 0, "how long a message may be on its way inside RabbitMQ (default 5s)")
	return cmd
}

func (c *command) reshard(ctx context.Context, b *broker, name string, late time.Duration) error {
	from, to, err := partition.Find(ctx, b.conn, name)
	switch {
	case err != nil:
		return timedOut(ctx, err)
	case to.Generation == 0:
		return coded(No, fmt.Errorf("%q is at generation %d, and there is no next one; start workers whose Group has Generation: %d, and which apply its topology", name, from.Generation, from.Generation+1))
	}
	p := c.progress(fmt.Sprintf("switching %s to %s", name, count(to.Partitions, "partition")))
	err = partition.Reshard(ctx, b.conn, from, to, partition.ReshardConfig{Late: late, Progress: func(finished, all int) {
		p.set("switching %s to %s: %d of %d old partitions are finished", name, count(to.Partitions, "partition"), finished, all)
	}})
	p.end()
	if err != nil {
		return errors.Join(timedOut(ctx, err), errors.New("run it again to continue"))
	}
	if c.structured() {
		return c.printStructured(shownGroup{Name: to.Name, Generation: to.Generation, Partitions: to.Partitions, Window: to.Window})
	}
	_, err = fmt.Fprintf(c.stdout.w, "%q is at generation %d, with %s. Stop the workers of generation %d, and delete its queues, but no exchange.\n", name, to.Generation, count(to.Partitions, "partition"), from.Generation)
	return err
}
