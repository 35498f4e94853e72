package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/migrate"
)

// progressStep is how often the progress is updated.
const progressStep = 500 * time.Millisecond

func (c *command) migrate() *cobra.Command {
	var from, to string
	var keep bool
	var prefetch int
	var quiet time.Duration
	cmd := &cobra.Command{
		Use:   "migrate FILE --from OLD --to NEW",
		Short: "Move a live queue's messages and bindings to a new queue",
		Long: `Move a live queue to a new one, to change what can't be changed in place: the queue's
type, or an argument that no policy can set. FILE has the new queue and not the old
one. migrate applies FILE, moves the old queue's bindings to the new queue, and then
the messages, one by one. It acknowledges each message only after the broker has
confirmed the copy.

Publishers and consumers can continue. Move the consumers to the new queue, and also
publishers that address the old queue by name. migrate deletes the old queue after it
was empty and without consumers for --quiet. You can interrupt a move, and run it
again. That can duplicate a message; it can't lose one. There is no time limit unless
--timeout is set.`,
		Example: `  hopback topology migrate topology.yaml --from orders --to orders.v2`,
		Args:    files(1, 1), ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			if limit := cmd.Flag("timeout"); !limit.Changed {
				if err := limit.Value.Set("0s"); err != nil {
					return err
				}
			}
			switch {
			case from == "" || to == "":
				return usage("migrate needs both queues: %s topology.yaml --from OLD --to NEW", cmd.CommandPath())
			case from == to:
				return usage("--from and --to are the same queue; choose another name for the new queue")
			case prefetch < 0 || quiet < 0:
				return usage("--prefetch and --quiet can't be negative")
			}
			return c.work(cmd, args, func(ctx context.Context, b *broker, in input) error {
				queue, err := newQueue(in, from, to, keep)
				if err != nil {
					return err
				}
				if b.api == nil {
					return usage("migrate needs the HTTP API to read the old queue's bindings; %s", b.noAPI)
				}
				if err := b.connect(ctx); err != nil {
					return err
				}
				return c.move(ctx, b, in, migrate.Config{Old: from, New: queue, Keep: keep, Prefetch: prefetch, Quiet: quiet})
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "the `queue` to move from")
	f.StringVar(&to, "to", "", "the `queue` in FILE to move to")
	f.BoolVar(&keep, "keep", false, "keep the old queue, empty")
	f.IntVar(&prefetch, "prefetch", 0, "move up to this many messages at once (default 1000)")
	durationVar(f, &quiet, "quiet", 0, "delete the old queue after it was empty and unused for this long (default 6s)")
	_ = cmd.RegisterFlagCompletionFunc("from", c.queueNames())
	c.outputFlag(cmd, "the result")
	return cmd
}

// newQueue finds the queue to move to in the file.
func newQueue(in input, from, to string, keep bool) (declare.Queue, error) {
	var names []string
	var found declare.Queue
	for _, q := range in.topology.Queues {
		name := q.Address().QueueName()
		names = append(names, name)
		if name == to {
			found = q
		}
		if name == from && !keep {
			return nil, usage("%s still has the queue %q, which migrate deletes at the end; remove it from the file, or use --keep", in.name, from)
		}
	}
	if found == nil {
		if best := argument.Nearest(to, names); best != "" {
			return nil, usage("%s has no queue %q; did you mean %q?", in.name, to, best)
		}
		return nil, usage("%s has no queue %q; add the new queue to it", in.name, to)
	}
	return found, nil
}

// move checks both queues, applies the file, and moves the queue.
func (c *command) move(ctx context.Context, b *broker, in input, cfg migrate.Config) error {
	s, err := check.Read(ctx, check.Sources{HTTP: b.api}, declare.Topology{})
	if err != nil {
		return timedOut(ctx, err)
	}
	var names []string
	there := map[string]bool{}
	for _, q := range s.Queues {
		names = append(names, q.Name)
		there[q.Name] = true
	}
	if !there[cfg.Old] {
		to := cfg.New.Address().QueueName()
		err := fmt.Errorf("%s has no queue %q", b.shown, cfg.Old)
		names = slices.DeleteFunc(names, func(n string) bool { return n == to })
		if best := argument.Nearest(cfg.Old, names); best != "" {
			err = fmt.Errorf("%w; did you mean %q?", err, best)
		}
		if there[to] {
			err = fmt.Errorf("%w; if it was moved to %q before, nothing is left to do", err, to)
		}
		return coded(No, errors.Join(err, errors.New("nothing was done")))
	}
	if _, err := c.unrefused(ctx, b, in); err != nil {
		return err
	}
	if _, err := c.applyNow(ctx, b, in); err != nil {
		return err
	}
	p := c.progress("moving " + cfg.Old)
	cfg.OnProgress = func(r migrate.Report, left uint64) {
		p.set("moving %s to %s: %s moved, %d left", cfg.Old, cfg.New.Address().QueueName(), count(r.Moved, "message"), left)
	}
	report, err := migrate.Run(ctx, b.conn, b.api, cfg)
	p.end()
	if err != nil {
		code := Unknown
		var unsendable *argument.Error
		switch {
		case c.interrupted():
			code = Interrupted
		case errors.As(err, &unsendable):
			code = No
		}
		err = coded(code, errors.Join(timedOut(ctx, err), errors.New("run it again to continue: every message is in one of the two queues")))
	}
	return errors.Join(c.printMove(report, cfg), err)
}

func (c *command) printMove(r migrate.Report, cfg migrate.Config) error {
	if c.structured() {
		return c.printStructured(r)
	}
	fate := "still exists"
	if r.Deleted {
		fate = "is deleted"
	}
	_, err := fmt.Fprintf(c.stdout.w, "%s and %s moved from %q to %q; %q %s.\n", count(r.Moved, "message"), count(r.Bindings, "binding"), cfg.Old, cfg.New.Address().QueueName(), cfg.Old, fate)
	return err
}

// every calls do at an interval, until ctx ends.
func every(ctx context.Context, d time.Duration, do func()) {
	ticker := time.NewTicker(d)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			do()
		}
	}
}
