package hopbacktest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// Result is the result of a [Run].
type Result struct {
	// Messages has an Outcome for each message, in the order of Run's messages.
	Messages []*Outcome
	// Elapsed is the virtual time until all messages were settled.
	Elapsed time.Duration

	t tb
}

// The values of Outcome.Fate.
const (
	fateHandled      = "handled"
	fateDeadLettered = "dead-lettered"
	fateDiscarded    = "discarded"
	fateParked       = "parked"
	fateLost         = "lost"
	fateUnsettled    = "unsettled"
)

// Outcome is what happened to one message.
type Outcome struct {
	// ID is the message-id, as text.
	ID string
	// Attempts are the handler's calls for the message, in order.
	Attempts []Attempt
	// Fate is where the message ended up, and Ended the virtual time when it did. Fate is one
	// of:
	//
	//   - "handled": the last attempt returned nil.
	//   - "dead-lettered": it is in the dead-letter queue.
	//   - "discarded": it was acknowledged after an attempt that returned an error, as with
	//     retry.Discard.
	//   - "parked": it is in the parking queue, since it couldn't return to its work queue.
	//   - "lost": the broker dropped it.
	//   - "unsettled": it is still in some other queue.
	Fate  string
	Ended time.Time
	// In is the name of the queue that has the message at the end. Final is the message in
	// that queue, such as the dead letter, and Annotations are its message annotations. All
	// are zero if no queue has it.
	In          string
	Final       *client.Message
	Annotations map[string]any
	// DeadLetter is retry.DeadLetterOf(Final), for a message in the dead-letter or parking
	// queue.
	DeadLetter retry.DeadLetter
	// Duplicates is the number of extra copies of the message in queues.
	Duplicates int

	t     tb
	began time.Time
	queue string
	name  string // in reports: the ID, and the number if others share it
	// shared says that other messages have the same ID, and acknowledged that the last delivery was
	// acknowledged.
	shared, acknowledged bool
}

// Attempt is one call of the handler for a message.
type Attempt struct {
	// Number is the result of retry.Attempt: 1 for the first.
	Number int
	// Began and Ended are the virtual times of the call and of its return.
	Began, Ended time.Time
	// Err is the handler's error, and Panic the value that it panicked with.
	Err   error
	Panic any
	// Retried reports whether another attempt followed. WantedDelay is the delay from the
	// policy or retry.After. ActualDelay is the time from the end of this attempt to the next
	// one.
	Retried                  bool
	WantedDelay, ActualDelay time.Duration
	// DeliveryCount and Annotations are those of the delivery.
	DeliveryCount uint32
	Annotations   map[string]any
}

// Delays returns the actual delays between the attempts.
func (o *Outcome) Delays() []time.Duration {
	var all []time.Duration
	for _, a := range o.Attempts {
		if a.Retried {
			all = append(all, a.ActualDelay)
		}
	}
	return all
}

// Message returns the Outcome of message i, counted from 0. If there is no such message, it
// fails the test.
func (r *Result) Message(i int) *Outcome {
	r.t.Helper()
	if i < 0 || i >= len(r.Messages) {
		r.t.Fatalf("message %d: the number of messages in this run is %d", i, len(r.Messages))
	}
	return r.Messages[i]
}

// ByID returns the Outcome of the message with this message-id, or nil. If several messages share it,
// ByID returns that of the first one: use Messages or Message for the others.
func (r *Result) ByID(id string) *Outcome {
	i := slices.IndexFunc(r.Messages, func(o *Outcome) bool { return o.ID == id })
	if i < 0 {
		return nil
	}
	return r.Messages[i]
}

// Count returns how many messages have the fate f: see Outcome.Fate.
func (r *Result) Count(f string) int {
	n := 0
	for _, o := range r.Messages {
		if o.Fate == f {
			n++
		}
	}
	return n
}

// Each calls f for each message, in order.
func (r *Result) Each(f func(o *Outcome)) {
	for _, o := range r.Messages {
		f(o)
	}
}

