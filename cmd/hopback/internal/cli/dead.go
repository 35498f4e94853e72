package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/user"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/retry"
)

const deadHelp = `See why messages are dead, and send back those that should have another chance.

QUEUE is a dead-letter queue, such as orders.dead, or the parking queue. To look at
a queue its messages are received, held, and given back: their content and their
order stay. Where that can't be promised the command says so before it looks, and
continues only with --accept and the word that it names. One command at a time reads a
queue; another one waits.

Messages are selected by flags, all of which a message must meet. The same flags
select for list, replay, discard and export. ID is that of list, or a message-id.

--url or HOPBACK_URL names the broker. The HTTP API lists queues and shows policies
and rates; where it can't be guessed, give --management-url.

Exit codes:
  0    done
  1    no: a message couldn't be sent or found, a line of a file can't be used, or
       looking isn't allowed without --accept
  2    unknown: the broker can't be reached or refuses the user, the time is over, or
       other consumers held messages (--accept other-consumers makes that 0)
  64   the command line is wrong; nothing was sent
  130  interrupted; what was done is said, and how to go on`

func (c *command) dead() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dead",
		Short: "Survey, list, show, replay, edit, discard, export and import dead letters",
		Long:  deadHelp,
		Example: `  export HOPBACK_URL=amqp://guest:guest@localhost:5672/
  hopback dead survey
  hopback dead list orders.dead --group 3f2a9c01b7de
  hopback dead replay orders.dead --group 3f2a9c01b7de --dry-run`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	f.Duration("timeout", 0, "how long the command may take; 0 means no limit")
	f.StringVar(&c.deadFlags.prefix, "names-prefix", "", "`prefix` of the retry topology's names")
	f.StringArrayVar(&c.deadFlags.accept, "accept", nil, "`word` for what looking may change, as a refusal names it; may be repeated")
	cmd.AddCommand(c.deadSurvey(), c.deadList(), c.deadShow(), c.deadReplay(), c.deadEdit(), c.deadDiscard(), c.deadExport(), c.deadImport())
	return cmd
}

// deadFlags are those that the commands of "dead" share.
type deadFlags struct {
	prefix string
	accept []string
}

func (c *command) accepted() []desk.CaveatCode {
	var all []desk.CaveatCode
	for _, a := range c.deadFlags.accept {
		all = append(all, desk.CaveatCode(a))
	}
	return all
}

// atDesk runs do with a desk.
func (c *command) atDesk(cmd *cobra.Command, do func(ctx context.Context, d *desk.Desk) error) error {
	return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
		if err := b.connect(ctx); err != nil {
			return err
		}
		cfg := desk.Config{Names: retry.Names{Prefix: c.deadFlags.prefix}, Logger: b.logger()}
		if b.api != nil {
			cfg.HTTP = b.api
		}
		d, err := desk.New(b.conn, cfg)
		if err != nil {
			return err
		}
		err = flagged(do(ctx, d))
		if errors.Is(err, declare.ErrMissing) {
			err = fmt.Errorf("%w; \"hopback dead survey\" lists the queues of virtual host %q, and \"hopback topology apply\" declares those of a file", err, b.vhost)
		}
		return timedOut(ctx, err)
	})
}

// flags of the arguments that package desk names.
var flagOf = map[string]string{
	"ListConfig.Skip": "--skip", "ListConfig.Limit": "--limit", "Filter.MinReplays": "--min-replays", "Filter.MaxReplays": "--max-replays",
	"Filter.DiedBefore": "--older-than", "Filter.DiedAfter": "--newer-than", "ReplayConfig.ID": "--replay-id", "ReplayConfig.By": "--by",
	"ReplayConfig.Rate": "--rate", "ReplayConfig.Address": "--to", "DiscardConfig.To": "--to", "ImportConfig.Skip": "--skip", "file": "FILE", "queue": "QUEUE",
	"Edit.ContentType": "--content-type", "Edit.Property": "--set", "Filter.Groups": "--group",
}

