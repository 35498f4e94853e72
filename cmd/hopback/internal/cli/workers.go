package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/live"
)

// shownHandlers is how many running handlers are shown as text.
const shownHandlers = 50

func (c *command) workers() *cobra.Command {
	var watch time.Duration
	cmd := &cobra.Command{
		Use:   "workers",
		Short: "Show the workers, and which handlers run",
		Long: `Show all workers, their running handlers, and what they handled in the last hour. Workers
answer if they use package live (middleware/live). Nothing shows the bodies of messages.
--watch repeats that until ^C. Workers answer by themselves then, within seconds of a change,
so it shows nothing new more often than every 2 s.

Text has the 50 handlers that have run longest; JSON and YAML have up to 500 of each worker.

Exit codes:
  0    done, also if there are no workers
  2    unknown: the broker can't be reached or refuses the user, or the timeout expired
  64   the command line is wrong; nothing was sent
  130  interrupted`,
		Example: `  hopback workers
  hopback workers --watch=5s
  hopback workers -o json`,
		Args: takes(0, 0, "[flags]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkWatch(cmd, watch, args); err != nil {
				return err
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				if watch > 0 {
					take, end := follow(ctx, b.conn)
					defer end()
					return c.watch(ctx, watch, take)
				}
				s := fleetSnapshot(live.Ask(ctx, b.conn))
				if s.err != nil {
					return timedOut(ctx, s.err)
				}
				return c.result(s.value, nil, s.text, "")
			})
		},
	}
	f := cmd.Flags()
	c.connectionFlags(f)
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command; 0 means none")
	watchFlag(cmd, &watch)
	c.outputFlag(cmd, "the workers")
	return cmd
}

func fleetSnapshot(f live.Fleet, err error) snapshot {
	if err != nil {
		return snapshot{err: err}
	}
	return snapshot{value: f, text: func(text *strings.Builder) { fleetText(text, f, time.Now()) }}
}

// followPatience is how long workers have for their first answers, and how long follow waits after an error.
const followPatience = 2 * time.Second

// follow watches the workers until end is called. take waits for what is newer than its last result.
func follow(ctx context.Context, conn *client.Conn) (take func(context.Context) snapshot, end func()) {
	watching, cancel := context.WithCancel(ctx)
	news := make(chan snapshot, 1) // has the newest
	show := func(s snapshot) {
		select {
		case <-news:
		default:
		}
		news <- s
	}
	began, done := time.Now(), make(chan struct{})
	go func() {
		defer close(done)
		for watching.Err() == nil {
			err := live.Watch(watching, conn, func(f live.Fleet) {
				if len(f.Workers) > 0 || time.Since(began) >= followPatience {
					show(fleetSnapshot(f, nil))
				}
			})
			if err != nil {
				show(fleetSnapshot(live.Fleet{}, err))
				select {
				case <-time.After(followPatience):
				case <-watching.Done():
				}
			}
		}
	}()
	take = func(ctx context.Context) snapshot {
		select {
		case s := <-news:
			return s
		case <-ctx.Done():
			return snapshot{err: timedOut(ctx, context.Cause(ctx))}
		}
	}
	return take, func() { cancel(); <-done }
}

// fleetText shows the workers, and what has run longest.
func fleetText(text *strings.Builder, f live.Fleet, now time.Time) {
	type running struct {
		live.Running
		host string
	}
	var handlers []running
	all, stuck := 0, 0
	table := tabwriter.NewWriter(text, 0, 0, 2, ' ', 0)
	if len(f.Workers) > 0 {
		_, _ = fmt.Fprintln(table, "host\tversion\tup\tqueue\trunning\tstuck\thandled/h\tfailed/h")
	}
	for _, w := range f.Workers {
		for _, r := range w.Running {
			handlers = append(handlers, running{r, w.Host})
		}
		for _, q := range w.Queues {
			all, stuck = all+q.Running, stuck+q.Stuck
			_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\n", printable(w.Host), dash(w.Version), lasting(now, w.Since), printable(q.Name), q.Running, q.Stuck, q.Handled, q.Failed)
		}
		if len(w.Queues) == 0 {
			_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t-\t0\t0\t0\t0\n", printable(w.Host), dash(w.Version), lasting(now, w.Since))
		}
	}
	_ = table.Flush()
	slices.SortStableFunc(handlers, func(a, b running) int { return a.Since.Compare(b.Since) })
	if len(handlers) > 0 {
		_, _ = fmt.Fprintln(table, "\nfor\tqueue\tmessage\ttype\ttenant\tattempt\thost")
	}
	for _, r := range handlers[:min(len(handlers), shownHandlers)] {
		took := lasting(now, r.Since)
		if r.Stuck {
			took += " (stuck)"
		}
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%d\t%s\n", took, printable(r.Queue), dash(r.ID), dash(r.Type), dash(r.Tenant), r.Attempt, printable(r.host))
	}
	_ = table.Flush()
	if len(handlers) > 0 {
		text.WriteByte('\n')
	}
	_, _ = fmt.Fprintf(text, "%s, %s running, %d stuck\n", count(len(f.Workers), "worker"), count(all, "handler"), stuck)
	if f.Dropped > 0 {
		_, _ = fmt.Fprintf(text, "%s came that aren't answers of a worker: somebody may have forged them.\n", count(f.Dropped, "message"))
	}
}

// dash is a text of somebody else, or "-".
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return printable(s)
}

// lasting is how long something lasts that began at a time.
func lasting(now, since time.Time) string {
	d := max(now.Sub(since), 0)
	if d < time.Minute {
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}
