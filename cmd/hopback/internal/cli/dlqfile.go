package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/operate/desk"
)

func (c *command) dlqEdit() *cobra.Command {
	var r replaying
	var body, contentType string
	var set, unset []string
	cmd := &cobra.Command{
		Use:   "edit QUEUE ID",
		Short: "Change a message, and replay it",
		Long: `Change the body or properties of a message, and replay it. hopback removes the original
from QUEUE only after the broker has confirmed the changed message.

If several messages have this message-id, edit changes none: use the ID of list.`,
		Example: `  hopback dlq edit orders.dead order-4711 --body fixed.json
  hopback dlq edit orders.dead 5b0c6a7d1e2f3a4b5c6d7e8f --set shop=s2 --unset legacy`,
		Args:              takes(2, 2, "QUEUE ID"),
		ValidArgsFunction: c.queueThenID(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := r.destination(); err != nil {
				return err
			}
			change := cmd.Flags().Changed
			if !change("body") && !change("content-type") && len(set)+len(unset) == 0 {
				return usage("edit changes nothing; add --body, --content-type, --set, or --unset")
			}
			var text []byte
			if change("body") {
				var err error
				if text, err = c.readAll(body); err != nil {
					return coded(Usage, fmt.Errorf("--body: %w", err))
				}
			}
			edits := map[string]any{}
			for _, s := range set {
				k, v, ok := strings.Cut(s, "=")
				if !ok || k == "" {
					return usage("--set %.80q isn't a property; write it as key=value", s)
				}
				edits[k] = v
			}
			for _, k := range unset {
				edits[k] = nil
			}
			r.cfg.Queue, r.cfg.Filter = args[0], desk.Filter{IDs: []string{args[1]}}
			r.cfg.Edit = func(e *desk.Edit) error {
				if change("body") {
					e.SetBody(text)
				}
				if change("content-type") {
					e.SetContentType(contentType)
				}
				for k, v := range edits {
					e.SetProperty(k, v)
				}
				return nil
			}
			var probe desk.Edit
			if err := errors.Join(r.cfg.Edit(&probe), probe.Validate()); err != nil {
				return flagged(err)
			}
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error { return c.editOne(ctx, d, r.cfg, args[1]) })
		},
	}
	r.flags(c, cmd)
	f := cmd.Flags()
	f.StringVar(&body, "body", "", "`file` with the new body; - is stdin")
	f.StringVar(&contentType, "content-type", "", "new content-`type`")
	f.StringArrayVar(&set, "set", nil, "set an application property to a string, as `key=value`; may be repeated")
	f.StringArrayVar(&unset, "unset", nil, "remove the application property `key`; may be repeated")
	return cmd
}

// editOne replays the message with this ID or message-id, if there is only one.
func (c *command) editOne(ctx context.Context, d *desk.Desk, cfg desk.ReplayConfig, id string) error {
	found, err := d.List(ctx, desk.ListConfig{Queue: cfg.Queue, Filter: cfg.Filter, Count: true, Accept: c.accepted()})
	switch {
	case err != nil:
		return err
	case found.Matched == 0:
		return missed(&desk.NoMessageError{Queue: cfg.Queue, ID: id, Seen: int(found.Seen), Unread: found.Unread})
	case found.Matched > 1:
		return coded(No, fmt.Errorf("%d messages in %q have the ID or message-id %.100q; nothing was done: use the ID that hopback dlq list prints", found.Matched, cfg.Queue, id))
	}
	if found.Unread != "" {
		c.say(fmt.Errorf("warning: %s, so there may be another message with this ID or message-id", found.Unread))
	}
	cfg.Max = 1
	return c.replay(ctx, d, cfg, "")
}

