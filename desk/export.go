package desk

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/dedicated"
)

// ExportConfig selects the messages to export. Queue is required. The zero Filter selects
// all.
type ExportConfig struct {
	Queue  string
	Filter Filter
	// Resume continues a file that an earlier export began. It removes an incomplete last
	// line and doesn't write messages again that the file has. Of messages that are equal in
	// everything, it leaves out as many as the file has. Without Resume a file that isn't
	// empty is an *argument.Error.
	Resume bool
	// Accept names the Caveats that are accepted.
	Accept []WarningCode
	// Progress, if not nil, is called a few times a second. It must not block.
	OnProgress func(Progress)
}

// ExportReport is the result of an export. Seen is the number of messages read, and Matched
// how many of them the filter selected.
type ExportReport struct {
	Seen     uint64        `json:"seen"`
	Matched  uint64        `json:"matched"`
	Exported uint64        `json:"exported"` // lines that are complete in the file and synced
	Skipped  uint64        `json:"skipped"`  // messages that were in the file before
	Took     time.Duration `json:"took"`     // in nanoseconds in JSON
	// Warnings are the guarantees that the export couldn't give. Unread is why messages may be
	// missing: others consumed from the queue. Empty if every message was read, and if
	// WarningConsumers is accepted.
	Warnings []Warning `json:"caveats,omitempty"`
	Unread   string    `json:"unread,omitempty"`
}

// Export writes the selected messages of a queue to file and syncs it. Each message is a
// line of JSON that keeps every AMQP type. The messages stay in the queue, in order. file
// must be open for reading and writing. When ctx ends Export stops; the lines that the
// report counts are synced. Call it with Resume to continue. The errors are those of List
// and those of the file.
func (d *Desk) Export(ctx context.Context, file *os.File, cfg ExportConfig) (ExportReport, error) {
	began := time.Now()
	var report ExportReport
	if file == nil {
		return report, argument.At(argument.Root("file"), argument.CodeMissing, nil, "is nil", "give a file that is open for reading and writing")
	}
	if err := cfg.Filter.check(); err != nil {
		return report, err
	}
	out, err := openExport(file, cfg.Resume)
	if err != nil {
		return report, err
	}
	notify := notifier{notify: cfg.OnProgress}
	t, leave, err := d.enter(ctx, cfg.Queue, cfg.Accept, &notify)
	if err != nil {
		return report, err
	}
	defer leave()
	report.Warnings = t.Warnings
	match := cfg.Filter.matcher()
	before := out.lines
	// Where the walk begins again, what is in the file is skipped.
	passed := func(seen uint64) {
		notify.now(Progress{Seen: seen, Matched: report.Matched, Done: out.written, Of: t.Messages})
	}
	err = d.peek(ctx, cfg.Queue, peeking{accept: cfg.Accept, unread: &report.Unread, passed: passed, reset: func() {
		out.remember()
		report.Seen, report.Matched, report.Skipped = 0, 0, 0
	}, visit: func(_ dedicated.Delivery, l *deadLetter) error {
		report.Seen++
		if match.matches(l) {
			report.Matched++
			wrote, err := out.write(l, cfg.Queue)
			if err != nil {
				return err
			}
			if !wrote {
				report.Skipped++
			}
		}
		notify.now(Progress{Seen: report.Seen, Matched: report.Matched, Done: out.written, Of: t.Messages})
		return nil
	}})
	report.Skipped = min(report.Skipped, before)
	synced := out.sync()
	report.Exported = out.synced
	if synced != nil && (err == nil || !errors.Is(synced, err) && !errors.Is(err, synced)) {
		err = errors.Join(err, synced)
	}
	report.Took = time.Since(began)
	return report, err
}

// exportFile is an *os.File.
type exportFile interface {
	io.ReadWriteSeeker
	Name() string
	Stat() (os.FileInfo, error)
	Sync() error
	Truncate(size int64) error
}

// exporter writes lines to a file.
type exporter struct {
	file exportFile
	w    *bufio.Writer
	// there is how often the file had each ID before, some 30 bytes for each, and lines how
	// many lines that are. fresh are the IDs that were written since remember was called,
	// and left what a walk still leaves out.
	there, left map[[12]byte]uint32
	lines       uint64
	fresh       [][12]byte

	size    int64   // of the file
	end     int64   // of the last line, once all is in the file
	ends    []int64 // of the lines that may not be in the file yet
	good    int64   // the size when everything was synced last
	written uint64  // lines
	whole   uint64  // of them, those that are in the file to their end
	synced  uint64  // of them, those that are synced
}

