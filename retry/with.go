package retry

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

// Why a message was dead-lettered, beside client's own reasons.
const (
	// ReasonExhausted: the policy's retries are used up.
	ReasonExhausted client.Reason = "exhausted"
	// ReasonPermanent: the error was marked Permanent, or Policy.RetryIf said no.
	ReasonPermanent client.Reason = "permanent"
)

// Annotations that a dead letter carries beside client.AnnotationReason and
// client.AnnotationError. The origin is where the message was before its first
// retry.
const (
	// AnnotationRetries is how often the message was retried, an int64.
	AnnotationRetries = "x-opt-hopback-retries"
	// AnnotationQueue is the queue that it was handled from, a string.
	AnnotationQueue = "x-opt-hopback-queue"
	// AnnotationExchange is the exchange that it was first published to, a string.
	AnnotationExchange = "x-opt-hopback-exchange"
	// AnnotationRoutingKey is the routing key that it was first published with, a string.
	AnnotationRoutingKey = "x-opt-hopback-routing-key"
)

// With returns the decorator that retries by p: client.Middleware for the
// handlers of any queue that p's topology was declared for.
//
// What the handler returns decides:
//
//	nil                        accepted
//	a client.Outcome           carried out as it is: the handler has decided itself
//	Permanent, or RetryIf no   dead-lettered, ReasonPermanent
//	any other error            retried after the policy's delay, or After's;
//	                           dead-lettered with ReasonExhausted once MaxRetries are used up
//	the ctx's error, after the consumer's grace time ended the ctx
//	                           requeued: shutting down uses up no retry
//
// A policy that isn't valid stops the consumer at its start, with the error of
// Policy.Validate.
func With(p Policy) client.Middleware {
	pl, err := p.plan()
	return func(h client.Handler) client.Handler {
		return &decorator{handler: h, plan: pl, invalid: err}
	}
}

type decorator struct {
	handler client.Handler
	plan    plan
	invalid error
	// targets are the addresses for the queue that was consumed last: in all but
	// strange cases the only one.
	targets atomic.Pointer[targets]
}

// targets are where messages of one queue go, by rung.
type targets struct {
	queue     string
	addresses []address.Address
}

func (d *decorator) Prepare(ctx context.Context, s client.Start) error {
	if d.invalid != nil {
		return d.invalid
	}
	if _, err := d.targetsFor(s.Queue); err != nil {
		return err
	}
	return client.Prepare(ctx, d.handler, s)
}

func (d *decorator) Handle(ctx context.Context, del *client.Delivery) error {
	if d.invalid != nil {
		return client.Requeue{Failed: true, Err: d.invalid}
	}
	err := d.handler.Handle(ctx, del)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return client.Requeue{Err: err}
	}
	if o, ok := errors.AsType[client.Outcome](err); ok {
		if dead, ok := o.(client.DeadLetter); ok {
			dead.Annotations = d.history(del, dead.Annotations)
			return dead
		}
		return err
	}
	return d.decide(del, err)
}

// decide is the policy's decision on a failure.
func (d *decorator) decide(del *client.Delivery, err error) error {
	if _, ok := errors.AsType[*permanentError](err); ok {
		return d.dead(del, ReasonPermanent, err)
	}
	after, asked := errors.AsType[*afterError](err)
	if !asked && d.plan.retryIf != nil && !d.plan.retryIf(err) {
		return d.dead(del, ReasonPermanent, err)
	}
	m := del.Message()
	count := Count(m)
	if count >= d.plan.max {
		return d.dead(del, ReasonExhausted, err)
	}
	delay := d.plan.delays[count]
	if asked {
		delay = after.delay
	}
	ts, bad := d.targetsFor(del.Queue())
	if bad != nil {
		return d.dead(del, client.ReasonUnforwardable, errors.Join(bad, err))
	}
	c := client.Copy(m)
	setCount(c, count+1)
	if count == 0 {
		origin(c, m)
	}
	return client.Forward{To: ts.addresses[d.plan.rung(delay)], Message: c, Err: err}
}

func (d *decorator) targetsFor(queue string) (*targets, error) {
	if ts := d.targets.Load(); ts != nil && ts.queue == queue {
		return ts, nil
	}
	if err := checkQueue(queue); err != nil {
		return nil, err
	}
	ts := &targets{queue: queue}
	for _, delay := range d.plan.rungs {
		key, err := RoutingKey(delay, queue)
		if err != nil {
			return nil, err
		}
		ts.addresses = append(ts.addresses, address.Exchange(d.plan.names.RetryExchange, key))
	}
	d.targets.Store(ts)
	return ts, nil
}

func (d *decorator) dead(del *client.Delivery, reason client.Reason, err error) error {
	return client.DeadLetter{Reason: reason, Err: err, Annotations: d.history(del, nil)}
}

// history adds where a message came from to the annotations of its dead-lettering.
func (d *decorator) history(del *client.Delivery, annotations map[string]any) map[string]any {
	all := map[string]any{
		AnnotationRetries: int64(Count(del.Message())),
		AnnotationQueue:   del.Queue(),
	}
	for own, brokers := range originOf {
		v, ok := del.Annotation(own).(string)
		if !ok {
			v, ok = del.Annotation(brokers).(string)
		}
		if ok && utf8.ValidString(v) && len(v) <= maxOrigin {
			all[own] = v
		}
	}
	for k, v := range annotations {
		all[k] = v
	}
	return all
}

// originOf maps our annotations to those in which RabbitMQ tells how a message
// was last routed.
var originOf = map[string]string{
	AnnotationExchange:   "x-exchange",
	AnnotationRoutingKey: "x-routing-key",
}

// maxOrigin keeps a hostile annotation from growing with every hop.
const maxOrigin = 1024

// origin notes on the first copy where the message came from: the broker's own
// note is overwritten by the way through the delay queue.
func origin(c, m *client.Message) {
	for own, brokers := range originOf {
		v, ok := m.Annotations[brokers].(string)
		if !ok || len(v) > maxOrigin || !utf8.ValidString(v) {
			continue
		}
		if c.Annotations == nil {
			c.Annotations = make(map[any]any, len(originOf))
		}
		c.Annotations[own] = v
	}
}

// Delay is the delay before the given retry (1 for the first) by policy p, rounded
// up as it will be: for showing, and for tests of policies.
func (p Policy) Delay(retry int) (time.Duration, error) {
	pl, err := p.plan()
	if err != nil {
		return 0, err
	}
	if retry < 1 || retry > pl.max {
		return 0, fmt.Errorf("hopback: the policy has %d retries, not a retry %d", pl.max, retry)
	}
	return pl.delays[retry-1], nil
}
