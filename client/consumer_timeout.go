package client

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/message"
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
		if began == 0 || d.results.deliveries.over() || d.settling.Load() || time.Unix(0, began).Sub(d.received) > limit/2 {
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
			go d.results.nearTimeout(d, stage == 2)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.arm(max(wait, minTimeoutPeek))
}

// askTimeout learns the queue's own consumer timeout.
func (rs *results) askTimeout() {
	k := rs.consumer
	if rs.deliveries.old.LacksConsumerTimeout || k.cfg.ConsumerTimeout > 0 || k.timeoutAsked.Load() {
		return
	}
	rs.deciding.start(func() {
		ctx, cancel := rs.prompt()
		defer cancel()
		if limit, err := k.deps.Queues.consumerTimeout(ctx, k.queue); err == nil {
			k.timeouts.know(limit)
			k.timeoutAsked.Store(true)
		}
	})
}

// nearTimeout has a handler's failure count while it can. timeouts calls it, on a goroutine, before the
// broker takes d back, and again with last shortly before that.
func (rs *results) nearTimeout(d *delivery, last bool) {
	held := time.Since(d.received).Round(time.Millisecond)
	if !last {
		rs.consumer.log.WarnContext(d.logCtx(), "hopback: a handler has run for nearly as long as the consumer timeout; its ctx ends", "message_id", message.ID(d.message), "held", held)
		if d.inner.deadline.IsZero() { // the timeout wasn't known when it began
			d.end(ErrConsumerTimeoutNear)
		}
		return
	}
	d.end(ErrConsumerTimeoutNear)
	if rs.consumer.gated() {
		rs.deliveries.gate.stepBack() // with its link, the message returns in its order
		return
	}
	rs.deciding.start(func() {
		keeps, _ := rs.hasDeadLetterExchange()
		switch {
		case d.began.Load() == 0 || d.settling.Load() || rs.deliveries.over(): // the handler has returned
		case !keeps:
			rs.consumer.log.ErrorContext(d.logCtx(), "hopback: a handler ignores the end of its ctx, and the consumer timeout is nearly over; the broker will deliver the message again without counting a failure, because its queue isn't known to have a dead-letter exchange", "message_id", message.ID(d.message), "held", held)
		default:
			rs.consumer.log.ErrorContext(d.logCtx(), "hopback: a handler ignores the end of its ctx, and the consumer timeout is nearly over; its message returns to the queue as a failed delivery", "message_id", message.ID(d.message), "held", held)
			rs.deliveries.settle(d, link.Disposition{Kind: link.DispositionModified, Failed: true})
		}
	})
}

// leaseEnded is called by the link when the broker has taken deliveries back, so it hands
// on to a goroutine.
func (rs *results) leaseEnded(first, last uint32) {
	rs.deliveries.mu.Lock()
	leases := rs.deliveries.leases
	all := leases.revoked(first, last)
	rs.deliveries.mu.Unlock()
	if leases == nil {
		return
	}
	if rs.consumer.gated() {
		rs.deliveries.gate.stepBack()
		rs.deliveries.close() // no later message of the key begins
	}
	if len(all) == 0 {
		go rs.deliveries.credit.nudge() // the settlement and this have crossed
	}
	for _, d := range all {
		go rs.revoked(d)
	}
}

// revoked is called when the broker has given d to another consumer, because it was held for
// longer than the queue's consumer timeout. The broker sends this link nothing more until the
// revoked delivery is settled and a flow has followed. So revoked settles it at once. The
// handler's result will be ignored; the handler learns that from its ctx.
func (rs *results) revoked(d *delivery) {
	now := time.Now()
	rs.consumer.log.WarnContext(d.logCtx(), "hopback: the broker revoked a delivery because it was held for longer than the consumer timeout", "message_id", message.ID(d.message), "held", now.Sub(d.received).Round(time.Millisecond))
	rs.consumer.timeouts.learn(d.received, now)
	d.back.Store(true)
	d.end(ErrConsumerTimeout)
	if d.settling.Load() {
		rs.deliveries.mu.Lock()
		written := d.settled
		rs.deliveries.mu.Unlock()
		// Otherwise forget does it. A flow before the settlement is in vain, and a drain then would
		// keep the one behind it from being sent.
		if written {
			rs.deliveries.credit.nudge()
		}
		return
	}
	rs.deliveries.settle(d, link.Disposition{Kind: link.DispositionReleased})
}

// leases finds the deliveries that the broker revokes by their ids. A nil map keeps none.
// deliveries.mu guards it.
type leases map[uint32]*delivery

func (l leases) begin(d *delivery) {
	if l != nil {
		l[d.id] = d
	}
}

func (l leases) end(d *delivery) {
	if l[d.id] == d {
		delete(l, d.id)
	}
}

// revoked ends the leases of the deliveries from first to last, and returns those that
// there are.
func (l leases) revoked(first, last uint32) (all []*delivery) {
	if first == last { // mostly
		if d := l[first]; d != nil {
			delete(l, first)
			all = append(all, d)
		}
		return all
	}
	for id, d := range l { // ids wrap
		if id-first <= last-first {
			delete(l, id)
			all = append(all, d)
		}
	}
	return all
}