// Write hands bytes to the file.
func (e *exporter) Write(b []byte) (n int, err error) {
	n, err = e.file.Write(b)
	e.size += int64(n)
	return n, err
}

// maxLine is the longest line of an export. A message of 16 MiB, RabbitMQ's default
// limit, has at most some 70.
const maxLine = 1 << 30

// openExport goes to the end of what is in the file.
func openExport(file exportFile, resume bool) (*exporter, error) {
	e := &exporter{file: file, there: map[[12]byte]uint32{}}
	e.w = bufio.NewWriterSize(e, 1<<20)
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() == 0:
		return e, nil
	case !resume:
		return nil, argument.At(argument.Root("file"), argument.CodeConflict, file.Name(), "isn't empty", "name another file, or resume the export that it is of")
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(file, 1<<20)
	var end int64
	for n := 1; ; n++ {
		line, err := readBytes(r, maxLine)
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break // what has no end was cut off
		}
		if err != nil {
			return nil, &LineError{Line: n, Err: err}
		}
		id, err := lineID(line)
		if err != nil {
			return nil, &LineError{Line: n, Err: err}
		}
		e.there[id]++
		e.lines++
		end += int64(len(line)) + 1
	}
	e.size, e.end, e.good = end, end, end
	if err := file.Truncate(end); err != nil {
		return nil, err
	}
	_, err = file.Seek(end, io.SeekStart)
	return e, err
}

// lineID reads the id alone of a line.
func lineID(line []byte) (id [12]byte, err error) {
	var head struct {
		Version int    `json:"hopback"`
		ID      string `json:"id"`
	}
	if err := json.Unmarshal(line, &head); err != nil {
		return id, err
	}
	b, err := hex.DecodeString(head.ID)
	if err != nil || len(b) != len(id) || head.Version != lineVersion {
		return id, fmt.Errorf("isn't a line of an export of version %d", lineVersion)
	}
	return [12]byte(b), nil
}

// readBytes reads a line of at most limit bytes, without its end. The error is io.EOF at
// the end of the file, and io.ErrUnexpectedEOF where a line has no end.
func readBytes(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > limit {
			return nil, fmt.Errorf("the line is longer than %d bytes", limit)
		}
		switch {
		case err == nil && line == nil:
			return bytes.Clone(part[:len(part)-1]), nil
		case err == nil:
			line = append(line, part...)
			return line[:len(line)-1], nil
		case err == io.EOF && len(line)+len(part) > 0:
			return nil, io.ErrUnexpectedEOF
		case err != bufio.ErrBufferFull:
			return nil, err
		}
		line = append(line, part...)
	}
}

// remember has skips skip what was written since the last call, too.
func (e *exporter) remember() {
	for _, id := range e.fresh {
		e.there[id]++
	}
	e.fresh = nil
	e.left = maps.Clone(e.there)
}

// write writes the message unless it was there before: it skips as many equal ones as there
// were.
func (e *exporter) write(l *deadLetter, queue string) (wrote bool, err error) {
	id := l.hash()
	if e.had(id) {
		return false, nil
	}
	e.fresh = append(e.fresh, id)
	return true, e.add(l, queue)
}

// had reports whether the file had the message before, once for each such line.
func (e *exporter) had(id [12]byte) bool {
	n := e.left[id]
	if n > 0 {
		e.left[id] = n - 1
	}
	return n > 0
}

// add writes the message.
func (e *exporter) add(l *deadLetter, queue string) error {
	line, err := l.line(queue)
	if err != nil {
		return err
	}
	if _, err := e.w.Write(line); err != nil {
		return err
	}
	e.written++
	e.end += int64(len(line))
	e.ends = append(e.ends, e.end)
	if len(e.ends) >= 10_000 {
		e.arrived()
	}
	return nil
}

// arrived forgets the lines that are in the file to their end, and counts them.
func (e *exporter) arrived() {
	n, _ := slices.BinarySearch(e.ends, e.size+1)
	e.whole += uint64(n)
	e.ends = slices.Delete(e.ends, 0, n)
}

// sync puts everything that was written on the disk, or what the file has taken of it.
func (e *exporter) sync() error {
	flushed := e.w.Flush()
	e.arrived()
	if info, err := e.file.Stat(); err != nil || info.Mode().IsRegular() { // not a pipe
		if err := e.file.Sync(); err != nil {
			return errors.Join(flushed, err)
		}
	}
	e.synced = e.whole
	if flushed == nil {
		e.good = e.size
	}
	return flushed
}