// flagged says bad input in the words of the command line.
func flagged(err error) error {
	var bad *argument.Error
	if !errors.As(err, &bad) {
		return err
	}
	switch path, _, _ := strings.Cut(bad.Path.String(), "["); { // without an index
	case path == "ReplayConfig.Filter", path == "DiscardConfig.Filter":
		return usage("no flag selects messages; give --all if all are meant")
	case path == "SurveyConfig.Queues":
		return usage("queues can't be listed over AMQP; name the queues, or give --management-url")
	case path == "file" && bad.Code == argument.Conflict:
		return usage("%s isn't empty; name another file, or go on with this one by --resume", bad.Value)
	case path == "Filter.DiedBefore" && bad.Code == argument.Conflict:
		return usage("nothing can be both newer than --newer-than and older than --older-than; give a shorter --older-than")
	case path == "Filter.MaxReplays" && bad.Code == argument.Conflict:
		return usage("--max-replays is below --min-replays; give a larger one")
	case flagOf[path] != "":
		text := flagOf[path]
		if bad.Value != "" {
			text += " " + bad.Value
		}
		return usage("%s %s; %s", text, bad.Problem, bad.Remedy)
	}
	return err
}

// count is a number of things, such as "1 message".
func count[N int | uint64](n N, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// takes wants that many arguments, of which form names them.
func takes(least, most int, form string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usage("%s has %s; write it as %s %s", cmd.CommandPath(), count(len(args), "argument"), cmd.CommandPath(), form)
		}
		for _, a := range args {
			if a == "" {
				return usage("%s has an empty argument; write it as %s %s", cmd.CommandPath(), cmd.CommandPath(), form)
			}
		}
		return nil
	}
}

// selection has the flags that select messages.
type selection struct {
	filter               desk.Filter
	reasons, properties  []string
	match                string
	newerThan, olderThan time.Duration
	maxReplays           int
}

func (s *selection) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringArrayVar(&s.filter.IDs, "id", nil, "an `ID` of list, or a message-id; may be repeated")
	f.StringArrayVar(&s.filter.Groups, "group", nil, "a `group` of survey; may be repeated")
	f.StringArrayVar(&s.filter.Queues, "died-in", nil, "`queue` that the message died in; may be repeated")
	f.StringArrayVar(&s.reasons, "reason", nil, "`reason` of the death, such as exhausted; may be repeated")
	f.StringVar(&s.filter.ErrorType, "error-type", "", "Go `type` of the error")
	f.StringVar(&s.filter.Text, "text", "", "`part` of the error's text")
	f.StringVar(&s.match, "match", "", "regular `expression` that the error's text matches")
	f.StringArrayVar(&s.properties, "property", nil, "application property, as `key=value`; may be repeated")
	f.DurationVar(&s.newerThan, "newer-than", 0, "died less than this `time` ago")
	f.DurationVar(&s.olderThan, "older-than", 0, "died longer than this `time` ago")
	f.IntVar(&s.filter.MinReplays, "min-replays", 0, "replayed at least `n` times")
	f.IntVar(&s.maxReplays, "max-replays", -1, "replayed at most `n` times")
}

// selected is the filter that the flags make.
func (s *selection) selected() (desk.Filter, error) {
	f := s.filter
	for _, r := range s.reasons {
		f.Reasons = append(f.Reasons, client.Reason(r))
	}
	for _, p := range s.properties {
		k, v, ok := strings.Cut(p, "=")
		if !ok || k == "" {
			return f, usage("--property %.80q isn't of the form key=value", p)
		}
		if f.Properties == nil {
			f.Properties = map[string]string{}
		}
		f.Properties[k] = v
	}
	if s.match != "" {
		var err error
		if f.Match, err = regexp.Compile(s.match); err != nil {
			return f, coded(Usage, fmt.Errorf("--match: %w", err))
		}
	}
	if s.newerThan < 0 || s.olderThan < 0 {
		return f, usage("--newer-than and --older-than can't be negative")
	}
	now := time.Now()
	if s.newerThan > 0 {
		f.DiedAfter = now.Add(-s.newerThan)
	}
	if s.olderThan > 0 {
		f.DiedBefore = now.Add(-s.olderThan)
	}
	if s.maxReplays >= 0 {
		f.MaxReplays = &s.maxReplays
	}
	return f, nil
}

// stoppedAfter is when a command that was stopped, and hasn't ended, says what it does.
const stoppedAfter = 500 * time.Millisecond

// stopping says what a command does that takes a while to end after ctx has. The function
// that it returns must be called.
func (c *command) stopping(ctx context.Context, text string) (end func()) {
	over, said := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(said)
		t := time.NewTimer(stoppedAfter)
		defer t.Stop()
		select {
		case <-over:
		case <-t.C:
			c.say(errors.New(text))
		}
	})
	return func() {
		close(over)
		if !stop() {
			<-said
		}
	}
}

