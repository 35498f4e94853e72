package client

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/outcome"
)

// Delivery is a message that a queue has delivered.
//
// It can't be settled directly: the handler's result decides what becomes of it. So
// handlers and middleware run on any source of messages: this package's consumer,
// another client's, or a test.
type Delivery struct {
	message  *Message
	id       uint32 // on its link
	queue    string
	received time.Time
	link     deliveryLink
	standing standing // see quarantine
	// uncounted: it doesn't count toward the window any more.
	uncounted atomic.Bool
	// aside is the size of its copy, if it is uncounted since its forward waits.
	aside int64
	lane  *string // see lanes; nil if it has none
	// settling is set when what becomes of it is on its way to the broker.
	settling atomic.Bool
	lease    lease
	lastWord error                     // see outcome.LastWord
	observed atomic.Pointer[observed]  // nil: no Instrument follows it
	server   *string                   // for an Instrument
	decided  func(instrument.Decision) // nil: nobody has called OnReport
	began    atomic.Int64              // when its handler began, in Unix nanoseconds; 0: it hasn't
	nearing  atomic.Int32              // how far its consumer timeout is used up: see timeouts
	back     atomic.Bool               // the broker has taken it back
	// ctx is the one that its consumer calls the handler with, here so that it needn't
	// be allocated.
	ctx deliveryContext
}

// NewDelivery returns a Delivery of m from queue. It serves to call a Handler outside of
// Consume: in a test, or from another client's consumer. m must not be nil.
func NewDelivery(queue string, m *Message) *Delivery {
	return &Delivery{message: m, queue: queue, received: time.Now()}
}

// Server returns the host:port of the endpoint that the Conn was last connected to, for an
// Instrument. It is empty without one, and outside of Conn.Consume.
func (d *Delivery) Server() string {
	if d.server == nil {
		return ""
	}
	return *d.server
}

// Message returns the message as received. It must not be changed or sent again: use
// Copy.
func (d *Delivery) Message() *Message {
	return d.message
}

// Queue returns the name of the queue that delivered the message, unencoded.
func (d *Delivery) Queue() string { return d.queue }

// Received returns when this client received the message.
func (d *Delivery) Received() time.Time { return d.received }

// DeliveryCount returns how many earlier deliveries of the message have failed, by the
// broker's count. A copy, such as a retry by republishing, starts at 0. A dead letter
// inherits the count.
func (d *Delivery) DeliveryCount() uint32 {
	if d.message.Header == nil {
		return 0
	}
	return d.message.Header.DeliveryCount
}

// Property returns the application property key, or nil.
func (d *Delivery) Property(key string) any { return d.message.ApplicationProperties[key] }

// Annotation returns the message annotation key, or nil.
func (d *Delivery) Annotation(key string) any {
	return d.message.Annotations[key]
}

// Report tells the consumer's Instrument what has been decided about the delivery, and
// calls the function of OnReport. It is for middleware, which calls it within Handle.
func (d *Delivery) Report(x instrument.Decision) {
	if d.decided != nil {
		d.decided(x)
	}
	if o := d.observed.Load(); o != nil {
		o.decided(x)
	}
}

// OnReport makes Report call f, in its caller's goroutine and before the decision is
// carried out. A handler thereby learns what the middleware around it makes of its
// result, such as retry.With. It calls OnReport within Handle. The last call counts.
func (d *Delivery) OnReport(f func(instrument.Decision)) { d.decided = f }

// logCtx is the ctx for log lines about the delivery: an Instrument's for it, if it has one.
func (d *Delivery) logCtx() context.Context {
	if o := d.observed.Load(); o != nil {
		return o.ctx
	}
	return context.Background()
}

// deliveryKey finds the Delivery in a handler's ctx.
type deliveryKey struct{}

// WithDelivery returns a ctx that carries d. Code that calls a Handler outside of
// Consume should call it with such a ctx.
func WithDelivery(ctx context.Context, d *Delivery) context.Context {
	return &deliveryContext{Context: ctx, delivery: d}
}

// DeliveryFrom returns the delivery of a handler's ctx. It returns false if ctx carries
// none.
func DeliveryFrom(ctx context.Context) (*Delivery, bool) {
	d, ok := ctx.Value(deliveryKey{}).(*Delivery)
	return d, ok && d != nil
}

// ErrConsumerTimeout is the cause of a handler's ctx that ended because the broker took the
// delivery back and delivers it to another consumer. The handler held it for longer than
// the queue's consumer timeout (RabbitMQ 4.3 and later; 30 minutes by default). The
// handler's result is ignored.
var ErrConsumerTimeout = errors.New("the broker took the delivery back")

