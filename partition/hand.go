package partition

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/retry"
)

// attempts is what is known of a message in hand.
type attempts struct {
	retries int
	first   time.Time // of its failures; zero: it hasn't failed
	blocked bool      // it isn't retried by the policy any more
	// sealed is the number of the question that says whether it is a marker, and ordinary that it
	// isn't, although it has the annotation of one. See seals.
	sealed   uint64
	ordinary bool
	since    time.Time // when a marker came
	// tried says that it counted as poison, and that its handler was called in this turn.
	tried bool
}

const (
	// minHold keeps a handler that asks for no delay from looping without one.
	minHold = 10 * time.Millisecond
	maxHold = 24 * time.Hour
	// blockedEvery is how often a blocked message is tried.
	blockedEvery = 5 * time.Minute
	// clockSkew is how far the clock of a worker may be ahead that couldn't ask for the broker's.
	clockSkew = time.Minute
)

// handler is the handler of one partition. It turns what would return a message to its queue, and
// so lose its place, into another attempt later.
type handler struct{ *part }

func (h handler) Prepare(ctx context.Context, s client.Start) error {
	return client.Prepare(inside.WithGroup(ctx, h.of.pausable), h.of.inner, s)
}

func (h handler) Handle(ctx context.Context, d *client.Delivery) (err error) {
	var was attempts
	again := inside.AgainFrom(ctx)
	if again != nil {
		was, _ = again.State.(attempts)
	} else {
		past := h.of.cfg.policy.Past(d.Message())
		was.retries, was.first = past.Retries, past.First
		select {
		case <-h.of.clock.ready: // times in messages follow the broker's clock
		case <-ctx.Done():
			return h.keep(again, was)
		}
		if acquired, _ := d.Annotation("x-acquired-count").(int64); acquired > 0 {
			if left := left(past, h.of.clock.passed()); left > 0 {
				h.part.poisons.waits(h.of.cfg.Key(d))
				return &inside.Again{Delay: left, Retries: was.retries, State: was}
			}
		}
	}
	if ordinary, again := h.marker(d, &was); !ordinary {
		return again
	}
	if h.of.held.Load().holds(func() string { return h.of.cfg.Key(d) }, d) {
		return &inside.Again{Delay: heldPause, Retries: was.retries, State: was}
	}
	end, instead := h.begin(ctx, d, again, &was)
	if end == nil {
		return instead
	}
	defer func() { end(err) }()
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		err = h.giveUp(d, was, client.ReasonPanicked, &client.PanicError{Value: value, Stack: stack})
		if value == nil {
			outcome.LeaveLastWord(ctx, err)
		}
	})
	err = h.judge(ctx, d, again, was, h.of.inner.Handle(ctx, d))
	returned = true
	if _, inHand := err.(*inside.Again); inHand {
		h.part.poisons.waits(h.of.cfg.Key(d))
	}
	if ctx.Err() == nil {
		err = h.survivor(d, err)
	}
	return err
}

// left is how much of its delay a returned message still has to wait. A publisher can write a
// history, too, so what no worker would write isn't believed: it would block the message's key.
func left(past inside.Past, now time.Time) time.Duration {
	if past.Delay > maxHold || past.Last.IsZero() || past.Last.After(now.Add(clockSkew)) {
		return 0
	}
	due := past.Last.Add(past.Delay + time.Millisecond) // Last is in whole milliseconds
	return min(due.Sub(now), past.Delay)
}

// keep leaves a delivery unchanged in hand: its handler wasn't called, or was interrupted.
func (h handler) keep(again *inside.Again, was attempts) error {
	kept := inside.Again{Retries: was.retries, State: was}
	if again != nil {
		kept.Annotations = again.Annotations
	}
	return &kept
}

