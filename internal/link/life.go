package link

import (
	"context"
	"fmt"
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/backoff"
)

// The broker's heartbeats prove only one direction. What this end sends may be lost for as long as TCP tries
// again, which is a quarter of an hour. Only an answer proves that the broker receives. So if none has come for
// half of Config.IdleTimeout, the client asks for one, and the broker has the other half to answer.

const errSilent silence = "the broker sends data but answers no requests: it hangs, or what the client sends doesn't arrive"

// silence is the error of a connection that is closed because its broker is silent in some way. Each silence is
// amqp.ErrSilent, the error if nothing comes at all.
type silence string

func (s silence) Error() string { return string(s) }

// Is makes each silence amqp.ErrSilent.
func (silence) Is(target error) bool { return target == engine.ErrSilent }

// noAnswer returns the silence of a broker that doesn't answer a request within limit.
func noAnswer(limit time.Duration) silence {
	return silence(fmt.Sprintf("the broker didn't answer within %v", limit))
}

// watchLife closes the connection if the broker answers nothing for idle.
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

// answerPeeks is how often answering checks for an answer before it gives up. It counts checks instead of
// measuring time: a process that was suspended hasn't checked, and the answer may be in its socket.
const answerPeeks = 4

// answering asks the broker for an answer, and reports whether one came within limit. It opens and closes a
// session, which needs no permission and works during an alarm. Concurrent callers share the question. It also
// returns true if the connection has no room for a session.
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
	// A slow network that is still sending a large message isn't silent.
	now := w.AMQP.Writes()
	busy := now != writes && now%2 == 1
	return busy || w.AMQP.Answers() != answers
}

// ask returns when the broker has answered, or if there is no room for a session to ask with.
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
