package schedule

import (
	"time"

	"github.com/hopback/hopback/argument"
)

// When is when a message is to be delivered: At a time, or After a time. The zero When is
// neither, and is refused.
type When struct {
	at    time.Time
	after time.Duration
	kind  whenKind
}

type whenKind uint8

const (
	atTime whenKind = iota + 1
	afterTime
)

// At is the time t by the broker's clock. A time that is past means at once: a service that
// was down schedules late rather than never. The zero time is refused.
func At(t time.Time) When { return When{at: t, kind: atTime} }

// After is d from now. A d of zero or less means at once.
func After(d time.Duration) When { return When{after: d, kind: afterTime} }

// due is the time that w means at now. at leads to w.
func (w When) due(at argument.Path, now time.Time) (time.Time, error) {
	due := w.at
	switch {
	case w.kind == 0:
		return due, argument.At(at, argument.CodeMissing, nil, "is not set", "use schedule.At or schedule.After")
	case w.kind == atTime && w.at.IsZero():
		return due, argument.At(at, argument.CodeMissing, nil, "is the zero time", "set the time; use schedule.After(0) for at once")
	case w.kind == afterTime:
		due = now.Add(max(w.after, 0))
	}
	// Sub stops at 292 years, and Add may go round.
	if due.Sub(now) > maxDelay || w.after > maxDelay {
		return due, argument.At(at, argument.CodeOutOfRange, due.UTC().Format(time.RFC3339), "is more than 366 days ahead", "schedule a message for within the year, which schedules the next; or keep it in a database (outbox.PublishAt)")
	}
	// RabbitMQ counts in whole milliseconds, and cuts.
	return due.Truncate(time.Millisecond), nil
}
