package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	_ "time/tzdata" // an image may have no time zones

	"github.com/robfig/cron/v3"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/schedule"
)

const scheduleHelp = `Publish messages at recurring times, and see, pause, and run those of any program that
uses schedule.Group. GROUP is the group's name. All of it works whether or not a worker
runs, and outlasts restarts of workers and brokers.

"hopback schedule serve" is such a program, for messages in a file:

  group: billing
  version: 2          # a higher one replaces a lower one that still runs
  messages:
    report:
      cron: "0 6 * * 1-5"        # or every: 1h
      time-zone: Europe/Berlin   # default UTC
      to: /queues/reports        # or /exchanges/NAME/KEY
      body: '{"kind": "daily"}'
      content-type: application/json
      missed: one                # or skip, or all

Exit codes:
  0    done; ^C or SIGTERM stopped serve
  1    no: there is no such group or message
  2    unknown: the broker can't be reached or refuses the user, or the timeout expired
  64   the command line or the file is wrong; nothing was sent
  130  interrupted`

func (c *command) schedule() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "schedule",
		Short: "Publish messages at recurring times; list, pause, and run them",
		Long:  scheduleHelp,
		Example: `  hopback schedule list billing
  hopback schedule pause billing report --for 2h --why "the printer is broken"
  hopback schedule serve messages.yaml --declare`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	durationVar(f, nil, "timeout", time.Minute, "time limit of the command, or of the start of serve; 0 means none")
	var pause schedule.PauseConfig
	paused := c.scheduleDo("pause GROUP [NAME...]", "Pause messages, or the whole group", `Pause messages, or, without NAME, the whole group. Times in a pause are skipped. When the
command returns, no worker publishes any more.`, 1, func(ctx context.Context, g schedule.Group, names []string) (string, error) {
		pause := pause
		pause.Names, pause.By = names, cmp.Or(pause.By, c.who())
		return "paused", g.Pause(ctx, pause)
	})
	paused.Example = "  hopback schedule pause billing report --for 2h --why \"the printer is broken\"\n  hopback schedule pause billing"
	durationVar(paused.Flags(), &pause.For, "for", 0, "resume after this time (default: until resume)")
	paused.Flags().StringVar(&pause.Why, "why", "", "the `reason`, for other people")
	paused.Flags().StringVar(&pause.By, "by", "", "`who` pauses it (default user@host)")
	cmd.AddCommand(c.scheduleList(), paused,
		c.scheduleDo("resume GROUP [NAME...]", "Resume messages, or the whole group", `End the pause of messages, and bring back removed ones. Without NAME, end the pause of the
whole group; messages that were paused by name stay paused.`, 1, func(ctx context.Context, g schedule.Group, names []string) (string, error) {
			return "resumed", g.Resume(ctx, names...)
		}),
		c.scheduleDo("run-now GROUP NAME...", "Publish messages once, now", `Have a worker publish messages once, now, even while they are paused. If none runs, the
next one does it, within an hour.`, 2, func(ctx context.Context, g schedule.Group, names []string) (string, error) {
			for _, name := range names {
				if _, err := g.RunNow(ctx, name); err != nil {
					return "", err
				}
			}
			return "requested", nil
		}),
		c.scheduleDo("remove GROUP NAME...", "Stop messages until they are resumed", `Stop messages until resume, even if programs still define them.`, 2, func(ctx context.Context, g schedule.Group, names []string) (string, error) {
			return "removed", g.Remove(ctx, names...)
		}),
		c.scheduleServe())
	return cmd
}

// noGroup gives the exit code of a group or a message that there isn't.
func noGroup(ctx context.Context, err error) error {
	var missing = errors.Is(err, client.ErrNotFound)
	if missing {
		return coded(No, err)
	}
	return timedOut(ctx, err)
}

// scheduled is what a command has done.
type scheduled struct {
	Group string   `json:"group"`
	Names []string `json:"names,omitempty"`
	Done  string   `json:"done"`
}

