package amqp

import (
	"context"
	"runtime"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

const (
	// bufferLimit is beyond how many bytes transfers wait for the network. Other frames don't.
	bufferLimit = 64 << 10
	// readLimit is beyond how many bytes the reader stops, until the network takes them: a peer
	// that doesn't read could have any number of answers wait for it. It is more than transfers
	// and settlements fill, so it never stops for a peer that only is slow. If the peer doesn't
	// read for writeLimit, the connection ends.
	readLimit = 2 * maxPeerFrame
	// bufferKeep is the largest buffer that is used again.
	bufferKeep = 512 << 10
	// bufferEnough is so much that the writer doesn't wait for more.
	bufferEnough = 16 << 10
	// yields is how often the writer lets other goroutines run that are about to send.
	yields = 4
	// impatient is for how many writes it doesn't, once that took over a millisecond: with
	// handlers that keep the processors busy, to yield is to wait.
	impatient = 1000
)

// output is what is to be written. It is guarded by the connection's mu.
type output struct {
	b, spare []byte
	wake     chan struct{} // has room for one
	asleep   bool          // the writer waits for wake
	flushed  chan struct{} // closed when this end's close was written
	puts     int           // frames since the last write
	busy     bool          // the last write had several frames
	hasty    int           // writes that don't yield

	// try writes as much as the socket has room for now, and returns how much that was; nil:
	// only the writer writes.
	try func(b []byte) int

	shrunk chan struct{} // closed when the buffer is empty again, or the connection has ended; nil: nobody waits

	waiting  []*Sender  // with messages that wait for room in the buffer
	settling []*Session // with settlements that aren't encoded yet

	// Parts of the transfer that is being encoded, so that it needs no memory.
	transfer frames.Transfer
	tag      [4]byte

	disposition frames.Disposition

	counts, notified []int // how many deliveries each disposition settles, if anybody wants to know
}

// kick has the writer write. It is called with the connection's mu held.
func (o *output) kick() {
	o.puts++
	if o.asleep {
		o.asleep = false
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

func (o *output) empty() bool { return len(o.b) == 0 && len(o.settling) == 0 && len(o.waiting) == 0 }

// write is the writer: it writes until the connection ends.
func (c *Conn) write() {
	var beat <-chan time.Time
	if c.peer.IdleTimeout > 0 {
		t := time.NewTicker(max(c.peer.IdleTimeout/3, 100*time.Millisecond))
		defer t.Stop()
		beat = t.C
	}
	o := &c.out
	wrote := false // since the last beat
	c.mu.Lock()
	for {
		for o.empty() && c.err == nil {
			o.asleep = true
			c.mu.Unlock()
			alive := false
			select {
			case <-o.wake:
			case <-beat:
				alive = !wrote
				wrote = false
			}
			c.mu.Lock()
			o.asleep = false
			if alive && o.empty() && !c.closing {
				o.b, _ = frames.Append(o.b, frames.Frame{}) // an empty frame always fits
			}
		}
		if c.err != nil {
			c.mu.Unlock()
			return
		}
		c.gather()
		b := o.take()
		o.pump()
		if len(b) == 0 { // what waits can't be sent yet
			o.spare = b
			continue
		}
		counts := o.counts
		o.counts, o.notified = o.notified[:0], counts
		c.mu.Unlock()
		for _, n := range counts {
			c.settled.SettledRange(n)
		}
		_ = c.net.SetWriteDeadline(time.Now().Add(writeLimit))
		c.writes.Add(1)
		_, err := c.net.Write(b)
		c.writes.Add(1)
		wrote = true
		if err != nil {
			c.Fail(err)
		}
		c.mu.Lock()
		if cap(b) <= bufferKeep {
			o.spare = b[:0]
		}
		if c.closing && len(o.b) == 0 {
			close(o.flushed)
			c.mu.Unlock()
			return
		}
	}
}

// direct says whether a message that is sent now is to be written on its sender's goroutine, by
// writeNow, which saves waking the writer. That is for a message with nothing else in flight,
// unless the last write had several frames: what many senders send is better written together.
// It is called with mu held, which isn't released before writeNow, so that the writer sleeps
// until then.
func (c *Conn) direct() bool {
	o := &c.out
	if o.try == nil || o.busy || !o.asleep || !o.empty() {
		return false
	}
	for _, s := range c.sessions {
		if s != nil && len(s.unanswered) > 0 {
			return false
		}
	}
	o.asleep = false // kick wakes nobody
	return true
}

// writeNow writes what was put since direct, as far as the socket takes it without waiting. The
// writer writes the rest, and reports what is wrong with the socket. Nothing that waits for
// Config.Settlements is in the buffer.
func (c *Conn) writeNow() {
	o := &c.out
	o.asleep, o.puts = true, 0
	if n := len(o.b); n > 0 && n <= bufferEnough {
		o.b = o.b[:copy(o.b, o.b[o.try(o.b):])]
	}
	if len(o.b) > 0 {
		o.kick()
	}
}

// gather lets those run that are about to send, if the last write suggests that there are some:
// a group commit without a timer. It is called with mu held, which it releases while they run.
func (c *Conn) gather() {
	o := &c.out
	switch {
	case o.hasty > 0:
		o.hasty--
	case o.busy && len(o.b) < bufferEnough:
		began := time.Now()
		for range yields {
			before := o.puts
			c.mu.Unlock()
			runtime.Gosched()
			c.mu.Lock()
			if time.Since(began) > time.Millisecond {
				o.hasty = impatient
				break
			}
			if o.puts == before || len(o.b) >= bufferEnough {
				break
			}
		}
	}
	o.busy, o.puts = o.puts > 1, 0
}

// take returns all that is to be written. Settlements that were joined so far are part of it.
func (o *output) take() []byte {
	for i, s := range o.settling {
		s.writeSettled()
		s.marked = false
		o.settling[i] = nil
	}
	o.settling = o.settling[:0]
	if len(o.b) == 0 {
		o.pump()
	}
	b := o.b
	o.b, o.spare = o.spare[:0], nil
	o.release()
	return b
}

// release wakes those who wait for room.
func (o *output) release() {
	if o.shrunk != nil {
		close(o.shrunk)
		o.shrunk = nil
	}
}

// note notes that a disposition settles the deliveries from first to last. It is called with mu
// held.
func (c *Conn) note(first, last uint32) {
	if c.settled != nil {
		c.out.counts = append(c.out.counts, int(last-first)+1)
	}
}

// pump encodes messages that waited for room in the buffer.
func (o *output) pump() {
	for len(o.waiting) > 0 && len(o.b) < bufferLimit {
		l := o.waiting[0]
		o.waiting[0] = nil
		o.waiting = o.waiting[1:]
		l.waits = false
		l.pump()
	}
}

// AwaitRoom waits until fewer than limit bytes wait for the network, for callers that settle or
// send much without waiting for anything else. It returns why the connection has ended, or ctx's
// cause.
func (c *Conn) AwaitRoom(ctx context.Context, limit int) error {
	for {
		c.mu.Lock()
		if c.err != nil || c.closing {
			defer c.mu.Unlock()
			return c.over()
		}
		if len(c.out.b) < limit {
			c.mu.Unlock()
			return nil
		}
		if c.out.shrunk == nil {
			c.out.shrunk = make(chan struct{})
		}
		shrunk := c.out.shrunk
		c.mu.Unlock()
		select {
		case <-shrunk:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
