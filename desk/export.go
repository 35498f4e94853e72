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
	"os"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/rawlink"
)

// ExportConfig selects the messages to export. Queue is required. The zero Filter selects
// all.
type ExportConfig struct {
	Queue  string
	Filter Filter
	// Resume continues a file that an earlier export began. It removes an incomplete last
	// line and doesn't write messages again that the file has. Without Resume a file that
	// isn't empty is an *argument.Error.
	Resume bool
	// Accept names the Caveats that are accepted.
	Accept []CaveatCode
	// Progress, if not nil, is called a few times a second. It must not block.
	Progress func(Progress)
}

// ExportReport is the result of an export. Seen is the number of messages read, and Matched
// how many of them the filter selected.
type ExportReport struct {
	Seen     uint64        `json:"seen"`
	Matched  uint64        `json:"matched"`
	Exported uint64        `json:"exported"` // lines that were written and synced
	Skipped  uint64        `json:"skipped"`  // messages that were in the file before
	Took     time.Duration `json:"took"`     // in nanoseconds in JSON
}

// Export writes the selected messages of a queue to file and syncs it. Each message is a
// line of JSON that keeps every AMQP type. The messages stay in the queue, in order. file
// must be open for reading and writing. When ctx ends Export stops; the lines that the
// report counts are synced. Call it with Resume to continue. The errors are those of List
// and those of the file.
//
// Two messages that are equal bit for bit, with the same death, get a single line if the
// export was stopped and resumed between them.
func (d *Desk) Export(ctx context.Context, file *os.File, cfg ExportConfig) (ExportReport, error) {
	began := time.Now()
	var report ExportReport
	if file == nil {
		return report, argument.At(argument.Root("file"), argument.Missing, nil, "is nil", "give a file that is open for reading and writing")
	}
	if err := cfg.Filter.check(); err != nil {
		return report, err
	}
	out, err := openExport(file, cfg.Resume)
	if err != nil {
		return report, err
	}
	t, err := d.terms(ctx, cfg.Queue, cfg.Accept)
	if err != nil {
		return report, err
	}
	match := cfg.Filter.matcher()
	tell := teller{tell: cfg.Progress}
	before := uint64(len(out.there))
	// Where the walk begins again, what is in the file is skipped.
	err = d.look(ctx, cfg.Queue, looking{reset: func() {
		out.remember()
		report.Seen, report.Matched, report.Skipped = 0, 0, 0
	}, visit: func(_ rawlink.Delivery, l *letter) error {
		report.Seen++
		if match.matches(l) {
			report.Matched++
			wrote, err := out.write(l, cfg.Queue)
			if err != nil {
				return err
			}
			if wrote {
				report.Exported++
			} else {
				report.Skipped++
			}
		}
		tell.now(Progress{Seen: report.Seen, Matched: report.Matched, Done: report.Exported, Of: t.Messages})
		return nil
	}})
	report.Skipped = min(report.Skipped, before)
	if synced := out.sync(); synced != nil {
		report.Exported = 0
		if err == nil || !errors.Is(synced, err) && !errors.Is(err, synced) {
			err = errors.Join(err, synced)
		}
	}
	report.Took = time.Since(began)
	return report, err
}

// exporter writes lines to a file.
type exporter struct {
	file *os.File
	w    *bufio.Writer
	// there are the messages that were in the file before, which aren't written again:
	// 12 bytes each, so that a million take some 30 MB.
	there map[[12]byte]struct{}
	fresh [][12]byte // written since
}

// maxLine is the longest line of an export. A message of 16 MiB, RabbitMQ's default
// limit, has at most some 70.
const maxLine = 1 << 30

// openExport goes to the end of what is in the file.
func openExport(file *os.File, resume bool) (*exporter, error) {
	e := &exporter{file: file, w: bufio.NewWriterSize(file, 1<<20), there: map[[12]byte]struct{}{}}
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() == 0:
		return e, nil
	case !resume:
		return nil, argument.At(argument.Root("file"), argument.Conflict, file.Name(), "isn't empty", "name another file, or resume the export that it is of")
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
		e.there[id] = struct{}{}
		end += int64(len(line)) + 1
	}
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

// remember has write skip what was written since the last call.
func (e *exporter) remember() {
	for _, id := range e.fresh {
		e.there[id] = struct{}{}
	}
	e.fresh = nil
}

// write writes the message unless it was there before.
func (e *exporter) write(l *letter, queue string) (wrote bool, err error) {
	id := l.id()
	b, err := hex.DecodeString(id)
	if err != nil {
		return false, err
	}
	if _, has := e.there[[12]byte(b)]; has {
		return false, nil
	}
	line, err := l.line(queue)
	if err != nil {
		return false, err
	}
	e.fresh = append(e.fresh, [12]byte(b))
	_, err = e.w.Write(line)
	return err == nil, err
}

// sync has all that was written on the disk.
func (e *exporter) sync() error {
	if err := e.w.Flush(); err != nil {
		return err
	}
	if info, err := e.file.Stat(); err == nil && !info.Mode().IsRegular() {
		return nil // a pipe
	}
	return e.file.Sync()
}

