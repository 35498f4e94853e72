package client

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/outcome"
)

// delivery is a message that a consumer was given, from its link to its settlement. Handlers see its Delivery.
type delivery struct {
	Delivery
	id       uint32   // on its link
	results  *results // of its link session
	consumer *consumer
	key      *string // of its lane; nil if it has none

	// Guarded by deliveries.mu: standing is what it is to the isolation. uncounted says that it
	// doesn't count toward the window any more, and settled that its settlement is written. aside
	// is the size of its copy, if it is uncounted since its forward waits. lane is its key, while
	// those behind it in its lane wait.
	standing           standing
	uncounted, settled bool
	aside              int64
	bytes              int // that the link counts until they are released
	lane               *string
	// forwarding says that its lane waits for its copy, and kept are annotations for its return to
	// the queue: see gate.
	forwarding bool
	kept       map[string]any

	// settling is set when what becomes of it is on its way to the broker.
	settling atomic.Bool
	lease    lease
	watched  atomic.Pointer[observedDelivery] // as Delivery's, for all goroutines; nil: no Instrument follows it
	began    atomic.Int64                     // when its handler began, in Unix nanoseconds; 0: it hasn't
	nearing  atomic.Int32                     // how far its consumer timeout is used up: see timeouts
	back     atomic.Bool                      // the broker has taken it back
	// outer and inner are the ctx that its handler is called with, here to save allocations: outer
	// carries the Delivery, and inner ends with the lease.
	outer deliveryContext
	inner handlerContext

	// Of the goroutine that handles it: result is the handler's error, and after decide the outcome
	// that it stands for. unordered takes its place if the message's key isn't known. again is the
	// handler's last call; nil: it wasn't called before.
	result, unordered error
	again             *inside.Again
}

// failures is how many earlier deliveries of the message have failed, by the broker's count.
func (d *delivery) failures() uint32 {
	if d.message.Header == nil {
		return 0
	}
	return d.message.Header.DeliveryCount
}

// logCtx is the ctx for log lines about the delivery: an Instrument's for it, if it has one.
func (d *delivery) logCtx() context.Context {
	if o := d.watched.Load(); o != nil {
		return o.Ctx
	}
	return context.Background()
}

// lease ends a handler's ctx when the delivery is no longer its own. A separate context is created only
// for a handler that asks, since most never do. A delivery whose handler
// doesn't ask takes no lock.
type lease struct {
	ended atomic.Pointer[ending] // nil: it hasn't
	asked atomic.Bool            // set before mu is locked for cancel

	mu     sync.Mutex
	cancel context.CancelCauseFunc
}

// ending is how a lease has ended.
type ending struct{ cause error }

// handlerReturned ends a lease without a cause.
var handlerReturned = &ending{}

// end ends the delivery's ctx, with a cause or, when the handler is done with it,
// without.
func (d *delivery) end(cause error) {
	l, by := &d.lease, handlerReturned
	if cause != nil {
		by = &ending{cause}
	}
	if !l.ended.CompareAndSwap(nil, by) || !l.asked.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cancel != nil {
		l.cancel(cause)
	}
}

// context returns a ctx that ends with ctx, and with the delivery's lease.
func (d *delivery) context(ctx context.Context) context.Context {
	return &handlerContext{Context: ctx, delivery: d}
}

// handlerContext is a handler's ctx: it ends with its delivery's lease.
type handlerContext struct {
	context.Context
	delivery *delivery
	// deadline is shortly before the consumer timeout; zero: there is none, or it isn't
	// known. It doesn't change once a handler has the ctx.
	deadline time.Time

	mu    sync.Mutex
	inner context.Context // made by the first that asks
}

func (c *handlerContext) ask() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inner == nil {
		outer, release := c.Context, context.CancelFunc(func() {})
		if !c.deadline.IsZero() {
			outer, release = context.WithDeadlineCause(outer, c.deadline, ErrConsumerTimeoutNear)
		}
		ctx, cancelCause := context.WithCancelCause(outer)
		cancel := func(cause error) {
			cancelCause(cause)
			release()
		}
		c.inner = ctx
		l := &c.delivery.lease
		l.asked.Store(true) // before the look at ended: end does it the other way round
		l.mu.Lock()
		defer l.mu.Unlock()
		if e := l.ended.Load(); e != nil {
			cancel(e.cause)
		} else {
			before := l.cancel
			l.cancel = func(cause error) {
				if before != nil {
					before(cause)
				}
				cancel(cause)
			}
		}
	}
	return c.inner
}

func (c *handlerContext) Done() <-chan struct{} { return c.ask().Done() }

// Err makes no context while there is nothing to report.
func (c *handlerContext) Err() error {
	c.mu.Lock()
	inner := c.inner
	c.mu.Unlock()
	if inner != nil {
		return inner.Err()
	}
	if c.delivery.lease.ended.Load() != nil || !c.deadline.IsZero() && !time.Now().Before(c.deadline) {
		return c.ask().Err() // context.Cause finds the cause then
	}
	return c.Context.Err()
}

// Deadline is shortly before the consumer timeout, if that is known, or the outer ctx's.
func (c *handlerContext) Deadline() (time.Time, bool) {
	outer, ok := c.Context.Deadline()
	if c.deadline.IsZero() || ok && outer.Before(c.deadline) {
		return outer, ok
	}
	return c.deadline, true
}