// walking shows the progress of a walk, and what the command does once ctx has ended.
func (c *command) walking(ctx context.Context, what string) (show func(desk.Progress), end func()) {
	p := c.progress(what)
	began := time.Now()
	stopped := c.stopping(ctx, "stopping: the messages that are held are being returned in order; a further interrupt ends the command at once, and the next scan restores the order")
	return func(now desk.Progress) {
			if now.Waiting {
				p.set("%s: waiting for another scan of the queue to end; --accept another-scan doesn't wait", what)
				began = time.Now()
				return
			}
			done, rest := now.Seen, ""
			rate := float64(done) / max(time.Since(began).Seconds(), 0.001)
			if now.Of > done && done >= now.Of/50 && rate > 0 {
				left := time.Duration(float64(now.Of-done) / rate * float64(time.Second)).Round(time.Second)
				rest = fmt.Sprintf(", %v left", left)
			}
			p.set("%s: %d of %d looked at, %d selected, %d done, %.0f a second%s", what, done, max(now.Of, done), now.Matched, now.Done, rate, rest)
		}, func() {
			stopped()
			p.end()
		}
}

// unread is the error for messages that an operation may have missed.
func unread(why string) error {
	if why == "" {
		return nil
	}
	return coded(Unknown, fmt.Errorf("%s; if that's meant: --accept %s", why, desk.CaveatConsumers))
}

// missed adds to an error that says there is no such message why there may be one.
func missed(err error) error {
	var none *desk.NoMessageError
	if errors.As(err, &none) && none.Unread != "" {
		return coded(Unknown, fmt.Errorf("%w; if that's meant: --accept %s", err, desk.CaveatConsumers))
	}
	return err
}

// caveatsText shows the guarantees that an operation couldn't give.
func caveatsText(b *strings.Builder, queue string, caveats []desk.Caveat) {
	for _, v := range caveats {
		fmt.Fprintf(b, "%s: %s\n", clean(queue), clean(v.Text))
	}
}

// result prints what a command has done, and says how it ended. Where it was stopped,
// again is the command that goes on.
func (c *command) result(report any, err error, text func(*strings.Builder), again string) error {
	var out strings.Builder
	text(&out)
	var printed error
	if c.json {
		printed = c.printJSON(report)
	} else {
		_, printed = fmt.Fprint(c.stdout.w, out.String())
	}
	if err != nil && again != "" && (c.interrupted() || errors.Is(err, client.ErrConnectionLost) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, new(*fs.PathError))) {
		err = errors.Join(err, errors.New("every message is in the queue, or where it was sent to; to go on: "+again))
	}
	return errors.Join(printed, err)
}

// early prints what a look has found before the queue is in order again.
type early struct {
	c       *command
	ctx     context.Context
	queue   string
	show    func(desk.Progress)
	end     func()
	printed bool
	err     error // of printing
}

// early begins to show the progress of a look. Its end must be called.
func (c *command) early(ctx context.Context, queue string) *early {
	e := &early{c: c, ctx: ctx, queue: queue}
	e.show, e.end = c.walking(ctx, "looking at "+queue)
	return e
}

func (e *early) tell(p desk.Progress) { e.show(p) }

// print prints what was found, and says from now on that the queue is put back in order.
func (e *early) print(report any, text func(*strings.Builder)) {
	e.end()
	e.printed, e.err = true, e.c.result(report, nil, text, "")
	p := e.c.progress("putting " + e.queue + " back in order")
	e.show = func(now desk.Progress) {
		p.set("putting %s back in order: %d of at most %d read", e.queue, now.Seen, max(now.Of, now.Seen))
	}
	said := make(chan struct{})
	stop := context.AfterFunc(e.ctx, func() {
		defer close(said)
		e.c.say(fmt.Errorf("what was found is printed, and %s is still being put back in order; an interrupt ends that, and the next look puts it in order", e.queue))
	})
	e.end = func() {
		if !stop() {
			<-said
		}
		p.end()
	}
}

// over is how a look has ended.
func (e *early) over(err error) error {
	if e.printed && err != nil {
		err = fmt.Errorf("what was found is printed, but %s may be out of order until the next look: %w", e.queue, err)
	}
	return errors.Join(e.err, err)
}

