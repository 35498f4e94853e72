package retry

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/internal/refusal"
)

// With returns a middleware that retries failed messages by the policy p. Wrap the handlers of
// all queues that [Topology] declared for p. Several consumers can share one wrapped handler,
// also on connections to different clusters: each keeps its own strategy, checks, and clock.
//
// The handler's result decides what happens to the message:
//
//	nil                        acknowledged
//	a client.Outcome           carried out unchanged
//	Permanent, or not retried  dead-lettered, ReasonPermanent
//	Discard                    acknowledged
//	Snooze                     delivered again, without counting a retry
//	any other error            retried after the policy's delay, or After's;
//	                           dead-lettered with ReasonExhausted once MaxRetries
//	                           or GiveUpAfter are used up
//	an error whose methods panic
//	                           retried like any other error
//	a panic                    dead-lettered, client.ReasonPanicked; put client.Recover()
//	                           inside to have panics retried
//	the ctx's error, after the consumer's grace time canceled the ctx
//	                           requeued: a shutdown uses up no retry
//
// When the consumer starts, it checks the policy, the queue, and the topology: see [Guard]. If p
// is invalid, it doesn't start, and the error is that of [Policy.Validate].
//
//   - A handler has one With: within another, it keeps the consumer from starting, with an
//     *argument.Error. Handlers next to each other, as in a typemux, may have one each.
//   - A middleware around With must keep its Prepare method: use [client.Wrap]. Otherwise the
//     consumer stops at its first delivery with an *argument.Error, and the message is requeued.
//   - A test may call Handle without Prepare, with a delivery from [client.NewDelivery].
//     StrategyNative and StrategyAuto then act as StrategyRepublish.
func With(p Policy) client.Middleware {
	pl, err := p.plan()
	return func(h client.Handler) client.Handler {
		return &decorator{handler: h, policy: p, plan: &pl, invalid: err}
	}
}

type decorator struct {
	handler client.Handler
	policy  Policy // as the user wrote it
	plan    *plan
	invalid error
	states  states
	// forgets are headers that copies lack, and counter is one that counts for another system.
	// Only Central sets them.
	forgets []string
	counter string
}

// nestedKey is the key for which the ctx of a Prepare within another retry.With has a value.
type nestedKey struct{}

// errNested keeps a consumer from starting whose handler has two policies.
var errNested = argument.New("handler", nil, "has a retry.With within another retry.With, whose policy would have no effect: the inner one decides about each failure",
	"use one of them, with Policy.Rules for errors that differ; to choose a policy by type, put a retry.With around each handler of a typemux")

// errHidden stops a consumer that hasn't prepared its decorator.
var errHidden = argument.New("handler", nil, "hides the Prepare method of retry.With, so the topology isn't checked and no strategy is chosen",
	"write the middleware around retry.With with client.Wrap, or give its Handler a Prepare method that calls client.Prepare(ctx, inner, start)")

func (d *decorator) Prepare(ctx context.Context, s client.Start) error {
	if d.invalid != nil {
		return d.invalid
	}
	if ctx.Value(nestedKey{}) != nil {
		return errNested
	}
	if q := d.newState(ctx, s); q.unusable != nil {
		return q.unusable
	}
	q, err := d.start(ctx, s)
	if err != nil {
		return err
	}
	if s.Forwards != nil && q.strategy == StrategyRepublish && (q.pending == nil || d.plan.strategy == StrategyRepublish) {
		if to, ok := d.plan.copiesTo(q); ok {
			s.Forwards(to)
		}
	}
	d.states.put(q)
	err = client.Prepare(context.WithValue(ctx, nestedKey{}, true), d.handler, s)
	if err != nil && q.pending != nil {
		q.pending.Cancel()
	}
	return err
}

func (d *decorator) Handle(ctx context.Context, del *client.Delivery) (err error) {
	if d.invalid != nil {
		return client.Requeue{Failed: true, Err: d.invalid}
	}
	q, err := d.state(ctx, del.Queue())
	if err != nil {
		return client.Requeue{Failed: true, Err: err}
	}
	was := pastOf(messageOf(del), del.Queue())
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) { err = d.panicked(ctx, del, q, was, value, stack) })
	err = d.handle(ctx, del, q, was)
	returned = true
	return err
}

