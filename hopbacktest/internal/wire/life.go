package wire

import (
	"time"

	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/internal/frames"
)

// startTimers starts what ends a silent connection and keeps a quiet one alive.
func (w *writer) startTimers() {
	w.check = time.NewTimer(w.c.server.cfg.Heartbeat)
	w.answer = time.NewTimer(time.Hour)
	w.answer.Stop()
	w.beat = time.NewTimer(time.Hour)
	if w.c.beat > 0 {
		w.beat.Reset(w.c.beat)
	} else {
		w.beat.Stop()
	}
}

func (w *writer) stopTimers() {
	w.check.Stop()
	w.answer.Stop()
	w.beat.Stop()
}

var emptyFrame = []byte{0, 0, 0, 8, 2, 0, 0, 0}

// signOfLife sends an empty frame if nothing was sent since the last call. The first goes out
// in any case, as RabbitMQ's does.
func (w *writer) signOfLife() {
	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if (c.sent == w.sent || w.sent == 0) && len(c.out) == 0 && !c.closeSent {
		c.out = append(c.out, emptyFrame...)
	}
	w.sent = c.sent + uint64(len(c.out))
	w.beat.Reset(c.beat)
}

// checkLife closes a connection that was silent for two times in a row.
func (w *writer) checkLife() {
	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.received != w.received {
		w.quiet = 0
	} else {
		w.quiet++
	}
	w.received = c.received
	if w.quiet >= 2 {
		c.server.log(c, "the client was silent for too long")
		c.close(&frames.Error{Condition: "amqp:resource-limit-exceeded", Description: "no frame received from client within idle timeout threshold"})
		return
	}
	w.check.Reset(c.server.cfg.Heartbeat)
}

// answer is an answer to a message or a request that is held back or late.
type answer struct {
	due   time.Time
	event engine.Event     // of a confirmation
	reply *managementReply // or this
}

// postpone says whether an answer is to come later, and keeps it then. c.mu is held.
func (c *Conn) postpone(a answer) bool {
	s := c.server
	delay := time.Duration(s.answers.delay.Load())
	if delay <= 0 && !s.answers.held.Load() && len(c.later) == 0 {
		return false
	}
	a.due = time.Now().Add(delay)
	c.later = append(c.later, a)
	return true
}

// later carries out what was postponed until now. c.mu is held.
func (w *writer) later() {
	c := w.c
	if len(c.later) == 0 || c.server.answers.held.Load() {
		return
	}
	n := 0
	for n < len(c.later) && len(c.out) < maxOut {
		a := &c.later[n]
		if wait := time.Until(a.due); wait > 0 {
			w.answer.Reset(wait)
			break
		}
		if a.reply != nil {
			a.reply.send()
		} else {
			c.confirmed(&a.event)
		}
		n++
	}
	c.later = append(c.later[:0], c.later[n:]...)
}
