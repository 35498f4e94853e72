package cli

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/user"
	"reflect"
	"regexp"
	"slices"
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
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

const dlqHelp = `Find out why messages were dead-lettered, and send back those that deserve another
attempt.

QUEUE is a dead-letter queue, such as orders.dead, or the parking queue. To read it,
hopback receives its messages, holds them, and returns them in order, unchanged. Where
it can't do so without side effects, the command names the side effect and refuses,
unless --accept allows it. Only one command at a time reads a queue; others wait.

Flags select messages. A message is selected if it matches all of them. list, replay,
discard, and export share these flags. ID is an ID that list prints, or a message-id.

The HTTP API lists queues and shows policies and rates. Without it, name the queues.

Exit codes:
  0    done
  1    no: a message couldn't be sent or found, a line of a file is invalid, or reading
       has a side effect that --accept doesn't allow
  2    unknown: the broker can't be reached or refuses the user, the timeout expired, or
       other consumers held messages, or messages wait for their delivery time (0 with
       --accept other-consumers, or --accept waiting-messages)
  64   the command line is wrong; nothing was sent
  130  interrupted; the output reports what was done, and how to continue`

func (c *command) dlq() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "dlq",
		Aliases: []string{"dead"},
		Short:   "Survey, list, show, replay, edit, discard, export, and import dead letters",
		Long:    dlqHelp,
		Example: `  hopback dlq survey
  hopback dlq list orders.dead --group 3f2a9c01b7de
  hopback dlq replay orders.dead --group 3f2a9c01b7de --dry-run`,
	}
	group(cmd)
	f := cmd.PersistentFlags()
	c.connectionFlags(f)
	durationVar(f, nil, "timeout", 0, "time limit of the command; 0 means none")
	f.StringVar(&c.dlqFlags.prefix, "names-prefix", "", "`prefix` of the names in the retry topology, as in retry.names.prefix of its file")
	f.StringArrayVar(&c.dlqFlags.accept, "accept", nil, "allow a side effect of reading, by the `name` that the refusal prints; may be repeated")
	c.completeAccept(cmd)
	cmd.AddCommand(c.dlqSurvey(), c.dlqList(), c.dlqShow(), c.dlqReplay(), c.dlqEdit(), c.dlqDiscard(), c.dlqExport(), c.dlqImport())
	return cmd
}

// dlqFlags are those that the commands of "dlq" and "desk" share.
type dlqFlags struct {
	prefix string
	accept []string
}

func (c *command) accepted() []desk.WarningCode {
	var all []desk.WarningCode
	for _, a := range c.dlqFlags.accept {
		all = append(all, desk.WarningCode(a))
	}
	return all
}

// warnings are what --accept can name.
var warnings = []desk.WarningCode{
	desk.WarningLimit, desk.WarningLoss, desk.WarningConsumers, desk.WarningWaiting, desk.WarningSingleActive, desk.WarningClassic, desk.WarningHeaders, desk.WarningPolicies, desk.WarningScan,
}

// checkAccepted refuses an --accept that names no side effect.
func (c *command) checkAccepted() error {
	var names []string
	for _, v := range warnings {
		names = append(names, string(v))
	}
	for _, a := range c.dlqFlags.accept {
		if slices.Contains(names, a) {
			continue
		}
		if best := argument.Nearest(a, names); best != "" {
			return usage("--accept %.80q isn't a side effect; did you mean %q?", a, best)
		}
		return usage("--accept %.80q isn't a side effect; it can be %s", a, strings.Join(names, ", "))
	}
	return nil
}

// atDesk connects, and runs do with a desk.
func (c *command) atDesk(cmd *cobra.Command, do func(ctx context.Context, d *desk.Desk) error) error {
	if err := c.checkAccepted(); err != nil {
		return err
	}
	return c.work(cmd, nil, func(ctx context.Context, b *broker, _ input) error {
		if err := b.connect(ctx); err != nil {
			return err
		}
		cfg := desk.Config{Names: retry.Names{Prefix: c.dlqFlags.prefix}, Logger: b.logger()}
		if b.api != nil {
			cfg.HTTP = b.api
		}
		d, err := desk.New(b.conn, cfg)
		if err != nil {
			return err
		}
		err = flagged(do(ctx, d))
		if errors.Is(err, declare.ErrNotFound) {
			err = fmt.Errorf("%w; \"hopback dlq survey\" lists the queues of virtual host %q, and \"hopback topology apply\" declares the queues of a file", err, b.vhost)
		}
		if sideEffects, ok := errors.AsType[*desk.SideEffectsError](err); ok {
			err = refusedToRead(sideEffects)
		}
		return timedOut(ctx, err)
	})
}

