package desk

import (
	"context"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/inside"
)

const (
	// inFlight and inFlightBytes limit the unconfirmed copies.
	inFlight      = 1000
	inFlightBytes = 16 << 20
	// answerLimit is how long a stopped replay or import waits for confirmations.
	answerLimit = 30 * time.Second
)

// outbox is the connection that sends copies. It is opened on first use, and again after the
// broker has closed it over a refusal.
type outbox struct {
	d       *Desk
	c       *dedicated.Conn
	changed chan struct{} // has an element after an answer

	mu    sync.Mutex
	open  int // copies without an answer
	bytes int // the size of these copies
}

func newOutbox(d *Desk) *outbox { return &outbox{d: d, changed: make(chan struct{}, 1)} }

// send sends a copy. It calls notify with the broker's answer, unless send returns an error.
func (o *outbox) send(ctx context.Context, target string, payload []byte, notify func(error)) error {
	if o.c != nil && o.c.Err() != nil {
		o.close()
	}
	if o.c == nil {
		openCtx, cancel := context.WithTimeout(ctx, openLimit)
		defer cancel()
		c, err := dedicated.Open(openCtx, inside.Of(o.d.conn))
		if err != nil {
			return err
		}
		o.c = c
	}
	size := len(payload)
	o.count(1, size)
	err := o.c.Send(ctx, target, payload, func(err error) {
		notify(err)
		o.count(-1, -size)
	})
	if err != nil {
		o.count(-1, -size)
	}
	return err
}

func (o *outbox) count(n, bytes int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open += n
	o.bytes += bytes
	if n < 0 {
		select {
		case o.changed <- struct{}{}:
		default:
		}
	}
}

// room waits until the limits allow another copy of size bytes. With alone, it waits until no
// copy is in flight. It stops waiting when gone is closed.
func (o *outbox) room(ctx context.Context, size int, alone bool, gone <-chan struct{}) error {
	for {
		o.mu.Lock()
		ok := o.open == 0 || !alone && o.open < inFlight && o.bytes+size <= inFlightBytes
		o.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-o.changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-gone:
			return o.c.Err()
		}
	}
}

// wait waits for the answers to all copies, for limit at most, and for answerLimit after ctx
// has ended. While it waits, it calls progress.
func (o *outbox) wait(ctx context.Context, limit time.Duration, progress func()) {
	end := time.NewTimer(limit)
	defer end.Stop()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	stopped := ctx.Done()
	for {
		o.mu.Lock()
		open := o.open
		o.mu.Unlock()
		if open == 0 {
			return
		}
		progress()
		select {
		case <-o.changed:
		case <-stopped:
			stopped = nil
			end.Reset(answerLimit)
		case <-end.C:
			o.cut() // all open answers become losses
		case <-tick.C:
		}
	}
}

func (o *outbox) done() <-chan struct{} {
	if o.c == nil {
		return nil
	}
	return o.c.Done()
}

// cut closes the connection immediately.
func (o *outbox) cut() {
	if o.c != nil {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = o.c.Close(ctx)
	}
}

func (o *outbox) close() {
	if o.c != nil {
		abandon(o.c)
		o.c = nil
	}
}