func (c *command) deadSurvey() *cobra.Command {
	var counts bool
	cmd := &cobra.Command{
		Use:   "survey [QUEUE...]",
		Short: "Count messages, and group the dead by where they died, why, and of which error",
		Long: `Count the messages of all queues, or of those that are named, and group the dead by
where they died, why, and of which error. Numbers, ids and addresses in the error's
text make no difference. Work and delay queues are counted and not looked into.`,
		Example: `  hopback dead survey
  hopback dead survey orders.dead --json`,
		Args: takes(0, math.MaxInt, "[QUEUE...]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				show, end := c.walking(ctx, "surveying")
				s, err := d.Survey(ctx, desk.SurveyConfig{Queues: args, CountsOnly: counts, Accept: c.accepted(), Progress: func(_ string, p desk.Progress) { show(p) }})
				end()
				if err != nil && len(s.Queues) == 0 {
					return err
				}
				missing := 0
				for _, q := range s.Queues {
					if q.Unread != "" {
						missing++
						c.say(fmt.Errorf("%s: %s", clean(q.Name), clean(q.Unread)))
					}
				}
				if missing > 0 && err == nil {
					err = coded(Unknown, fmt.Errorf("%s could not be read, or not to the end; messages that other consumers hold: --accept %s", count(missing, "queue"), desk.CaveatConsumers))
				}
				return c.result(s, err, func(b *strings.Builder) { surveyText(b, s, err == nil && !counts) }, "")
			})
		},
	}
	cmd.Flags().BoolVar(&counts, "counts", false, "count only, and look into no queue")
	c.jsonFlag(cmd, "the survey")
	return cmd
}

// surveyText shows a survey; looked says that the dead-letter queues were read to their end.
func surveyText(b *strings.Builder, s desk.Survey, looked bool) {
	rows := [][]string{{"QUEUE", "ROLE", "READY", "HELD", "DELAYED", "CONSUMERS", "IN/S", "OUT/S", "OLDEST", "NEWEST"}}
	for _, q := range s.Queues {
		known := func(n uint64) string {
			if !q.Counted {
				return "?"
			}
			return strconv.FormatUint(n, 10)
		}
		rows = append(rows, []string{
			q.Name, q.Role, strconv.FormatUint(q.Messages, 10), known(q.Unacknowledged), known(q.Delayed), strconv.FormatUint(q.Consumers, 10),
			fmt.Sprintf("%.1f", q.In), fmt.Sprintf("%.1f", q.Out), when(q.Oldest), when(q.Newest),
		})
	}
	table(b, rows)
	for _, q := range s.Queues {
		caveatsText(b, q.Name, q.Caveats)
		if q.Unread != "" {
			fmt.Fprintf(b, "%s: not looked at to its end: %s\n", clean(q.Name), clean(q.Unread))
		}
	}
	if len(s.Groups) == 0 {
		if looked {
			b.WriteString("\nNo dead letters were found.\n")
		}
		return
	}
	rows = [][]string{{"GROUP", "COUNT", "IN", "DIED IN", "REASON", "NEWEST", "ERROR"}}
	for _, g := range s.Groups {
		rows = append(rows, []string{g.ID, strconv.FormatUint(g.Count, 10), g.In, g.Queue, string(g.Reason), when(g.Newest), errorText(g.ErrorType, g.Text)})
	}
	b.WriteByte('\n')
	table(b, rows)
	if s.Others > 0 {
		fmt.Fprintf(b, "%d more in further groups.\n", s.Others)
	}
}

func (c *command) deadList() *cobra.Command {
	var s selection
	var cfg desk.ListConfig
	cmd := &cobra.Command{
		Use:   "list QUEUE",
		Short: "List messages, without changing them",
		Long: `List the messages of a queue that the flags select, from the queue's head. They stay
where they are, in their order. If no message has the --id or --group the exit code is 1.`,
		Example: `  hopback dead list orders.dead --reason permanent --limit 20
  hopback dead list orders.dead --match 'timeout after \d+s' --newer-than 1h --count`,
		Args: takes(1, 1, "QUEUE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := s.selected()
			if err != nil {
				return err
			}
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				e := c.early(ctx, args[0])
				cfg.Queue, cfg.Filter, cfg.Accept, cfg.Progress = args[0], filter, c.accepted(), e.tell
				cfg.Found = func(l desk.List) { e.print(l, func(b *strings.Builder) { listText(b, l, cfg) }) }
				l, err := d.List(ctx, cfg)
				e.end()
				missing := unread(l.Unread)
				if err == nil && missing == nil && l.Matched == 0 && len(filter.IDs)+len(filter.Groups) > 0 {
					missing = coded(No, fmt.Errorf("none of the %s in %q has the --id or --group that was asked for", count(l.Seen, "message"), args[0]))
				}
				if e.printed {
					return errors.Join(e.over(err), missing)
				}
				if err != nil && l.Seen == 0 {
					return err
				}
				return c.result(l, errors.Join(err, missing), func(b *strings.Builder) { listText(b, l, cfg) }, "")
			})
		},
	}
	s.flags(cmd)
	f := cmd.Flags()
	f.IntVar(&cfg.Skip, "skip", 0, "leave out the first `n` that match")
	f.IntVar(&cfg.Limit, "limit", 0, "show at most `n` (default 50, at most 10000)")
	f.BoolVar(&cfg.Count, "count", false, "go on to the queue's end, and count all that match")
	c.jsonFlag(cmd, "the list")
	return cmd
}