// readAll reads a file that the command line names.
func (c *command) readAll(name string) ([]byte, error) {
	const limit = 128 << 20
	if name != "-" {
		info, err := os.Stat(name)
		if err != nil {
			return nil, err
		}
		if info.Size() > limit {
			return nil, fmt.Errorf("the file has more than %d bytes", limit)
		}
		return os.ReadFile(name)
	}
	b, err := io.ReadAll(io.LimitReader(c.io.Stdin, limit+1))
	if err == nil && len(b) > limit {
		err = fmt.Errorf("stdin has more than %d bytes", limit)
	}
	return b, err
}

func (c *command) dlqDiscard() *cobra.Command {
	var s selection
	var cfg desk.DiscardConfig
	var to string
	cmd := &cobra.Command{
		Use:   "discard QUEUE",
		Short: "Remove selected messages, after writing them to a file",
		Long: `Remove the selected messages from a queue. hopback first appends each to the file of
--to, and syncs the file. hopback dlq import publishes them again. --destroy removes
them for good, without a file. All other messages stay, in order.

RabbitMQ hides headers of AMQP 0-9-1 messages that hold tables or arrays, so the file would
lack them. A message that may come from there stays in the queue, unless you add
--accept hidden-headers.`,
		Example: `  hopback dlq discard orders.dead --older-than 30d --to old-orders.jsonl
  hopback dlq discard orders.dead --group 3f2a9c01b7de --dry-run`,
		Args:              takes(1, 1, "QUEUE"),
		ValidArgsFunction: firstOnly(c.queueNames()),
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := s.some(cfg.All)
			switch {
			case err != nil:
				return err
			case to == "" && !cfg.Destroy && !cfg.DryRun:
				return usage("discard needs a file for the messages: --to messages.jsonl, or --destroy to remove them for good")
			case to != "" && cfg.Destroy:
				return usage("--to writes the messages to a file, and --destroy doesn't; choose one")
			}
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				cfg := cfg
				if to != "" && !cfg.DryRun {
					f, err := openFile(to)
					if err != nil {
						return err
					}
					defer func() { _ = f.Close() }()
					cfg.To = f
				}
				show, end := c.scanning(ctx, "discarding from "+args[0])
				cfg.Queue, cfg.Filter, cfg.Accept, cfg.OnProgress = args[0], filter, c.accepted(), show
				r, err := d.Discard(ctx, cfg)
				end()
				if err != nil && r.Seen == 0 {
					return err
				}
				if err == nil && r.Hidden > 0 {
					err = coded(No, fmt.Errorf("%s stayed in the queue, with headers that the file could lack", count(r.Hidden, "message")))
				}
				return c.result(r, errors.Join(err, unread(r.Unread)), func(b *strings.Builder) {
					warningsText(b, args[0], r.Warnings)
					groupsText(b, r.Groups, r.Others)
					hiddenText(b, r.Hidden, "left in the queue")
					if r.DryRun {
						fmt.Fprintf(b, "%d of %s would be discarded; nothing was done.\n", r.Matched, count(r.Seen, "message"))
						return
					}
					fmt.Fprintf(b, "%s discarded from %q; %d written to the file.\n", count(r.Discarded, "message"), args[0], r.Exported)
					if r.Twice > 0 {
						fmt.Fprintf(b, "%s already in the file before: an import publishes both copies.\n", plural(r.Twice, "message was", "messages were"))
					}
				}, "the same command")
			})
		},
	}
	s.flags(c, cmd)
	f := cmd.Flags()
	f.StringVar(&to, "to", "", "append the messages to this `file` first")
	f.BoolVar(&cfg.Destroy, "destroy", false, "remove the messages for good, without a file")
	f.BoolVar(&cfg.All, "all", false, "discard all messages of the queue")
	f.BoolVar(&cfg.DryRun, "dry-run", false, "only select and count")
	f.Uint64Var(&cfg.Max, "max", 0, "at most `n` messages")
	c.outputFlag(cmd, "the report")
	return cmd
}

// openFile opens a file to write lines to.
func openFile(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, coded(Usage, err)
	}
	return f, nil
}

