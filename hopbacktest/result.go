package hopbacktest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// Result is what became of the messages of a Run.
type Result struct {
	// Messages has an Outcome for each message, in the order in which they were given.
	Messages []*Outcome
	// Elapsed is how much virtual time it took until all were settled.
	Elapsed time.Duration

	t    TB
	byID map[string]*Outcome
}

// Fate is what became of a message in the end.
type Fate string

// The fates of messages.
const (
	// Handled: the last attempt returned nil.
	Handled Fate = "handled"
	// DeadLettered: it is in the dead-letter queue.
	DeadLettered Fate = "dead-lettered"
	// Discarded: it was accepted though its last attempt failed, as by retry.Discard.
	Discarded Fate = "discarded"
	// Parked: it is in the parking queue, since it had no way back.
	Parked Fate = "parked"
	// Lost: the broker has dropped it.
	Lost Fate = "lost"
	// Unsettled: it is still in another queue.
	Unsettled Fate = "unsettled"
)

// Outcome is what became of one message.
type Outcome struct {
	// ID is the message-id, as text.
	ID string
	// Attempts are the calls of the handler.
	Attempts []Attempt
	// Fate is where it ended, and Ended when.
	Fate  Fate
	Ended time.Time
	// In is the queue that it is in, Final the message there, and Annotations that
	// message's: of a dead letter, say. They are empty for what is in no queue.
	In          string
	Final       *client.Message
	Annotations map[string]any
	// Death tells why a dead letter is dead.
	Death retry.Death
	// Duplicates is how many more of it are in queues.
	Duplicates int

	t     TB
	began time.Time
	queue string
}

// Attempt is one call of the handler for a message.
type Attempt struct {
	// Number is retry.Attempt: 1 for the first.
	Number       int
	Began, Ended time.Time
	// Err is what the handler returned, and Panic what it panicked with.
	Err   error
	Panic any
	// Retried says that another attempt followed. Asked is after what delay that was to
	// come, by the policy or by retry.After, and Had is the delay that it had, from the
	// end of this one.
	Retried    bool
	Asked, Had time.Duration
	// DeliveryCount and Annotations are those of the delivery.
	DeliveryCount uint32
	Annotations   map[string]any
}

// Delays are the delays that the message had between its attempts.
func (o *Outcome) Delays() []time.Duration {
	var all []time.Duration
	for _, a := range o.Attempts {
		if a.Retried {
			all = append(all, a.Had)
		}
	}
	return all
}

// Message returns the Outcome of the i-th message, from 0. It fails the test if there is
// none.
func (r *Result) Message(i int) *Outcome {
	r.t.Helper()
	if i < 0 || i >= len(r.Messages) {
		r.t.Fatalf("message %d: the run had %d", i, len(r.Messages))
	}
	return r.Messages[i]
}

// ByID returns the Outcome of the message with that message-id, nil if there is none.
func (r *Result) ByID(id string) *Outcome { return r.byID[id] }

// Count is how many messages have a fate.
func (r *Result) Count(f Fate) int {
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

// WantHandled wants the message to have been handled in the end.
func (o *Outcome) WantHandled() *Outcome {
	o.t.Helper()
	return o.WantFate(Handled)
}

// WantDead wants the message in the dead-letter queue, for a reason such as
// retry.ReasonExhausted.
func (o *Outcome) WantDead(reason client.Reason) *Outcome {
	o.t.Helper()
	if o.WantFate(DeadLettered); o.Fate == DeadLettered && o.Death.Reason != reason {
		o.errorf("is dead as %q, want %q", o.Death.Reason, reason)
	}
	return o
}

// WantFate wants the message to have ended so.
func (o *Outcome) WantFate(f Fate) *Outcome {
	o.t.Helper()
	if o.Fate != f {
		o.errorf("is %s, want %s", o.Fate, f)
	}
	return o
}

// WantAttempts wants so many calls of the handler.
func (o *Outcome) WantAttempts(n int) *Outcome {
	o.t.Helper()
	if len(o.Attempts) != n {
		o.errorf("had %d attempts, want %d", len(o.Attempts), n)
	}
	return o
}

// WantDelays wants these delays between the attempts. Each may be late by a hundredth, or
// by 50 ms if that is more.
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

// Timeline tells what happened to the message, a line each.
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
			what += fmt.Sprintf("; was to wait %v, waited %v", a.Asked, a.Had.Round(time.Millisecond))
		}
		line(a.Began, "attempt %d %s", a.Number, what)
	}
	end := string(o.Fate)
	if o.In != "" {
		end += " in " + o.In
	}
	if o.Death.Reason != "" {
		end += " as " + string(o.Death.Reason)
	}
	if o.Ended.IsZero() {
		o.Ended = o.began
	}
	line(o.Ended, "%s", end)
	return b.String()
}

// maxTimelines is how many messages Timeline tells of.
const maxTimelines = 10

// Timeline tells what happened to each message, or to the first ten: of those that aren't
// handled, if there are any.
func (r *Result) Timeline() string {
	all := slices.DeleteFunc(slices.Clone(r.Messages), func(o *Outcome) bool { return o.Fate == Handled })
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