// WantHandled fails the test unless the message was handled in the end. Like all Want methods,
// it prints the message's timeline on failure, lets the test continue, and returns o, so that
// calls can be chained.
func (o *Outcome) WantHandled() *Outcome {
	o.t.Helper()
	return o.WantFate(fateHandled)
}

// WantDead fails the test unless the message is in the dead-letter queue with this reason,
// such as retry.ReasonExhausted.
func (o *Outcome) WantDead(reason client.Reason) *Outcome {
	o.t.Helper()
	if o.WantFate(fateDeadLettered); o.Fate == fateDeadLettered && o.DeadLetter.Reason != reason {
		o.errorf("was dead-lettered with the reason %q, want %q", o.DeadLetter.Reason, reason)
	}
	return o
}

// WantFate fails the test unless the message has this fate, such as "parked".
func (o *Outcome) WantFate(fate string) *Outcome {
	o.t.Helper()
	if o.Fate != fate {
		o.errorf("is %s, want %s", o.Fate, fate)
	}
	return o
}

// WantAttempts fails the test unless the handler was called n times for the message.
func (o *Outcome) WantAttempts(n int) *Outcome {
	o.t.Helper()
	if len(o.Attempts) != n {
		o.errorf("had %d attempts, want %d", len(o.Attempts), n)
	}
	return o
}

// WantDelays fails the test unless the delays between the attempts are these. Each can be
// longer by 1% or 50 ms, whichever is more.
func (o *Outcome) WantDelays(delays ...time.Duration) *Outcome {
	o.t.Helper()
	ok := slices.EqualFunc(o.Delays(), delays, func(had, want time.Duration) bool {
		return had >= want-2*time.Millisecond && had <= want+max(want/100, 50*time.Millisecond)
	})
	if !ok {
		o.errorf("had the delays %v, want %v", o.Delays(), delays)
	}
	return o
}

func (o *Outcome) errorf(format string, args ...any) {
	o.t.Helper()
	o.t.Errorf("message %s %s\n%s", o.name, fmt.Sprintf(format, args...), o.Timeline())
}

// Timeline returns what happened to the message, one line for each event.
func (o *Outcome) Timeline() string {
	var b strings.Builder
	line := func(at time.Time, format string, args ...any) {
		since := "+" + at.Sub(o.began).Round(time.Millisecond).String()
		fmt.Fprintf(&b, "    %-14s %s\n", since, fmt.Sprintf(format, args...))
	}
	line(o.began, "published to %s", o.queue)
	for _, a := range o.Attempts {
		what := "succeeded"
		switch {
		case a.Panic != nil:
			what = fmt.Sprintf("panicked: %v", a.Panic)
		case a.Err != nil:
			what = "failed: " + client.ErrorText(a.Err)
		}
		if took := a.Ended.Sub(a.Began); took > 0 {
			what += fmt.Sprintf(", after %v", took.Round(time.Millisecond))
		}
		if a.Retried {
			what += fmt.Sprintf("; was to wait %v, waited %v", a.WantedDelay, a.ActualDelay.Round(time.Millisecond))
		}
		line(a.Began, "attempt %d %s", a.Number, what)
	}
	end := o.Fate
	if o.In != "" {
		end += " in " + o.In
	}
	if o.DeadLetter.Reason != "" {
		end += " as " + string(o.DeadLetter.Reason)
	}
	if o.Ended.IsZero() {
		o.Ended = o.began
	}
	line(o.Ended, "%s", end)
	return b.String()
}

// maxTimelines is how many messages Timeline shows.
const maxTimelines = 10

// Timeline returns the timelines of up to ten messages: of those that weren't handled, or, if
// all were handled, of the first ten.
func (r *Result) Timeline() string {
	all := slices.DeleteFunc(slices.Clone(r.Messages), func(o *Outcome) bool { return o.Fate == fateHandled })
	if len(all) == 0 {
		all = r.Messages
	}
	var b strings.Builder
	for i, o := range all {
		if i == maxTimelines {
			fmt.Fprintf(&b, "  and %d more\n", len(all)-i)
			break
		}
		fmt.Fprintf(&b, "  message %s\n%s", o.name, o.Timeline())
	}
	return b.String()
}