// panicked dead-letters a message whose handler, or a function of the policy, has panicked. That
// overwrites the mark of a retry, so that the message isn't retried again. The same holds for
// runtime.Goexit, where no result reaches the consumer.
func (d *decorator) panicked(ctx context.Context, del *client.Delivery, q *queueState, was past, value any, stack []byte) error {
	failed := &client.PanicError{Value: value, Stack: stack}
	err := d.onceChecked(ctx, del, q, was, failed, func(q *queueState) error {
		return d.dead(del, q, client.ReasonPanicked, failed, was, q.clock.now())
	})
	if value == nil {
		outcome.LeaveLastWord(ctx, err)
	}
	return err
}

func (d *decorator) handle(ctx context.Context, del *client.Delivery, q *queueState, was past) error {
	if !q.prepared && refusal.Stop(ctx, errHidden) {
		return client.Requeue{Err: errHidden}
	}
	if due, asked := heldUntil(messageOf(del)); asked > 0 {
		was = was.read()
		claim := min(asked, d.plan.longest())
		if q.holdsMessages && q.strategy != StrategyNative || messageOf(del).Annotations[annotation.DeferralToken] != nil {
			claim = 0 // in the latter case a consumer may have claimed it before its time
		}
		if left, early := q.clock.arrived(due, claim, firstMillis(was)); left > 0 {
			q.clock.askFresh(ctx)
			return d.tooEarly(ctx, del, q, left, early, was)
		}
	}
	if q.watch.awaits() {
		q.watch.retryReturned(messageOf(del), q.clock.now())
	}
	if whole, left := d.delayLeft(messageOf(del), was); left > 0 && q.unusable == nil && d.plan.canWait(q.strategy) {
		return d.waitOn(ctx, del, q, whole, left, was.read())
	}
	for again := 0; ; again++ {
		err := d.handler.Handle(ctx, del)
		if err == nil {
			return nil
		}
		says := outcome.Read[client.Outcome](err)
		err = readable(err, says)
		if ctx.Err() != nil && errors.Is(err, context.Canceled) && context.Cause(ctx) != client.ErrConsumerTimeoutNear {
			return client.Requeue{Err: err}
		}
		if says.Kind == outcome.IsDecided {
			return d.decidedByHandler(ctx, del, q, err, client.OutcomeOf(says.Decided), was)
		}
		was = was.read()
		now := q.clock.now()
		what := d.decide(del, q, err, says, was, now)
		if what.do == decidedRetry && again < d.plan.immediate && !what.asked && ctx.Err() == nil {
			continue
		}
		if q.pending == nil || what.do == decidedDiscard {
			return d.follow(ctx, del, q, what, err, was, now)
		}
		return d.followLater(ctx, del, q, err, says, was)
	}
}

// decide applies the policy to a failure.
func (d *decorator) decide(del *client.Delivery, q *queueState, err error, says outcome.Verdict, was past, now time.Time) decision {
	return d.plan.decide(failure{
		err: err, says: says, count: was.count, first: was.first, now: now,
		strategy: d.strategyFor(q, messageOf(del)), u: rand.Float64(),
	})
}

// followLater decides about a failure once the check is done.
func (d *decorator) followLater(ctx context.Context, del *client.Delivery, q *queueState, err error, says outcome.Verdict, was past) error {
	return d.onceChecked(ctx, del, q, was, err, func(q *queueState) error {
		now := q.clock.now()
		return d.follow(ctx, del, q, d.decide(del, q, err, says, was, now), err, was, now)
	})
}

// follow carries out what was decided about a failure.
func (d *decorator) follow(ctx context.Context, del *client.Delivery, q *queueState, what decision, err error, was past, now time.Time) error {
	switch what.do {
	case decidedDiscard:
		del.Report(instrument.Decision{Kind: instrument.DecisionDiscard, Attempt: was.count + 1, Err: err})
		return nil
	case decidedDead:
		return d.dead(del, q, what.reason, what.err, was, now)
	}
	return d.wait(ctx, del, q, what, err, was, now)
}

// deadLetters reports whether o dead-letters the message.
func deadLetters(o client.Outcome) bool {
	if m, ok := o.(client.Modify); ok {
		return m.DeadLetter
	}
	_, ok := o.(client.DeadLetter)
	return ok
}