// DiscardConfig selects the messages to discard. Queue is required, so is Filter or All,
// and so is To or Destroy.
type DiscardConfig struct {
	Queue string
	// Filter selects the messages. The zero Filter is refused unless All is set.
	Filter Filter
	All    bool
	// To is the file that each message is written to before it is discarded, in the form of
	// Export. It is a regular file, open for reading and writing, and may have lines of an
	// earlier export.
	To *os.File
	// Destroy discards without a file. The messages can't be recovered.
	Destroy bool
	// Max limits the messages that are discarded. 0 means no limit.
	Max uint64
	// DryRun counts the selected messages and discards nothing.
	DryRun bool
	// Accept names the Caveats that are accepted.
	Accept []CaveatCode
	// Progress, if not nil, is called a few times a second. It must not block.
	Progress func(Progress)
}

// DiscardReport is the result of a discard. Seen, Matched, Groups, Others and Took are as
// in a ReplayReport.
type DiscardReport struct {
	DryRun  bool   `json:"dry_run,omitempty"`
	Seen    uint64 `json:"seen"`
	Matched uint64 `json:"matched"`
	// Discarded is the number of messages that were accepted, and so removed. If the
	// connection was lost, the last of them may still be in the queue.
	Discarded uint64        `json:"discarded"`
	Exported  uint64        `json:"exported"` // lines that were written for it
	Groups    []GroupCount  `json:"groups,omitempty"`
	Others    uint64        `json:"others,omitempty"`
	Took      time.Duration `json:"took"` // in nanoseconds in JSON
}

// Discard removes the selected messages from a queue. Each is first written to
// DiscardConfig.To, which is synced, unless Destroy is set. All other messages stay in the
// queue, in order. Discard stops when ctx ends and when the connection is lost; call it
// again to continue. The errors are those of List and those of the file.
func (d *Desk) Discard(ctx context.Context, cfg DiscardConfig) (DiscardReport, error) {
	began := time.Now()
	report := DiscardReport{DryRun: cfg.DryRun}
	at := argument.Root("DiscardConfig")
	switch {
	case cfg.Filter.everything() && !cfg.All:
		return report, argument.At(at.Field("Filter"), argument.Missing, nil, "selects all messages", "set All if that is meant")
	case cfg.To == nil && !cfg.Destroy && !cfg.DryRun:
		return report, argument.At(at.Field("To"), argument.Missing, nil, "is nil: the messages would be gone for good", "give a file to write them to, or set Destroy")
	case cfg.To != nil && cfg.Destroy:
		return report, argument.At(at.Field("Destroy"), argument.Conflict, nil, "is set, and so is", "choose one of them").And(at.Field("To"))
	}
	if err := cfg.Filter.check(); err != nil {
		return report, err
	}
	var out *exporter
	if cfg.To != nil && !cfg.DryRun {
		if info, err := cfg.To.Stat(); err != nil || !info.Mode().IsRegular() {
			return report, errors.Join(argument.At(at.Field("To"), argument.Unsupported, cfg.To.Name(), "isn't a regular file, so it can't be synced", "name a file"), err)
		}
		var err error
		if out, err = openExport(cfg.To, true); err != nil {
			return report, err
		}
	}
	t, err := d.terms(ctx, cfg.Queue, cfg.Accept)
	if err != nil {
		return report, err
	}
	w, err := d.begin(ctx, cfg.Queue)
	if err != nil {
		return report, err
	}
	groups := newTally(maxGroups)
	match := cfg.Filter.matcher()
	tell := teller{tell: cfg.Progress}
	turns := 0
	for more := true; more && err == nil; {
		var selected []uint32
		more, err = w.next(ctx, batch, func(v rawlink.Delivery, l *letter) error {
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case cfg.Max > 0 && report.Matched >= cfg.Max:
				return errStop
			case time.Since(w.began) > maxHold:
				return &HoldError{Queue: cfg.Queue, After: maxHold}
			}
			report.Seen++
			if match.matches(l) {
				if out != nil {
					wrote, err := out.write(l, cfg.Queue)
					if err != nil {
						return err
					}
					if wrote {
						report.Exported++
					}
				}
				report.Matched++
				groups.add(l, "")
				selected = append(selected, v.ID)
			}
			tell.now(Progress{Seen: report.Seen, Matched: report.Matched, Done: report.Discarded, Of: t.Messages})
			return nil
		})
		turned := errors.Is(err, errTurned)
		if turned {
			err = nil
		}
		if !cfg.DryRun && len(selected) > 0 {
			if out != nil {
				if synced := out.sync(); synced != nil {
					err = errors.Join(err, synced)
					break
				}
			}
			for _, id := range selected {
				if settled := w.r.Accept(id, id); settled != nil {
					err = errors.Join(err, settled)
					break
				}
				report.Discarded++
			}
		}
		if turned && turns < maxTurns && err == nil {
			turns++
			if err = w.end(); err != nil {
				return report, walkError(cfg.Queue, err)
			}
			if w, err = d.begin(ctx, cfg.Queue); err != nil {
				return report, err
			}
			more, report.Seen = true, 0
			if cfg.DryRun {
				report.Matched, groups = 0, newTally(maxGroups)
			}
		}
	}
	if errors.Is(err, errStop) {
		err = nil
	}
	if back := w.end(); back != nil && err == nil {
		err = walkError(cfg.Queue, back)
	}
	report.Groups, report.Others = groups.top(100)
	report.Took = time.Since(began)
	return report, err
}

// LineError says which line of an export can't be imported, and why.
type LineError struct {
	Line int // from 1
	Err  error
}

func (e *LineError) Error() string { return fmt.Sprintf("hopback: line %d: %v", e.Line, e.Err) }

// Unwrap returns Err.
func (e *LineError) Unwrap() error { return e.Err }
