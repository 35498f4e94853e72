package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

// maxPublishBody is RabbitMQ's default limit of a message, 16 MiB.
const maxPublishBody = 16 << 20

const publishHelp = `Publish a message to a queue or an exchange, and wait until the broker has stored it.
The body is --body, or what is read from stdin.

With --lines, each line of stdin is a message. The command stops at the first one that
the broker doesn't store, and names its line.

Exit codes:
  0    the broker has stored every message
  1    no: no queue is bound, the queue or exchange is missing, or the queue refuses messages
  2    unknown: the broker can't be reached or refuses the user, or the timeout expired
  64   the command line is wrong; nothing was sent
  130  interrupted`

// publishFlags describe the messages of "hopback publish".
type publishFlags struct {
	exchange, key, body  string
	id, subject, content string
	properties           []string
	lines                bool

	hasExchange bool
	to          address.Address // what check has computed
	headers     map[string]any
}

func (c *command) publish() *cobra.Command {
	f := &publishFlags{}
	cmd := &cobra.Command{
		Use:   "publish [QUEUE]",
		Short: "Publish messages to a queue or an exchange",
		Long:  publishHelp,
		Example: `  hopback publish orders --body '{"id": "o-1"}'
  hopback publish --exchange shop --routing-key order.paid < order.json
  hopback publish orders --lines < orders.jsonl`,
		Args:              takes(0, 1, "[QUEUE]"),
		ValidArgsFunction: firstOnly(c.queueNames()),
		RunE: func(cmd *cobra.Command, args []string) error {
			f.hasExchange = cmd.Flags().Changed("exchange")
			if err := f.check(args, cmd.Flags().Changed("body"), cmd.Flags().Changed("routing-key")); err != nil {
				return err
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				return c.publishTo(ctx, b, f, cmd.Flags().Changed("body"))
			})
		},
	}
	flags := cmd.Flags()
	c.connectionFlags(flags)
	durationVar(flags, nil, "timeout", time.Minute, "time limit of the command; 0 means none")
	flags.StringVar(&f.exchange, "exchange", "", "publish to this exchange, in place of a queue")
	flags.StringVar(&f.key, "routing-key", "", "routing key, with --exchange")
	flags.StringVar(&f.body, "body", "", "body of the message; default: stdin")
	flags.StringVar(&f.id, "id", "", "message-id; default: a random one")
	flags.StringVar(&f.subject, "subject", "", "subject, by which consumers can tell types of messages apart")
	flags.StringVar(&f.content, "content-type", "application/json", "content type of the body")
	flags.StringArrayVar(&f.properties, "property", nil, "application property as name=value, a string; can be repeated")
	flags.BoolVar(&f.lines, "lines", false, "each line of stdin is a message")
	_ = cmd.RegisterFlagCompletionFunc("exchange", c.exchangeNames())
	c.outputFlag(cmd, "the number of messages")
	return cmd
}

// check refuses flags that don't go together, and computes the address and the properties.
func (f *publishFlags) check(args []string, hasBody, hasKey bool) error {
	switch {
	case len(args) == 0 && !f.hasExchange:
		return usage("publish has neither a queue nor --exchange; write it as hopback publish QUEUE")
	case len(args) == 1 && f.hasExchange:
		return usage("publish has a queue and --exchange; leave one out")
	case hasKey && !f.hasExchange:
		return usage("--routing-key is the routing key of an exchange; name it with --exchange")
	case f.hasExchange && f.exchange == "":
		return usage("--exchange is empty; to publish to a queue, write hopback publish QUEUE")
	case f.lines && hasBody:
		return usage("--lines reads messages from stdin; leave --body out")
	case f.lines && f.id != "":
		return usage("--id would be the message-id of every line; leave it out")
	}
	f.to = address.Exchange(f.exchange, f.key)
	if !f.hasExchange {
		f.to = address.Queue(args[0])
	}
	if err := f.to.Validate(); err != nil {
		return coded(Usage, err)
	}
	f.headers = map[string]any{}
	for _, p := range f.properties {
		name, value, found := strings.Cut(p, "=")
		if !found || name == "" {
			return usage("--property %.80q has no name or no value; write it as name=value", p)
		}
		f.headers[name] = value
	}
	return nil
}

func (c *command) publishTo(ctx context.Context, b *broker, f *publishFlags, hasBody bool) error {
	if err := b.connect(ctx); err != nil {
		return err
	}
	p, err := client.NewPublisher[*client.Message](ctx, b.conn, f.to, client.PublisherConfig{})
	if err != nil {
		return notStored(ctx, err)
	}
	defer func() { _ = p.Close(context.WithoutCancel(ctx)) }()
	if f.lines {
		return c.publishLines(ctx, p, f)
	}
	body := []byte(f.body)
	if !hasBody {
		if body, err = io.ReadAll(io.LimitReader(c.io.Stdin, maxPublishBody+1)); err != nil {
			return fmt.Errorf("read stdin: %w", err)
		}
		if len(body) > maxPublishBody {
			return usage("stdin has more than 16 MiB, RabbitMQ's limit for a message")
		}
	}
	if err := p.Publish(ctx, f.message(body)); err != nil {
		return notStored(ctx, err)
	}
	return c.printStored(1)
}

func (c *command) publishLines(ctx context.Context, p *client.Publisher[*client.Message], f *publishFlags) error {
	lines := bufio.NewScanner(c.io.Stdin)
	lines.Buffer(make([]byte, 0, 64<<10), maxPublishBody)
	stored := 0
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		if err := p.Publish(ctx, f.message([]byte(lines.Text()))); err != nil {
			return notStored(ctx, fmt.Errorf("line %d, after %s stored: %w", n, count(stored, "message"), err))
		}
		stored++
	}
	if err := lines.Err(); err != nil {
		if errors.Is(err, bufio.ErrTooLong) {
			return usage("a line has more than 16 MiB, RabbitMQ's limit for a message; %s stored before it", count(stored, "message"))
		}
		return fmt.Errorf("read stdin: %w", err)
	}
	return c.printStored(stored)
}

func (c *command) printStored(n int) error {
	if c.structured() {
		return c.printStructured(map[string]int{"stored": n})
	}
	_, err := fmt.Fprintf(c.stdout.w, "%s stored.\n", count(n, "message"))
	return err
}

func (f *publishFlags) message(body []byte) *client.Message {
	m := &client.Message{Data: [][]byte{body}, Properties: &client.Properties{ContentType: &f.content}}
	if f.id != "" {
		m.Properties.MessageID = f.id
	}
	if f.subject != "" {
		m.Properties.Subject = &f.subject
	}
	if len(f.headers) > 0 {
		m.ApplicationProperties = f.headers
	}
	return m
}

// notStored gives an error of publishing its exit code: No if the message is certainly in no queue.
func notStored(ctx context.Context, err error) error {
	if errors.Is(err, client.ErrUnroutable) || errors.Is(err, client.ErrRefused) || errors.Is(err, client.ErrNotFound) {
		return coded(No, err)
	}
	return timedOut(ctx, err)
}

// refuseUnknownHelp makes "--help" of a command that doesn't exist fail, as the command itself does: cobra would show
// the help of the command above it, and succeed.
func (c *command) refuseUnknownHelp(root *cobra.Command) {
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if rest := cmd.Flags().Args(); cmd.HasSubCommands() && len(rest) > 0 && cmd.RunE != nil {
			c.unknown = cmd.RunE(cmd, rest)
			return
		}
		help(cmd, args)
	})
}