// decidedByHandler adds the history when the handler itself dead-letters a message. The mark must
// differ from that of a retry. Otherwise a message that StrategyDeadLetter retried before would
// be retried again.
func (d *decorator) decidedByHandler(ctx context.Context, del *client.Delivery, q *queueState, err error, o client.Outcome, was past) error {
	if q.pending == nil || !deadLetters(o) {
		return d.withReason(del, q, o, was)
	}
	return d.onceChecked(ctx, del, q, was, err, func(q *queueState) error { return d.withReason(del, q, o, was) })
}

func (d *decorator) withReason(del *client.Delivery, q *queueState, o client.Outcome, was past) error {
	if deadLetters(o) {
		was = was.read()
	}
	switch o := o.(type) {
	case client.DeadLetter:
		if o.Reason == "" {
			o.Reason = ReasonRejected
		}
		report(del, decision{attempt: was.count + 1}, instrument.DecisionDeadLetter, string(o.Reason), 0, o.Err)
		o.Annotations = d.withHistory(del, q, o.Err, o.Annotations, was)
		return o
	case client.Modify:
		if o.DeadLetter {
			report(del, decision{attempt: was.count + 1}, instrument.DecisionDeadLetter, string(ReasonRejected), 0, o.Err)
			if _, marked := o.Annotations[client.AnnotationReason]; !marked {
				o.Annotations = d.withHistory(del, q, o.Err, o.Annotations, was)
				o.Annotations[client.AnnotationReason] = string(ReasonRejected)
			}
		}
		return o
	}
	return o
}

func (d *decorator) withHistory(del *client.Delivery, q *queueState, err error, annotations map[string]any, was past) map[string]any {
	h := d.plan.history(del, err, was, q.clock.now())
	for k, v := range annotations {
		h[k] = v
	}
	return h
}

func (d *decorator) dead(del *client.Delivery, q *queueState, reason client.Reason, err error, was past, now time.Time) error {
	q.watch.messageGivenUp()
	was = was.read()
	report(del, decision{attempt: was.count + 1}, instrument.DecisionDeadLetter, string(reason), 0, err)
	return client.DeadLetter{Reason: reason, Err: err, Annotations: d.plan.history(del, err, was, now)}
}

// wait carries out a retry by the queue's strategy.
func (d *decorator) wait(ctx context.Context, del *client.Delivery, q *queueState, what decision, err error, was past, now time.Time) error {
	if q.unusable != nil {
		return d.dead(del, q, client.ReasonUnforwardable, errors.Join(q.unusable, err), was, now)
	}
	what.attempt = was.count + 1
	was.count = what.count
	var a account
	if what.snoozed {
		a = d.plan.newHistory(del, was, now)
	} else {
		a = d.plan.account(del, err, was, now)
	}
	return d.carryOut(ctx, del, q, d.strategyFor(q, messageOf(del)), what, &a, err)
}

// carryOut returns the outcome that makes the message wait, with its history.
func (d *decorator) carryOut(ctx context.Context, del *client.Delivery, q *queueState, strategy Strategy, what decision, a *account, err error) error {
	strategy, what = d.fit(ctx, del, q, strategy, what)
	whole := max(what.whole, what.delay)
	switch {
	case strategy == StrategyNative:
		q.reportRetry(ctx, del, what, strategy, what.delay, a, err)
		h := a.annotations(what.delay)
		h[client.AnnotationReason] = reasonWaits
		h[annotation.Delay] = what.delay.Milliseconds()
		h[annotation.DeliveryTime] = q.clock.hold(what.delay, a.first, what.early)
		if token, ok := tokenOf(messageOf(del)); ok && d.plan.claimable && q.tokens {
			h[annotation.DeferralToken] = token
		}
		return client.Modify{Annotations: h, Err: err}
	case strategy == StrategyDeadLetter && len(d.plan.levels) > 0:
		level, bad := q.watch.usable(d.plan.leg(whole, what.delay))
		if bad != nil {
			return q.cannotWait(del, what, a, errors.Join(bad, err))
		}
		q.reportRetry(ctx, del, what, strategy, d.plan.levels[level], a, err)
		a.waits(what, d.plan.levels[level])
		h := a.annotations(d.plan.levels[level])
		h[client.AnnotationReason] = reasonRetry
		h[annotation.Delay] = d.plan.levels[level].Milliseconds()
		q.watch.retrySent(d.plan.levels[level])
		return client.Modify{DeadLetter: true, Annotations: h, Err: err}
	}
	return d.republish(ctx, del, q, what, a, err)
}