// undo removes what was written since the last sync that went well.
func (e *exporter) undo() error {
	if err := e.file.Truncate(e.good); err != nil {
		return err
	}
	_, err := e.file.Seek(e.good, io.SeekStart)
	return errors.Join(err, e.file.Sync())
}

// DiscardConfig selects the messages to discard. Queue is required, so is Filter or All,
// and so is To or Destroy.
type DiscardConfig struct {
	Queue string
	// Filter selects the messages. The zero Filter is refused unless All is set.
	Filter Filter
	All    bool
	// To is the file that each message is written to before it is discarded, in the form of
	// Export. It is a regular file, open for reading and writing. Discard appends to what it
	// has. Every message that is discarded is written, also if the file has an equal line of
	// an earlier export: see DiscardReport.Twice.
	To *os.File
	// Destroy discards without a file. The messages can't be recovered.
	Destroy bool
	// Max limits the messages that are discarded. 0 means no limit.
	Max uint64
	// DryRun counts the selected messages and discards nothing.
	DryRun bool
	// Accept names the Caveats that are accepted.
	Accept []WarningCode
	// Progress, if not nil, is called a few times a second. It must not block.
	OnProgress func(Progress)
}

// DiscardReport is the result of a discard. Seen, Matched, Groups, Others, Took, Caveats
// and Unread are as in a ReplayReport.
type DiscardReport struct {
	DryRun  bool   `json:"dry_run,omitempty"`
	Seen    uint64 `json:"seen"`
	Matched uint64 `json:"matched"`
	// Discarded is the number of messages that were accepted, and so removed. If the
	// connection was lost, the last of them may still be in the queue.
	Discarded uint64 `json:"discarded"`
	// Exported is the number of lines that were written and synced. It is never less than
	// Discarded, unless Destroy is set.
	Exported uint64 `json:"exported"`
	// Twice is how many of these lines the file had before. An import publishes both.
	Twice    uint64        `json:"twice,omitempty"`
	Groups   []Group       `json:"groups,omitempty"`
	Others   uint64        `json:"others,omitempty"`
	Took     time.Duration `json:"took"` // in nanoseconds in JSON
	Warnings []Warning     `json:"caveats,omitempty"`
	Unread   string        `json:"unread,omitempty"`
}

// Discard removes the selected messages from a queue. Each is first written to
// DiscardConfig.To, which is synced, unless Destroy is set. All other messages stay in the
// queue, in order. Discard stops when ctx ends and when the connection is lost; call it
// again to continue. If the connection is lost, or the process killed, at most 2,000
// messages may be in the file and still in the queue. The errors are those of List and
// those of the file: if that is full, it keeps the messages that were discarded.
func (d *Desk) Discard(ctx context.Context, cfg DiscardConfig) (DiscardReport, error) {
	began := time.Now()
	g := &discarding{d: d, cfg: cfg, match: cfg.Filter.matcher(), notify: notifier{notify: cfg.OnProgress}, groups: newTally(maxGroups), report: DiscardReport{DryRun: cfg.DryRun}}
	if err := g.open(); err != nil {
		return g.report, err
	}
	t, leave, err := d.enter(ctx, cfg.Queue, cfg.Accept, &g.notify)
	if err != nil {
		return g.report, err
	}
	defer leave()
	g.of, g.report.Warnings = t.Messages, t.Warnings
	for err = g.pass(ctx); errors.Is(err, errTurned); err = g.pass(ctx) {
		g.turns++
	}
	g.report.Groups, g.report.Others = g.groups.top(100)
	g.report.Took = time.Since(began)
	return g.report, err
}

// discarding is a Discard that is running.
type discarding struct {
	d      *Desk
	cfg    DiscardConfig
	match  *matcher
	notify notifier
	of     uint64
	out    *exporter // nil without a file
	groups *tally
	turns  int    // walks that ended to put the queue in order
	twice  uint64 // of the batch, those that the file had
	report DiscardReport
}

