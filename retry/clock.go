package retry

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/brokerclock"
)

const (
	// earlyTolerance is how early a message may come without waiting again.
	earlyTolerance = 200 * time.Millisecond
	// lateTolerance is how late it may come before the clock assumes an error.
	lateTolerance = 2 * time.Second
	// clockAge is how long the broker's answer is valid.
	clockAge = 10 * time.Minute
	// reportedSkew is the smallest difference of the clocks that is reported.
	reportedSkew = time.Second
	// clockJump is how much the host's clock may step, or the process sleep.
	clockJump = time.Second
	// maxEarly is how often in a row a message may come early before the clock concludes that the
	// broker ignores delivery times. It is below the default delivery limit, because brokers
	// before 4.3 count each return.
	maxEarly = 14
	// ignoredFor is how long StrategyNative isn't tried after that.
	ignoredFor = time.Minute
	maxWaits   = 4096
	// freshEvery is the shortest time between two questions to the broker, however many messages
	// come early.
	freshEvery = 10 * time.Second
	// overdueAgain is the same when no message comes back.
	overdueAgain = time.Minute
	// sweepEvery is how often finished waits are removed while all places are taken.
	sweepEvery = time.Second
)

// clock returns the broker's time. All times in messages use it, since the clocks of workers
// differ from it and from each other. The consumer asks for it when it starts. If the connection is
// lost or the broker doesn't answer in time, the clock uses the worker's own time and asks again, since
// messages come late then, too. If the broker can't be asked, the clock starts with the worker's own time
// and learns from the messages that come back:
//
//   - A message comes early. The queue held it until the time in the message, so the broker's
//     clock has reached that. The message waits for the rest, measured by this process. Each time
//     it comes early again, the next wait is twice as long, so a large difference takes few
//     waits.
//   - A message comes late. Either its queue was busy, or the broker's clock is behind. The clock
//     assumes the latter, until a message that comes very early disproves it. One that comes a
//     little early corrects the guess.
//
// An administrator may set the broker's clock while messages wait. If a message comes early, or
// none comes back, the clock asks the broker again: its last answer no longer holds. A message
// that got its delivery time before the clock was set back stays in the queue until that time.
//
// The clock learns only from messages that this process requeued: a sender can forge annotations.
// It measures time on Go's monotonic clock, so the host's clock may step.
type clock struct {
	own    func() time.Time
	ask    func(context.Context) (time.Time, error) // nil if the broker can't be asked
	notify func(ahead time.Duration)                // nil if there is no listener
	// fresh is ask without any cache; nil if the broker can't be asked.
	fresh func(context.Context) (time.Time, error)
	log   *slog.Logger // nil: no log
	ended func() bool  // whether the consumer has ended; nil: it never does

	mu sync.Mutex
	// The broker's time was broker when this host's was at. at is zero while nothing is
	// known.
	at, broker time.Time
	notified   bool
	asked      time.Time // when the broker was asked last; zero if it has never answered
	answer     ahead     // its last answer
	asking     bool
	tried      bool      // by learnOnce
	askAgain   time.Time // when to ask a broker that hasn't answered yet, but may; zero: never
	// inFlight is closed when the answer to askFresh is there; nil if nobody asks.
	inFlight chan struct{}
	askedNew time.Time // when askFresh was last answered
	// returned is when the last message came back. The timer fires overdue after awaited, the
	// time of the next expected return; awaited is zero if the timer doesn't run. lastDue is the
	// last expected return.
	returned, awaited, lastDue time.Time
	timer                      *time.Timer
	waits                      map[waitKey]wait
	room                       int       // for waits, before finished ones are removed
	full                       time.Time // until when it isn't cleared again
	// doubt is set while the guess that the broker's clock is behind is unproved.
	doubt *doubt
	// guessAgain is when the next guess may be made.
	guessAgain time.Time
	ignored    time.Time // until when the broker is assumed to ignore times
}

// waitKey identifies a message that was requeued until a time. A sender can't invent one.
type waitKey struct{ due, first int64 }

// wait is a wait that was asked for.
type wait struct {
	since time.Time // by this host's clock
	delay time.Duration
	early int // times in a row that the message had come early before
}

// ahead is a pair of simultaneous times.
type ahead struct{ own, broker time.Time }

// doubt is what the clock knew before a guess, and by how much the guess set it back.
type doubt struct {
	since     time.Time
	ahead, by time.Duration
}