// report notifies an Instrument. Without one it does nothing.
func report(del *client.Delivery, what decision, kind instrument.DecisionKind, lane string, wait time.Duration, err error) {
	x := instrument.Decision{Kind: kind, Attempt: what.attempt, Reason: lane, Err: err}
	if kind != instrument.DecisionDeadLetter {
		x.Delay, x.Wait = what.delay, wait
	}
	del.Report(x)
}

// reportRetry notifies an Instrument that the message waits, and logs a failed attempt.
func (q *queueState) reportRetry(ctx context.Context, del *client.Delivery, what decision, by Strategy, wait time.Duration, a *account, err error) {
	kind := kindOf(what)
	report(del, what, kind, string(by), wait, err)
	if kind != instrument.DecisionRetry || !q.log.Enabled(ctx, q.level) {
		return
	}
	q.log.Log(ctx, q.level, "hopback: an attempt failed; the message will be retried",
		"queue", q.queue, "message_id", message.ID(messageOf(del)), "attempt", what.attempt, "delay", what.delay, "strategy", string(by), "error", a.text)
}

// kindOf is what a retry is to an Instrument.
func kindOf(what decision) instrument.DecisionKind {
	if what.snoozed {
		return instrument.DecisionWait
	}
	return instrument.DecisionRetry
}

// cannotWait dead-letters a message that has no place to wait.
func (q *queueState) cannotWait(del *client.Delivery, what decision, a *account, err error) error {
	report(del, what, instrument.DecisionDeadLetter, string(client.ReasonUnforwardable), 0, err)
	q.watch.messageGivenUp()
	return client.DeadLetter{Reason: client.ReasonUnforwardable, Err: err, Annotations: a.annotations(0)}
}

// strategyFor returns how m waits.
func (d *decorator) strategyFor(q *queueState, m *client.Message) Strategy {
	switch {
	case q.strategy != StrategyNative:
	case d.plan.strategy == StrategyAuto && hasTTL(m):
		return StrategyRepublish // it would expire while the queue holds it
	case q.clock.ignores():
		return StrategyRepublish
	}
	return q.strategy
}

func hasTTL(m *client.Message) bool { return m.Header != nil && m.Header.TTL > 0 }

// republish forwards a copy into the delay queues. Its history is in one annotation. A
// dozen annotations cost more than the rest of the message, here and in the broker.
func (d *decorator) republish(ctx context.Context, del *client.Delivery, q *queueState, what decision, a *account, err error) error {
	whole := max(what.whole, what.delay)
	to, delay, bad := d.plan.target(q, whole, what.delay, q.queue)
	if bad != nil {
		return q.cannotWait(del, what, a, errors.Join(bad, err))
	}
	q.reportRetry(ctx, del, what, StrategyRepublish, delay, a, err)
	q.watch.retrySent(delay)
	m := messageOf(del)
	c := client.Copy(m)
	for _, key := range d.forgets {
		delete(c.Annotations, key)
		delete(c.ApplicationProperties, key)
	}
	if d.counter != "" {
		counterToProperty(c, d.counter)
	}
	counterToProperty(c, CountProperty)
	setCount(c, CountProperty, what.count)
	for k := range c.Annotations {
		if s, ok := k.(string); ok && (keyValues[s] != nil || s == client.AnnotationKnownCount) {
			delete(c.Annotations, k) // older history; the copy's delivery count begins at zero
		}
	}
	original := *a // it is requeued if the copy can't be stored: then it hasn't been retried, and hasn't waited
	original.passesOn(what)
	a.waits(what, delay)
	copied := *a
	copied.was.base = 0 // the copy's count is its own
	var history any = copied.compact(delay, false)
	back := history
	if original.left != a.left || original.asked != a.asked || original.was.base != 0 {
		back = original.compact(delay, false)
	}
	f := client.Forward{To: to, Message: c, Annotations: map[string]any{annotation.History: back}, Err: err}
	if m.Annotations[annotation.Queue] != nil {
		// It wins over the history, so it must be the newer one.
		f.Annotations = original.annotations(delay)
		delete(f.Annotations, annotation.Retries)
	}
	if mayNotCopy(c) {
		f.Else = q.uncopied(f, m, a, what)
	}
	if c.Annotations == nil {
		c.Annotations = make(map[any]any, 1)
	}
	c.Annotations[keyValues[annotation.History]] = history
	return f
}

