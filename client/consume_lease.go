package client

import (
	"context"
	"errors"
	"sync"

	"github.com/hopback/hopback/internal/lastword"
)

// ErrConsumerTimeout is the cause of a handler's ctx that ended because the broker has
// taken the delivery back, to give it to somebody else: it was held for longer
// than the queue's consumer timeout (RabbitMQ 4.3 and later, 30 minutes unless set
// otherwise). The handler's result is ignored.
var ErrConsumerTimeout = errors.New("the broker took the delivery back")

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

	mu    sync.Mutex
	inner context.Context // made by the first that asks
}

func (c *deliveryContext) ask() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inner == nil {
		ctx, cancel := context.WithCancelCause(c.Context)
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
	if over {
		return c.ask().Err() // context.Cause finds the cause then
	}
	return c.Context.Err()
}

func (c *deliveryContext) Value(key any) any {
	switch key {
	case deliveryKey{}:
		return c.delivery
	case lastword.Key{}:
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

// leases finds the deliveries that the broker takes back by their tags. A nil
// *leases keeps none.
type leases struct {
	taken func(*Delivery)

	mu    sync.Mutex
	byTag map[tag]*Delivery
}

// tag is a delivery tag as a key that needn't be allocated. AMQP's have 32 bytes at
// the most.
type tag struct {
	n     uint8
	bytes [32]byte
}

func tagOf(b []byte) (t tag) {
	t.n = uint8(copy(t.bytes[:], b))
	return t
}

func (l *leases) begin(d *Delivery) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byTag[tagOf(d.message.DeliveryTag)] = d
}

func (l *leases) end(d *Delivery) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := tagOf(d.message.DeliveryTag); l.byTag[t] == d {
		delete(l.byTag, t)
	}
}

// takenBack is called by the link, so it hands on to a goroutine.
func (l *leases) takenBack(b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := tagOf(b)
	if d := l.byTag[t]; d != nil {
		delete(l.byTag, t)
		go l.taken(d)
	}
}