// wrong reports whether a message that came early disproves the guess. One that comes only a little
// early doesn't: then the message that led to the guess was late because of the clock and, for a
// small part, because of its queue.
func (d *doubt) wrong(early, delay time.Duration) bool {
	return early > earlyTolerance && 2*early > min(d.by, delay)
}

// asks makes the clock ask the broker of the consumer that s describes and q belongs to.
func (c *clock) asks(q *queueState, s client.Start) {
	c.ask, c.fresh, c.notify = s.BrokerTime, s.QueryBrokerTime, s.OnClockDiffers
	c.log = q.log.With("queue", q.queue)
	if q.consumer != nil {
		c.ended = q.consumer.Ended
	}
}

// now returns the broker's time.
func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.own()
	c.refresh(own)
	return c.brokers(own)
}

// brokers returns the broker's time at a time of this host. mu is held, here and below.
func (c *clock) brokers(own time.Time) time.Time {
	if c.at.IsZero() {
		return own
	}
	return c.broker.Add(own.Sub(c.at))
}

func (c *clock) set(own, broker time.Time) {
	c.at, c.broker = own, broker.Round(0)
	if ahead := c.broker.Sub(own.Round(0)); c.notify != nil && !c.notified && ahead.Abs() > reportedSkew {
		c.notified = true
		go c.notify(ahead) // without the lock
	}
}

// learnOnce asks the broker, if nobody has.
func (c *clock) learnOnce(ctx context.Context) {
	c.mu.Lock()
	known := c.tried || !c.asked.IsZero()
	c.tried = true
	c.mu.Unlock()
	if !known {
		c.learn(ctx)
	}
}

// learn asks the broker.
func (c *clock) learn(ctx context.Context) { c.learnBy(ctx, c.ask) }

func (c *clock) learnBy(ctx context.Context, ask func(context.Context) (time.Time, error)) {
	if ask == nil {
		return
	}
	r, err := brokerclock.Read(ctx, c.own, ask, c.ask)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.askAgain = time.Time{}
	if err != nil {
		if after, ok := brokerclock.AskAgain(err); ok && c.asked.IsZero() {
			c.askAgain = c.own().Add(after)
		}
		return
	}
	own, broker := r.Own, r.Broker
	if !c.asked.IsZero() && c.log != nil {
		// Clocks drift by far less than clockJump within clockAge.
		if by := broker.Round(0).Sub(c.answer.broker.Add(own.Sub(c.answer.own))); by.Abs() > clockJump {
			c.log.Warn("hopback: the broker's clock changed, or this host slept. New retries with StrategyNative use the new time. If the clock was set back, messages already waiting come back late by the difference",
				"by", by.Round(time.Millisecond))
		}
	}
	c.asked, c.answer, c.doubt = own, ahead{own, broker.Round(0)}, nil
	c.set(own, broker)
}

// refresh asks again, in the background, when the answer is old, the host's clock has stepped, or the broker hasn't
// answered yet.
func (c *clock) refresh(own time.Time) {
	age := own.Sub(c.asked)
	jumped := own.Round(0).Sub(c.asked.Round(0)) - age
	switch {
	case c.asking,
		c.asked.IsZero() && (c.askAgain.IsZero() || own.Before(c.askAgain)),
		!c.asked.IsZero() && age < clockAge && jumped.Abs() < clockJump:
		return
	}
	c.asking = true
	go func() {
		c.learn(context.Background()) // it is bounded
		c.mu.Lock()
		defer c.mu.Unlock()
		c.asking = false
		if !c.asked.IsZero() {
			c.asked = c.own() // also after a failure: not at once again
		}
	}()
}

