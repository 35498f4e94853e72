package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
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
	queues := pausing{"queue", "queue", "QUEUE", c.queueNames(), pause.Pause, pause.Resume, pause.Of}
	cmd.AddCommand(c.pause(queues), c.resume(queues),
		c.pauseDo(queues, "show", "Show whether a queue is paused", "Show whether a queue is paused: since when, until when, by whom, and why.", "the pause", queues.of))
	return cmd
}

// pausing is what can be paused: a queue, or a group of partitions.
type pausing struct {
	command, kind, arg string

	names  cobra.CompletionFunc
	pause  func(context.Context, *client.Conn, string, pause.PauseConfig) error
	resume func(context.Context, *client.Conn, string) error
	state  func(context.Context, *client.Conn, string) (pause.State, bool, error)
}

// shownPause is the pause of a queue or a group, or that there is none.
type shownPause struct {
	Queue  string       `json:"queue,omitempty"`
	Group  string       `json:"group,omitempty"`
	Paused *pause.State `json:"paused,omitempty"`
}

func (p pausing) of(ctx context.Context, b *broker, name string) (*pause.State, error) {
	s, is, err := p.state(ctx, b.conn, name)
	if err != nil || !is {
		return nil, err
	}
	return &s, nil
}

func (c *command) pause(p pausing) *cobra.Command {
	var cfg pause.PauseConfig
	cmd := c.pauseDo(p, "pause", "Pause a "+p.kind, "Pause a "+p.kind+`. If it is paused already, it gets the new time and reason. The command
returns when the broker has stored the pause; workers notice within about a second.`, "what was done", func(ctx context.Context, b *broker, name string) (*pause.State, error) {
		cfg := cfg
		cfg.By = cmp.Or(cfg.By, c.who())
		if err := p.pause(ctx, b.conn, name, cfg); err != nil {
			return nil, err
		}
		return p.of(ctx, b, name)
	})
	cmd.Example = fmt.Sprintf("  hopback %[1]s pause orders --for 1h --why \"the bank is down\"\n  hopback %[1]s pause orders", p.command)
	durationVar(cmd.Flags(), &cfg.For, "for", 0, "resume after this time (default: until resume)")
	cmd.Flags().StringVar(&cfg.Why, "why", "", "the `reason`, for other people")
	cmd.Flags().StringVar(&cfg.By, "by", "", "`who` pauses it (default user@host)")
	return cmd
}

func (c *command) resume(p pausing) *cobra.Command {
	return c.pauseDo(p, "resume", "Resume a "+p.kind, "Resume a "+p.kind+". If it isn't paused, nothing changes.", "what was done", func(ctx context.Context, b *broker, name string) (*pause.State, error) {
		return nil, p.resume(ctx, b.conn, name)
	})
}

// pauseDo is a command about the pause of a queue or of a group.
func (c *command) pauseDo(p pausing, verb, short, long, result string, do func(context.Context, *broker, string) (*pause.State, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use: verb + " " + p.arg, Short: short, Long: long,
		Example:           "  hopback " + p.command + " " + verb + " orders",
		Args:              takes(1, 1, p.arg),
		ValidArgsFunction: firstOnly(p.names),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				s, err := do(ctx, b, args[0])
				if err != nil {
					return timedOut(ctx, b.otherKind(ctx, p, args[0], err))
				}
				shown := shownPause{Queue: args[0], Paused: s}
				if p.kind == "group" {
					shown = shownPause{Group: args[0], Paused: s}
				}
				if err := c.result(shown, nil, func(text *strings.Builder) {
					state := "not paused"
					if s != nil {
						state = s.String()
					}
					_, _ = fmt.Fprintf(text, "%s: %s\n", printable(args[0]), state)
				}, ""); err != nil {
					return err
				}
				if verb == "show" && s == nil {
					return exit(No)
				}
				return nil
			})
		},
	}
	c.outputFlag(cmd, result)
	return cmd
}

// otherKind adds to an error that there is no such queue, if there is a group of that name.
func (b *broker) otherKind(ctx context.Context, p pausing, name string, err error) error {
	if p.kind != "queue" || !errors.Is(err, client.ErrNotFound) {
		return err
	}
	if _, _, none := partition.Find(ctx, b.conn, name); none != nil {
		return err
	}
	return errors.Join(err, errors.New("it is the name of a group of partitions: use hopback partition in place of hopback queue"))
}
