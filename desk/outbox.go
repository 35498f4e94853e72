package desk

import (
	"context"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/dedicated"
)

const (
	// inFlight and inFlightBytes bound the copies that wait for their answer.
	inFlight      = 1000
	inFlightBytes = 16 << 20
	// answerLimit is how long a replay or an import that is stopped waits for answers.
	answerLimit = 30 * time.Second
)

// outbox is the connection that copies are sent on. It is opened when it is needed, and
// again after a refusal has ended it.
type outbox struct {
	d       *Desk
	c       *dedicated.Conn
	changed chan struct{} // has one when an answer has come

	mu    sync.Mutex
	open  int // copies without an answer
	bytes int // theirs
}

func newOutbox(d *Desk) *outbox { return &outbox{d: d, changed: make(chan struct{}, 1)} }

// send sends a copy. tell is called with its answer, unless send returns an error.
func (o *outbox) send(ctx context.Context, target string, payload []byte, notify func(error)) error {
	if o.c != nil && o.c.Err() != nil {
		o.close()
	}
	if o.c == nil {
		openCtx, cancel := context.WithTimeout(ctx, openLimit)
		defer cancel()
		c, err := dedicated.Open(openCtx, o.d.conn.Internal())
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

// room waits until a copy of size bytes has room among those that wait for their answer, or
// until there are none, if it is to be alone. It doesn't wait once gone is closed.
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

// wait waits for the answers to what was sent, for at most limit, and for answerLimit once
// ctx has ended. While it waits, it calls progress.
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
			o.cut() // the answers come as lost
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

// cut ends the connection at once.
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