// askFresh asks the broker without any cache, and waits for the answer: a message came early.
// Calls at the same time share an answer.
func (c *clock) askFresh(ctx context.Context) {
	c.mu.Lock()
	done := c.inFlight
	if done == nil {
		if c.fresh == nil || c.asked.IsZero() || !c.askedNew.IsZero() && c.own().Sub(c.askedNew) < freshEvery {
			c.mu.Unlock()
			return
		}
		done = make(chan struct{})
		c.inFlight = done
		go func() {
			c.learnBy(context.Background(), c.fresh) // it is bounded
			c.mu.Lock()
			defer c.mu.Unlock()
			c.askedNew, c.inFlight = c.own(), nil
			close(done)
		}()
	}
	c.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// watchReturn asks the broker again if the next message should be back, and overdue later none
// has come since. mu is held.
func (c *clock) watchReturn(own time.Time, delay time.Duration) {
	due := own.Add(delay)
	if due.After(c.lastDue) {
		c.lastDue = due
	}
	switch {
	case c.fresh == nil || c.asked.IsZero() || !c.awaited.IsZero() && !due.Before(c.awaited):
		return
	case c.timer == nil:
		c.timer = time.AfterFunc(delay+overdue, c.nothingReturned)
	default:
		c.timer.Reset(delay + overdue)
	}
	c.awaited = due
}

// nothingReturned asks the broker unless a message has come back.
func (c *clock) nothingReturned() {
	c.mu.Lock()
	own := c.own()
	none := c.returned.Before(c.awaited) && (c.askedNew.IsZero() || own.Sub(c.askedNew) >= overdueAgain)
	if last := c.lastDue; last.After(c.awaited) {
		c.awaited = last
		c.timer.Reset(last.Add(overdue).Sub(own))
	} else {
		c.awaited = time.Time{}
	}
	c.mu.Unlock()
	if none && (c.ended == nil || !c.ended()) {
		c.askFresh(context.Background())
	}
}

// hold returns the time until which the queue should hold a message for delay, in
// milliseconds. first is the time of its first failure by the message, 0 if it has
// none. early is how often in a row it came early.
func (c *clock) hold(delay time.Duration, first int64, early int) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.own()
	until := c.brokers(own).Add(delay)
	if early > 1 {
		until = until.Add(max(delay, time.Second) * (1<<(early-1) - 1))
	}
	due := until.Add(time.Millisecond - 1).UnixMilli()
	c.watchReturn(own, until.Sub(c.brokers(own)))
	if c.makeRoom(own) {
		c.waits[waitKey{due, first}] = wait{since: own, delay: delay, early: early}
	}
	return due
}

// makeRoom reports whether one more wait can be remembered. The clock learns nothing
// from others.
func (c *clock) makeRoom(own time.Time) bool {
	if c.waits == nil {
		c.waits, c.room = map[waitKey]wait{}, 64
	}
	if len(c.waits) < c.room {
		return true
	}
	if own.Before(c.full) {
		return false // scanning all of them for each message would block every handler
	}
	for k, w := range c.waits {
		if own.Sub(w.since) > w.delay+time.Minute {
			delete(c.waits, k)
		}
	}
	if c.room = min(max(64, 2*len(c.waits)), maxWaits); c.room == maxWaits {
		c.full = own.Add(sweepEvery)
	}
	return len(c.waits) < c.room
}

// arrived learns from a message that was due at a time. It returns the rest of its delay, or 0,
// and how often in a row it came early. asked bounds the claim of a message that this process
// didn't requeue.
func (c *clock) arrived(due time.Time, asked time.Duration, first int64) (left time.Duration, early int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.own()
	w, ours := c.waits[waitKey{due.UnixMilli(), first}]
	if !ours {
		// Another worker's, or forged. Half of the delay is left to clocks that differ.
		left = min(due.Sub(c.brokers(own)), asked)
		if left < earlyTolerance || left*2 < asked {
			return 0, 0
		}
		return left, 0
	}
	c.returned = own
	left = w.delay - own.Sub(w.since)
	if left < earlyTolerance {
		left = 0
	}
	c.correct(own, due, w, left == 0)
	if left == 0 {
		return 0, 0
	}
	if early = w.early + 1; early > maxEarly {
		c.ignored = own.Add(ignoredFor)
		c.at, c.broker = c.answer.own, c.answer.broker // what was learned since is wrong
		c.guessAgain = own.Add(clockAge)
	}
	return left, early
}

// correct learns from a message that the queue has held until due.
func (c *clock) correct(own, due time.Time, w wait, whole bool) {
	late := c.brokers(own).Sub(due)
	if c.doubt != nil && whole && w.since.After(c.doubt.since) {
		c.doubt = nil // a delay that was set by the guess was kept
	}
	switch {
	case late < 0:
		if c.doubt != nil && c.doubt.wrong(-late, w.delay) {
			c.set(own, own.Add(c.doubt.ahead))
			c.doubt, c.guessAgain = nil, own.Add(clockAge)
		}
		if c.brokers(own).Before(due) {
			c.set(own, due)
		}
	case late > lateTolerance && c.doubt == nil && c.asked.IsZero() && c.askAgain.IsZero() && own.After(c.guessAgain):
		c.doubt = &doubt{since: own, ahead: c.brokers(own).Sub(own), by: late}
		c.set(own, due)
	}
}

// ignores reports whether the broker has shown that it ignores times.
func (c *clock) ignores() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.ignored.IsZero() && c.own().Before(c.ignored)
}
