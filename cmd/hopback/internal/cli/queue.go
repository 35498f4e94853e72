package cli

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/middleware/pause"
)

const queueHelp = `Pause a queue for all workers that use package pause (middleware/pause), and resume it.
They stop within about a second: running handlers continue, and messages stay in the
queue. A pause outlasts restarts of workers and of the broker. Publishers, the desk, and
workers without the package aren't affected.

Exit codes:
  0    done; show: the queue is paused
  1    no: there is no such queue; show: it isn't paused
  2    unknown: the broker can't be reached or refuses the user, or the timeout expired
  64   the command line is wrong; nothing was sent
  130  interrupted`

func (c *command) queue() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "queue",
		Short: "Pause a queue for all of its workers, and resume it",
		Long:  queueHelp,
		Example: `  hopback queue pause orders --for 1h --why "the bank is down"
  hopback queue show orders
  hopback queue resume orders`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command; 0 means none")
	var cfg pause.PauseConfig
	paused := c.queueDo("pause QUEUE", "Pause a queue", `Pause a queue. One that is paused gets the new time and reason. The command returns when the
broker knows it; workers notice within about a second.`, "what was done", func(ctx context.Context, b *broker, queue string) (queuePause, error) {
		cfg := cfg
		cfg.By = cmp.Or(cfg.By, c.who())
		if err := pause.Pause(ctx, b.conn, queue, cfg); err != nil {
			return queuePause{}, err
		}
		return pauseOf(ctx, b, queue)
	})
	paused.Example = "  hopback queue pause orders --for 1h --why \"the bank is down\"\n  hopback queue pause orders"
	durationVar(paused.Flags(), &cfg.For, "for", 0, "resume after this time (default: until resume)")
	paused.Flags().StringVar(&cfg.Why, "why", "", "a `reason` for those who wonder")
	paused.Flags().StringVar(&cfg.By, "by", "", "`who` pauses it (default user@host)")
	cmd.AddCommand(paused,
		c.queueDo("resume QUEUE", "Resume a queue", "Resume a queue. One that isn't paused stays so.", "what was done", func(ctx context.Context, b *broker, queue string) (queuePause, error) {
			return queuePause{Queue: queue}, pause.Resume(ctx, b.conn, queue)
		}),
		c.queueDo("show QUEUE", "Show whether a queue is paused", "Show whether a queue is paused: since when, until when, by whom, and why.", "the pause", pauseOf))
	return cmd
}

// queuePause is the pause of a queue, or that there is none.
type queuePause struct {
	Queue  string       `json:"queue"`
	Paused *pause.State `json:"paused,omitempty"`
}

func pauseOf(ctx context.Context, b *broker, queue string) (queuePause, error) {
	s, is, err := pause.Of(ctx, b.conn, queue)
	if err != nil || !is {
		return queuePause{Queue: queue}, err
	}
	return queuePause{queue, &s}, nil
}

// queueDo is a command about a queue.
func (c *command) queueDo(use, short, long, result string, do func(context.Context, *broker, string) (queuePause, error)) *cobra.Command {
	verb := strings.Fields(use)[0]
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long,
		Example:           "  hopback queue " + verb + " orders",
		Args:              takes(1, 1, "QUEUE"),
		ValidArgsFunction: firstOnly(c.queueNames()),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				p, err := do(ctx, b, args[0])
				if err != nil {
					return timedOut(ctx, err)
				}
				if err := c.result(p, nil, func(text *strings.Builder) {
					state := "not paused"
					if p.Paused != nil {
						state = p.Paused.String()
					}
					_, _ = fmt.Fprintf(text, "%s: %s\n", printable(p.Queue), state)
				}, ""); err != nil {
					return err
				}
				if verb == "show" && p.Paused == nil {
					return exit(No)
				}
				return nil
			})
		},
	}
	c.outputFlag(cmd, result)
	return cmd
}