// ErrConsumerTimeoutNear is the cause of a handler's ctx that ended shortly before the broker
// would take the delivery back: a tenth of the consumer timeout before, at most a minute. The
// ctx has that time as its deadline, and its error is context.DeadlineExceeded. The handler's
// result counts, so an error is a failed attempt like any other. A handler that begins when
// half of the timeout is over, because its delivery had to wait, has no such deadline.
//
// If the handler hasn't returned after half of that time, the delivery goes back to its queue
// as failed, provided the queue is known to have a dead-letter exchange. So the queue's
// delivery limit ends a message whose handler never returns in time. The broker itself
// doesn't count a delivery that it takes back.
//
// The consumer knows the timeout if ConsumerConfig.ConsumerTimeout or the queue's argument
// sets it. Otherwise it knows it after the broker has taken two deliveries back.
var ErrConsumerTimeoutNear = errors.New("the consumer timeout is nearly over")

// TakenBack reports whether the broker has taken the delivery back, because it was held for
// longer than the queue's consumer timeout, and delivers it again. The handler's result is then
// ignored. It may be called concurrently.
func (d *Delivery) TakenBack() bool { return d.back.Load() }

// lease ends a handler's ctx when the delivery is no longer its own. A context of
// its own is made only for a handler that asks, since most never do.
type lease struct {
	mu     sync.Mutex
	over   bool
	cause  error
	cancel context.CancelCauseFunc
}

// end ends the delivery's ctx, with a cause or, when the handler is done with it,
// without.
func (d *Delivery) end(cause error) {
	l := &d.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return
	}
	l.over, l.cause = true, cause
	if l.cancel != nil {
		l.cancel(cause)
	}
}

// deliveryContext is a handler's ctx: it carries the Delivery, and ends with its
// lease.
type deliveryContext struct {
	context.Context
	delivery *Delivery
	// deadline is shortly before the consumer timeout; zero: there is none, or it isn't
	// known. It doesn't change once a handler has the ctx.
	deadline time.Time

	mu    sync.Mutex
	inner context.Context // made by the first that asks
}

func (c *deliveryContext) ask() context.Context {
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
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.over {
			cancel(l.cause)
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

func (c *deliveryContext) Done() <-chan struct{} { return c.ask().Done() }

// Err makes no context while there is nothing to tell.
func (c *deliveryContext) Err() error {
	c.mu.Lock()
	inner := c.inner
	c.mu.Unlock()
	if inner != nil {
		return inner.Err()
	}
	l := &c.delivery.lease
	l.mu.Lock()
	over := l.over
	l.mu.Unlock()
	if over || !c.deadline.IsZero() && !time.Now().Before(c.deadline) {
		return c.ask().Err() // context.Cause finds the cause then
	}
	return c.Context.Err()
}

// Deadline is shortly before the consumer timeout, if that is known, or the outer ctx's.
func (c *deliveryContext) Deadline() (time.Time, bool) {
	outer, ok := c.Context.Deadline()
	if c.deadline.IsZero() || ok && outer.Before(c.deadline) {
		return outer, ok
	}
	return c.deadline, true
}

func (c *deliveryContext) Value(key any) any {
	switch key {
	case deliveryKey{}:
		return c.delivery
	case outcome.LastWordKey{}:
		return &c.delivery.lastWord
	}
	c.mu.Lock()
	ctx := c.inner
	c.mu.Unlock()
	if ctx == nil {
		ctx = c.Context
	}
	return ctx.Value(key)
}

// countUnsettled is how many of ds the broker hasn't taken back.
func countUnsettled(ds []*Delivery) (n int) {
	for _, d := range ds {
		if !d.settling.Load() {
			n++
		}
	}
	return n
}

// standing is what a delivery is to the quarantine; guarded by its mu.
type standing uint8

const (
	standsNowhere standing = iota // not admitted yet
	standsOrdinary
	standsWaiting // in suspects
	standsAlone   // running
	standsAside   // no worker gets it
	standsSettled
)

// deliveryLink is what a delivery came in on.
type deliveryLink interface{ over() bool }

// newDelivery is a delivery that came on a link.
func newDelivery(a arrival, link deliveryLink) *Delivery {
	return &Delivery{message: a.msg, id: a.id, link: link}
}

// annotationDeliveryTime has RabbitMQ 4.3 hold a message that goes back to a quorum
// queue until then, in milliseconds since 1970.
const annotationDeliveryTime = "x-opt-delivery-time"
