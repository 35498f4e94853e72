package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/partition"
)

const partitionHelp = `Show who handles the partitions of a group of package partition, and change their
number.

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
		Short: "Show the owners of partitions, and change their number",
		Long:  partitionHelp,
		Example: `  hopback partition show orders
  hopback partition reshard orders`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	f.Duration("timeout", time.Minute, "time limit of the command; 0 means none")
	cmd.AddCommand(c.partitionShow(), c.partitionReshard())
	return cmd
}

// shownGroup is a group as JSON.
type shownGroup struct {
	Name       string            `json:"name"`
	Generation int               `json:"generation"`
	Partitions int               `json:"partitions"`
	Window     int               `json:"window"`
	Next       int               `json:"next_partitions,omitempty"`
	States     []partition.State `json:"states"`
}

func (c *command) partitionShow() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Show the owner of each partition, and how many messages wait",
		Long: `Show the owner of each partition, and how many messages wait in its queue. The workers
answer within a moment; if a partition has no owner, the command waits for 2 s. An
owner is shown by its Config.Worker.`,
		Example: `  hopback partition show orders
  hopback partition show orders --json`,
		Args: takes(1, 1, "NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				now, next, err := partition.Find(ctx, b.conn, args[0])
				if err != nil {
					return timedOut(ctx, err)
				}
				states, err := partition.Inspect(ctx, b.conn, now)
				if err != nil {
					return timedOut(ctx, err)
				}
				return c.printPartitions(shownGroup{now.Name, now.Generation, now.Partitions, now.Window, next.Partitions, states})
			})
		},
	}
	c.jsonFlag(cmd, "the partitions")
	return cmd
}

func (c *command) printPartitions(g shownGroup) error {
	if c.json {
		return c.printJSON(g)
	}
	var text strings.Builder
	shares := map[string]int{}
	waiting, free := uint64(0), 0
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "queue\towner\twaiting")
	for _, s := range g.States {
		owner := printable(s.Owner)
		if s.Owner == "" {
			owner, free = "-", free+1
		} else {
			shares[s.Owner]++
		}
		waiting += s.Waiting
		_, _ = fmt.Fprintf(table, "%s\t%s\t%d\n", s.Queue, owner, s.Waiting)
	}
	_ = table.Flush()
	_, _ = fmt.Fprintf(&text, "%s in generation %d, window %d: %s, %d without an owner; %s waiting\n",
		count(g.Partitions, "partition"), g.Generation, g.Window, count(len(shares), "owner"), free, count(int(waiting), "message"))
	if g.Next > 0 {
		_, _ = fmt.Fprintf(&text, "The next generation, with %s, waits for \"hopback partition reshard %s\".\n", count(g.Next, "partition"), g.Name)
	}
	_, err := fmt.Fprint(c.stdout.w, text.String())
	return err
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
inside RabbitMQ. You can interrupt the command, and run it again. There is no time
limit unless --timeout is set.`,
		Example: `  hopback partition reshard orders`,
		Args:    takes(1, 1, "NAME"),
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
	cmd.Flags().DurationVar(&late, "late", 0, "how long a message may be on its way inside RabbitMQ (default 5s)")
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
	_, err = fmt.Fprintf(c.stdout.w, "%q is at generation %d, with %s. Stop the workers of generation %d, and delete its queues.\n", name, to.Generation, count(to.Partitions, "partition"), from.Generation)
	return err
}
