package retry

import (
	"cmp"
	"fmt"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/outcome"
)

// Marks of waiting messages, in the annotation for a reason.
const (
	// reasonRetry marks a message that StrategyDeadLetter retries. The delay queues are bound for
	// it. A later dead-lettering overwrites it, so the broker doesn't treat that as a retry.
	reasonRetry = "retry"
	// reasonWaits is the mark of the other strategies. It differs, because otherwise a message
	// that a worker of another kind rejects later would be routed to those delay queues.
	reasonWaits = "waiting"
)

// failure is all that a decision depends on.
type failure struct {
	err   error
	says  outcome.Verdict // of err
	count int             // retries so far
	first time.Time       // of the message's first failure; zero if this is it
	now   time.Time
	// strategy that the message would wait by.
	strategy Strategy
	// dead is the reason for dead-lettering the message unless a rule retries it. It is empty for
	// a failure of a handler.
	dead client.Reason
	u    float64 // random, at least 0 and below 1
}

// decision is what to do about a failure.
type decision struct {
	do    decided
	delay time.Duration // decidedRetry: not yet rounded to a level
	// whole is the delay that the message had before it passed a delay queue, if delay is
	// the rest of it. It is 0 otherwise.
	whole time.Duration
	count int  // decidedRetry: retries, this one included
	asked bool // decidedRetry: the handler named the delay
	// early is how often in a row the message has come before its time; see clock.
	early int
	// attempt is the number of the attempt that this is about.
	attempt int
	// snoozed marks a decidedRetry of a message that hasn't failed.
	snoozed bool
	// reason and err are of a decidedDead.
	reason client.Reason
	err    error
}

type decided uint8

const (
	decidedRetry decided = iota
	decidedDead
	decidedDiscard
)

// decide is the whole policy, as a pure function. An error's own mark goes before
// the rules, and RetryIf comes last. Of marks in one error, one that is around
// another counts, except that Permanent counts inside After. Of joined errors
// Permanent goes before Snooze and After, the first joined of those two before an
// error without a mark, and Discard last.
func (pl *plan) decide(f failure) decision {
	switch f.says.Kind {
	case outcome.IsDiscard:
		return decision{do: decidedDiscard}
	case outcome.IsPermanent:
		return decision{do: decidedDead, reason: ReasonPermanent, err: f.err}
	}
	limit, delays, counted := pl.max, pl.delays, true
	after, asked := f.says.After, f.says.Kind == outcome.IsAfter
	if asked && after.Snooze {
		return pl.inTime(f, decision{delay: bounded(after.Delay), count: f.count, asked: true, snoozed: true})
	}
	matched := false
	for _, r := range pl.rules {
		if !r.applies(f.err) {
			continue
		}
		matched = true
		switch r.do {
		case ActionDeadLetter:
			return decision{do: decidedDead, reason: cmp.Or(f.dead, ReasonPermanent), err: f.err}
		case ActionDiscard:
			return decision{do: decidedDiscard}
		case ActionRetryUncounted:
			counted = false
		}
		limit, delays = r.max, r.delays
		break
	}
	if !matched && f.dead != "" {
		return decision{do: decidedDead, reason: f.dead, err: f.err}
	}
	if !matched && !asked && pl.retryIf != nil && !pl.retryIf(f.err) {
		return decision{do: decidedDead, reason: ReasonPermanent, err: f.err}
	}
	if counted && f.count >= limit {
		return decision{do: decidedDead, reason: ReasonExhausted, err: f.err}
	}
	d := decision{count: f.count}
	if counted {
		d.count++
	}
	if asked {
		d.delay, d.asked = bounded(after.Delay), true
	} else {
		// An uncounted retry doesn't move on in the list of delays.
		d.delay = pl.jitter.spread(delays[min(f.count, len(delays)-1)], f.u)
	}
	return pl.inTime(f, d)
}

// bounded limits a delay that a handler asked for to what a message can have.
func bounded(d time.Duration) time.Duration {
	return wholeMillis(min(max(d, time.Millisecond), maxDelay))
}

// inTime dead-letters a message whose retry would come too late.
func (pl *plan) inTime(f failure, d decision) decision {
	if pl.giveUp <= 0 || f.first.IsZero() && d.snoozed {
		return d
	}
	first := since(f.first, f.now)
	if f.now.Add(pl.held(f.strategy, d.delay)).Sub(first) > pl.giveUp {
		return decision{do: decidedDead, reason: ReasonExhausted,
			err: fmt.Errorf("dead-lettered %v after the first failure: %w", f.now.Sub(first).Round(time.Millisecond), f.err)}
	}
	return d
}

// since is when a message first failed: now, if it hasn't before, or if it claims a time in the
// future. A sender could forge such a time to be retried forever.
func since(first, now time.Time) time.Time {
	if first.IsZero() || first.After(now) {
		return now
	}
	return first
}
