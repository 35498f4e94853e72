package client

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hopback/hopback/client/instrument"
)

// credit grants a link's credit and revokes it, as the window says. flow is held from the moment when
// the window says what to grant until that is written, so that no credit follows a drain: the broker
// would answer that with a count that nobody waits for. deliveries.mu guards window and gathering, and
// is taken with flow held, never the other way round.
type credit struct {
	of     *deliveries
	flow   sync.Mutex
	window window
	// gathering says that credit is granted when gathered fires. Only the one that sets it uses gathered.
	gathering bool
	gathered  *time.Timer
}

// grant grants what the window has room for, or revokes what is too much.
func (c *credit) grant() { c.adjust(false) }

// check notes whether credit is to be granted or revoked, now or after the wait for more. It is
// called with mu held.
func (c *credit) check(more bool, then *followUps) {
	then.credit = c.window.due(more)
	if !then.credit && !more && !c.gathering && c.window.gathers() {
		c.gathering = true
		then.gather = c.of.consumer.estimate.gather()
	}
}

// grantAfter grants what there is room for after a while.
func (c *credit) grantAfter(d time.Duration) {
	if c.gathered != nil {
		c.gathered.Reset(d)
		return
	}
	c.gathered = time.AfterFunc(d, func() {
		c.of.mu.Lock()
		c.gathering = false
		room := c.window.room()
		c.of.mu.Unlock()
		if room > 0 {
			c.adjust(true)
		}
	})
}

// nudge has a flow follow what was settled, if more can be delivered.
func (c *credit) nudge() { c.adjust(true) }

func (c *credit) adjust(flow bool) {
	c.flow.Lock()
	defer c.flow.Unlock()
	c.of.mu.Lock()
	credit, reclaim := c.window.nextCredit(time.Now(), flow)
	var done chan struct{}
	if reclaim {
		done = make(chan struct{})
		c.window.draining = done
	}
	c.of.mu.Unlock()
	switch {
	case credit > 0:
		// An error means that the link is gone, which its receive notices.
		_ = c.of.link.IssueCredit(uint32(credit))
	case reclaim:
		go c.reclaim(done)
	}
}

// reclaim takes credit back, and then grants what there is room for.
func (c *credit) reclaim(done chan struct{}) {
	answered := c.drain(c.of.dead, lowerTimeout, context.Background())
	arrived := c.of.link.Arrived()
	c.of.mu.Lock()
	c.window.drained(answered, arrived)
	close(done)
	c.of.mu.Unlock()
	if !answered {
		c.of.die(errUndrained)
		return
	}
	c.grant()
}

// roundTrip returns when the queue has taken all that was settled before on the link, or the link session
// is over: a queue answers a drain after what came before it. Without credit it answers, too.
func (c *credit) roundTrip() {
	for {
		c.flow.Lock()
		c.of.mu.Lock()
		running, stopped := c.window.draining, c.window.stopped
		done := make(chan struct{})
		if running == nil && !stopped {
			c.window.draining = done
		}
		c.of.mu.Unlock()
		c.flow.Unlock()
		switch {
		case stopped: // the broker's answer to the detach comes after all as well
			<-c.of.dead
			return
		case running == nil:
			c.reclaim(done)
			return
		}
		select {
		case <-running: // which may have begun before
		case <-c.of.dead:
			return
		}
	}
}

// drain asks the broker to use or give up its credit, and waits for the answer
// until expedite is closed, or for limit. It reports whether the wait ended otherwise than by
// the limit. While the deliveries that are held leave no room for those that the broker has to
// send before its answer (see link.ReceiverLink.Full), the wait ends with patience instead.
func (c *credit) drain(expedite <-chan struct{}, limit time.Duration, patience context.Context) (answered bool) {
	for {
		wait := limit
		if c.of.link.Full() {
			if end, ok := patience.Deadline(); ok {
				wait = min(wait, time.Until(end))
			}
			if patience.Err() != nil {
				wait = 0
			}
		}
		answered = c.drainOnce(expedite, wait)
		if answered || patience.Err() != nil || !c.of.link.Full() {
			return answered
		}
	}
}

func (c *credit) drainOnce(expedite <-chan struct{}, limit time.Duration) (answered bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-expedite:
			cancel()
		case <-done:
		}
	}()
	return !errors.Is(c.of.link.Drain(ctx), context.DeadlineExceeded)
}

// stop grants no more credit, and revokes what is granted, unless expedite is closed. patience
// is drain's.
func (c *credit) stop(expedite <-chan struct{}, patience context.Context) {
	c.flow.Lock()
	c.of.mu.Lock()
	c.window.stopped = true
	running, granted := c.window.draining, c.window.granted
	c.of.mu.Unlock()
	c.flow.Unlock()
	if running != nil {
		limit := time.NewTimer(drainTimeout)
		defer limit.Stop()
		select {
		case <-running:
		case <-expedite:
		case <-limit.C:
		}
		return
	}
	if granted > 0 {
		answered := c.drain(expedite, drainTimeout, patience)
		c.of.mu.Lock()
		defer c.of.mu.Unlock()
		c.window.unanswered = !answered
	}
}

// undrained reports whether nobody knows what credit the broker has left.
func (c *credit) undrained() bool {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	return c.window.unanswered
}

// resume undoes stop.
func (c *credit) resume() {
	c.of.mu.Lock()
	unanswered := c.window.unanswered
	if !unanswered {
		c.window.resume()
	}
	c.of.mu.Unlock()
	if unanswered {
		c.of.die(errUndrained)
		return
	}
	c.grant()
}

const (
	// drainTimeout bounds the wait for the broker's answer to the drain at the end.
	drainTimeout = 10 * time.Second
	// lowerTimeout bounds it while the link lives on: it is lost without the answer.
	lowerTimeout = 30 * time.Second
)

// errUndrained is why a link counts as lost whose credit nobody knows.
var errUndrained = errors.New("the broker hasn't answered the drain of the link")

// window says how much credit to grant, so that what the broker has given and what it may
// still give never exceed a limit that can change at any time. deliveries.mu guards it.
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
	t.granted = max(t.granted, t.arrived) // some followed a drain without an answer
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
	// One that follows a drain without an answer was counted off with it.
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

// nextCredit returns the credit to grant, which counts as granted from now on, or that credit is to
// be taken back. It returns neither if that can wait; a flow says that it can't.
func (w *window) nextCredit(now time.Time, flow bool) (credit int, reclaim bool) {
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

// drained notes the end of a drain. Of all deliveries that have arrived until then, some may not have been received:
// they still use credit.
func (w *window) drained(answered bool, arrived uint64) {
	w.granted, w.draining, w.unanswered = 0, nil, !answered
	if answered && arrived > w.trip.arrived {
		w.granted = int(arrived - w.trip.arrived)
	}
	w.trip.reset()
	w.trip.granted += uint64(w.granted)
}

// resume undoes a stop whose drain was answered.
func (w *window) resume() {
	w.stopped, w.granted = false, 0
	w.trip.reset()
}