// open checks the configuration, and opens the file.
func (g *discarding) open() error {
	cfg, at := &g.cfg, argument.Root("DiscardConfig")
	switch {
	case cfg.Filter.everything() && !cfg.All:
		return argument.At(at.Field("Filter"), argument.CodeMissing, nil, "selects all messages", "set All if that is meant")
	case cfg.To == nil && !cfg.Destroy && !cfg.DryRun:
		return argument.At(at.Field("To"), argument.CodeMissing, nil, "is nil: the messages would be gone for good", "give a file to write them to, or set Destroy")
	case cfg.To != nil && cfg.Destroy:
		return argument.At(at.Field("Destroy"), argument.CodeConflict, nil, "is set, and so is", "choose one of them").And(at.Field("To"))
	}
	if err := cfg.Filter.check(); err != nil {
		return err
	}
	if cfg.To == nil || cfg.DryRun {
		return nil
	}
	if info, err := cfg.To.Stat(); err != nil || !info.Mode().IsRegular() {
		return errors.Join(argument.At(at.Field("To"), argument.CodeUnsupported, cfg.To.Name(), "isn't a regular file, so it can't be synced", "name a file"), err)
	}
	out, err := openExport(cfg.To, true)
	if err == nil {
		out.remember()
		g.out = out
	}
	return err
}

// pass walks the queue once. The error is errTurned if another walk is needed, since the
// queue was out of order.
func (g *discarding) pass(ctx context.Context) error {
	g.report.Seen = 0
	if g.cfg.DryRun {
		g.report.Matched, g.groups = 0, newTally(maxGroups)
	}
	w, err := g.d.begin(ctx, g.cfg.Queue)
	if err != nil {
		return err
	}
	w.othersToo = slices.Contains(g.cfg.Accept, WarningConsumers)
	w.passed = func(seen uint64) {
		g.notify.now(Progress{Seen: seen, Matched: g.report.Matched, Done: g.report.Discarded, Of: g.of})
	}
	for more := true; more && err == nil; {
		var selected []uint32
		more, err = w.next(ctx, batch, func(v dedicated.Delivery, l *deadLetter) error {
			chosen, err := g.visit(ctx, w, l)
			if chosen {
				selected = append(selected, v.ID)
			}
			return err
		})
		if errors.Is(err, errTurned) && g.turns >= maxTurns {
			err = nil
		}
		if removed := g.remove(w, selected); removed != nil {
			err = removed // a file that is full has failed visit, too
		}
		if err == nil && !more {
			more = g.d.again(ctx, w)
		}
	}
	g.report.Unread = w.unread
	back := w.end()
	switch {
	case errors.Is(err, errStop), back != nil && (err == nil || errors.Is(err, errTurned)):
		return scanError(g.cfg.Queue, back)
	}
	return err
}

// visit reads one message, and writes it if it is selected.
func (g *discarding) visit(ctx context.Context, w *scan, l *deadLetter) (chosen bool, err error) {
	switch {
	case ctx.Err() != nil:
		return false, context.Cause(ctx)
	case g.cfg.Max > 0 && g.report.Matched >= g.cfg.Max:
		return false, errStop
	case time.Since(w.began) > maxHold:
		return false, &holdError{Queue: g.cfg.Queue, After: maxHold}
	}
	g.report.Seen++
	if chosen = g.match.matches(l); chosen {
		if g.out != nil {
			if err := g.out.add(l, g.cfg.Queue); err != nil {
				return false, err
			}
			if g.out.had(l.hash()) {
				g.twice++
			}
		}
		g.report.Matched++
		g.groups.add(l, "")
	}
	g.notify.now(Progress{Seen: g.report.Seen, Matched: g.report.Matched, Done: g.report.Discarded, Of: g.of})
	return chosen, nil
}

// remove accepts the selected messages of a batch, once all of them are synced.
func (g *discarding) remove(w *scan, selected []uint32) error {
	if g.cfg.DryRun {
		return nil
	}
	if g.out != nil {
		if err := g.out.sync(); err != nil {
			// None of the batch is removed, so the file shall have none of it.
			if undone := g.out.undo(); undone != nil {
				g.report.Exported = g.out.synced
				return errors.Join(err, undone)
			}
			return err
		}
		g.report.Exported = g.out.synced
		g.report.Twice, g.twice = g.report.Twice+g.twice, 0
	}
	for _, id := range selected {
		if err := w.r.Accept(id, id); err != nil {
			return scanError(g.cfg.Queue, err)
		}
		g.report.Discarded++
	}
	return nil
}

// LineError says which line of an export can't be imported, and why.
type LineError struct {
	Line int // from 1
	Err  error
}

func (e *LineError) Error() string { return fmt.Sprintf("hopback: line %d: %v", e.Line, e.Err) }

// Unwrap returns Err.
func (e *LineError) Unwrap() error { return e.Err }
