package retry

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/lastword"
)

// With returns the decorator that retries by p: client.Middleware for the
// handlers of any queue that p's topology was declared for.
//
// What the handler returns decides:
//
//	nil                        accepted
//	a client.Outcome           carried out as it is: the handler has decided itself
//	Permanent, or not retried  dead-lettered, ReasonPermanent
//	Discard                    accepted
//	Snooze                     comes back, without using up a retry
//	any other error            retried after the policy's delay, or After's;
//	                           dead-lettered with ReasonExhausted once MaxRetries
//	                           or GiveUpAfter are used up
//	a panic                    dead-lettered, client.ReasonPanicked; put client.Recover()
//	                           inside to have panics retried
//	the ctx's error, after the consumer's grace time ended the ctx
//	                           requeued: shutting down uses up no retry
//
// When the consumer starts, policy, queue and topology are checked: see Guard. A
// policy that isn't valid stops it with the error of Policy.Validate.
func With(p Policy) client.Middleware {
	pl, err := p.plan()
	return func(h client.Handler) client.Handler {
		return &decorator{handler: h, plan: &pl, invalid: err}
	}
}

type decorator struct {
	handler client.Handler
	plan    *plan
	invalid error
	// queues has a *queueState for each queue that deliveries came from: in all
	// but strange cases one.
	queues sync.Map
	last   atomic.Pointer[queueState] // that was asked for
}

// queueState is what is worked out once for a queue.
type queueState struct {
	queue    string
	strategy Strategy
	targets  []address.Address // Republish: where messages go, by rung
	unusable error             // why this queue's messages can't be retried
}

func (d *decorator) Prepare(ctx context.Context, s client.Start) error {
	if d.invalid != nil {
		return d.invalid
	}
	q := d.plan.stateFor(s.Queue, Republish)
	if q.unusable != nil {
		return q.unusable
	}
	strategy, err := d.plan.prepare(ctx, s)
	if err != nil {
		return err
	}
	q.strategy = strategy
	d.queues.Store(s.Queue, q)
	d.last.Store(q)
	return client.Prepare(ctx, d.handler, s)
}

// stateFor works out what is known of a queue without the broker.
func (pl *plan) stateFor(queue string, strategy Strategy) *queueState {
	q := &queueState{queue: queue, strategy: strategy}
	if q.unusable = checkQueue(queue); q.unusable != nil || pl.ladder != nil {
		return q
	}
	for _, delay := range pl.rungs {
		key, err := RoutingKey(delay, queue)
		if err != nil {
			q.unusable = err
			return q
		}
		q.targets = append(q.targets, address.Exchange(pl.names.RetryExchange, key))
	}
	return q
}

// state returns the queue's state. A consumer has prepared it, unless another
// middleware hides this handler from it: then the strategy is the one that needs
// nothing of the broker to be known.
func (d *decorator) state(queue string) *queueState {
	if q := d.last.Load(); q != nil && q.queue == queue {
		return q
	}
	if q, ok := d.queues.Load(queue); ok {
		d.last.Store(q.(*queueState))
		return q.(*queueState)
	}
	strategy := d.plan.strategy
	if strategy == Native || strategy == Auto {
		strategy = Republish
	}
	q, _ := d.queues.LoadOrStore(queue, d.plan.stateFor(queue, strategy))
	return q.(*queueState)
}

func (d *decorator) Handle(ctx context.Context, del *client.Delivery) (err error) {
	// A panic, of the handler's or of a function of the policy's, is a death: with
	// its mark overwritten, the message can't be taken for one that is to be retried.
	// So is the end of its goroutine, at which no result reaches the consumer.
	returned := false
	defer func() {
		if returned {
			return
		}
		p := &client.PanicError{Value: recover(), Stack: debug.Stack()}
		err = d.dead(del, client.ReasonPanicked, p, time.Now())
		if p.Value == nil {
			lastword.Leave(ctx, err)
		}
	}()
	err = d.handle(ctx, del)
	returned = true
	return err
}

func (d *decorator) handle(ctx context.Context, del *client.Delivery) error {
	if d.invalid != nil {
		return client.Requeue{Failed: true, Err: d.invalid}
	}
	if left := earlyBy(del.Message(), time.Now()); left > 0 {
		return d.tooEarly(del, left)
	}
	for again := 0; ; again++ {
		err := d.handler.Handle(ctx, del)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			return client.Requeue{Err: err}
		}
		if _, ok := errors.AsType[client.Outcome](err); ok {
			return d.passOn(del, client.OutcomeOf(err))
		}
		m, now := del.Message(), time.Now()
		what := d.plan.decide(failure{
			err: err, count: Count(m), first: firstFailure(m), now: now,
			strategy: d.strategyFor(d.state(del.Queue()), m), u: rand.Float64(),
		})
		switch what.do {
		case decidedDiscard:
			return nil
		case decidedDead:
			return d.dead(del, what.reason, what.err, now)
		}
		if again < d.plan.immediate && !what.asked && ctx.Err() == nil {
			continue
		}
		return d.wait(del, what, err, now)
	}
}

