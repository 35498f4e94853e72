package dedicated

import (
	"context"
	"slices"
	"sync"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
)

// maxUnwritten is how many bytes wait for the network before a Move waits.
const maxUnwritten = 1 << 20

// Delivery is a received message.
type Delivery struct {
	ID uint32
	// Payload is the encoded message.
	Payload []byte
}

// Receiver receives from one queue. It is for one goroutine.
type Receiver struct {
	amqp.NoReceiverEvents
	c *Conn
	r *amqp.Receiver

	mu    sync.Mutex
	queue []Delivery
	// drained is the count of the last drain that is over; has says that there was one.
	drained uint32
	has     bool
	ended   bool
	wake    chan struct{}
}

// Receiver attaches to source, an address. A Conn has at most one Receiver.
func (c *Conn) Receiver(ctx context.Context, source string) (*Receiver, error) {
	return c.ReceiverOf(ctx, source, nil)
}

// ReceiverOf is Receiver with a filter set.
func (c *Conn) ReceiverOf(ctx context.Context, source string, filter frames.Map) (*Receiver, error) {
	s, err := c.begin(ctx, maxBytes)
	if err != nil {
		return nil, err
	}
	r := &Receiver{c: c, wake: make(chan struct{}, 1)}
	r.r, err = s.Receiver(ctx, amqp.ReceiverConfig{
		Source: &frames.Source{Address: source, Filter: filter, Outcomes: []frames.Symbol{"amqp:accepted:list", "amqp:rejected:list", "amqp:released:list", "amqp:modified:list"}},
		Events: r,
	})
	if err != nil {
		return nil, c.ending(err)
	}
	return r, nil
}

// Delivered is called by the engine, as are Drained and Ended.
func (r *Receiver) Delivered(d *amqp.Delivery) {
	payload := d.Payload
	if !d.Owned {
		payload = slices.Clone(payload)
	}
	r.change(func() { r.queue = append(r.queue, Delivery{d.ID, payload}) })
}

func (r *Receiver) Drained(count uint32) {
	r.change(func() { r.drained, r.has = count, true })
}

func (r *Receiver) Ended(error) { r.change(func() { r.ended = true }) }

func (r *Receiver) change(f func()) {
	r.mu.Lock()
	f()
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Fetch asks for the next n messages, and calls take for each that is there. It returns
// how many there were: fewer than n means that the queue had no more. If take returns
// an error, Fetch continues to the end of what was asked for without calling it again.
// What take gets is unsettled, and stays so until it is settled.
func (r *Receiver) Fetch(ctx context.Context, n uint32, take func(Delivery) error) (got uint32, last *uint32, err error) {
	count, err := r.r.Drain(n)
	if err != nil {
		return 0, nil, r.over(err)
	}
	var taken error
	var batch []Delivery
	for got < n {
		r.mu.Lock()
		batch, r.queue = r.queue, batch[:0]
		drained, ended := r.has && r.drained == count, r.ended
		r.mu.Unlock()
		for _, d := range batch {
			got++
			last = &d.ID
			if taken == nil {
				taken = take(d)
			}
			r.r.Taken(len(d.Payload))
		}
		clear(batch)
		switch {
		case len(batch) > 0:
			continue
		case drained:
			return got, last, taken
		case ended:
			return got, last, r.over(r.r.Err())
		}
		select {
		case <-r.wake:
		case <-r.c.Done():
			return got, last, r.c.Err()
		case <-ctx.Done():
			return got, last, context.Cause(ctx)
		}
	}
	return got, last, taken
}

// over is the reason for which the connection has ended, if it has, or else err's.
func (r *Receiver) over(err error) error {
	if lost := r.c.Err(); lost != nil {
		return lost
	}
	return r.c.ending(err)
}

// Close detaches the link, and waits for the broker's answer.
func (r *Receiver) Close(ctx context.Context) error {
	if err := r.r.Detach(ctx); err != nil {
		return err
	}
	return r.c.Err()
}

// Accept settles the deliveries from first to last as accepted.
func (r *Receiver) Accept(first, last uint32) error { return r.settle(first, last, amqp.Accepted) }

// Requeue settles the deliveries from first to last as modified, so that the queue
// delivers them again, in their order. It doesn't count as a failed delivery. Those
// among them that are settled stay so.
func (r *Receiver) Requeue(first, last uint32) error {
	return r.settle(first, last, amqp.Modified(false, false, nil))
}

// Move settles a delivery as modified and undeliverable-here, so that the queue
// dead-letters it, with these annotations added to its own or in their place. It waits
// while much is to be written.
func (r *Receiver) Move(ctx context.Context, id uint32, annotations frames.Map) error {
	if err := r.c.c.AwaitRoom(ctx, maxUnwritten); err != nil {
		return r.over(err)
	}
	return r.settle(id, id, amqp.Modified(false, true, annotations))
}

func (r *Receiver) settle(first, last uint32, o amqp.Outcome) error {
	if err := r.r.Settle(first, last, o); err != nil {
		return r.over(err)
	}
	return nil
}
