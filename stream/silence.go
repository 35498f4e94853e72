package stream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/dedicated"
)

// RabbitMQ can forget a stream's reader without ending its link, for instance when the replica that it
// reads is started again on another node's demand: then it neither delivers nor answers a drain. So
// each step of attaching has a limit, and a consumer that receives nothing for a while looks whether
// messages are ready for it.

const (
	// answerLimit is how long the broker may stay silent while a consumer attaches.
	answerLimit = 30 * time.Second
	// silenceLimit is how long a consumer receives nothing before it looks whether messages are
	// ready. The limit doubles with each look that finds none, up to maxSilence: a look opens a
	// connection.
	silenceLimit = 30 * time.Second
	maxSilence   = 10 * time.Minute
)

var (
	errNoAnswer = fmt.Errorf("the broker hasn't answered for %v: %w", answerLimit, amqp.ErrSilent)
	errQuiet    = errors.New("no message has come")
	errStarving = errors.New("messages are ready in the stream, and the broker sends none")
)

// impatience ends a ctx when the broker hasn't answered for answerLimit.
type impatience struct {
	context.Context
	timer *time.Timer
	end   context.CancelCauseFunc
}

func impatient(ctx context.Context) *impatience {
	i := &impatience{}
	i.Context, i.end = context.WithCancelCause(ctx)
	i.timer = time.AfterFunc(answerLimit, func() { i.end(errNoAnswer) })
	return i
}

// answered begins the limit again.
func (i *impatience) answered() { i.timer.Reset(answerLimit) }

func (i *impatience) stop() {
	i.timer.Stop()
	i.end(nil)
}

// silence ends a ctx when nothing has been delivered for a while.
type silence struct {
	k     *consumer
	limit time.Duration
	ctx   context.Context // for the next delivery
	timer *time.Timer
	end   context.CancelCauseFunc
}

// listen begins a silence, which lasts for k.silence before it is too long.
func (k *consumer) listen(ctx context.Context) *silence {
	s := &silence{k: k, limit: max(k.silence, silenceLimit)}
	s.ctx, s.end = context.WithCancelCause(ctx)
	began := time.Now()
	s.timer = time.AfterFunc(s.limit, func() {
		since := time.Unix(0, k.counts.delivered.Load())
		if since.Before(began) || since.After(time.Now()) { // in the latter case, the host's clock was set back
			since = began
		}
		if left := s.limit - time.Since(since); left > 0 {
			s.timer.Reset(left)
			return
		}
		s.end(errQuiet)
	})
	return s
}

func (s *silence) stop() {
	s.timer.Stop()
	s.end(nil)
}

// next is sub.Next. If nothing comes for too long although messages are ready, it returns errStarving.
func (s *silence) next(ctx context.Context, sub *dedicated.Subscription) ([]dedicated.Message, error) {
	for began := time.Now(); ; began = time.Now() {
		batch, err := sub.Next(s.ctx)
		if err == nil || ctx.Err() != nil || !errors.Is(err, errQuiet) {
			return batch, err
		}
		s.stop()
		if time.Since(began) < s.limit { // a handler took longer than that
			*s = *s.k.listen(ctx)
			continue
		}
		ready, err := s.k.ready(ctx)
		if err != nil && ctx.Err() == nil {
			s.k.log.Warn("hopback: a stream consumer has received nothing for a while, and can't find out whether messages are ready; it will try again", "from", s.k.at, "silence", s.limit, "error", err)
		}
		if ready {
			if batch, err := sub.Next(s.ctx); err == nil { // they came in the meantime
				return batch, nil
			}
			return nil, errStarving
		}
		s.k.silence = min(2*s.limit, maxSilence)
		*s = *s.k.listen(ctx)
	}
}

// ready reports whether the stream has messages from k.at on that the filter selects. It asks another
// endpoint than the consumer's, if there is one.
func (k *consumer) ready(ctx context.Context) (bool, error) {
	patient := impatient(ctx)
	defer patient.stop()
	raw, err := dedicated.OpenFor(patient, k.owner, "stream", k.behind+1)
	if err != nil {
		return false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = raw.Close(ctx)
	}()
	r, err := raw.ReceiverOf(patient, k.source, k.cfg.Filter.set(k.at))
	if err != nil {
		return false, err
	}
	found := false
	for seen := uint32(0); seen < maxTail && !found; {
		got, _, err := r.Fetch(patient, tailStep, func(d dedicated.Delivery) error {
			patient.answered()
			n, ok := offsetOfEncoded(d.Payload)
			if !ok {
				return errNoOffset
			}
			if !found && n >= k.at.n { // before it is the beginning of a chunk
				m, unreadable := decode(d.Payload)
				found = unreadable != nil || k.cfg.Filter.matches(m)
			}
			return nil
		})
		if err != nil {
			return false, err
		}
		patient.answered()
		if seen += got; got < tailStep {
			break
		}
	}
	return found, nil
}