func listText(b *strings.Builder, l desk.List, cfg desk.ListConfig) {
	caveatsText(b, l.Terms.Queue, l.Terms.Caveats)
	rows := [][]string{{"ID", "MESSAGE-ID", "DIED", "DIED IN", "REASON", "RETRIES", "REPLAYS", "SIZE", "ERROR"}}
	for _, m := range l.Messages {
		text := errorText(m.ErrorType, m.Error)
		if m.Unreadable != "" {
			text = "unreadable: " + m.Unreadable
		}
		rows = append(rows, []string{m.ID, m.MessageID, when(m.Died), m.Queue, string(m.Reason), strconv.Itoa(m.Retries), strconv.Itoa(m.Replays), strconv.Itoa(m.Size), text})
	}
	table(b, rows)
	if l.More && !cfg.Count {
		fmt.Fprintf(b, "%d shown, and there are more: --skip %d.\n", len(l.Messages), cfg.Skip+len(l.Messages))
		return
	}
	fmt.Fprintf(b, "%d shown; %d match of %d looked at", len(l.Messages), l.Matched, l.Seen)
	if l.More {
		fmt.Fprintf(b, "; for more: --skip %d", cfg.Skip+len(l.Messages))
	}
	b.WriteString(".\n")
}

func (c *command) deadShow() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "show QUEUE ID",
		Short:   "Show one message whole, with its way",
		Long:    "Show one message whole: why it is dead, its way, its properties and annotations with\ntheir types, and its body. It stays where it is.",
		Example: "  hopback dead show orders.dead 5b0c6a7d1e2f3a4b5c6d7e8f\n  hopback dead show orders.dead order-4711 --json",
		Args:    takes(2, 2, "QUEUE ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				e := c.early(ctx, args[0])
				_, err := d.Show(ctx, desk.ShowConfig{
					Queue: args[0], ID: args[1], Accept: c.accepted(), Progress: e.tell,
					Found: func(m desk.Letter) { e.print(m, func(b *strings.Builder) { letterText(b, m) }) },
				})
				e.end()
				return e.over(missed(err))
			})
		},
	}
	c.jsonFlag(cmd, "the message")
	return cmd
}

func letterText(b *strings.Builder, m desk.Letter) {
	field := func(name, value string) {
		if value != "" {
			fmt.Fprintf(b, "%-15s %s\n", name, clean(value))
		}
	}
	field("id", m.ID)
	field("message-id", m.MessageID)
	field("died in", m.Queue)
	field("reason", string(m.Reason))
	field("error", errorText(m.ErrorType, m.Error))
	field("unreadable", m.Unreadable)
	field("group", m.Group)
	field("died", when(m.Died))
	field("worker", m.Worker)
	field("published to", strings.TrimSpace(m.Exchange+" "+m.RoutingKey))
	fmt.Fprintf(b, "%-15s %d retries, %d replays, priority %d, %d bytes, delivery-count %d\n", "counts", m.Retries, m.Replays, m.Priority, m.Size, m.DeliveryCount)
	if len(m.Hops) > 0 {
		b.WriteString("\nits way\n")
		rows := [][]string{}
		for _, h := range m.Hops {
			times := ""
			if h.Count > 1 {
				times = fmt.Sprintf("%d times", h.Count)
				if !h.Since.IsZero() {
					times += " since " + when(h.Since)
				}
			}
			if h.Delay > 0 {
				times = "retry after " + h.Delay.String()
			}
			rows = append(rows, []string{"  " + when(h.At), string(h.Kind), h.Queue, h.Reason, times, h.Text})
		}
		table(b, rows)
	}
	for _, s := range []struct {
		name string
		json []byte
	}{{"properties", m.Properties}, {"application properties", m.ApplicationProperties}, {"annotations", m.Annotations}, {"footer", m.Footer}} {
		if len(s.json) > 0 {
			fmt.Fprintf(b, "\n%s\n  %s\n", s.name, clean(string(s.json)))
		}
	}
	fmt.Fprintf(b, "\nbody, %d bytes, shown as %s", m.BodySize, m.BodyForm)
	if m.BodyCut {
		b.WriteString(", cut")
	}
	b.WriteString("\n")
	for line := range strings.Lines(m.Body) {
		b.WriteString(clean(strings.TrimRight(line, "\r\n")) + "\n")
	}
}

