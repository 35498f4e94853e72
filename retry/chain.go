package retry

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// delayQueues are the queues of a policy in which messages wait, and how a delay is made up of them. They
// don't change.
//
// A message may have to wait longer than any of them holds it, or for a time between two
// delays. Then it passes several, one after the other. Each time it comes back, the
// worker sends it to the next one, without calling the handler. The message carries the rest of
// its delay, and each queue holds it for at least that queue's delay. So this depends on no
// clock, and the message is never early.
type delayQueues struct {
	levels []time.Duration // all different delays of the policy, ascending
	ladder *Ladder         // replaces the queue for each level; nil: it doesn't
}

// longest is the policy's longest delay.
func (q delayQueues) longest() time.Duration {
	if len(q.levels) == 0 {
		return 0
	}
	return q.levels[len(q.levels)-1]
}

// longestPart is how long a message can wait at most in one piece.
func (q delayQueues) longestPart() time.Duration {
	if q.ladder != nil {
		return q.ladder.longest()
	}
	return q.longest()
}

// errNotDue says why a message waits again.
var errNotDue = errors.New("its delay isn't over")

// leg returns the level for the next part of a delay: left is the rest of whole. A delay between
// two levels is made up of shorter ones, if together they hold the message for less than the
// longer one. There are at most 16 parts, unless the delay is longer than all levels.
func (q delayQueues) leg(whole, left time.Duration) int {
	i := q.part(whole, left)
	up, _ := slices.BinarySearch(q.levels, left)
	if i == up || up >= len(q.levels) {
		return i
	}
	for rest := left; rest > 0; {
		rest -= q.levels[q.part(whole, rest)]
		if rest <= left-q.levels[up] {
			return up
		}
	}
	return i
}

// part returns the longest level that isn't longer than left. It returns the next longer one if
// that adds an eighth of whole at most, or if the other is too short: a message must not come
// back too often. It returns -1 if there are no levels.
func (q delayQueues) part(whole, left time.Duration) int {
	up, exact := slices.BinarySearch(q.levels, left)
	down := up - 1
	switch {
	case exact || down < 0:
	case up == len(q.levels):
		return down
	case q.levels[up]-left > whole/8 && q.levels[down] >= whole/16:
		return down
	}
	return min(up, len(q.levels)-1)
}

const (
	// manyParts is the number of delay queues in a row from which on the work queue itself holds a
	// message, if it can.
	manyParts = 16
	// maxParts is the most delay queues that a message passes for one delay. A longer delay is cut
	// short: each part costs the broker a message.
	maxParts = 256
)

// parts is how many delay queues a message with the delay d passes, or somewhat more.
func (q delayQueues) parts(s Strategy, d time.Duration) int64 {
	if s == StrategyNative {
		return 1
	}
	longest := q.longestPart()
	if longest <= 0 {
		return 1
	}
	return int64((d + longest - 1) / longest)
}

// fit returns by which strategy a message waits, and how. A delay of many parts is spent in the work
// queue. If that can't hold the message, a delay of too many parts is cut short.
func (d *decorator) fit(ctx context.Context, del *client.Delivery, q *queueState, s Strategy, what decision) (Strategy, decision) {
	if d.plan.parts(s, what.delay) <= manyParts || del.Queue() != q.queue {
		return s, what
	}
	if m := messageOf(del); q.canHold && !hasTTL(m) && !q.clock.ignores() {
		q.clock.learnOnce(ctx)
		return StrategyNative, what
	}
	longest := d.plan.longestPart()
	most := maxParts * longest
	if most/maxParts != longest || what.delay <= most {
		return s, what
	}
	q.capped.Do(func() {
		q.log.Warn("hopback: a delay is cut short, because the message would pass too many delay queues; add a longer delay to the policy, or use AnyDelay. On RabbitMQ 4.3 and later, a quorum queue without a message TTL holds the message itself",
			"queue", q.queue, "asked", what.delay, "delay", most, "longest_delay_queue", longest)
	})
	what.delay, what.whole = most, min(what.whole, most)
	return s, what
}

// held returns how long a message with the delay d really waits.
func (q delayQueues) held(s Strategy, d time.Duration) time.Duration {
	if s == StrategyNative || !q.canWait(s) { // in the latter case there is nowhere to wait: see errNoDelays
		return d
	}
	longest := q.longestPart()
	all := max(d/longest-1, 0) * longest
	for all < d {
		if q.ladder != nil {
			all += time.Duration(q.ladder.steps(d-all)) * q.ladder.Unit
		} else {
			all += q.levels[q.leg(d, d-all)]
		}
	}
	return all
}

// delayLeft returns the whole delay of m and the rest of it, once m has passed a delay queue.
// Both are 0 if no rest is left. Only the broker can record in the message that it expired in a
// delay queue, so a sender can't make a message wait.
func (d *decorator) delayLeft(m *client.Message, was past) (whole, left time.Duration) {
	if m.Annotations[annotation.Older.Left] == nil && !strings.Contains(was.compact, `"left":`) {
		return 0, 0
	}
	t := historyOf(m)
	if t.Left <= 0 || t.Left > maxDelay.Milliseconds() {
		return 0, 0
	}
	n := d.plan.names
	var few [4]annotation.DeadLettering
	if !slices.ContainsFunc(annotation.DeadLetterings(few[:0], m.Annotations), func(e annotation.DeadLettering) bool {
		return e.Reason == "expired" && (strings.HasPrefix(e.Queue, n.DelayPrefix) || strings.HasPrefix(e.Queue, n.HoldPrefix) || strings.HasPrefix(e.Queue, n.LadderPrefix))
	}) {
		return 0, 0
	}
	left = time.Duration(t.Left) * time.Millisecond
	return max(left, time.Duration(min(t.Asked, maxDelay.Milliseconds()))*time.Millisecond), left
}

// waitOn returns the outcome for a message that has some of its delay left.
func (d *decorator) waitOn(ctx context.Context, del *client.Delivery, q *queueState, whole, left time.Duration, was past) error {
	if q.pending != nil {
		return d.onceChecked(ctx, del, q, was, errNotDue, func(q *queueState) error { return d.waitOn(ctx, del, q, whole, left, was) })
	}
	a := d.plan.newHistory(del, was, q.clock.now())
	what := decision{delay: left, whole: whole, count: was.count, snoozed: true, attempt: was.count + 1}
	return d.carryOut(ctx, del, q, d.strategyFor(q, messageOf(del)), what, &a, errNotDue)
}

// canWait reports whether messages can wait with this policy at all.
func (q delayQueues) canWait(s Strategy) bool {
	return s == StrategyNative || q.ladder != nil || len(q.levels) > 0
}
