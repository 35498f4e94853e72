package hopbacktest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// Result holds the outcomes of a Run.
type Result struct {
	// Messages has an Outcome for each message, in the order of Run's messages.
	Messages []*Outcome
	// Elapsed is the virtual time until all messages were settled.
	Elapsed time.Duration

	t    tb
	byID map[string]*Outcome
}

// What Outcome.Fate may be.
const (
	fateHandled      = "handled"
	fateDeadLettered = "dead-lettered"
	fateDiscarded    = "discarded"
	fateParked       = "parked"
	fateLost         = "lost"
	fateUnsettled    = "unsettled"
)

// Outcome is the history and the fate of one message.
type Outcome struct {
	// ID is the message-id, as text.
	ID string
	// Attempts are the calls of the handler for it, in order.
	Attempts []Attempt
	// Fate is how it ended, and Ended the virtual time of that:
	//
	//	"handled"        the last attempt returned nil
	//	"dead-lettered"  it is in the dead-letter queue
	//	"discarded"      it was accepted although its last attempt returned an error, as with
	//	                 retry.Discard
	//	"parked"         it is in the parking queue, because it couldn't return to its work
	//	                 queue
	//	"lost"           the broker dropped it
	//	"unsettled"      it is still in some other queue
	Fate  string
	Ended time.Time
	// In is the name of the queue that holds the message at the end. Final is the message
	// there, such as the dead letter, and Annotations are its message annotations. All are
	// zero if no queue holds it.
	In          string
	Final       *client.Message
	Annotations map[string]any
	// DeadLetter is retry.DeadLetterOf(Final) for a message in the dead-letter or the parking queue.
	DeadLetter retry.DeadLetter
	// Duplicates is the number of further copies of the message in queues.
	Duplicates int

	t     tb
	began time.Time
	queue string
}

// Attempt is one call of the handler for a message.
type Attempt struct {
	// Number is retry.Attempt: 1 for the first.
	Number       int
	Began, Ended time.Time
	// Err is the handler's error, and Panic the value that it panicked with.
	Err   error
	Panic any
	// Retried reports whether another attempt followed. Asked is the delay that the policy
	// or retry.After asked for. Had is the actual delay from the end of this attempt to the
	// next.
	Retried                  bool
	WantedDelay, ActualDelay time.Duration
	// DeliveryCount and Annotations are the delivery's.
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

// Message returns the Outcome of message i, counted from 0. It fails the test if there is
// none.
func (r *Result) Message(i int) *Outcome {
	r.t.Helper()
	if i < 0 || i >= len(r.Messages) {
		r.t.Fatalf("message %d: the run had %d", i, len(r.Messages))
	}
	return r.Messages[i]
}

// ByID returns the Outcome of the message with this message-id, or nil.
func (r *Result) ByID(id string) *Outcome { return r.byID[id] }

// Count returns how many messages have the fate f.
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

// The Want methods fail the test, and go on, where the message isn't as they say. They
// print its timeline then. They return the Outcome, for the next one.

// WantHandled fails the test unless the message was handled in the end. Like the other Want
// methods it prints the timeline, lets the test go on, and returns o.
func (o *Outcome) WantHandled() *Outcome {
	o.t.Helper()
	return o.WantFate(fateHandled)
}

// WantDead fails the test unless the message is in the dead-letter queue with this reason,
// such as retry.ReasonExhausted.
func (o *Outcome) WantDead(reason client.Reason) *Outcome {
	o.t.Helper()
	if o.WantFate(fateDeadLettered); o.Fate == fateDeadLettered && o.DeadLetter.Reason != reason {
		o.errorf("is dead as %q, want %q", o.DeadLetter.Reason, reason)
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

// WantDelays fails the test unless the delays between the attempts are these. Each may be
// late by 1%, or by 50 ms if that is more.
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
	o.t.Errorf("message %s %s\n%s", o.ID, fmt.Sprintf(format, args...), o.Timeline())
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

// maxTimelines is how many messages Timeline tells of.
const maxTimelines = 10

// Timeline returns the timelines of up to ten messages: of those that weren't handled if
// there are any, else of the first.
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
		fmt.Fprintf(&b, "  message %s\n%s", o.ID, o.Timeline())
	}
	return b.String()
}