// refusedToRead says which side effects of reading a queue have to be allowed, and how.
func refusedToRead(e *desk.SideEffectsError) error {
	var why, flags []string
	for _, v := range e.SideEffects.Warnings {
		if v.Refuses {
			why = append(why, v.Text)
			flags = append(flags, "--accept "+string(v.Code))
		}
	}
	return coded(No, fmt.Errorf("the queue %q wasn't read: %s; to read it anyway: %s", e.SideEffects.Queue, strings.Join(why, "; "), strings.Join(flags, " ")))
}

// flagOf is the flag of each argument that package desk names.
var flagOf = map[string]string{
	"ListConfig.Skip": "--skip", "ListConfig.Limit": "--limit", "Filter.MinReplays": "--min-replays", "Filter.MaxReplays": "--max-replays",
	"Filter.DeadLetteredBefore": "--older-than", "Filter.DeadLetteredAfter": "--newer-than", "ReplayConfig.ID": "--replay-id", "ReplayConfig.By": "--by",
	"ReplayConfig.Rate": "--rate", "ReplayConfig.Address": "--to", "DiscardConfig.To": "--to", "ImportConfig.Skip": "--skip", "file": "FILE", "queue": "QUEUE",
	"Edit.ContentType": "--content-type", "Edit.Property": "--set", "Filter.Groups": "--group",
}

// flagged reports bad input in terms of the command line.
func flagged(err error) error {
	var bad *argument.Error
	if !errors.As(err, &bad) {
		return err
	}
	switch path, _, _ := strings.Cut(bad.Path.String(), "["); { // without an index
	case path == "ReplayConfig.Filter", path == "DiscardConfig.Filter":
		return usage("no flag selects messages; select some, for example with --group or --id, or add --all for all messages of the queue")
	case path == "SurveyConfig.Queues":
		return usage("hopback can't list queues without the HTTP API; name the queues, or set --management-url")
	case path == "file" && bad.Code == argument.CodeConflict:
		return usage("%s isn't empty; name another file, or continue this one with --resume", bad.Value)
	case flagOf[path] != "":
		text := flagOf[path]
		if bad.Value != "" {
			text += " " + bad.Value
		}
		return usage("%s %s; %s", text, bad.Problem, bad.Remedy)
	}
	return err
}

// noneOf is a subject for what no message is.
func noneOf(seen uint64) string {
	if seen == 0 {
		return "no message"
	}
	return fmt.Sprintf("none of the %s", count(seen, "message"))
}

// count is a number of things, such as "1 message".
func count[N int | uint64](n N, thing string) string { return plural(n, thing, thing+"s") }

