package cli

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// waitingAnswer is the answer about one token.
type waitingAnswer struct {
	Token    string `json:"token"`
	Messages int    `json:"messages"`
	Error    string `json:"error,omitempty"`
}

// waiting is a command about waiting messages. do does it for one token.
func (c *command) waiting(name, short, done, more string, do func(context.Context, *client.Claimer, string) (int, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name + " QUEUE TOKEN...",
		Short: short,
		Long: short + `. ` + more + `

A token is the message-id of a retry (with claimable: true in the topology file, or
Policy.Claimable) and of a scheduled message (PublisherConfig.Claimable, in the queue
schedule_claimable), or what a handler parked its message under. It needs RabbitMQ 4.4.

The answer comes from the broker, and is final. The exit code is 0 if a message was
waiting under each token, 1 if one wasn't, and 2 if an answer isn't known.`,
		Example: "  hopback retry " + name + " orders 4711 4712",
		Args:    takes(2, math.MaxInt, "QUEUE TOKEN..."), ValidArgsFunction: firstOnly(c.queueNames()),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				claimer, err := client.NewClaimer(ctx, b.conn, args[0])
				var bad *argument.Error
				switch {
				case errors.As(err, &bad): // the broker or the queue can't
					return coded(No, err)
				case err != nil:
					return timedOut(ctx, err)
				}
				defer func() { _ = claimer.Close(ctx) }()
				return c.answers(ctx, args[1:], done, func(token string) (int, error) { return do(ctx, claimer, token) })
			})
		},
	}
	c.outputFlag(cmd, "the answers")
	return cmd
}

// answers does something for each token, and prints what came of it.
func (c *command) answers(ctx context.Context, tokens []string, done string, do func(string) (int, error)) error {
	var all []waitingAnswer
	var failed, none error
	for _, token := range tokens {
		n, err := do(token)
		a := waitingAnswer{Token: token, Messages: n}
		text := fmt.Sprintf("%s: %s %s", printable(token), count(n, "message"), done)
		switch {
		case err != nil:
			a.Error = err.Error()
			text += ", and then: " + err.Error()
			failed = errors.Join(failed, fmt.Errorf("%s: %w", printable(token), timedOut(ctx, err)))
		case n == 0:
			text = printable(token) + ": no message waits"
			none = fmt.Errorf("no message waits under %s; it may be due, handled, or never have been parked", printable(token))
		}
		all = append(all, a)
		if !c.structured() {
			if _, err := fmt.Fprintln(c.stdout.w, text); err != nil {
				return err
			}
		}
	}
	if c.structured() {
		if err := c.printStructured(all); err != nil {
			return err
		}
	}
	if failed != nil {
		return failed
	}
	return coded(No, none)
}

// printable is a token for people.
func printable(token string) string {
	if quoted := strconv.Quote(token); quoted != `"`+token+`"` {
		return quoted
	}
	return token
}

func (c *command) waitingCommands() []*cobra.Command {
	var in time.Duration
	var at string
	again := c.waiting("reschedule", "Let waiting messages wait until another time", "rescheduled",
		`Name the time with --in or --at.`,
		func(ctx context.Context, claimer *client.Claimer, token string) (int, error) {
			until := time.Now().Add(in)
			if at != "" {
				until, _ = time.Parse(time.RFC3339, at)
			}
			return claimer.Reschedule(ctx, token, until)
		})
	again.Example = "  hopback retry reschedule orders 4711 --in 10m\n  hopback retry reschedule orders 4711 --at 2030-01-31T08:00:00Z"
	durationVar(again.Flags(), &in, "in", 0, "wait for this long from now")
	again.Flags().StringVar(&at, "at", "", "wait until this `time`, such as 2030-01-31T08:00:00Z")
	again.PreRunE = func(*cobra.Command, []string) error {
		switch {
		case (in == 0) == (at == ""):
			return usage("name the new time, with either --in or --at")
		case in < 0:
			return usage("--in %v is negative", in)
		case at != "":
			if t, err := time.Parse(time.RFC3339, at); err != nil || time.Until(t) <= 0 {
				return usage("--at %.80q isn't a time in the future, such as 2030-01-31T08:00:00Z", at)
			}
		}
		return nil
	}
	return []*cobra.Command{
		c.waiting("cancel", "Delete waiting messages", "canceled", `They are never delivered again.`,
			func(ctx context.Context, claimer *client.Claimer, token string) (int, error) {
				return claimer.Cancel(ctx, token)
			}),
		c.waiting("run-now", "Deliver waiting messages now", "ready now", `Their queue delivers them to any of its consumers.`,
			func(ctx context.Context, claimer *client.Claimer, token string) (int, error) {
				return claimer.RunNow(ctx, token)
			}),
		again,
	}
}
