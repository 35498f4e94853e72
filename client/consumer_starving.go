package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hopback/hopback/internal/failure"
)

// A consumer can starve on a link that looks healthy. After the leader of a queue was
// frozen, RabbitMQ 4.0.5 keeps sending a session's credit and settlements to the
// deposed leader, which ignores them; AMQP confirms neither. More credit goes there, too; another session doesn't.
//
// So a consumer that has credit and gets nothing for a while asks how many messages are
// ready in its queue. If there are some, its session is replaced, in order. Consumers of
// lower priority and those that stand by for a single active consumer legitimately get
// nothing, so attempts that bring nothing become rarer.
//
// Unacknowledged messages that nobody holds can't be seen over AMQP. But below RabbitMQ
// 4.3, when the queue has another leader than before, settlements may be with the old
// one: then the session of an idle consumer is replaced, too.

const (
	// starvingConfirm is the pause between the two checks that must both find messages:
	// what was published a moment ago is on its way.
	starvingConfirm = time.Second
	// starvingPeek bounds one look. The broker doesn't answer while it has an alarm.
	starvingPeek = 10 * time.Second
	// An empty queue is checked less and less often, down to every emptyPause; a
	// session is replaced in vain down to every vainPause.
	emptyPause = 2 * time.Minute
	vainPause  = 16 * time.Minute
)

// starvation watches one link; live calls its methods.
type starvation struct {
	s      *linkSession
	ctx    context.Context // of looks
	cancel context.CancelFunc
	timer  *time.Timer // nil: nothing is watched
	found  chan finding
	// leader is the queue's when it was first checked.
	leader     string
	confirming bool      // the last look has found messages
	checked    time.Time // deliveries up to then are known of
}

type finding struct {
	queuePeek
	err error
}

// watchStarving watches the link of a consumer that isn't gated: that one may be in line for long.
func (s *linkSession) watchStarving(ctx context.Context) *starvation {
	w := &starvation{s: s}
	w.ctx, w.cancel = context.WithCancel(ctx)
	if !s.consumer.gated() && !s.consumer.starvation.refused {
		w.found = make(chan finding, 1)
		w.timer = time.NewTimer(jittered(s.consumer.starvation.after))
	}
	return w
}

func (w *starvation) stop() {
	w.cancel()
	if w.timer != nil {
		w.timer.Stop()
	}
}

// due fires when it is time for check.
func (w *starvation) due() <-chan time.Time {
	if w.timer == nil {
		return nil
	}
	return w.timer.C
}

// rearm sets the time of the next check, after a silence so far.
func (w *starvation) rearm(silent time.Duration) {
	wait := w.s.consumer.starvation.pause
	if silent < wait {
		wait -= silent
	}
	w.timer.Reset(jittered(wait))
}

// jittered is d and up to a quarter more, so that a thousand consumers don't ask at once.
func jittered(d time.Duration) time.Duration { return d + rand.N(d/4+1) }

// silence is for how long there has been credit and no delivery; 0 if there is no
// credit.
func (w *starvation) silence() (d time.Duration, came bool) {
	ds := w.s.deliveries
	ds.mu.Lock()
	since, came, open := ds.credit.window.starving()
	ds.mu.Unlock()
	if !open || ds.link.Full() { // no delivery has room, so the broker isn't at fault
		return 0, came
	}
	return max(time.Since(since), 1), came
}

// check inspects the queue if the link has been silent for long enough. The answer
// comes through found.
func (w *starvation) check() {
	h := &w.s.consumer.starvation
	silent, came := w.silence()
	if came && time.Since(w.checked) > silent {
		if h.vain > 0 {
			w.s.consumer.log.Info("hopback: the consumer receives deliveries again after its session was replaced")
		}
		h.reset()
	}
	w.checked = time.Now()
	confirm := w.confirming && silent > 0
	unknown := w.s.deliveries.old.LosesSettlements && w.leader == ""
	if !confirm && !unknown && silent < h.pause {
		w.confirming = false
		w.rearm(silent)
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(w.ctx, starvingPeek)
		defer cancel()
		l, err := w.s.consumer.deps.Queues.peek(ctx, w.s.consumer.queue)
		w.found <- finding{l, err}
	}()
}

// starves decides on what a look has found. A non-nil error is why the session is to be
// replaced.
func (w *starvation) starves(f finding) error {
	h := &w.s.consumer.starvation
	moved := f.Leader != "" && w.leader != "" && f.Leader != w.leader
	was := w.leader
	if f.Leader != "" {
		w.leader = f.Leader
	}
	silent, came := w.silence()
	confirmed := w.confirming
	w.confirming = false
	switch {
	case errors.Is(f.err, failure.ErrUnauthorized):
		h.refused = true // each refusal costs the management its session
		w.s.consumer.log.Debug("hopback: the user may not read the queue, so a starving consumer can't be detected", "error", f.err)
		return nil
	case f.err != nil:
	case confirmed && silent > 0 && f.Ready > 0:
		return fmt.Errorf("the queue has %d messages ready, and has delivered none for %v", f.Ready, silent.Round(time.Second))
	case silent < h.pause:
		if moved {
			w.leader = was // for the next look, when the link is idle
		}
	case moved && came && w.s.deliveries.old.LosesSettlements:
		return mayHaveLost(was, f.Leader)
	case f.Ready > 0:
		w.confirming = true
		w.timer.Reset(starvingConfirm)
		return nil
	case h.vain == 0:
		h.pause = min(2*h.pause, max(emptyPause, h.after))
	}
	w.rearm(silent)
	return nil
}

// replaces reports that a session is about to be replaced.
func (w *starvation) replaces(why error) {
	h := &w.s.consumer.starvation
	level := w.s.consumer.log.Warn
	if h.vain > 0 {
		level = w.s.consumer.log.Debug
	}
	level("hopback: the consumer starves; its session is replaced", "error", why, "in_vain", h.vain)
	w.s.consumer.event(Event{Kind: EventStarved, Err: why})
	h.vain++
	h.pause = min(2*h.pause, max(vainPause, h.after))
}