// replaying are the flags of replay and edit.
type replaying struct {
	cfg        desk.ReplayConfig
	to         string
	toExchange bool
}

func (r *replaying) flags(c *command, cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.cfg.By, "by", "", "`name` of who replays, which is kept in the messages (default the user and the host)")
	f.StringVar(&r.cfg.ID, "replay-id", "", "`id` of the replay; a replay that was stopped goes on under the same one (default a random one)")
	f.StringVar(&r.to, "to", "", "send to this `queue` in place of the one that the message died in")
	f.BoolVar(&r.toExchange, "to-exchange", false, "send to the exchange and key that the message was first published with")
	c.jsonFlag(cmd, "the report")
}

func (r *replaying) destination() error {
	if r.to != "" && r.toExchange {
		return usage("--to and --to-exchange are two destinations; choose one of them")
	}
	if r.to != "" {
		r.cfg.Address = address.Queue(r.to)
	}
	if r.toExchange {
		r.cfg.ToExchange = true
	}
	return nil
}

// who is the name of who runs the command.
func (c *command) who() string {
	name := c.io.Env("USER")
	if name == "" {
		name = c.io.Env("LOGNAME")
	}
	if u, err := user.Current(); name == "" && err == nil {
		name = u.Username
	}
	if name == "" { // as in a container whose user has no name
		name = fmt.Sprint("uid-", os.Getuid())
	}
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	if len(name) > 100 || !utf8.ValidString(name) {
		return ""
	}
	return name
}

func (c *command) replay(ctx context.Context, d *desk.Desk, cfg desk.ReplayConfig, again string) error {
	show, end := c.walking(ctx, "replaying from "+cfg.Queue)
	cfg.Accept, cfg.Progress = c.accepted(), show
	if cfg.By == "" {
		cfg.By = c.who()
	}
	r, err := d.Replay(ctx, cfg)
	end()
	if err != nil && r.Walks == 0 {
		return err
	}
	if err == nil && r.Failed > 0 {
		err = coded(No, fmt.Errorf("%s can't be sent; see the lines that begin with \"not sent\". Each stays in its queue", count(r.Failed, "message")))
	}
	if err == nil && cfg.Edit != nil && r.Replayed == 0 {
		switch {
		case r.Again > 0:
			err = coded(No, fmt.Errorf("nothing was sent: the message was in replay %s before and is dead again; use another --replay-id", clean(r.ID)))
		case r.Unread == "":
			err = coded(No, fmt.Errorf("nothing was sent: the message isn't in %q any more; it was replayed, discarded or consumed a moment ago", cfg.Queue))
		}
	}
	err = errors.Join(err, unread(r.Unread))
	if again != "" {
		again = fmt.Sprintf("the same command with --replay-id %s", r.ID)
	}
	return c.result(r, err, func(b *strings.Builder) { replayText(b, r, cfg) }, again)
}