func (c *command) dlqExport() *cobra.Command {
	var s selection
	var resume bool
	cmd := &cobra.Command{
		Use:   "export QUEUE FILE",
		Short: "Write selected messages to a file, and leave them in the queue",
		Long: `Write the selected messages to FILE, one JSON object per line, exactly: the JSON keeps
AMQP's types. FILE is synced. The messages stay in the queue, in order.`,
		Example: `  hopback dlq export orders.dead orders.jsonl
  hopback dlq export orders.dead orders.jsonl --resume`,
		Args: takes(2, 2, "QUEUE FILE"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return firstOnly(c.queueNames())(cmd, args, begun)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := s.selected()
			if err != nil {
				return err
			}
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				f, err := openFile(args[1])
				if err != nil {
					return err
				}
				defer func() { _ = f.Close() }()
				show, end := c.scanning(ctx, "exporting from "+args[0])
				r, err := d.Export(ctx, f, desk.ExportConfig{Queue: args[0], Filter: filter, Resume: resume, Accept: c.accepted(), OnProgress: show})
				end()
				if err != nil && r.Seen == 0 {
					return err
				}
				return c.result(r, errors.Join(err, unread(r.Unread)), func(b *strings.Builder) {
					warningsText(b, args[0], r.Warnings)
					if r.Hidden > 0 {
						fmt.Fprintf(b, "%s may come from AMQP 0-9-1: RabbitMQ hides headers of such messages that hold tables or arrays, so the file lacks them.\n", count(r.Hidden, "message"))
					}
					fmt.Fprintf(b, "%s written to %s; %s there before.\n", count(r.Exported, "message"), args[1], plural(r.Skipped, "was", "were"))
				}, "the same command with --resume")
			})
		},
	}
	s.flags(c, cmd)
	cmd.Flags().BoolVar(&resume, "resume", false, "continue the file of a stopped export")
	c.outputFlag(cmd, "the report")
	return cmd
}

func (c *command) dlqImport() *cobra.Command {
	var cfg desk.ImportConfig
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Publish the messages of an export, with confirms",
		Long: `Publish the messages of FILE to the queues that they were exported from, with confirms.
An invalid line stops the import; the error names the line, and all lines before it are
published. To continue, skip as many lines as the report or the progress on stderr says.
Without --skip, an import publishes every line again.`,
		Example: `  hopback dlq import orders.jsonl --dry-run
  hopback dlq import orders.jsonl --queue orders.dead.2 --skip 12000`,
		Args:              takes(1, 1, "FILE"),
		ValidArgsFunction: cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault),
		RunE: func(cmd *cobra.Command, args []string) error {
			in := c.io.Stdin
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return coded(Usage, err)
				}
				defer func() { _ = f.Close() }()
				if info, err := f.Stat(); err == nil && info.IsDir() {
					return usage("%s is a folder; name a file that hopback dlq export has written", args[0])
				}
				in = f
			}
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				p := c.progress("importing")
				cfg.OnProgress = func(now desk.Progress) {
					p.set("importing: %s read; to continue from here: --skip %d", count(now.Seen, "line"), uint64(cfg.Skip)+now.Done)
				}
				r, err := d.Import(ctx, in, cfg)
				p.end()
				if err != nil {
					err = errors.Join(err, errors.New("to continue: the same command with --skip "+strconv.Itoa(r.Lines)))
				}
				return c.result(r, err, func(b *strings.Builder) {
					if r.DryRun {
						fmt.Fprintf(b, "%s can be imported; nothing was sent.\n", count(r.Lines, "line"))
						return
					}
					fmt.Fprintf(b, "%s imported; %s done.\n", count(r.Imported, "message"), count(r.Lines, "line"))
				}, "")
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Queue, "queue", "", "publish all messages to this `queue` (default the queue that each line names)")
	_ = cmd.RegisterFlagCompletionFunc("queue", c.queueNames())
	f.IntVar(&cfg.Skip, "skip", 0, "skip the first `n` lines")
	f.BoolVar(&cfg.DryRun, "dry-run", false, "only check every line")
	c.outputFlag(cmd, "the report")
	return cmd
}
