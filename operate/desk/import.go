package desk

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/frames"
)

// ImportConfig configures [Desk.Import]. The zero value publishes each line to the queue that
// it names.
type ImportConfig struct {
	// Queue receives all messages. Default: the queue that each line names, which is where
	// the message was exported from.
	Queue string
	// Skip is the number of lines to skip at the start of the file. To continue an import that
	// stopped, set it to ImportReport.Lines.
	Skip int
	// DryRun checks every line and publishes nothing.
	DryRun bool
	// OnProgress, if not nil, is called a few times a second. It must not block. Seen is the
	// number of lines read, and Skip + Done is what ImportReport.Lines would be. Of is 0.
	OnProgress func(Progress)
}

// ImportReport is the result of an import.
type ImportReport struct {
	DryRun bool `json:"dry_run,omitempty"`
	// Lines is the number of lines that are finished, counted from the start of the file
	// without a gap: skipped, confirmed, or checked in a dry run. Use it as ImportConfig.Skip
	// to continue.
	Lines int `json:"lines"`
	// Imported is the number of messages that the broker has confirmed, including those
	// after Lines.
	Imported uint64 `json:"imported"`
	// Took is how long the import took. In JSON it is in nanoseconds.
	Took time.Duration `json:"took"`
}

// Import publishes the lines of an export and waits until the broker has confirmed each. It
// keeps everything that the sender of a message set, and the annotations of its history
// except those that only RabbitMQ may write: x-opt-deaths, x-exchange, and x-routing-key.
// The delivery count starts over.
//
//   - If a line can't be used, Import stops with a [*LineError]. The lines before it are
//     published.
//   - If the broker refuses a message or doesn't confirm it, Import stops, too.
//   - To continue, call Import with Skip. It publishes messages after ImportReport.Lines
//     again, even those that were already confirmed.
//   - If the process is killed, only the last OnProgress call knows where to continue.
//     Without Skip, every message is published again.
//   - If an argument is invalid, the error is an [*argument.Error].
func (d *Desk) Import(ctx context.Context, r io.Reader, cfg ImportConfig) (ImportReport, error) {
	began := time.Now()
	report := ImportReport{DryRun: cfg.DryRun}
	at := argument.Root("ImportConfig")
	switch {
	case r == nil:
		return report, argument.At(argument.Root("r"), argument.CodeMissing, nil, "is nil", "pass a file")
	case cfg.Skip < 0:
		return report, argument.At(at.Field("Skip"), argument.CodeOutOfRange, cfg.Skip, "is negative", "use 0 or more")
	}
	if cfg.Queue != "" {
		if err := address.Queue(cfg.Queue).Validate(); err != nil {
			return report, err
		}
	}
	i := &importing{d: d, out: newOutbox(d), lines: cfg.Skip, answered: map[int]bool{}, known: map[string]bool{}}
	defer i.out.close()
	notify := notifier{notify: cfg.OnProgress}
	err := i.run(ctx, bufio.NewReaderSize(r, 1<<20), cfg, &notify)
	i.out.wait(ctx, 10*time.Minute, func() {})
	i.mu.Lock()
	defer i.mu.Unlock()
	report.Lines, report.Imported = i.lines, i.imported
	if err == nil {
		err = i.failed
	}
	report.Took = time.Since(began)
	return report, err
}

// importing is an Import that is running.
type importing struct {
	d     *Desk
	out   *outbox
	known map[string]bool

	mu       sync.Mutex
	lines    int // confirmed without a gap
	answered map[int]bool
	imported uint64
	failed   error
}

func (i *importing) run(ctx context.Context, r *bufio.Reader, cfg ImportConfig, notify *notifier) error {
	for n := 1; ; n++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		line, err := readBytes(r, maxLine)
		switch {
		case err == io.EOF:
			return nil
		case err == io.ErrUnexpectedEOF:
			return &LineError{n, errors.New("the line is cut off: it has no line feed at its end")}
		case err != nil:
			return &LineError{n, err}
		case n <= cfg.Skip:
			continue
		}
		in, err := readLine(line)
		var payload []byte
		if err == nil {
			payload, err = sendable(in.payload)
		}
		if err != nil {
			return &LineError{n, err}
		}
		queue := cfg.Queue
		if queue == "" {
			queue = in.queue
		}
		to, err := address.Queue(queue).Build()
		if err != nil {
			return &LineError{n, err}
		}
		if cfg.DryRun {
			i.done(n, nil, false)
			continue
		}
		if err := i.send(ctx, n, queue, to, payload); err != nil {
			return err
		}
		i.mu.Lock()
		p := Progress{Seen: uint64(n), Matched: uint64(n - cfg.Skip), Done: uint64(i.lines - cfg.Skip)}
		failed := i.failed
		i.mu.Unlock()
		if failed != nil {
			return failed
		}
		notify.now(p)
	}
}

func (i *importing) send(ctx context.Context, n int, queue, to string, payload []byte) error {
	if !i.known[queue] {
		_, alarm, err := i.d.inspect(ctx, queue)
		if alarm {
			err = blocked("import", queue, "end the alarm first: importing publishes")
		}
		if alarm || errors.Is(err, declare.ErrNotFound) {
			return &LineError{n, err}
		}
		if len(i.known) < 10_000 {
			i.known[queue] = true
		}
	}
	// If the connection is lost, the answers show which line failed.
	if err := i.out.room(ctx, len(payload), false, nil); err != nil {
		return err
	}
	if err := i.out.send(ctx, to, payload, func(err error) { i.done(n, err, true) }); err != nil {
		return sendError(queue, n, err)
	}
	return nil
}

