package client

import (
	"time"

	"github.com/hopback/hopback/client/instrument"
)

// window says how much credit to grant, so that what the broker has given and what it may
// still give never exceed a limit that can change at any time. linkSession.mu guards it.
type window struct {
	// workers is how many deliveries are handled at once, and pace how fast; nil: it isn't known.
	workers int
	pace    *prefetchEstimate
	// limit is the most deliveries that may be unsettled or on their way.
	limit int
	// granted is the credit that no delivery has used yet; unsettled are the
	// deliveries received and not settled.
	granted, unsettled int
	stopped            bool
	draining           chan struct{} // closed when the drain in flight ends; nil if none is
	// unanswered says that a drain wasn't answered: nobody knows what credit the broker
	// has left on the link.
	unanswered bool
	// quiet is when the last delivery came, or when credit was granted with none
	// left; came says that a delivery has come at all.
	quiet time.Time
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

// received counts a delivery. It returns the round trip to the broker where it has just
// been measured, and 0 otherwise.
func (w *window) received(now time.Time) time.Duration {
	w.unsettled++
	w.quiet, w.last, w.came = now, now, true
	// A delivery that overtook the end of a drain was counted off with it.
	w.granted = max(w.granted-1, 0)
	return w.trip.arrive(now)
}

// count adds its numbers.
func (w *window) count(c *instrument.ConsumerStats) {
	c.Window, c.Unsettled = w.limit, w.unsettled
	c.Delivered = w.last
}

// starving says since when there has been credit and no delivery; false if there is
// no credit. came says that there was a delivery before.
func (w *window) starving() (since time.Time, came, open bool) {
	return w.quiet, w.came, w.granted > 0 && !w.stopped && w.draining == nil
}

// room is how many more deliveries may come than there is credit for; below 0, credit must be
// taken back.
func (w *window) room() int { return w.limit - w.granted - w.unsettled }

// due says whether credit is to be granted or revoked now. Credit is granted in batches: one
// flow frame for half a window, or as much as leaves no worker without work for long. more says that the
// next settlements follow at once, and so grant what leaves no worker without work.
func (w *window) due(more bool) bool {
	if w.stopped || w.draining != nil {
		return false
	}
	room := w.room()
	return room < 0 && w.granted > 0 || room >= w.batch() && !(more && room < w.limit/2)
}

// batch is how much credit is worth a flow frame. Where there are as many workers as the window is
// large, each settlement would be followed by one, which costs RabbitMQ half as much as the message.
// So where handlers are quick, credit for several waits a little: see prefetchEstimate.gather.
func (w *window) batch() int { return max(min(w.limit/2, max(w.limit-w.workers, w.pace.soon())), 1) }

// gathers reports whether workers are without work while credit waits for more.
func (w *window) gathers() bool {
	room := w.room()
	return !w.stopped && w.draining == nil && room < w.batch() && room >= max(min(w.limit/2, w.limit-w.workers), 1)
}

// take returns the credit to grant, which counts as granted from now on, or that credit is to
// be taken back. It returns neither if that can wait; a flow says that it can't.
func (w *window) take(now time.Time, flow bool) (credit int, reclaim bool) {
	if w.stopped || w.draining != nil {
		return 0, false
	}
	room := w.room()
	switch {
	case room >= w.batch() || flow && room > 0:
		if w.granted == 0 {
			w.quiet = now
		}
		w.granted += room
		w.trip.grant(room, now)
		return room, false
	case room < 0 && w.granted > 0 || flow && w.granted > 0:
		return 0, true
	}
	return 0, false
}

// drained notes the end of a drain.
func (w *window) drained(answered bool) {
	w.granted, w.draining, w.unanswered = 0, nil, !answered
	w.trip.reset()
}

// resume undoes a stop whose drain was answered.
func (w *window) resume() {
	w.stopped, w.granted = false, 0
	w.trip.reset()
}