// passOn adds the history to a death that the handler has decided on. Its mark must
// be another than that of a retry, or a message that was retried before by the
// DeadLetter strategy would be taken for one that is to be retried again.
func (d *decorator) passOn(del *client.Delivery, o client.Outcome) error {
	switch o := o.(type) {
	case client.DeadLetter:
		if o.Reason == "" {
			o.Reason = client.Reason(LaneRejected)
		}
		o.Annotations = d.withHistory(del, o.Err, o.Annotations)
		return o
	case client.Modify:
		if o.DeadLetter {
			if _, marked := o.Annotations[client.AnnotationReason]; !marked {
				o.Annotations = d.withHistory(del, o.Err, o.Annotations)
				o.Annotations[client.AnnotationReason] = string(LaneRejected)
			}
		}
		return o
	}
	return o
}

func (d *decorator) withHistory(del *client.Delivery, err error, annotations map[string]any) map[string]any {
	h := d.plan.history(del, err, Count(del.Message()), time.Now())
	for k, v := range annotations {
		h[k] = v
	}
	return h
}

func (d *decorator) dead(del *client.Delivery, reason client.Reason, err error, now time.Time) error {
	return client.DeadLetter{Reason: reason, Err: err, Annotations: d.plan.history(del, err, Count(del.Message()), now)}
}

// wait carries a retry out by the queue's strategy.
func (d *decorator) wait(del *client.Delivery, what decision, err error, now time.Time) error {
	q := d.state(del.Queue())
	if q.unusable != nil {
		return d.dead(del, client.ReasonUnforwardable, errors.Join(q.unusable, err), now)
	}
	var h map[string]any
	if what.snoozed {
		h = d.plan.story(del, what.count, now)
	} else {
		h = d.plan.history(del, err, what.count, now)
	}
	return d.carryOut(del, q, d.strategyFor(q, del.Message()), what, h, err, now)
}

// carryOut hands the message to where it waits, with its history.
func (d *decorator) carryOut(del *client.Delivery, q *queueState, strategy Strategy, what decision, h map[string]any, err error, now time.Time) error {
	switch {
	case strategy == Native:
		h[client.AnnotationReason] = reasonWaits
		h[AnnotationDelay] = what.delay.Milliseconds()
		h[AnnotationDeliveryTime] = now.Add(wholeMillis(what.delay)).UnixMilli()
		return client.Modify{Annotations: h, Err: err}
	case strategy == DeadLetter && len(d.plan.rungs) > 0:
		h[client.AnnotationReason] = reasonRetry
		h[AnnotationDelay] = d.plan.rungs[d.plan.rung(what.delay)].Milliseconds()
		return client.Modify{DeadLetter: true, Annotations: h, Err: err}
	}
	return d.republish(del, q, what, h, err)
}

// strategyFor is how m waits.
func (d *decorator) strategyFor(q *queueState, m *client.Message) Strategy {
	if q.strategy == Native && d.plan.strategy == Auto && hasTTL(m) {
		return Republish // it would expire while the queue holds it
	}
	return q.strategy
}

func hasTTL(m *client.Message) bool { return m.Header != nil && m.Header.TTL > 0 }

// republish forwards a copy into the delay queues.
func (d *decorator) republish(del *client.Delivery, q *queueState, what decision, history map[string]any, err error) error {
	to, delay, bad := d.plan.target(q, what.delay, del.Queue())
	if bad != nil {
		return client.DeadLetter{Reason: client.ReasonUnforwardable, Err: errors.Join(bad, err), Annotations: history}
	}
	c := client.Copy(del.Message())
	setCount(c, what.count)
	own := c.Annotations
	c.Annotations = make(map[any]any, len(own)+len(history)+2)
	maps.Copy(c.Annotations, own)
	for k, v := range history {
		if key, ok := keyValues[k]; ok {
			c.Annotations[key] = v
		} else {
			c.Annotations[k] = v
		}
	}
	c.Annotations[client.AnnotationReason] = reasonWaits
	c.Annotations[AnnotationDelay] = delay.Milliseconds()
	// The copy's delivery count begins at zero.
	delete(c.Annotations, client.AnnotationKnownCount)
	return client.Forward{To: to, Message: c, Err: err}
}

// target is where a message waits, and for how long it will.
func (pl *plan) target(q *queueState, delay time.Duration, queue string) (address.Address, time.Duration, error) {
	if pl.ladder != nil {
		to, err := pl.ladder.address(pl.names, delay, queue)
		return to, time.Duration(pl.ladder.steps(delay)) * pl.ladder.Unit, err
	}
	if len(q.targets) == 0 {
		return address.Address{}, 0, errNoDelays
	}
	rung := pl.rung(delay)
	return q.targets[rung], pl.rungs[rung], nil
}

var errNoDelays = errors.New("the policy has no delay to wait for: it has no retries")

// tooEarly deals with a broker that ignores x-opt-delivery-time, as one below 4.3
// does: the message waits in another way for what is left of its delay. It doesn't
// count as a retry, and the handler isn't called. Where the delay queues are missing,
// the forward's patience and then the queue's delivery limit end it: it never spins.
// Other messages go on as before: a sender could have forged this one's time.
func (d *decorator) tooEarly(del *client.Delivery, left time.Duration) error {
	q := d.state(del.Queue())
	now := time.Now()
	if q.unusable != nil {
		return d.dead(del, client.ReasonUnforwardable, errors.Join(q.unusable, errEarly), now)
	}
	strategy := q.strategy
	if strategy == Native {
		strategy = Republish
	}
	count := Count(del.Message())
	return d.carryOut(del, q, strategy, decision{delay: left, count: count}, d.plan.story(del, count, now), errEarly, now)
}