// sendError is why a line wasn't published.
func sendError(queue string, n int, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	e, ok := scanError(queue, err).(*client.Error)
	if ok {
		e.Op = "import"
		return &LineError{n, e}
	}
	return &LineError{n, err}
}

// done records the broker's answer to a line.
func (i *importing) done(n int, err error, sent bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case err != nil && i.failed == nil:
		i.failed = &LineError{n, fmt.Errorf("the broker hasn't confirmed the message: %w", err)}
	case err == nil:
		if sent {
			i.imported++
		}
		i.answered[n] = true
		for i.answered[i.lines+1] {
			i.lines++
			delete(i.answered, i.lines)
		}
	}
}

// brokers are the annotations that only RabbitMQ may write. It writes all of them again,
// except x-opt-deaths, which it accepts from nobody.
var brokers = map[string]bool{
	"x-exchange": true, "x-routing-key": true, "x-opt-deaths": true, "x-acquired-count": true, "x-delivery-count": true,
	"x-opt-rabbitmq-received-time": true, "x-opt-delivery-time": true,
}

// sendable is an exported message without what belongs to its deliveries. Everything else is
// unchanged, byte by byte.
func sendable(payload []byte) ([]byte, error) {
	sections, err := frames.SplitSections(payload)
	if err != nil {
		return nil, err
	}
	var out []byte
	body := false
	for _, s := range sections {
		switch {
		case s.Code == frames.SectionHeader, s.Code == frames.SectionAnnotations:
			m, err := frames.DecodeMessage(s.Raw)
			if err != nil {
				return nil, err
			}
			if m.Header != nil {
				m.Header.DeliveryCount, m.Header.FirstAcquirer = 0, false
			}
			var kept frames.Map
			for _, a := range m.Annotations {
				k, ok := a.Key.(frames.Symbol)
				switch {
				case !ok || len(k) < 2 || k[:2] != "x-" || len(k) > 255:
					return nil, fmt.Errorf("annotations: the key %.40q isn't a symbol that starts with \"x-\": RabbitMQ would close the session", fmt.Sprint(a.Key))
				case a.Value == nil:
					return nil, fmt.Errorf("annotations: %.40q is null: each consumer that receives the message would lose its connection", k)
				case poisons(a.Value):
					return nil, fmt.Errorf("annotations: %.40q has a decimal, or a float that isn't finite: RabbitMQ 4.0 accepts the message and can't deliver it", k)
				case !brokers[string(k)]:
					kept = append(kept, a)
				}
			}
			m.Annotations = kept
			if out, err = m.Append(out); err != nil {
				return nil, err
			}
		case s.Code == frames.SectionDeliveryAnnotations:
		default:
			if err := checkSection(s); err != nil {
				return nil, err
			}
			body = body || s.Code >= frames.SectionData && s.Code < frames.SectionFooter
			out = append(out, s.Raw...)
		}
	}
	if !body {
		return nil, errors.New("has no body")
	}
	return out, nil
}

// poisons reports whether v has a decimal, or a float that isn't a finite number. RabbitMQ 4.0
// accepts a message with one in an annotation, and the session crashes at every delivery.
func poisons(v any) bool {
	switch v := v.(type) {
	case frames.Decimal32, frames.Decimal64, frames.Decimal128:
		return true
	case float32:
		return poisons(float64(v))
	case float64:
		return math.IsNaN(v) || math.IsInf(v, 0)
	case frames.List:
		return slices.ContainsFunc(v, poisons)
	case frames.Array:
		return slices.ContainsFunc(v.Elements, poisons)
	case frames.Map:
		return slices.ContainsFunc(v, func(e frames.Entry) bool { return poisons(e.Key) || poisons(e.Value) })
	case frames.Described:
		return poisons(v.Value)
	}
	return false
}

// checkSection refuses a section for which RabbitMQ would close the session, or which it would
// deliver to consumers that can't read it.
func checkSection(s frames.Section) error {
	if _, err := s.Value(); err != nil {
		return err
	}
	if s.Code >= frames.SectionData {
		return nil
	}
	m, err := frames.DecodeMessage(s.Raw)
	if err != nil {
		return err
	}
	if p := m.Properties; p != nil {
		for name, id := range map[string]any{"message-id": p.MessageID, "correlation-id": p.CorrelationID} {
			switch id.(type) {
			case nil, uint64, frames.UUID, []byte, string:
			default:
				return fmt.Errorf("properties: %s is a %T, not a ulong, uuid, binary or string", name, id)
			}
		}
		for name, v := range map[string]any{"to": p.To, "reply-to": p.ReplyTo} {
			switch v.(type) {
			case nil, string:
			default:
				return fmt.Errorf("properties: %s is a %T, not a string", name, v)
			}
		}
	}
	for _, e := range m.ApplicationProperties {
		if _, ok := e.Key.(string); !ok {
			return fmt.Errorf("application-properties: a key is a %T, not a string", e.Key)
		}
		switch e.Value.(type) {
		case frames.List, frames.Map, frames.Array, frames.Described:
			return fmt.Errorf("application-properties: %.40q isn't a simple value", e.Key)
		}
	}
	return nil
}