// scheduleDo is a command about a group.
func (c *command) scheduleDo(use, short, long string, least int, do func(context.Context, schedule.Group, []string) (string, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long,
		Example:           "  hopback schedule " + strings.Fields(use)[0] + " billing report",
		Args:              takes(least, math.MaxInt, use[strings.Index(use, " ")+1:]),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				done, err := do(ctx, schedule.Group{Conn: b.conn, Name: args[0]}, args[1:])
				if err != nil {
					return noGroup(ctx, err)
				}
				what := "the group " + printable(args[0])
				if len(args) > 1 {
					what = strings.Join(args[1:], ", ")
				}
				return c.result(scheduled{args[0], args[1:], done}, nil, func(text *strings.Builder) { _, _ = fmt.Fprintf(text, "%s: %s\n", printable(what), done) }, "")
			})
		},
	}
	c.outputFlag(cmd, "what was done")
	return cmd
}

func (c *command) scheduleList() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list GROUP",
		Short: "List the messages of a group, and their next times",
		Long: `List the messages of a group, with their next times, and what is paused. A next time isn't
shown if only the program knows it.`,
		Example: `  hopback schedule list billing
  hopback schedule list billing -o json`,
		Args:              takes(1, 1, "GROUP"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				if err := b.connect(ctx); err != nil {
					return err
				}
				g, err := schedule.Group{Conn: b.conn, Name: args[0]}.List(ctx, schedule.ListConfig{Times: timesOf})
				if err != nil {
					return noGroup(ctx, err)
				}
				return c.result(g, nil, func(text *strings.Builder) { listed(text, g) }, "")
			})
		},
	}
	c.outputFlag(cmd, "the messages")
	return cmd
}

func listed(text *strings.Builder, g schedule.GroupState) {
	table := tabwriter.NewWriter(text, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "name\ttimes\tto\tmissed\tlast\tnext\tpaused")
	at := func(t time.Time) string {
		if t.IsZero() {
			return "-"
		}
		return t.Format(time.RFC3339)
	}
	for _, r := range g.Recurring {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", printable(r.Name), printable(r.Spec), printable(r.To), r.Missed, at(r.Last), at(r.Next), pausedText(r.Paused, r.Removed))
	}
	_ = table.Flush()
	worker := "last published by a worker that has stopped"
	if g.Worker != "" {
		worker = "last published by " + printable(g.Worker)
	}
	_, _ = fmt.Fprintf(text, "%s, version %d: %s, at %s\n", count(len(g.Recurring), "message"), g.Version, worker, g.LastActive.Format(time.RFC3339))
	if g.Paused != nil {
		_, _ = fmt.Fprintf(text, "The group is paused: %s\n", pausedText(g.Paused, false))
	}
	if late := g.LastActive.Sub(g.Done); late > time.Second {
		_, _ = fmt.Fprintf(text, "The broker refuses a message since %s; see the log of the worker.\n", g.Done.Format(time.RFC3339))
	}
}

func pausedText(p *schedule.PauseState, removed bool) string {
	switch {
	case removed:
		return "removed"
	case p == nil:
		return "-"
	}
	text := "since " + p.Since.Format(time.RFC3339)
	if !p.Until.IsZero() {
		text += " until " + p.Until.Format(time.RFC3339)
	}
	if p.By != "" {
		text += " by " + printable(p.By)
	}
	if p.Why != "" {
		text += ": " + printable(p.Why)
	}
	return text
}

// messagesFile is the file of serve.
type messagesFile struct {
	Group    string                   `yaml:"group"`
	Version  int64                    `yaml:"version"`
	Messages map[string]recurringYAML `yaml:"messages"`
}

type recurringYAML struct {
	Cron        string          `yaml:"cron"`
	Every       string          `yaml:"every"`
	TimeZone    string          `yaml:"time-zone"`
	To          string          `yaml:"to"`
	Body        string          `yaml:"body"`
	ContentType string          `yaml:"content-type"`
	Missed      schedule.Missed `yaml:"missed"`
}

// parseCron returns the times of a cron expression. It may begin with CRON_TZ=, and have names such as @daily.
func parseCron(text string) (schedule.Times, error) {
	if strings.Contains(text, "@every ") { // its times depend on when it was added
		return nil, errors.New("use the key every in place of @every")
	}
	return cron.ParseStandard(text)
}

// timesOf returns the times of a Recurring.Spec that timesIn has made, or a cron expression of a program.
func timesOf(spec string) schedule.Times {
	if d, ok := strings.CutPrefix(spec, "every "); ok {
		if d, err := time.ParseDuration(d); err == nil {
			return schedule.Every(d)
		}
		return nil
	}
	t, err := parseCron(spec)
	if err != nil {
		return nil
	}
	return t
}