func (c *command) deadReplay() *cobra.Command {
	var s selection
	var r replaying
	cmd := &cobra.Command{
		Use:   "replay QUEUE",
		Short: "Send selected messages back to where they came from, as new",
		Long: `Send the selected messages back to the queue that they died in, as new: their retries
and their time begin again. All others stay, in their order.

Each message is gone from QUEUE only after its copy is confirmed, so there may be two
of it, and never none. Where the topology has replay-by-move, the broker moves the
messages instead, and there is only ever one of each. --copy has them copied there, too.

--dry-run shows what would be replayed. A replay can be stopped at any moment, and
goes on with the same --replay-id. It doesn't send back twice what dies again.`,
		Example: `  hopback dead replay orders.dead --group 3f2a9c01b7de --dry-run
  hopback dead replay orders.dead --group 3f2a9c01b7de --rate 50 --max 1000`,
		Args: takes(1, 1, "QUEUE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := s.selected()
			if err != nil {
				return err
			}
			if err := r.destination(); err != nil {
				return err
			}
			r.cfg.Queue, r.cfg.Filter = args[0], filter
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error { return c.replay(ctx, d, r.cfg, "go on") })
		},
	}
	s.flags(cmd)
	r.flags(c, cmd)
	f := cmd.Flags()
	f.BoolVar(&r.cfg.All, "all", false, "replay all messages of the queue, where no flag selects")
	f.BoolVar(&r.cfg.DryRun, "dry-run", false, "select and count, and send nothing")
	f.BoolVar(&r.cfg.Copy, "copy", false, "copy the messages that could be moved, too")
	f.Float64Var(&r.cfg.Rate, "rate", 0, "at most `n` messages a second")
	f.Uint64Var(&r.cfg.Max, "max", 0, "at most `n` messages")
	return cmd
}

func replayText(b *strings.Builder, r desk.ReplayReport, cfg desk.ReplayConfig) {
	caveatsText(b, cfg.Queue, r.Caveats)
	groupsText(b, r.Groups, r.Others)
	for _, f := range r.Failures {
		fmt.Fprintf(b, "not sent: %s %s: %s\n", f.ID, clean(f.MessageID), clean(f.Err))
	}
	if r.DryRun {
		fmt.Fprintf(b, "%d of %s would be replayed; nothing was sent.\n", r.Matched-r.Failed, count(r.Seen, "message"))
		if r.Moved > 0 {
			fmt.Fprintf(b, "%d of them would be moved without a copy.\n", r.Moved)
		}
		return
	}
	fmt.Fprintf(b, "%s replayed from %q in %v, by replay %s.\n", count(r.Replayed, "message"), cfg.Queue, r.Took.Round(time.Millisecond), clean(r.ID))
	if r.Moved > 0 {
		fmt.Fprintf(b, "%d of them were moved without a copy. The broker may still be bringing the last of them.\n", r.Moved)
	}
	if r.Again > 0 {
		fmt.Fprintf(b, "%d were in this replay before and are dead again; they stay.\n", r.Again)
	}
	if r.Failed > uint64(len(r.Failures)) {
		fmt.Fprintf(b, "%d couldn't be sent; the first %d are shown.\n", r.Failed, len(r.Failures))
	}
	if r.Unsure > 0 {
		fmt.Fprintf(b, "The connection was lost before it was certain that %d more were replayed. A copied one may be there twice; a moved one is in one of the two queues.\n", r.Unsure)
	}
}

func groupsText(b *strings.Builder, groups []desk.Group, others uint64) {
	if len(groups) == 0 {
		return
	}
	rows := [][]string{{"GROUP", "COUNT", "DIED IN", "REASON", "NEWEST", "ERROR"}}
	for _, g := range groups {
		rows = append(rows, []string{g.ID, strconv.FormatUint(g.Count, 10), g.Queue, string(g.Reason), when(g.Newest), errorText(g.ErrorType, g.Text)})
	}
	table(b, rows)
	if others > 0 {
		fmt.Fprintf(b, "%d more in further groups.\n", others)
	}
}

// table writes rows in columns. The last column has what is left of the line.
func table(b *strings.Builder, rows [][]string) {
	const most = 44
	var aligned strings.Builder
	w := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			if row[i] = clean(cell); i < len(row)-1 && utf8.RuneCountInString(row[i]) > most {
				row[i] = string([]rune(row[i])[:most-1]) + "…"
			}
		}
		_, _ = fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush()
	for line := range strings.Lines(aligned.String()) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
}

// clean keeps what a message says from steering the terminal.
func clean(s string) string {
	if !strings.ContainsFunc(s, unsafe) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if unsafe(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// unsafe are control characters, and those that turn the direction of text.
func unsafe(r rune) bool {
	return unicode.Is(unicode.C, r) || r == utf8.RuneError || r == '\u2028' || r == '\u2029'
}

func when(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format("2006-01-02 15:04:05")
}

func errorText(kind, text string) string {
	if kind == "" {
		return text
	}
	return strings.TrimSuffix(kind+": "+text, ": ")
}
