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

// ExportConfig configures [Desk.Export]. Queue is required.
type ExportConfig struct {
	// Queue is the queue to export from.
	Queue string
	// Filter selects the messages. Default: all messages.
	Filter Filter
	// Resume continues a file of an earlier export. It removes an incomplete last line, and
	// skips messages that the file already has. If several messages are equal in everything,
	// it skips as many as the file has. Default: a file that isn't empty is an
	// *argument.Error.
	Resume bool
	// Accept lists the warnings that the caller accepts. See [Warning].
	Accept []WarningCode
	// OnProgress, if not nil, is called a few times a second. It must not block.
	OnProgress func(Progress)
}

// ExportReport is the result of an export.
type ExportReport struct {
	// Seen is the number of messages read. Matched is how many of them the filter selected.
	Seen    uint64 `json:"seen"`
	Matched uint64 `json:"matched"`
	// Exported is the number of complete lines that were written and synced. Skipped is the
	// number of messages that the file already had.
	Exported uint64 `json:"exported"`
	Skipped  uint64 `json:"skipped"`
	// Took is how long the export took. In JSON it is in nanoseconds.
	Took time.Duration `json:"took"`
	// Hidden is how many of the selected messages may have headers that the file lacks: see
	// [WarningHeaders].
	Hidden uint64 `json:"hidden,omitempty"`
	// Warnings are the warnings about reading the queue. Unread says why messages may be
	// missing: other consumers are on the queue, or messages wait for their delivery time. It is
	// empty if the export read every message, and if WarningConsumers and WarningWaiting are
	// accepted.
	Warnings []Warning `json:"warnings,omitempty"`
	Unread   string    `json:"unread,omitempty"`
}

