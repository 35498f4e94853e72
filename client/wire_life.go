package client

import (
	"context"
	"errors"
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
)

// The broker's heartbeats prove that it can be heard, and nothing about the other
// direction: what we send may be lost on its way for as long as TCP tries again, which
// is a quarter of an hour. Only an answer proves that the broker receives. So when none
// has come for half of Config.IdleTimeout, the broker is asked for one, and has the other
// half for it.

// lifeLooks is how often in Config.IdleTimeout a connection is looked at. Looks are
// counted rather than time measured: a process that was suspended has missed looks, and
// its answers lie in the socket.
const lifeLooks = 8

var errSilent = errors.New("the broker sends data but answers nothing: what is sent doesn't reach it, or it hangs")

// watchLife ends the connection when the broker has answered nothing for idle, and owes an
// answer for half of that.
func (w *wire) watchLife(idle time.Duration) {
	look := time.NewTicker(idle / lifeLooks)
	defer look.Stop()
	answers, written := w.amqp.Answers(), w.uplink.written.Load()
	quiet, owed := 0, 0 // looks
	for {
		select {
		case <-look.C:
		case <-w.amqp.Done():
			return
		case <-w.ctx.Done():
			return
		}
		n, m := w.amqp.Answers(), w.uplink.written.Load()
		// A slow network that is busy with a large message isn't silent.
		busy := m != written && w.uplink.writing.Load()
		if n != answers || busy {
			quiet, owed = 0, 0
		}
		answers, written = n, m
		quiet++
		if len(w.turn) > 0 { // whoever has it waits for an answer
			owed++
		} else {
			owed = 0
		}
		switch {
		case quiet > lifeLooks && owed >= lifeLooks/2:
			w.giveUp(errSilent)
			return
		case quiet > lifeLooks/2 && owed == 0:
			go w.ask()
		}
	}
}

// ask asks the broker for an answer: it opens a session and closes it. That needs no
// permission, and works in an alarm. It returns when the answer is there, or at once
// if the connection has no room for a session.
func (w *wire) ask() {
	_, _ = bounded(w.ctx, w, func(ctx context.Context) (struct{}, error) {
		select {
		case w.spare <- struct{}{}:
			defer func() { <-w.spare }()
		default:
			return struct{}{}, nil
		}
		s, err := w.amqp.Begin(ctx, engine.SessionConfig{})
		if err == nil {
			err = s.End(ctx)
		}
		return struct{}{}, err
	}, func(struct{}) {})
}

// answering says whether the broker answers within limit. Callers that ask at the same
// time share the question.
func (w *wire) answering(ctx context.Context, limit time.Duration) bool {
	before := w.amqp.Answers()
	w.question.Lock()
	answered := w.question.answered
	if answered == nil {
		answered = make(chan struct{})
		w.question.answered = answered
		go func() {
			w.ask()
			w.question.Lock()
			w.question.answered = nil
			w.question.Unlock()
			close(answered)
		}()
	}
	w.question.Unlock()
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-answered:
	case <-w.amqp.Done():
	case <-ctx.Done():
	case <-t.C:
		return w.amqp.Answers() != before
	}
	return true
}