// judge returns what becomes of a message whose handler returned err.
func (h handler) judge(ctx context.Context, d *client.Delivery, again *inside.Again, was attempts, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) && context.Cause(ctx) != client.ErrConsumerTimeoutNear {
		return h.keep(again, was)
	}
	says := outcome.Read[client.Outcome](err)
	if says.Kind != outcome.IsDecided {
		return h.decided(d, was, err, says)
	}
	switch o := client.OutcomeOf(says.Decided).(type) {
	case client.DeadLetter:
		if o.Reason == "" {
			o.Reason = retry.ReasonRejected
		}
		history := h.of.cfg.policy.History(h.part.queue, d.Message(), was.retries, was.first, h.of.clock.now(), 0, o.Err)
		for k, v := range o.Annotations {
			history[k] = v
		}
		o.Annotations = history
		report(d, instrument.Decision{Kind: instrument.DecisionDeadLetter, Attempt: was.retries + 1, Reason: string(o.Reason), Err: o.Err})
		return o
	case client.Modify:
		if o.DeadLetter {
			return o
		}
		return h.decided(d, was, err, outcome.Verdict{})
	case client.Requeue:
		if o.Failed {
			return h.decided(d, was, err, outcome.Verdict{})
		}
		return &inside.Again{Delay: hold(h.of.cfg.policy.Decide(inside.Attempt{Err: err, Now: h.of.clock.now()}).Delay), Retries: was.retries, State: was, Err: err}
	default:
		return o
	}
}

// decided carries out what the policy decides.
func (h handler) decided(d *client.Delivery, was attempts, err error, says outcome.Verdict) error {
	now := h.of.clock.now()
	if was.blocked {
		return h.block(d, was, err)
	}
	what := h.of.cfg.policy.Decide(inside.Attempt{Err: err, Says: says, Retries: was.retries, First: was.first, Now: now})
	switch {
	case what.Discard:
		report(d, instrument.Decision{Kind: instrument.DecisionDiscard, Attempt: was.retries + 1, Err: err})
		return nil
	case what.Reason != "":
		return h.giveUp(d, was, client.Reason(what.Reason), what.Err)
	}
	kind := instrument.DecisionWait
	delay := hold(what.Delay)
	attempt := was.retries + 1
	if what.Counted {
		kind = instrument.DecisionRetry
		was.retries++
	}
	if was.first.IsZero() && !(says.Kind == outcome.IsAfter && says.After.Snooze) {
		was.first = now
	}
	report(d, instrument.Decision{Kind: kind, Attempt: attempt, Reason: "in-hand", Delay: delay, Wait: delay, Err: err})
	return h.wait(d, was, delay, err)
}

func hold(delay time.Duration) time.Duration { return min(max(delay, minHold), maxHold) }

// giveUp ends the retries of a message.
func (h handler) giveUp(d *client.Delivery, was attempts, reason client.Reason, err error) error {
	if h.of.cfg.Failed == BlockKey {
		if was.first.IsZero() {
			was.first = h.of.clock.now()
		}
		h.of.log.Error("hopback: a message isn't retried by its policy any more; its key is blocked", "queue", h.part.queue, "key", h.of.cfg.Key(d), "reason", string(reason), "error", client.ErrorText(err))
		return h.block(d, was, err)
	}
	report(d, instrument.Decision{Kind: instrument.DecisionDeadLetter, Attempt: was.retries + 1, Reason: string(reason), Err: err})
	return client.DeadLetter{Reason: reason, Err: err, Annotations: h.of.cfg.policy.History(h.part.queue, d.Message(), was.retries, was.first, h.of.clock.now(), 0, err)}
}

// block keeps a message at the head of its key.
func (h handler) block(d *client.Delivery, was attempts, err error) error {
	was.blocked = true
	report(d, instrument.Decision{Kind: instrument.DecisionWait, Attempt: was.retries + 1, Reason: "blocked", Delay: blockedEvery, Wait: blockedEvery, Err: err})
	return h.wait(d, was, blockedEvery, err)
}

// wait keeps a message in hand until its next attempt.
func (h handler) wait(d *client.Delivery, was attempts, delay time.Duration, err error) error {
	return &inside.Again{
		Delay: delay, Retries: was.retries, State: was, Err: err,
		Annotations: h.of.cfg.policy.History(h.part.queue, d.Message(), was.retries, was.first, h.of.clock.now(), delay, err),
	}
}

func report(d *client.Delivery, x instrument.Decision) { d.Report(x) }
