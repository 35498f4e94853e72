package wire

import (
	"runtime"
	"slices"
	"time"
)

// writer takes the engine's events and writes what there is to write.
func (c *Conn) writer() {
	defer close(c.written)
	w := writer{c: c, ready: c.engine.Ready()}
	w.startTimers()
	defer w.stopTimers()
	for w.wait() {
		if !w.round() {
			c.stop()
			return
		}
	}
}

// writer is the state of the goroutine that writes.
type writer struct {
	c     *Conn
	ready <-chan struct{}
	busy  bool // several events came at once

	beat, check, answer *time.Timer
	received, sent      uint64
	quiet               int // times that nothing was received
}

// wait waits for something to do.
func (w *writer) wait() bool {
	select {
	case <-w.c.done:
		return false
	case _, ok := <-w.ready:
		if !ok {
			w.ready = nil
		}
	case <-w.c.wake:
	case <-w.beat.C:
		w.signOfLife()
	case <-w.check.C:
		w.checkLife()
	case <-w.answer.C:
	}
	if w.busy {
		// Those that are about to do something for this connection may do it first: what
		// they have to say then goes out in the same write.
		runtime.Gosched()
	}
	return true
}

// round carries out all events that have come, and writes all that there is to write.
func (w *writer) round() bool {
	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		w.busy = c.notify(maxOut) > 1
		w.later()
		for i := 0; i < len(c.stalled) && len(c.out) < maxOut; i++ {
			c.stalled[i].pump()
		}
		c.stalled = slices.DeleteFunc(c.stalled, func(s *session) bool { s.stalled = s.pending.len() > 0; return !s.stalled })
		c.notifyConfirmed()
		if len(c.out) == 0 {
			return true
		}
		b := c.out
		c.out, c.spare = c.spare[:0], nil
		c.sent += uint64(len(b))
		c.mu.Unlock()
		err := c.put(b)
		poke(c.room)
		c.mu.Lock()
		if cap(b) <= 4*maxOut {
			c.spare = b[:0]
		}
		if err != nil {
			return false
		}
	}
}

// notify carries out the events that the engine has, until so much is to be written. It
// returns how many there were. c.mu is held.
func (c *Conn) notify(limit int) (n int) {
	if c.notifying {
		return 0
	}
	c.notifying = true
	defer func() { c.notifying = false }()
	for {
		if c.notified == len(c.events) {
			clear(c.events)
			c.events, c.notified = c.engine.Take(c.events[:0]), 0
		}
		if c.notified == len(c.events) {
			return n
		}
		for ; c.notified < len(c.events); n++ {
			if len(c.out) >= limit {
				return n
			}
			c.notified++
			c.event(&c.events[c.notified-1])
		}
	}
}

// catchUp tells the client what has come of all that it has said so far, ahead of what
// comes of the next thing. c.mu is held.
func (c *Conn) catchUp() {
	if !c.closeSent {
		c.notify(maxOut)
		c.notifyConfirmed()
	}
}

// notifyConfirmed sends the confirmations that have gathered. c.mu is held.
func (c *Conn) notifyConfirmed() {
	for _, s := range c.dirty {
		s.notifyConfirmed()
	}
	clear(c.dirty)
	c.dirty = c.dirty[:0]
}

// put writes b to the network.
func (c *Conn) put(b []byte) error {
	b, cut := c.faults.outgoing(b)
	if len(b) > 0 {
		if _, err := c.net.Write(b); err != nil {
			return err
		}
	}
	if cut {
		return errOver
	}
	return nil
}