// Export writes the selected messages of a queue to file and syncs it. Each message is one
// line of JSON that keeps every AMQP type. The messages stay in the queue, in order. Use it
// to keep a backup, or to move messages elsewhere with [Desk.Import].
//
//   - file must be open for reading and writing.
//   - If ctx ends, Export stops and returns ctx's cause. The lines that the report counts are
//     synced. To continue, call Export again with Resume.
//   - The errors are those of [Desk.List], those of the file, and a [*LineError] if Resume
//     finds a line that isn't a line of an export.
func (d *Desk) Export(ctx context.Context, file *os.File, cfg ExportConfig) (ExportReport, error) {
	began := time.Now()
	var report ExportReport
	if file == nil {
		return report, argument.At(argument.Root("file"), argument.CodeMissing, nil, "is nil", "pass a file that is open for reading and writing")
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
	// If the scan starts over, it skips what is in the file.
	passed := func(seen uint64) {
		notify.now(Progress{Seen: seen, Matched: report.Matched, Done: out.written, Of: t.Messages})
	}
	err = d.peek(ctx, cfg.Queue, peeking{accept: cfg.Accept, unread: &report.Unread, passed: passed, reset: func() {
		out.remember()
		report.Seen, report.Matched, report.Skipped, report.Hidden = 0, 0, 0, 0
	}, visit: func(_ dedicated.Delivery, l *deadLetter) error {
		report.Seen++
		if match.matches(l) {
			report.Matched++
			if l.mayHideHeaders() {
				report.Hidden++
			}
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
	// there is how often the file had each ID before, about 30 bytes for each, and lines is
	// the number of these lines. fresh are the IDs written since the last call of remember.
	// left is what the scan still has to skip.
	there, left map[[12]byte]uint32
	lines       uint64
	fresh       [][12]byte

	size    int64   // of the file
	end     int64   // of the last line, once all is in the file
	ends    []int64 // of the lines that may not be in the file yet
	last    int64   // the end of the last line that is completely in the file
	good    int64   // the size up to the last line that is synced
	written uint64  // lines
	whole   uint64  // lines that are completely in the file
	synced  uint64  // lines that are synced
}

// Write hands bytes to the file.
func (e *exporter) Write(b []byte) (n int, err error) {
	n, err = e.file.Write(b)
	e.size += int64(n)
	return n, err
}

// maxLine is the longest line of an export in bytes. A message of 16 MiB, RabbitMQ's default
// limit, becomes a line of 70 MiB at most.
const maxLine = 1 << 30

// openExport reads the file and positions it behind the last complete line.
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
		return nil, argument.At(argument.Root("file"), argument.CodeConflict, file.Name(), "isn't empty", "use another file, or set Resume to continue its export")
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(file, 1<<20)
	var end int64
	for n := 1; ; n++ {
		line, err := readBytes(r, maxLine)
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break // an incomplete last line
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
	e.size, e.end, e.last, e.good = end, end, end, end
	if err := file.Truncate(end); err != nil {
		return nil, err
	}
	_, err = file.Seek(end, io.SeekStart)
	return e, err
}

// lineID reads only the ID of a line.
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
		return id, fmt.Errorf("isn't a line of an export in format %d; use a file that hopback exported", lineVersion)
	}
	return [12]byte(b), nil
}

// readBytes reads a line of at most limit bytes, without its line feed. The error is io.EOF
// at the end of the file, and io.ErrUnexpectedEOF if the last line has no line feed.
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

// remember makes had skip the messages written since the last call, too.
func (e *exporter) remember() {
	for _, id := range e.fresh {
		e.there[id]++
	}
	e.fresh = nil
	e.left = maps.Clone(e.there)
}

// write writes the message unless the file has it: it skips as many equal messages as the
// file had.
func (e *exporter) write(l *deadLetter, queue string) (wrote bool, err error) {
	id := l.hash()
	if e.had(id) {
		return false, nil
	}
	e.fresh = append(e.fresh, id)
	return true, e.add(l, queue)
}

// had reports whether the file had the message. It does so once for each such line.
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

// arrived counts the lines that are completely in the file, and forgets their ends.
func (e *exporter) arrived() {
	n, _ := slices.BinarySearch(e.ends, e.size+1)
	e.whole += uint64(n)
	if n > 0 {
		e.last = e.ends[n-1]
	}
	e.ends = slices.Delete(e.ends, 0, n)
}

// sync flushes everything to the file and syncs it. If the flush fails, it syncs what the file
// has.
func (e *exporter) sync() error {
	flushed := e.w.Flush()
	e.arrived()
	if info, err := e.file.Stat(); err != nil || info.Mode().IsRegular() { // not a pipe
		if err := e.file.Sync(); err != nil {
			return errors.Join(flushed, err)
		}
	}
	e.synced, e.good = e.whole, e.last
	return flushed
}

// undo removes everything behind the last line that is synced.
func (e *exporter) undo() error {
	if err := e.file.Truncate(e.good); err != nil {
		return err
	}
	_, err := e.file.Seek(e.good, io.SeekStart)
	return errors.Join(err, e.file.Sync())
}

// DiscardConfig configures [Desk.Discard]. Queue is required. So are Filter or All, and To or
// Destroy.
type DiscardConfig struct {
	// Queue is the queue to remove messages from.
	Queue string
	// Filter selects the messages. A Filter that selects all messages, such as the zero
	// value, is refused unless All is set.
	Filter Filter
	All    bool
	// To is a regular file, open for reading and writing. Each message is written to it
	// before it is removed, in the form of Export. Discard appends to the file. It writes
	// every message that it removes, even if the file has an equal line from an earlier
	// export: see DiscardReport.Twice.
	To *os.File
	// Destroy removes the messages without writing them to a file. They can't be recovered.
	Destroy bool
	// Max is the maximum number of messages to remove. Default: 0, no limit.
	Max uint64
	// DryRun counts the selected messages and removes nothing.
	DryRun bool
	// Accept lists the warnings that the caller accepts. See [Warning].
	Accept []WarningCode
	// OnProgress, if not nil, is called a few times a second. It must not block.
	OnProgress func(Progress)
}

// DiscardReport is the result of a discard. Seen, Matched, Groups, Others, Took, Warnings,
// and Unread are as in [ReplayReport].
type DiscardReport struct {
	DryRun  bool   `json:"dry_run,omitempty"`
	Seen    uint64 `json:"seen"`
	Matched uint64 `json:"matched"`
	// Discarded is the number of messages that were removed. After a lost connection, the
	// last of them may still be in the queue.
	Discarded uint64 `json:"discarded"`
	// Exported is the number of lines that were written and synced. Unless Destroy is set, it
	// is never below Discarded.
	Exported uint64 `json:"exported"`
	// Hidden is how many of the selected messages stay in the queue, since they may have headers
	// that the file would lack. To discard them all the same, accept [WarningHeaders], or set
	// Destroy.
	Hidden uint64 `json:"hidden,omitempty"`
	// Twice is how many of these lines the file already had. An import publishes both.
	Twice    uint64        `json:"twice,omitempty"`
	Groups   []Group       `json:"groups,omitempty"`
	Others   uint64        `json:"others,omitempty"`
	Took     time.Duration `json:"took"` // in nanoseconds in JSON
	Warnings []Warning     `json:"warnings,omitempty"`
	Unread   string        `json:"unread,omitempty"`
}

// Discard removes the selected messages from a queue. All other messages stay in the queue,
// in order. Unless Destroy is set, it first writes each message to DiscardConfig.To and syncs
// the file, and [Desk.Import] can publish them again. A message that may have headers which the
// file would lack stays in the queue: see [WarningHeaders].
//
//   - Discard stops if ctx ends or the connection is lost. To continue, call it again.
//   - If the connection is lost or the process is killed, up to 2,000 messages can be both in
//     the file and in the queue.
//   - If the disk gets full, Discard removes the messages that are completely in the file, and
//     cuts off the rest.
//
// The errors are those of [Desk.List] and those of the file.
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
	turns  int // scans that stopped to restore the queue's order
	report DiscardReport
}

// discarded is a selected message of a batch.
type discarded struct {
	id    uint32
	twice bool // the file had it before
}

// open checks the configuration and opens the file.
func (g *discarding) open() error {
	cfg, at := &g.cfg, argument.Root("DiscardConfig")
	switch {
	case cfg.Filter.everything() && !cfg.All:
		return argument.At(at.Field("Filter"), argument.CodeMissing, nil, "selects all messages", "set All if you mean that, or narrow the Filter")
	case cfg.To == nil && !cfg.Destroy && !cfg.DryRun:
		return argument.At(at.Field("To"), argument.CodeMissing, nil, "is nil: the messages would be gone for good", "set a file to write them to, or set Destroy")
	case cfg.To != nil && cfg.Destroy:
		return argument.At(at.Field("Destroy"), argument.CodeConflict, nil, "is set, and so is", "set only one of them").And(at.Field("To"))
	}
	if err := cfg.Filter.check(); err != nil {
		return err
	}
	if cfg.To == nil || cfg.DryRun {
		return nil
	}
	if info, err := cfg.To.Stat(); err != nil || !info.Mode().IsRegular() {
		return errors.Join(argument.At(at.Field("To"), argument.CodeUnsupported, cfg.To.Name(), "isn't a regular file, so it can't be synced", "use a regular file"), err)
	}
	out, err := openExport(cfg.To, true)
	if err == nil {
		out.remember()
		g.out = out
	}
	return err
}

// pass scans the queue once. The error is errTurned if another scan is needed, since the
// queue was out of order.
func (g *discarding) pass(ctx context.Context) error {
	g.report.Seen, g.report.Hidden = 0, 0
	if g.cfg.DryRun {
		g.report.Matched, g.groups = 0, newTally(maxGroups)
	}
	w, err := g.d.begin(ctx, g.cfg.Queue)
	if err != nil {
		return err
	}
	w.accept = g.cfg.Accept
	w.passed = func(seen uint64) {
		g.notify.now(Progress{Seen: seen, Matched: g.report.Matched, Done: g.report.Discarded, Of: g.of})
	}
	for more := true; more && err == nil; {
		var selected []discarded
		more, err = w.next(ctx, batch, func(v dedicated.Delivery, l *deadLetter) error {
			chosen, twice, err := g.visit(ctx, w, l)
			if chosen {
				selected = append(selected, discarded{v.ID, twice})
			}
			return err
		})
		if errors.Is(err, errTurned) && g.turns >= maxTurns {
			err = nil
		}
		if removed := g.remove(w, selected); removed != nil {
			err = removed // a full disk has failed visit, too
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
func (g *discarding) visit(ctx context.Context, w *scan, l *deadLetter) (chosen, twice bool, err error) {
	switch {
	case ctx.Err() != nil:
		return false, false, context.Cause(ctx)
	case g.cfg.Max > 0 && g.report.Matched >= g.cfg.Max:
		return false, false, errStop
	case time.Since(w.began) > maxHold:
		return false, false, &holdError{Queue: g.cfg.Queue, After: maxHold}
	}
	g.report.Seen++
	chosen = g.match.matches(l)
	if chosen && !g.cfg.Destroy && l.mayHideHeaders() && !slices.Contains(g.cfg.Accept, WarningHeaders) {
		g.report.Hidden++
		chosen = false
	}
	if chosen {
		if g.out != nil {
			if err := g.out.add(l, g.cfg.Queue); err != nil {
				return false, false, err
			}
			twice = g.out.had(l.hash())
		}
		g.report.Matched++
		g.groups.add(l, "")
	}
	g.notify.now(Progress{Seen: g.report.Seen, Matched: g.report.Matched, Done: g.report.Discarded, Of: g.of})
	return chosen, twice, nil
}

// remove accepts the selected messages of a batch that are synced: all of them, unless the disk is
// full.
func (g *discarding) remove(w *scan, selected []discarded) error {
	if g.cfg.DryRun {
		return nil
	}
	var full error
	if g.out != nil {
		before := g.out.synced
		if full = g.out.sync(); full != nil {
			full = errors.Join(full, g.out.undo()) // the rest isn't removed, so it may not stay in the file
		}
		g.report.Exported = g.out.synced
		selected = selected[:min(uint64(len(selected)), g.out.synced-before)]
	}
	for _, m := range selected {
		if err := w.r.Accept(m.id, m.id); err != nil {
			return errors.Join(scanError(g.cfg.Queue, err), full)
		}
		g.report.Discarded++
		if m.twice {
			g.report.Twice++
		}
	}
	return full
}

// LineError means that a line of an export can't be used.
type LineError struct {
	// Line is the number of the line, from 1.
	Line int
	// Err is the reason.
	Err error
}

func (e *LineError) Error() string { return fmt.Sprintf("hopback: line %d: %v", e.Line, e.Err) }

// Unwrap returns Err.
func (e *LineError) Unwrap() error { return e.Err }
