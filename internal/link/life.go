package link

import (
	"context"
	"fmt"
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/backoff"
)

// The broker's heartbeats prove that it can be heard, and nothing about the other
// direction: what we send may be lost on its way for as long as TCP tries again, which
// is a quarter of an hour. Only an answer proves that the broker receives. So when none
// has come for half of Config.IdleTimeout, the broker is asked for one, and has the other
// half for it.

const errSilent silence = "the broker sends data but answers no requests: it hangs, or what the client sends doesn't arrive"

// silence is why a connection is given up whose broker stays silent in some way. Each is amqp.ErrSilent, which is
// the cause if nothing comes at all.
type silence string

func (s silence) Error() string { return string(s) }

// Is makes each silence amqp.ErrSilent.
func (silence) Is(target error) bool { return target == engine.ErrSilent }

// noAnswer is the silence of a broker that doesn't answer a request within limit.
func noAnswer(limit time.Duration) silence {
	return silence(fmt.Sprintf("the broker didn't answer within %v", limit))
}

// watchLife ends the connection when the broker answers nothing.
func (w *Wire) watchLife(idle time.Duration) {
	for {
		before := w.AMQP.Answers()
		if !backoff.Sleep(w.Ctx, idle/2) {
			return
		}
		if w.AMQP.Answers() == before && !w.answering(w.Ctx, idle/2) {
			w.giveUp(errSilent)
			return
		}
	}
}

// answerPeeks is how often a question's answer is checked. Checks are counted rather than
// time measured: a process that was suspended has missed looks, and its answers lie in the
// socket.
const answerPeeks = 4

// answering says whether the broker answers within limit. It is asked for that: a session
// begins and ends, which needs no permission, and works in an alarm. Callers that ask at the
// same time share the question. If the connection has no room for a session, it is taken to
// answer.
func (w *Wire) answering(ctx context.Context, limit time.Duration) bool {
	answers, writes := w.AMQP.Answers(), w.AMQP.Writes()
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
	peek := time.NewTicker(limit / answerPeeks)
	defer peek.Stop()
	for range answerPeeks {
		select {
		case <-answered:
			return true
		case <-w.AMQP.Done():
			return true
		case <-ctx.Done():
			return true
		case <-peek.C:
		}
	}
	// A slow network that is busy with a large message isn't silent.
	now := w.AMQP.Writes()
	busy := now != writes && now%2 == 1
	return busy || w.AMQP.Answers() != answers
}

// ask returns when the broker has answered, or can't be asked.
func (w *Wire) ask() {
	select {
	case w.Spare <- struct{}{}:
	default:
		return
	}
	_ = w.Answered(w.Ctx, LinkTimeout, func(ctx context.Context) error {
		s, err := w.AMQP.Begin(ctx, engine.SessionConfig{OnOver: func() { <-w.Spare }})
		if err != nil {
			return err
		}
		return s.End(ctx)
	})
}
