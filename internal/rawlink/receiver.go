package rawlink

import (
	"context"

	"github.com/hopback/hopback/internal/frames"
)

// Receiver receives from one queue. It is for one goroutine.
type Receiver struct {
	c     *Conn
	l     *link
	count uint32 // the delivery-count behind all credit that was granted
}

// Receiver attaches to source, an address. A Conn has at most one Receiver.
func (c *Conn) Receiver(ctx context.Context, source string) (*Receiver, error) {
	return c.ReceiverOf(ctx, source, nil)
}

// ReceiverOf is Receiver with a filter set.
func (c *Conn) ReceiverOf(ctx context.Context, source string, filter frames.Map) (*Receiver, error) {
	l := &link{in: make(chan event, 2*window)}
	err := c.attach(ctx, l, &frames.Attach{
		Role: frames.RoleReceiver, SenderSettleMode: frames.Some(uint8(0)), ReceiverSettleMode: frames.Some(uint8(0)),
		Source: &frames.Source{Address: source, Filter: filter, Outcomes: []frames.Symbol{"amqp:accepted:list", "amqp:rejected:list", "amqp:released:list", "amqp:modified:list"}},
		Target: &frames.Target{},
	})
	if err != nil {
		return nil, err
	}
	return &Receiver{c: c, l: l, count: l.deliveryCount}, nil
}

// Fetch asks for the next n messages, and calls take for each that is there. It returns
// how many there were: fewer than n means that the queue had no more. Where take returns
// an error Fetch goes on to the end of what was asked for, without calling it again.
// What take gets is unsettled, and stays so until Settle is called.
func (r *Receiver) Fetch(ctx context.Context, n uint32, take func(Delivery) error) (got uint32, last *uint32, err error) {
	c := r.c
	c.mu.Lock()
	start := r.count
	r.count += n
	c.flow(&frames.Flow{Handle: frames.Some(r.l.handle), DeliveryCount: frames.Some(start), LinkCredit: frames.Some(n), Drain: true})
	c.mu.Unlock()
	var taken error
	for got < n {
		var e event
		var ok bool
		select {
		case e, ok = <-r.l.in:
		case <-c.done:
			return got, last, c.Err()
		case <-ctx.Done():
			return got, last, context.Cause(ctx)
		}
		if !ok {
			c.mu.Lock()
			defer c.mu.Unlock()
			return got, last, r.l.gone
		}
		if e.drained {
			if e.count == r.count {
				return got, last, taken
			}
			continue // of a drain before this, whose messages all came
		}
		got++
		id := e.delivery.ID
		last = &id
		if taken == nil {
			taken = take(e.delivery)
		}
		c.mu.Lock()
		c.untaken -= e.delivery.frames
		if c.granted < window/2 && window-c.untaken > c.granted+window/4 {
			c.flow(nil)
		}
		c.mu.Unlock()
	}
	return got, last, taken
}

// Close detaches the link, and waits for the broker's answer.
func (r *Receiver) Close(ctx context.Context) error {
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.l.gone == nil {
		r.l.gone = ErrClosed
		c.put(&frames.Detach{Handle: r.l.handle, Closed: true}, nil)
	}
	return c.awaitLocked(ctx, func() bool { return r.l.detached })
}

// Accept settles the deliveries from first to last as accepted.
func (r *Receiver) Accept(first, last uint32) error { return r.settle(first, last, &frames.Accepted{}) }

// GiveBack settles the deliveries from first to last as modified, so that the queue
// delivers them again, in their order. It doesn't count as a failed delivery. Those
// among them that are settled stay so.
func (r *Receiver) GiveBack(first, last uint32) error {
	return r.settle(first, last, &frames.Modified{})
}

// Move settles a delivery as modified and undeliverable-here, so that the queue
// dead-letters it, with these annotations added to its own or in their place. It waits
// while much is to be written.
func (r *Receiver) Move(ctx context.Context, id uint32, annotations frames.Map) error {
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.awaitLocked(ctx, func() bool { return r.l.gone != nil || len(c.unwritten) < maxUnwritten }); err != nil {
		return err
	}
	if c.err != nil {
		return c.err
	}
	if r.l.gone != nil {
		return r.l.gone
	}
	c.put(&frames.Disposition{Role: frames.RoleReceiver, First: id, Last: frames.Some(id), Settled: frames.Some(true), State: &frames.Modified{UndeliverableHere: true, Annotations: annotations}}, nil)
	return nil
}

func (r *Receiver) settle(first, last uint32, state any) error {
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	if r.l.gone != nil {
		return r.l.gone
	}
	// What follows the last that was settled, in the same way, becomes one range with it:
	// the broker has one command for both.
	_, accepts := state.(*frames.Accepted)
	if j := c.joint; j.open && j.accepts == accepts && j.last+1 == first {
		first = j.first
		c.unwritten = c.unwritten[:j.at]
	}
	at := len(c.unwritten)
	c.put(&frames.Disposition{Role: frames.RoleReceiver, First: first, Last: frames.Some(last), Settled: frames.Some(true), State: state}, nil)
	c.joint = joint{open: true, accepts: accepts, at: at, first: first, last: last}
	return nil
}
