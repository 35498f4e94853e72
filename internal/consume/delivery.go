package consume

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/instrumented"
)

// Delivery is what a consumer knows of a delivery: where it stands between the link and its
// settlement. What the user sees of it is handled.
type Delivery struct {
	Message  *amqp.Message
	id       uint32 // on its link
	received time.Time
	link     deliveryLink
	Handled  handled
	key      *string // of its lane; nil if it has none

	// Guarded by linkSession.mu: standing is what it is to the isolation. uncounted says that it
	// doesn't count toward the window any more, and settled that its settlement is written. aside
	// is the size of its copy, if it is uncounted since its forward waits. lane is its key, while
	// those behind it in its lane wait.
	standing           standing
	uncounted, settled bool
	aside              int64
	lane               *string
	// forwarding says that its lane waits for its copy, and kept are annotations for its return to
	// the queue: see gate.
	forwarding bool
	kept       map[string]any

	// settling is set when what becomes of it is on its way to the broker.
	settling atomic.Bool
	lease    lease
	observed atomic.Pointer[instrumented.Observed] // nil: no Instrument follows it
	began    atomic.Int64                          // when its handler began, in Unix nanoseconds; 0: it hasn't
	nearing  atomic.Int32                          // how far its consumer timeout is used up: see timeouts
	back     atomic.Bool                           // the broker has taken it back
	// ctx is the one that its handler is called with, here to save an allocation.
	ctx handlerContext
}

// handled is the user's side of a delivery: its handler, and what the handler's result means.
type handled interface {
	// Lane is the key of those that are handled in order; false if it needs no order.
	Lane() (key string, ok bool)
	// Observe has the Instrument follow the delivery, and returns the ctx for its handler.
	Observe(ctx context.Context) context.Context
	// Handle runs the handler. If the handler ends its goroutine, Handle calls the delivery's
	// exited.
	Handle(ctx context.Context)
	// Decide says what the handler's result means.
	Decide() Decision
	// Undecodable is the decision about a message that nobody can read.
	Undecodable(err error) Decision
	// Unsendable is the decision if the copy of a decisionForward can never be sent.
	Unsendable(why error) Decision
	// Unaccepted is the one if the copy wasn't accepted for too long.
	Unaccepted(why error) Decision
}

// Decision is what becomes of a delivery. It was checked: nothing in it can poison the
// message or end the link.
type Decision struct {
	Kind DecisionKind
	// Of decisionModify: see disposition. The annotations may be the user's map.
	Failed, DeadLetter bool
	Annotations        map[string]any
	Reason, ErrorText  string // for the annotations of these names; "": none
	// Of decisionForward: the copy, and where it goes.
	To   address.Address
	Copy *amqp.Message
	// Delay is that of DecisionAgain.
	Delay time.Duration
	// Refused is why this takes the place of what the handler has asked for.
	Refused error
}

type DecisionKind string

const (
	DecisionAccept  DecisionKind = "accept"
	decisionRelease DecisionKind = "release"
	decisionModify  DecisionKind = "modify"
	decisionForward DecisionKind = "forward"
	// DecisionAgain keeps the delivery, and has its handler called again after Delay. Only a gated
	// consumer carries it out. If it has to return the delivery, it returns it with Annotations.
	DecisionAgain DecisionKind = "again"
)

// deliveryLink is what a delivery came in on.
type deliveryLink interface {
	over() bool
	// parks reports whether the queue can park messages.
	parks() bool
	// exited carries out what has become of d, whose handler has ended its goroutine.
	exited(d *Delivery)
}

// Exited is called when the handler has ended its goroutine.
func (d *Delivery) Exited() { d.link.exited(d) }

// Parks reports whether the delivery's queue can park messages.
func (d *Delivery) Parks() bool { return d.link.parks() }

// Revoked says whether the broker has taken it back.
func (d *Delivery) Revoked() bool { return d.back.Load() }

// failures is how many earlier deliveries of the message have failed, by the broker's count.
func (d *Delivery) failures() uint32 {
	if d.Message.Header == nil {
		return 0
	}
	return d.Message.Header.DeliveryCount
}

// LogCtx is the ctx for log lines about the delivery: an Instrument's for it, if it has one.
func (d *Delivery) LogCtx() context.Context {
	if o := d.observed.Load(); o != nil {
		return o.Ctx
	}
	return context.Background()
}

var (
	// ErrRevoked is the cause of a handler's ctx whose delivery the broker revoked.
	ErrRevoked = errors.New("the broker revoked the delivery after the consumer timeout")
	// ErrTimeoutNear is the cause of one that ended shortly before that.
	ErrTimeoutNear = errors.New("the consumer timeout is nearly over")
)

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

// End ends the delivery's ctx, with a cause or, when the handler is done with it,
// without.
func (d *Delivery) End(cause error) {
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

// Context returns a ctx that ends with ctx, and with the delivery's lease.
func (d *Delivery) Context(ctx context.Context) context.Context {
	return &handlerContext{Context: ctx, delivery: d}
}

// handlerContext is a handler's ctx: it ends with its delivery's lease.
type handlerContext struct {
	context.Context
	delivery *Delivery
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
			outer, release = context.WithDeadlineCause(outer, c.deadline, ErrTimeoutNear)
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
func countUnsettled(ds []*Delivery) (n int) {
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