func (c *handlerContext) Value(key any) any {
	c.mu.Lock()
	ctx := c.inner
	c.mu.Unlock()
	if ctx == nil {
		ctx = c.Context
	}
	return ctx.Value(key)
}

// countUnsettled is how many of ds the broker hasn't revoked.
func countUnsettled(ds []*delivery) (n int) {
	for _, d := range ds {
		if !d.settling.Load() {
			n++
		}
	}
	return n
}

// standing is what a delivery is to the isolation.
type standing uint8

const (
	standingNowhere standing = iota // not admitted yet
	standingOrdinary
	standingWaiting // in suspects
	standingAlone   // running
	standingAside   // no worker gets it
	standingSettled
)

// laneKey calls the function of Start.Order. If it panics, the message can't be handled in order.
func (d *delivery) laneKey() (key string, ok bool) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		d.unordered = DeadLetter{Reason: ReasonPanicked, Err: &failure.PanicError{Value: value, Stack: stack}}
	})
	key, ok = d.consumer.order(&d.Delivery)
	returned = true
	return key, ok
}

// observe has the Instrument follow the delivery, and returns the ctx for its handler.
func (d *delivery) observe(ctx context.Context) context.Context {
	if d.consumer.hooks == nil {
		return ctx
	}
	ctx = d.follow(ctx, d.consumer.hooks)
	d.watched.Store(d.observed)
	return ctx
}

// handle runs the handler and turns a panic or Goexit into an error.
func (d *delivery) handle() {
	if d.unordered != nil {
		d.result = d.unordered
		return
	}
	d.outer = deliveryContext{Context: &d.inner, delivery: &d.Delivery, again: d.again}
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		d.result = DeadLetter{Reason: ReasonPanicked, Err: &failure.PanicError{Value: value, Stack: stack}}
		if value == nil {
			if d.lastWord != nil {
				d.result = d.lastWord
			}
			d.results.exited(d)
		}
	})
	d.result = d.consumer.handler.Handle(&d.outer, &d.Delivery)
	returned = true
}

// decide resolves the handler's result.
func (d *delivery) decide() Resolution {
	if later, ok := outcome.Find[*inside.Later](d.result); ok {
		if !failure.IsClosed(later.Ready) {
			return Resolution{Kind: resolutionLater, ready: later.Ready}
		}
		d.result = later.Then()
	}
	d.watched.Load().Handled(d.result)
	if d.result == nil {
		return Resolution{Kind: ResolutionAccept}
	}
	if again, ok := d.result.(*inside.Again); ok {
		d.again = again
		return Resolution{Kind: resolutionAgain, delay: again.Delay, Annotations: again.Annotations}
	}
	o := OutcomeOf(d.result)
	d.result = o
	if dead, ok := o.(DeadLetter); ok {
		d.logDeadLetter(dead)
	}
	r := d.resolve(o)
	if r.Refused != nil {
		d.consumer.log.ErrorContext(d.logCtx(), "hopback: an outcome can't be carried out; another one replaces it", "message_id", message.ID(d.message), "outcome", ErrorText(o), "error", r.Refused, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	}
	return d.decided(r)
}

func (d *delivery) resolve(o Outcome) Resolution {
	p, ok := o.(Park)
	if !ok || d.consumer.conn == nil {
		return resolve(o)
	}
	return p.resolve(context.WithoutCancel(&d.outer), d.results.deliveries.link.Claims(), d.consumer.conn.Broker(), d.consumer.conn.brokerTime)
}

// undecodable dead-letters the message.
func (d *delivery) undecodable(err error) Resolution {
	dead := DeadLetter{Reason: ReasonUndecodable, Err: err}
	if errors.Is(err, ErrTooLarge) {
		dead.Reason = ReasonTooLarge
	}
	d.watched.Load().Handled(dead)
	return dead.resolve()
}

// unsendable is what Forward.Unsendable says.
func (d *delivery) unsendable(why error) Resolution {
	return d.decided(d.forward().Unsendable(why))
}

// unaccepted is what Forward.Unaccepted says.
func (d *delivery) unaccepted(why error) Resolution {
	return d.decided(d.forward().Unaccepted(why))
}

// forward is the outcome that the core is carrying out.
func (d *delivery) forward() Forward {
	f, _ := d.result.(Forward)
	return f
}

// decided notes the Else of a Forward, which may be a Forward as well.
func (d *delivery) decided(r Resolution) Resolution {
	if r.Kind == ResolutionForward && r.Refused != nil {
		d.result = r.Forward
	}
	return r
}

func (d *delivery) logDeadLetter(o DeadLetter) {
	if p, ok := outcome.Find[*failure.PanicError](o.Err); ok && p != nil {
		d.consumer.log.ErrorContext(d.logCtx(), "hopback: a handler panicked; the message is dead-lettered", "message_id", message.ID(d.message), "panic", ErrorText(p), "stack", string(p.Stack))
		return
	}
	d.consumer.log.WarnContext(d.logCtx(), "hopback: a message is dead-lettered", "message_id", message.ID(d.message), "reason", failure.Clip(string(o.Reason), 255), "error", ErrorText(o.Err))
}