func plural[N int | uint64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// takes checks the number of arguments. form names them.
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

func (s *selection) flags(c *command, cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringArrayVar(&s.filter.IDs, "id", nil, "`ID` of list, or message-id; may be repeated")
	f.StringArrayVar(&s.filter.Groups, "group", nil, "ID of a `group` of survey; may be repeated")
	f.StringArrayVar(&s.filter.Queues, "from", nil, "`queue` that dead-lettered the message; may be repeated")
	f.StringArrayVar(&s.reasons, "reason", nil, "`reason` for dead-lettering, such as exhausted; may be repeated")
	f.StringVar(&s.filter.ErrorType, "error-type", "", "Go `type` of the error, such as *net.OpError")
	f.StringVar(&s.filter.Text, "text", "", "`text` that the error contains")
	f.StringVar(&s.match, "match", "", "regular `expression` that the error matches")
	f.StringArrayVar(&s.properties, "property", nil, "application property, as `key=value`; may be repeated")
	durationVar(f, &s.newerThan, "newer-than", 0, "dead-lettered less than this `duration` ago, such as 7d or 1h")
	durationVar(f, &s.olderThan, "older-than", 0, "dead-lettered more than this `duration` ago, such as 30d")
	f.IntVar(&s.filter.MinReplays, "min-replays", 0, "replayed at least `n` times")
	f.IntVar(&s.maxReplays, "max-replays", -1, "replayed at most `n` times; -1 means no limit")
	c.completeSelection(cmd)
}

// selected is the filter of the flags. It refuses what can't be right, before anything connects.
func (s *selection) selected() (desk.Filter, error) {
	f := s.filter
	for _, r := range s.reasons {
		f.Reasons = append(f.Reasons, client.Reason(r))
	}
	for _, p := range s.properties {
		k, v, ok := strings.Cut(p, "=")
		if !ok || k == "" {
			return f, usage("--property %.80q isn't a property; write it as key=value", p)
		}
		if f.Properties == nil {
			f.Properties = map[string]string{}
		}
		f.Properties[k] = v
	}
	if s.match != "" {
		var err error
		if f.Match, err = regexp.Compile(s.match); err != nil {
			return f, usage("--match isn't a regular expression: %w; escape special characters with \\", err)
		}
	}
	for _, g := range f.Groups {
		if b, err := hex.DecodeString(g); err != nil || len(b) != 6 {
			return f, usage("--group %.80q isn't the ID of a group; \"hopback dlq survey\" prints them, with 12 hexadecimal digits each", g)
		}
	}
	switch {
	case s.newerThan < 0 || s.olderThan < 0:
		return f, usage("--newer-than and --older-than can't be negative; use a duration such as 7d or 1h")
	case s.newerThan > 0 && s.olderThan >= s.newerThan:
		return f, usage("no message is both newer than --newer-than and older than --older-than; use a shorter --older-than")
	case f.MinReplays < 0:
		return f, usage("--min-replays is negative; leave it out, or use a positive number")
	case s.maxReplays >= 0 && s.maxReplays < f.MinReplays:
		return f, usage("--max-replays is below --min-replays; use a larger number")
	}
	now := time.Now()
	if s.newerThan > 0 {
		f.DeadLetteredAfter = now.Add(-s.newerThan)
	}
	if s.olderThan > 0 {
		f.DeadLetteredBefore = now.Add(-s.olderThan)
	}
	if s.maxReplays >= 0 {
		f.MaxReplays = &s.maxReplays
	}
	return f, nil
}

// some is selected, for commands that need --all to select all messages.
func (s *selection) some(all bool) (desk.Filter, error) {
	f, err := s.selected()
	if err == nil && !all && reflect.ValueOf(f).IsZero() {
		err = usage("no flag selects messages; select some, for example with --group or --id, or add --all for all messages of the queue")
	}
	return f, err
}

// stoppedAfter is when a command that was stopped, and hasn't ended, reports what it does.
const stoppedAfter = 500 * time.Millisecond

// stopping reports what a command does that takes a while to stop after ctx has ended. Callers
// must call the function that it returns.
func (c *command) stopping(ctx context.Context, text string) (end func()) {
	over, logged := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(logged)
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
			<-logged
		}
	}
}