// recurring reads one message of the file.
func (y recurringYAML) recurring(name string) (r schedule.Recurring, err error) {
	r = schedule.Recurring{Name: name, Missed: y.Missed}
	if r.To, err = address.Parse(y.To); err != nil {
		return r, err
	}
	switch {
	case (y.Cron == "") == (y.Every == ""):
		return r, errors.New("it needs either cron or every")
	case y.Every != "":
		if y.TimeZone != "" {
			return r, errors.New("time-zone has no effect on every; leave it out")
		}
		d, err := time.ParseDuration(y.Every)
		if err != nil {
			return r, fmt.Errorf("every: %w", err)
		}
		r.Times = schedule.Every(d)
	default:
		if y.TimeZone == "" {
			y.TimeZone = "UTC"
		}
		if !strings.HasPrefix(y.Cron, "CRON_TZ=") && !strings.HasPrefix(y.Cron, "TZ=") {
			if _, err := time.LoadLocation(y.TimeZone); err != nil {
				return r, fmt.Errorf("time-zone: %w", err)
			}
			y.Cron = "CRON_TZ=" + y.TimeZone + " " + y.Cron
		}
		if r.Times, err = parseCron(y.Cron); err != nil {
			return r, fmt.Errorf("cron: %w", err)
		}
		r.Spec = y.Cron
	}
	r.Message = func(time.Time) (*client.Message, error) {
		m := client.NewMessage([]byte(y.Body))
		if y.ContentType != "" {
			m.Properties = &client.Properties{ContentType: new(y.ContentType)}
		}
		return m, nil
	}
	return r, nil
}

// readMessages reads the file of serve.
func (c *command) readMessages(name string) (f messagesFile, cfg schedule.RunConfig, err error) {
	text, name, err := c.read(name)
	if err != nil {
		return f, cfg, err
	}
	d := yaml.NewDecoder(strings.NewReader(string(text)))
	d.KnownFields(true)
	if err := d.Decode(&f); err != nil {
		return f, cfg, usage("%s: %w", name, err)
	}
	if f.Group == "" || len(f.Messages) == 0 {
		return f, cfg, usage("%s needs the keys group and messages; see hopback schedule --help", name)
	}
	cfg.Version = f.Version
	for message, y := range f.Messages {
		r, err := y.recurring(message)
		if err != nil {
			return f, cfg, usage("%s: messages.%s: %w", name, message, err)
		}
		cfg.Recurring = append(cfg.Recurring, r)
	}
	slices.SortFunc(cfg.Recurring, func(a, b schedule.Recurring) int { return strings.Compare(a.Name, b.Name) })
	return f, cfg, nil
}

func (c *command) scheduleServe() *cobra.Command {
	var apply bool
	cmd := &cobra.Command{
		Use:   "serve FILE",
		Short: "Publish the messages of a file at their times, until ^C or SIGTERM",
		Long: `Publish the messages of a file at their times, until ^C or SIGTERM. Run it in as many
processes as you like: each message is published once per time. --declare creates the
group's queues first, for which the user needs the permission to configure them.`,
		Example:           "  hopback schedule serve messages.yaml --declare",
		Args:              files(1, 1),
		ValidArgsFunction: completeFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			f, cfg, err := c.readMessages(args[0])
			if err != nil {
				return err
			}
			return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
				b.level = slog.LevelInfo
				if err := b.connect(ctx); err != nil {
					return err
				}
				topology, err := schedule.GroupTopology(schedule.Names{}, f.Group)
				if err != nil {
					return coded(Usage, err)
				}
				if apply {
					if _, err := declare.Apply(ctx, b.conn.Management(), topology); err != nil {
						return timedOut(ctx, err)
					}
				}
				b.logger().Info("hopback: publishing recurring messages", "group", f.Group, "messages", len(cfg.Recurring))
				err = schedule.Group{Conn: b.conn, Name: f.Group}.Run(c.ctx, cfg)
				if errors.Is(err, client.ErrNotFound) {
					return coded(No, fmt.Errorf("%w; or use --declare", err))
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&apply, "declare", false, "declare the group's queues first")
	return cmd
}
