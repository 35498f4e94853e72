package consume

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hopback/hopback/client/instrument"

	"github.com/hopback/hopback/internal/link"
)

// window grants credit so that what the broker has given and what it may still
// give never exceed a limit that can change at any time. Raising it grants the
// difference; lowering it takes credit back by draining the link.
type window struct {
	link link.ReceiverLink
	dead <-chan struct{}
	// owner's die ends the link. It is called with mu held.
	owner interface{ die(error) }

	// workers is how many deliveries are handled at once.
	workers int

	mu sync.Mutex
	// limit is the most deliveries that may be unsettled or on their way.
	limit int
	// granted is the credit that no delivery has used yet; unsettled are the
	// deliveries received and not settled.
	granted, unsettled int
	stopped            bool
	draining           chan struct{} // closed when the drain under way ends; nil if none is
	// unanswered says that a drain wasn't answered: nobody knows what credit the broker
	// has left on the link.
	unanswered bool
	// quiet is when the last delivery came, or when credit was granted with none
	// left; came says that a delivery has come at all.
	Quiet time.Time
	last  time.Time // when the last delivery came
	came  bool
	trip  trip
}

// trip measures how long it takes from a grant of credit to the first delivery that it
// allows, where nothing else was on its way. That the next ones come close behind shows
// that they were there to be sent; the time until a message is published says nothing.
type trip struct {
	granted, arrived uint64 // in all, of credits and deliveries
	// The grant that is being measured: the numbers of its first delivery and of the
	// last one that is watched, when it was made, and how long the first took.
	first, last uint64
	at          time.Time
	took        time.Duration
}

// tripDeliveries is how many deliveries of a grant are watched.
const tripDeliveries = 8

func (t *trip) grant(n int, now time.Time) {
	t.granted = max(t.granted, t.arrived) // some overtook the end of a drain
	first := t.granted + 1
	t.granted += uint64(n)
	if n > 1 && first == t.arrived+1 { // nothing else was on its way
		t.first, t.last, t.at = first, first+uint64(min(n, tripDeliveries))-1, now
	}
}

// arrive returns the round trip if this delivery completes a measurement, and 0
// otherwise.
func (t *trip) arrive(now time.Time) time.Duration {
	t.arrived++
	if t.arrived > t.last {
		return 0
	}
	if t.arrived == t.first {
		t.took = now.Sub(t.at)
	}
	if t.arrived == t.last && now.Sub(t.at) <= 2*t.took {
		return t.took
	}
	return 0
}

// reset is called when the broker has given up its credit.
func (t *trip) reset() { t.granted, t.last = t.arrived, t.arrived }

func NewWindow(link link.ReceiverLink, dead <-chan struct{}, owner interface{ die(error) }, workers, limit int) *window {
	return &window{link: link, dead: dead, owner: owner, workers: workers, limit: limit}
}

// setLimit changes the limit, and what is granted with it.
func (w *window) setLimit(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit = n
	w.adjust()
}

// received counts a delivery. It returns the round trip to the broker where it has just
// been measured, and 0 otherwise.
func (w *window) Received(now time.Time) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsettled++
	w.Quiet, w.last, w.came = now, now, true
	// A delivery that overtook the end of a drain was counted off with it.
	w.granted = max(w.granted-1, 0)
	return w.trip.arrive(now)
}

// settled counts a settlement, and grants credit in batches: one flow frame for
// half a window, or as much as leaves no worker without work. more says that the next
// settlement follows at once, which then grants what leaves no worker without work: where
// there are as many workers as the window is large, each settlement would else be followed
// by a flow frame of its own. It returns how many are left.
func (w *window) Settled(more bool) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsettled--
	if more && w.limit-w.granted-w.unsettled < w.limit/2 {
		return w.unsettled
	}
	w.adjust()
	return w.unsettled
}

// grant grants what settled has left.
func (w *window) Grant() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.adjust()
}

func (w *window) open() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unsettled
}

// count adds its numbers.
func (w *window) count(c *instrument.ConsumerStats) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c.Window, c.Unsettled = w.limit, w.unsettled
	c.Delivered = w.last
}

// starving says since when there has been credit and no delivery; false if there is
// no credit. came says that there was a delivery before.
func (w *window) starving() (since time.Time, came, open bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Quiet, w.came, w.granted > 0 && !w.stopped && w.draining == nil
}

// nudge has a flow follow what was settled, if more can be delivered.
func (w *window) nudge() {
	w.mu.Lock()
	defer w.mu.Unlock()
	room := w.limit - w.granted - w.unsettled
	switch {
	case w.stopped || w.draining != nil:
	case room > 0:
		w.issue(room)
	case w.granted > 0:
		w.reclaim()
	}
}

// adjust is called with mu held.
func (w *window) adjust() {
	if w.stopped || w.draining != nil {
		return
	}
	room := w.limit - w.granted - w.unsettled
	switch {
	case room < 0 && w.granted > 0:
		w.reclaim()
	case room >= max(min(w.limit/2, w.limit-w.workers), 1):
		w.issue(room)
	}
}

// issue is called with mu held.
func (w *window) issue(n int) {
	// An error means that the link is gone, which its receive notices.
	if w.link.IssueCredit(uint32(n)) == nil {
		now := time.Now()
		if w.granted == 0 {
			w.Quiet = now
		}
		w.granted += n
		w.trip.grant(n, now)
	}
}

// reclaim takes credit back, and then grants what there is room for. It is called with mu
// held.
func (w *window) reclaim() {
	done := make(chan struct{})
	w.draining = done
	go func() {
		answered := w.drain(w.dead, lowerTimeout)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.granted, w.draining, w.unanswered = 0, nil, !answered
		w.trip.reset()
		close(done)
		if !answered {
			w.owner.die(errUndrained)
			return
		}
		w.adjust()
	}()
}

// drain asks the broker to use or give up its credit, and waits for the answer
// until hurry is closed, or for limit. It says whether the wait ended otherwise than by
// the limit.
func (w *window) drain(hurry <-chan struct{}, limit time.Duration) (answered bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-hurry:
			cancel()
		case <-done:
		}
	}()
	return !errors.Is(w.link.Drain(ctx), context.DeadlineExceeded)
}

// stop grants no more credit, and takes back what is granted, unless hurry is
// closed.
func (w *window) stop(hurry <-chan struct{}) {
	w.mu.Lock()
	w.stopped = true
	running := w.draining
	granted := w.granted
	w.mu.Unlock()
	if running != nil {
		limit := time.NewTimer(DrainTimeout)
		defer limit.Stop()
		select {
		case <-running:
		case <-hurry:
		case <-limit.C:
		}
		return
	}
	if granted > 0 {
		answered := w.drain(hurry, DrainTimeout)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.unanswered = !answered
	}
}

// resume undoes stop.
func (w *window) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unanswered {
		w.owner.die(errUndrained)
		return
	}
	w.stopped, w.granted = false, 0
	w.trip.reset()
	w.adjust()
}

const (
	// drainTimeout bounds the wait for the broker's answer to the drain at the end.
	DrainTimeout = 10 * time.Second
	// lowerTimeout bounds it while the link goes on: it is lost without the answer.
	lowerTimeout = 30 * time.Second
)

// errUndrained is why a link is taken for lost whose credit nobody knows.
var errUndrained = errors.New("the broker hasn't answered the drain of the link")