// scanning shows the progress of a scan, and what the command does once ctx has ended.
func (c *command) scanning(ctx context.Context, what string) (show func(desk.Progress), end func()) {
	p := c.progress(what)
	began := time.Now()
	stopped := c.stopping(ctx, "stopping: returning the held messages in order; another interrupt stops the command at once, and the next scan restores the order")
	return func(now desk.Progress) {
			if now.Waiting {
				p.set("%s: waiting for another scan of the queue; --accept another-scan doesn't wait", what)
				began = time.Now()
				return
			}
			done, rest := now.Seen, ""
			rate := float64(done) / max(time.Since(began).Seconds(), 0.001)
			if now.Of > done && done >= now.Of/50 && rate > 0 {
				left := time.Duration(float64(now.Of-done) / rate * float64(time.Second)).Round(time.Second)
				rest = fmt.Sprintf(", %v left", left)
			}
			p.set("%s: %d of %d read, %d selected, %d done, %.0f per second%s", what, done, max(now.Of, done), now.Matched, now.Done, rate, rest)
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
	return coded(Unknown, fmt.Errorf("%s; %s", why, toAccept))
}

// toAccept is how to accept that messages weren't read.
var toAccept = fmt.Sprintf("to accept that: --accept %s for other consumers, --accept %s for waiting messages", desk.WarningConsumers, desk.WarningWaiting)

// missed adds to the error of a message that wasn't found why it may exist.
func missed(err error) error {
	var none *desk.NoMessageError
	if errors.As(err, &none) && none.Unread != "" {
		return coded(Unknown, fmt.Errorf("%w; %s", err, toAccept))
	}
	return err
}

// warningsText shows the guarantees that an operation couldn't make.
func warningsText(b *strings.Builder, queue string, warnings []desk.Warning) {
	for _, v := range warnings {
		fmt.Fprintf(b, "%s: %s\n", clean(queue), clean(v.Text))
	}
}

// result prints the report of a command, and returns its error. If the command was stopped,
// again is how to continue.
func (c *command) result(report any, err error, text func(*strings.Builder), again string) error {
	var out strings.Builder
	text(&out)
	var printed error
	if c.structured() {
		printed = c.printStructured(report)
	} else {
		_, printed = fmt.Fprint(c.stdout.w, out.String())
	}
	if err != nil && again != "" && (c.interrupted() || errors.Is(err, client.ErrConnectionLost) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, new(*fs.PathError))) {
		err = errors.Join(err, errors.New("no message is lost: each is in the queue, or where it was sent; to continue: "+again))
	}
	return errors.Join(printed, err)
}

// early prints what a scan has found before the queue is in order again.
type early struct {
	c       *command
	ctx     context.Context
	queue   string
	show    func(desk.Progress)
	end     func()
	printed bool
	err     error // of printing
}

// early starts to show the progress of a scan. Callers must call end.
func (c *command) early(ctx context.Context, queue string) *early {
	e := &early{c: c, ctx: ctx, queue: queue}
	e.show, e.end = c.scanning(ctx, "reading "+queue)
	return e
}

func (e *early) notify(p desk.Progress) { e.show(p) }

// print prints what was found. From now on, the progress is that of restoring the order.
func (e *early) print(report any, text func(*strings.Builder)) {
	e.end()
	e.printed, e.err = true, e.c.result(report, nil, text, "")
	p := e.c.progress("restoring the order of " + e.queue)
	e.show = func(now desk.Progress) {
		p.set("restoring the order of %s: %d of at most %d read", e.queue, now.Seen, max(now.Of, now.Seen))
	}
	logged := make(chan struct{})
	stop := context.AfterFunc(e.ctx, func() {
		defer close(logged)
		e.c.say(fmt.Errorf("the output is complete, and hopback is still restoring the order of %s; another interrupt stops that, and the next scan restores the order", e.queue))
	})
	e.end = func() {
		if !stop() {
			<-logged
		}
		p.end()
	}
}

// over is the error of a scan that has ended.
func (e *early) over(err error) error {
	if e.printed && err != nil {
		err = fmt.Errorf("the output is complete, but %s may be out of order until the next scan: %w", e.queue, err)
	}
	return errors.Join(e.err, err)
}

