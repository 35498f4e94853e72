package schedule

import (
	"time"

	"github.com/hopback/hopback/argument"
)

// When is the delivery time of a message. Make one with [At] or [After]. The zero value is an
// error.
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

// At returns the time t by the broker's clock. A past time means at once: a service that was down
// schedules late rather than never. The zero time is an error.
func At(t time.Time) When { return When{at: t, kind: atTime} }

// After returns the time d from now. Zero or less means at once.
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
	// Sub is limited to 292 years, and Add may overflow.
	if due.Sub(now) > maxDelay || w.after > maxDelay {
		return due, argument.At(at, argument.CodeOutOfRange, due.UTC().Format(time.RFC3339), "is more than 366 days ahead", "schedule a message within a year that schedules the next one, or use outbox.PublishAt")
	}
	// RabbitMQ counts in whole milliseconds, rounded down.
	return due.Truncate(time.Millisecond), nil
}
