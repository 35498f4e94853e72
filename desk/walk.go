package desk

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/rawlink"
)

const (
	// batch is how many messages are asked for at a time.
	batch = 2000
	// maxHold is how long a walk holds messages. RabbitMQ 4.3 takes back what is held for
	// 30 minutes, its default. A walk that takes longer begins anew.
	maxHold = 15 * time.Minute
	// openLimit bounds the opening of a walk, stepLimit one batch, and endLimit what gives
	// back at the end.
	openLimit = 2 * time.Minute
	stepLimit = 5 * time.Minute
	endLimit  = 2 * time.Minute
	// reachLimit bounds the time that the order is worth to a walk that is to stop.
	reachLimit = 5 * time.Minute
	// giveBack is how many messages are given back with one command of the broker.
	giveBack = 1000
)

// walk holds the messages of a queue from its head on, unsettled, and gives them back in
// the end.
//
// The broker numbers the deliveries of a session without gaps. So what is held is a range
// of numbers, however many there are, and costs this process nothing.
type walk struct {
	queue       string
	in          *rawlink.Conn
	r           *rawlink.Receiver
	began       time.Time
	first, last uint32
	held        bool // first and last are set
	more        bool // there may be more in the queue
	returned    bool // the last one was given back before
}

// begin attaches to a queue.
func (d *Desk) begin(ctx context.Context, queue string) (*walk, error) {
	source, err := address.Queue(queue).Build()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, openLimit)
	defer cancel()
	in, err := rawlink.Open(ctx, d.conn)
	if err != nil {
		return nil, walkError(queue, err)
	}
	r, err := in.Receiver(ctx, source)
	if err != nil {
		abandon(in)
		return nil, walkError(queue, err)
	}
	return &walk{queue: queue, in: in, r: r, began: time.Now()}, nil
}

// next shows the next batch of messages. more is false where the queue has no more. An
// error of visit ends the batch: what follows is held and isn't shown. ctx isn't looked at
// amid a batch, but by visit.
func (w *walk) next(ctx context.Context, n int, visit func(rawlink.Delivery) error) (more bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepLimit)
	defer cancel()
	var latest []byte
	var stop error
	got, last, err := w.r.Fetch(ctx, uint32(n), func(v rawlink.Delivery) error {
		if !w.held {
			w.held, w.first = true, v.ID
		}
		latest = v.Payload
		if stop == nil {
			stop = visit(v)
		}
		return nil
	})
	if last != nil {
		w.last = *last
	}
	if latest != nil {
		w.returned = wasReturned(latest)
	}
	w.more = got == uint32(n) && err == nil
	return w.more, errors.Join(err, stop)
}

// wasReturned says whether a message may have been given back to its queue before.
func wasReturned(payload []byte) bool {
	l := open(payload)
	for _, key := range []string{"x-acquired-count", "x-delivery-count"} {
		if v, ok := l.annotations.Get(key); ok && v != uint64(0) && v != int64(0) && v != uint32(0) {
			return true
		}
	}
	return l.bad != nil || l.header != nil && l.header.DeliveryCount > 0
}

// reach goes on to where what was given back before ends. A queue delivers that first, and
// puts what is given back at its end. So a walk that stops amid of it would put what it has
// seen behind what it hasn't.
func (w *walk) reach() error {
	for began := time.Now(); w.held && w.more && w.returned && time.Since(began) < reachLimit; {
		if _, err := w.next(context.Background(), batch, func(rawlink.Delivery) error { return nil }); err != nil {
			return err
		}
	}
	return nil
}

// end gives back what is held, in order, and closes the connection.
func (w *walk) end() error {
	err := w.reach()
	for at := w.first; w.held && err == nil; {
		to := w.last
		if to-at >= giveBack {
			to = at + giveBack - 1
		}
		err = w.r.GiveBack(at, to)
		if to == w.last {
			break
		}
		at = to + 1
	}
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	return errors.Join(err, w.in.Close(ctx))
}

// abandon closes a connection that holds nothing, or whose messages go back by themselves.
func abandon(c *rawlink.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = c.Close(ctx)
}

// walkError is an error of package rawlink as one of package client.
func walkError(queue string, err error) error {
	var known *client.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	e := &client.Error{Op: "walk", Target: queue, Kind: client.ErrConnectionLost, Err: err}
	var refused *rawlink.RefusedError
	if errors.As(err, &refused) {
		e.Condition, e.Text = refused.Condition, refused.Text
		switch refused.Condition {
		case "amqp:not-found", "amqp:resource-deleted":
			e.Kind = client.ErrNotFound
		case "amqp:unauthorized-access":
			e.Kind = client.ErrUnauthorized
		default:
			e.Kind = client.ErrRefused
		}
	}
	return e
}

// lookTries is how often a walk that changes nothing is begun again after the loss of its
// connection.
const lookTries = 5

// look shows all messages of a queue from its head on, until visit returns errStop. It
// begins again where the connection is lost, after reset.
func (d *Desk) look(ctx context.Context, queue string, reset func(), visit func(v rawlink.Delivery) error) error {
	for try := 1; ; try++ {
		reset()
		err := d.lookOnce(ctx, queue, visit)
		if err == nil || ctx.Err() != nil || try == lookTries || !errors.Is(err, client.ErrConnectionLost) {
			return err
		}
		d.log.Warn("hopback: the connection was lost while a queue was looked into, beginning again", "queue", queue, "error", err)
		if !pause(ctx, backoff(try)) {
			return context.Cause(ctx)
		}
	}
}

func (d *Desk) lookOnce(ctx context.Context, queue string, visit func(v rawlink.Delivery) error) error {
	w, err := d.begin(ctx, queue)
	if err != nil {
		return err
	}
	for more := true; more && err == nil; {
		if more, err = w.next(ctx, batch, func(v rawlink.Delivery) error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return visit(v)
		}); err == nil && time.Since(w.began) > maxHold {
			err = &HoldError{Queue: queue, After: maxHold}
		}
	}
	if errors.Is(err, errStop) {
		err = nil
	}
	back := w.end()
	if err == nil {
		err = back
	}
	if ctx.Err() != nil || errors.As(err, new(*HoldError)) {
		return err
	}
	return walkError(queue, err)
}

// HoldError says that a walk stopped because it had held its messages for After, the limit
// of 15 minutes. A List then has the messages that were read.
type HoldError struct {
	Queue string
	After time.Duration
}

func (e *HoldError) Error() string {
	return "hopback: looking into the queue " + e.Queue + " ended after " + e.After.String() + ": RabbitMQ takes back what is held longer"
}

func backoff(try int) time.Duration {
	return min(100*time.Millisecond<<min(try, 10), 10*time.Second)
}

// pause waits for d, and says whether ctx still lasts.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