func (c *command) dlqSurvey() *cobra.Command {
	var counts bool
	var watch time.Duration
	cmd := &cobra.Command{
		Use:   "survey [QUEUE...]",
		Short: "Count messages, and group dead letters by queue, reason, and error",
		Long: `Count the messages of all queues, or of the named ones, and group dead letters by the
queue that dead-lettered them, the reason, and the error. Errors that differ only in
numbers, IDs, and addresses are in one group. Work and delay queues are only counted.
With the HTTP API, it also names the queues and groups that are paused.

--watch repeats that until ^C, and reads the dead-letter queues each time; with --counts,
it only counts.`,
		Example: `  hopback dlq survey
  hopback dlq survey --counts --watch=5s
  hopback dlq survey orders.dead -o json`,
		Args:              takes(0, math.MaxInt, "[QUEUE...]"),
		ValidArgsFunction: c.queueNames(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkWatch(cmd, watch, args); err != nil {
				return err
			}
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				take := func(ctx context.Context) snapshot {
					return c.survey(ctx, d, desk.SurveyConfig{Queues: args, CountsOnly: counts, Accept: c.accepted()})
				}
				if watch > 0 {
					return c.watch(ctx, watch, take)
				}
				s := take(ctx)
				found, ok := s.value.(desk.Survey)
				if !ok {
					return s.err
				}
				for _, q := range found.Queues {
					if q.Unread != "" {
						c.say(fmt.Errorf("%s: %s", clean(q.Name), clean(q.Unread)))
					}
				}
				return c.result(found, s.err, s.text, "")
			})
		},
	}
	watchFlag(cmd, &watch)
	cmd.Flags().BoolVar(&counts, "counts", false, "only count, and read no messages")
	c.outputFlag(cmd, "the survey")
	return cmd
}

// survey takes one survey.
func (c *command) survey(ctx context.Context, d *desk.Desk, cfg desk.SurveyConfig) snapshot {
	show, end := c.scanning(ctx, "surveying")
	cfg.OnProgress = func(_ string, p desk.Progress) { show(p) }
	s, err := d.Survey(ctx, cfg)
	end()
	if err != nil && len(s.Queues) == 0 {
		return snapshot{err: err}
	}
	missing := 0
	for _, q := range s.Queues {
		if q.Unread != "" {
			missing++
		}
	}
	if missing > 0 && err == nil {
		err = coded(Unknown, fmt.Errorf("hopback couldn't read %s to the end; %s", count(missing, "queue"), toAccept))
	}
	return snapshot{s, func(b *strings.Builder) { surveyText(b, s, err == nil && !cfg.CountsOnly) }, err}
}