// mayNotCopy reports whether a copy of m may be refused, because m is large or has
// something that only a broker writes. The check costs nothing for most messages.
func mayNotCopy(m *client.Message) bool {
	size := 0
	for _, part := range m.Data {
		size += len(part)
	}
	if size > 4096 || m.Value != nil || len(m.Sequence) > 0 {
		return true
	}
	compound := func(v any) bool {
		switch v := v.(type) {
		case nil, bool, int32, int64, float64, time.Time:
			return false
		case string:
			return len(v) > 1024
		case []byte:
			return len(v) > 1024
		}
		return true
	}
	for _, v := range m.ApplicationProperties {
		if compound(v) {
			return true
		}
	}
	for _, v := range m.Annotations {
		if compound(v) {
			return true
		}
	}
	return len(m.Footer) > 0
}

// uncopied returns the outcome for m if its copy f can't be sent: a copy without the
// history. If that can't be sent either, the queue itself holds m, if it can.
func (q *queueState) uncopied(f client.Forward, m *client.Message, a *account, what decision) client.Outcome {
	var last client.Outcome
	if q.holdsMessages && !hasTTL(m) && !q.clock.ignores() {
		all := *a
		all.asked, all.left = 0, 0 // the queue itself holds it for all of its delay
		h := all.annotations(what.delay)
		h[client.AnnotationReason], h[annotation.Delay] = reasonWaits, what.delay.Milliseconds()
		h[annotation.DeliveryTime] = q.clock.hold(what.delay, a.first, what.early)
		last = client.Modify{Annotations: h, Err: f.Err}
	}
	small := *f.Message
	small.Annotations = make(map[any]any, len(f.Message.Annotations)+1)
	maps.Copy(small.Annotations, f.Message.Annotations)
	if a.first != 0 || a.left != 0 {
		small.Annotations[annotation.History] = brief(a.first, a.asked, a.left)
	}
	return client.Forward{To: f.To, Message: &small, Annotations: f.Annotations, Else: last, Err: f.Err}
}

// target returns where a message waits that has delay left of whole, and for how long.
func (pl *plan) target(q *queueState, whole, delay time.Duration, queue string) (address.Address, time.Duration, error) {
	if pl.ladder != nil {
		to, err := pl.ladder.address(argument.Root("queue"), pl.names, delay, queue)
		return to, time.Duration(pl.ladder.steps(delay)) * pl.ladder.Unit, err
	}
	switch {
	case q.noKey != nil:
		return address.Address{}, 0, q.noKey
	case len(q.targets) == 0:
		return address.Address{}, 0, errNoDelays
	}
	level, err := q.watch.usable(pl.leg(whole, delay))
	return q.targets[level], pl.levels[level], err
}

var errNoDelays = errors.New("the policy has no retries, so it has no delay queue")

// tooEarly returns the outcome for a message that came before its time. Either this worker's
// clock is behind the broker's, or the broker ignores x-opt-delivery-time, as brokers below 4.3
// do. The message waits again for the rest of its delay. That doesn't count as a retry, and the
// handler isn't called.
//
// With StrategyNative it waits in its queue. Once it has come early so often that the broker must
// be ignoring the time, it is republished. If there are no delay queues for that, the time limit
// of the forward and the queue's delivery limit stop it, so it never loops forever. Other
// messages aren't affected, since a sender could have forged this one's time.
func (d *decorator) tooEarly(ctx context.Context, del *client.Delivery, q *queueState, left time.Duration, early int, was past) error {
	if q.pending != nil {
		return d.onceChecked(ctx, del, q, was, errEarly, func(q *queueState) error { return d.tooEarly(ctx, del, q, left, early, was) })
	}
	now := q.clock.now()
	if q.unusable != nil {
		return d.dead(del, q, client.ReasonUnforwardable, errors.Join(q.unusable, errEarly), was, now)
	}
	a := d.plan.newHistory(del, was, now)
	return d.carryOut(ctx, del, q, d.strategyFor(q, messageOf(del)), decision{delay: wholeMillis(left), count: was.count, early: early, snoozed: true, attempt: was.count + 1}, &a, errEarly)
}

// firstMillis returns the time of the message's first failure, or 0 if it has none.
func firstMillis(was past) int64 {
	if was.first.IsZero() {
		return 0
	}
	return was.first.UnixMilli()
}
