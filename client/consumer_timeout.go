package client

import (
	"sync"
	"sync/atomic"
	"time"
)

// timeouts ends handlers shortly before the broker takes their deliveries back, which it
// counts as no failure: a message whose handler always runs for too long would be
// delivered forever, past every policy and delivery limit.
//
//	received ─── half: too late to begin ─── near: its ctx ends ─── last: it fails ─── the limit
//
// A handler that began after half of the time, since its delivery waited, isn't ended: it
// had no fair chance. A zero *timeouts knows of no limit, and ends nothing.
type timeouts struct {
	workers *workerSet

	limit atomic.Int64 // a time.Duration; 0: unknown

	mu    sync.Mutex
	timer *time.Timer
	over  bool
	// The last delivery that the broker revoked: for how long it was held, and until when.
	held  time.Duration
	until time.Time
}

// handlerLink is the link of a delivery with a handler.
type handlerLink interface {
	deliveryLink
	// nearTimeout is called before the broker takes d back, and again with last shortly
	// before that, on its own goroutine.
	nearTimeout(d *delivery, last bool)
}

// know takes a limit. The lowest counts.
func (t *timeouts) know(limit time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if was := time.Duration(t.limit.Load()); limit > 0 && (was == 0 || limit < was) {
		t.limit.Store(int64(limit))
		t.arm(0)
	}
}

// learn records a delivery that the broker has revoked. The limit may be a policy's or
// the broker's own, which can't be read over AMQP. One delivery that was received late, since
// the process was suspended, shows nothing; two in a row that were held for as long do.
func (t *timeouts) learn(received, now time.Time) {
	t.mu.Lock()
	last := t.held
	if received.Before(t.until) { // it was held together with the last
		t.mu.Unlock()
		return
	}
	t.held, t.until = now.Sub(received), now
	held := t.held
	t.mu.Unlock()
	if low, high := min(held, last), max(held, last); low > high-high/10 {
		t.know(high)
	}
}

// end is called when the consumer ends.
func (t *timeouts) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	if t.timer != nil {
		t.timer.Stop()
	}
}

// arm is called with mu held.
func (t *timeouts) arm(after time.Duration) {
	switch {
	case t.over:
	case t.timer == nil:
		t.timer = time.AfterFunc(after, t.peek)
	default:
		t.timer.Reset(after)
	}
}

// timeoutMargin is how long before the limit a handler's ctx ends. It fails for good at half
// of that.
func timeoutMargin(limit time.Duration) time.Duration { return min(limit/10, time.Minute) }

// deadline is when a handler's ctx ends that begins now with a delivery; zero: never.
func (t *timeouts) deadline(received time.Time) (at time.Time) {
	limit := time.Duration(t.limit.Load())
	if limit > 0 && time.Since(received) <= limit/2 {
		at = received.Add(limit - timeoutMargin(limit))
	}
	return at
}

// minTimeoutPeek is the least time between two looks.
const minTimeoutPeek = time.Millisecond

// peek ends what is due, and looks again when something else may be.
func (t *timeouts) peek() {
	t.mu.Lock()
	limit, over := time.Duration(t.limit.Load()), t.over
	t.mu.Unlock()
	if over {
		return
	}
	margin := timeoutMargin(limit)
	wait := limit/2 - margin // none is due sooner that hasn't begun yet
	for _, d := range t.workers.deliveries() {
		began := d.began.Load()
		link, ok := d.handledBy()
		if began == 0 || !ok || link.over() || d.settling.Load() || time.Unix(0, began).Sub(d.received) > limit/2 {
			continue
		}
		stage := int32(0)
		switch left := limit - time.Since(d.received); {
		case left <= margin/2:
			stage = 2
		case left <= margin:
			stage, wait = 1, min(wait, left-margin/2)
		default:
			wait = min(wait, left-margin)
		}
		if d.nearing.Swap(stage) < stage {
			go link.nearTimeout(d, stage == 2)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.arm(max(wait, minTimeoutPeek))
}

// handledBy is the link of a consumer that d came in on.
func (d *delivery) handledBy() (handlerLink, bool) {
	l, ok := d.link.(handlerLink)
	return l, ok
}