// surveyText shows a survey: what needs attention first, and idle queues last. peeked reports
// that the dead-letter queues were read to their end.
func surveyText(b *strings.Builder, s desk.Survey, peeked bool) {
	for _, a := range s.Alarms {
		fmt.Fprintf(b, "ALARM: %s. The broker accepts no messages until it clears.\n", alarmText(a))
	}
	shown := map[pause.State]bool{}
	for _, q := range s.Queues {
		if p := q.Paused; p != nil && !shown[*p] {
			shown[*p] = true // its group has other partitions
			fmt.Fprintf(b, "%s: %s\n", clean(cmp.Or(p.Queue, p.Group)), clean(p.String()))
		}
	}
	for _, q := range s.Queues {
		warningsText(b, q.Name, q.Warnings)
		if q.Unread != "" {
			fmt.Fprintf(b, "%s: not read to the end: %s\n", clean(q.Name), clean(q.Unread))
		}
	}
	if b.Len() > 0 {
		b.WriteByte('\n')
	}
	switch {
	case len(s.Groups) > 0:
		rows := [][]string{{"GROUP", "COUNT", "DLQ", "QUEUE", "REASON", "NEWEST", "ERROR"}}
		for _, g := range s.Groups {
			rows = append(rows, []string{g.ID, strconv.FormatUint(g.Count, 10), g.In, g.Queue, string(g.Reason), when(g.Newest), errorText(g.ErrorType, g.Text)})
		}
		table(b, rows)
		if s.Others > 0 {
			fmt.Fprintf(b, "%s in more groups.\n", count(s.Others, "message"))
		}
		b.WriteByte('\n')
	case peeked:
		b.WriteString("No dead letters were found.\n\n")
	}
	rows := [][]string{{"QUEUE", "ROLE", "READY", "UNACKED", "DELAYED", "CONSUMERS", "IN/S", "OUT/S", "OLDEST", "NEWEST"}}
	for _, q := range idleLast(s.Queues) {
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
}

// partitionName matches the queue of a partition; its first group is the same for all partitions
// of a generation. See partition.Group.
var partitionName = regexp.MustCompile(`^(.+\.\d+)\.\d{3,}$`)

// idleLast moves queues without messages, consumers, and traffic behind all others. Partitions of
// one group stay together: it is idle if all of them are.
func idleLast(queues []desk.QueueSurvey) []desk.QueueSurvey {
	group := func(q desk.QueueSurvey) string {
		if m := partitionName.FindStringSubmatch(q.Name); m != nil {
			return m[1]
		}
		return q.Name
	}
	busy := map[string]bool{}
	for _, q := range queues {
		if q.Messages+q.Consumers+q.Unacknowledged+q.Delayed+q.DeadLettering > 0 || q.In+q.Out > 0 || q.Unread != "" {
			busy[group(q)] = true
		}
	}
	sorted := slices.Clone(queues)
	slices.SortStableFunc(sorted, func(a, b desk.QueueSurvey) int {
		rank := map[bool]int{true: 0, false: 1}
		return rank[busy[group(a)]] - rank[busy[group(b)]]
	})
	return sorted
}

func alarmText(a desk.Alarm) string {
	if a.Resource == "" {
		return "memory or disk"
	}
	return a.Resource + " on " + clean(a.Node)
}

// maxListed is what ListConfig.Limit may be.
const maxListed = 10_000

func (c *command) dlqList() *cobra.Command {
	var s selection
	var cfg desk.ListConfig
	cmd := &cobra.Command{
		Use:   "list QUEUE",
		Short: "List messages, without changing them",
		Long: `List the selected messages of a queue, from its head. They stay in the queue, in order.
If no message has the --id or --group, the exit code is 1.`,
		Example: `  hopback dlq list orders.dead --reason permanent --limit 20
  hopback dlq list orders.dead --match 'timeout after \d+s' --newer-than 7d --count`,
		Args:              takes(1, 1, "QUEUE"),
		ValidArgsFunction: firstOnly(c.queueNames()),
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := s.selected()
			switch {
			case err != nil:
				return err
			case cfg.Skip < 0:
				return usage("--skip is negative; leave it out, or use a positive number")
			case cfg.Limit < 0 || cfg.Limit > maxListed:
				return usage("--limit is out of range; use 1 to %d", maxListed)
			}
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error {
				e := c.early(ctx, args[0])
				cfg.Queue, cfg.Filter, cfg.Accept, cfg.OnProgress = args[0], filter, c.accepted(), e.notify
				cfg.OnFound = func(l desk.List) { e.print(l, func(b *strings.Builder) { listText(b, l, cfg) }) }
				l, err := d.List(ctx, cfg)
				e.end()
				missing := unread(l.Unread)
				if err == nil && missing == nil && l.Matched == 0 && len(filter.IDs)+len(filter.Groups) > 0 {
					missing = coded(No, fmt.Errorf("%s in %q has the --id or --group; \"hopback dlq survey %s\" lists the groups", noneOf(l.Seen), args[0], args[0]))
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
	s.flags(c, cmd)
	f := cmd.Flags()
	f.IntVar(&cfg.Skip, "skip", 0, "leave out the first `n` selected messages")
	f.IntVar(&cfg.Limit, "limit", 0, "show at most `n` messages, up to 10000 (default 50)")
	f.BoolVar(&cfg.Count, "count", false, "read the whole queue, and count all selected messages")
	c.outputFlag(cmd, "the list")
	return cmd
}

func listText(b *strings.Builder, l desk.List, cfg desk.ListConfig) {
	warningsText(b, l.SideEffects.Queue, l.SideEffects.Warnings)
	rows := [][]string{{"ID", "MESSAGE-ID", "TIME", "QUEUE", "REASON", "RETRIES", "REPLAYS", "SIZE", "ERROR"}}
	for _, m := range l.Messages {
		text := errorText(m.ErrorType, m.Error)
		if m.Unreadable != "" {
			text = "unreadable: " + m.Unreadable
		}
		rows = append(rows, []string{m.ID, m.MessageID, when(m.DeadLetteredAt), m.Queue, string(m.Reason), strconv.Itoa(m.Retries), strconv.Itoa(m.Replays), strconv.Itoa(m.Size), text})
	}
	table(b, rows)
	if l.More && !cfg.Count {
		fmt.Fprintf(b, "%s shown, and there are more: --skip %d.\n", count(len(l.Messages), "message"), cfg.Skip+len(l.Messages))
		return
	}
	fmt.Fprintf(b, "%s shown; %d of %d selected", count(len(l.Messages), "message"), l.Matched, l.Seen)
	if l.More {
		fmt.Fprintf(b, "; for more: --skip %d", cfg.Skip+len(l.Messages))
	}
	b.WriteString(".\n")
}

// replaying are the flags of replay and edit.
type replaying struct {
	cfg        desk.ReplayConfig
	to         string
	toExchange bool
}

func (r *replaying) flags(c *command, cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.cfg.By, "by", "", "`name` of the person who replays, recorded in the messages (default user@host)")
	f.StringVar(&r.cfg.ID, "replay-id", "", "`ID` of the replay; the same ID continues a stopped replay (default random)")
	f.StringVar(&r.to, "to", "", "send to this `queue` instead of the one that dead-lettered the message")
	f.BoolVar(&r.toExchange, "to-exchange", false, "send to the exchange and routing key that the message was first published to")
	_ = cmd.RegisterFlagCompletionFunc("to", c.queueNames())
	c.outputFlag(cmd, "the report")
}

func (r *replaying) destination() error {
	if r.to != "" && r.toExchange {
		return usage("--to and --to-exchange are two destinations; choose one")
	}
	if r.to != "" {
		r.cfg.Address = address.Queue(r.to)
	}
	if r.toExchange {
		r.cfg.ToExchange = true
	}
	return nil
}

// who names the user who runs the command.
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
	show, end := c.scanning(ctx, "replaying from "+cfg.Queue)
	cfg.Accept, cfg.OnProgress = c.accepted(), show
	if cfg.By == "" {
		cfg.By = c.who()
	}
	r, err := d.Replay(ctx, cfg)
	end()
	if err != nil && r.Scans == 0 {
		return err
	}
	if err == nil && r.Failed > 0 {
		err = coded(No, fmt.Errorf("%s couldn't be sent, and stayed in the queue; the lines \"not sent\" name the reasons", count(r.Failed, "message")))
	}
	if err == nil && cfg.Edit != nil && r.Replayed == 0 {
		switch {
		case r.Again > 0:
			err = coded(No, fmt.Errorf("nothing was sent: replay %s sent the message before, and it was dead-lettered again; use another --replay-id", clean(r.ID)))
		case r.Unread == "":
			err = coded(No, fmt.Errorf("nothing was sent: the message isn't in %q anymore; it was replayed, discarded, or consumed a moment ago", cfg.Queue))
		}
	}
	err = errors.Join(err, unread(r.Unread))
	if again != "" {
		again = fmt.Sprintf("the same command with --replay-id %s", r.ID)
	}
	return c.result(r, err, func(b *strings.Builder) { replayText(b, r, cfg) }, again)
}

func (c *command) dlqReplay() *cobra.Command {
	var s selection
	var r replaying
	cmd := &cobra.Command{
		Use:   "replay QUEUE",
		Short: "Send selected messages back to the queues that dead-lettered them",
		Long: `Send the selected messages back to the queues that dead-lettered them. Their retries
start over. All other messages stay, in order.

hopback removes a message from QUEUE only after the broker has confirmed the copy. A
crash in between can duplicate a message; it can't lose one. If the topology has
replay-by-move, the broker moves the messages, without duplicates; --copy copies them
anyway.

RabbitMQ hides headers of AMQP 0-9-1 messages that hold tables or arrays. So a message that
may come from there isn't copied, unless you add --accept hidden-headers.

--dry-run only counts. You can stop a replay at any time, and continue it with the same
--replay-id: it doesn't resend a message that was dead-lettered again.`,
		Example: `  hopback dlq replay orders.dead --group 3f2a9c01b7de --dry-run
  hopback dlq replay orders.dead --group 3f2a9c01b7de --rate 50 --max 1000`,
		Args:              takes(1, 1, "QUEUE"),
		ValidArgsFunction: firstOnly(c.queueNames()),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := r.destination(); err != nil {
				return err
			}
			filter, err := s.some(r.cfg.All)
			if err != nil {
				return err
			}
			r.cfg.Queue, r.cfg.Filter = args[0], filter
			return c.atDesk(cmd, func(ctx context.Context, d *desk.Desk) error { return c.replay(ctx, d, r.cfg, "continue") })
		},
	}
	s.flags(c, cmd)
	r.flags(c, cmd)
	f := cmd.Flags()
	f.BoolVar(&r.cfg.All, "all", false, "replay all messages of the queue")
	f.BoolVar(&r.cfg.DryRun, "dry-run", false, "only select and count")
	f.BoolVar(&r.cfg.Copy, "copy", false, "copy messages even if the broker could move them")
	f.Float64Var(&r.cfg.Rate, "rate", 0, "at most `n` messages per second")
	f.Uint64Var(&r.cfg.Max, "max", 0, "at most `n` messages")
	return cmd
}

// hiddenText says how to treat messages that may have headers which a copy would lack.
func hiddenText(b *strings.Builder, n uint64, what string) {
	if n > 0 {
		fmt.Fprintf(b, "%s %s: they may come from AMQP 0-9-1, and RabbitMQ hides headers of such messages that hold tables or arrays. If yours have none: --accept %s\n", count(n, "message"), what, desk.WarningHeaders)
	}
}

func replayText(b *strings.Builder, r desk.ReplayReport, cfg desk.ReplayConfig) {
	warningsText(b, cfg.Queue, r.Warnings)
	groupsText(b, r.Groups, r.Others)
	for _, f := range r.Failures {
		fmt.Fprintf(b, "not sent: %s %s: %s\n", f.ID, clean(f.MessageID), clean(f.Err))
	}
	hiddenText(b, r.Hidden, "not copied")
	if r.DryRun {
		fmt.Fprintf(b, "%d of %s would be replayed; nothing was sent.\n", r.Matched-r.Failed, count(r.Seen, "message"))
		if r.Moved > 0 {
			fmt.Fprintf(b, "The broker would move %s, without a copy.\n", count(r.Moved, "message"))
		}
		return
	}
	fmt.Fprintf(b, "%s replayed from %q in %v; the replay's ID is %s.\n", count(r.Replayed, "message"), cfg.Queue, r.Took.Round(time.Millisecond), clean(r.ID))
	if r.Moved > 0 {
		fmt.Fprintf(b, "The broker moved %s without a copy; the last ones may still be on their way.\n", count(r.Moved, "message"))
	}
	if r.Again > 0 {
		fmt.Fprintf(b, "%s stayed: this replay sent them before, and they were dead-lettered again.\n", count(r.Again, "message"))
	}
	if r.Failed > uint64(len(r.Failures)) {
		fmt.Fprintf(b, "%s couldn't be sent; the first %d are shown.\n", count(r.Failed, "message"), len(r.Failures))
	}
	if r.Unknown > 0 {
		fmt.Fprintf(b, "The connection was lost before the broker confirmed %s more. A copied message may now exist twice; a moved one is in one of the two queues.\n", count(r.Unknown, "message"))
	}
}

func groupsText(b *strings.Builder, groups []desk.Group, others uint64) {
	if len(groups) == 0 {
		return
	}
	rows := [][]string{{"GROUP", "COUNT", "QUEUE", "REASON", "NEWEST", "ERROR"}}
	for _, g := range groups {
		rows = append(rows, []string{g.ID, strconv.FormatUint(g.Count, 10), g.Queue, string(g.Reason), when(g.Newest), errorText(g.ErrorType, g.Text)})
	}
	table(b, rows)
	if others > 0 {
		fmt.Fprintf(b, "%s in more groups.\n", count(others, "message"))
	}
}

// table writes rows in columns. The last column isn't cut.
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

// clean keeps the content of messages from controlling the terminal.
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

// unsafe are control characters, and those that change the direction of text.
func unsafe(r rune) bool {
	return unicode.Is(unicode.C, r) || r == utf8.RuneError || r == '\u2028' || r == '\u2029'
}

// when is a time as all commands print it: RFC 3339, in UTC.
func when(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

func errorText(kind, text string) string {
	if kind == "" {
		return text
	}
	return strings.TrimSuffix(kind+": "+text, ": ")
}
