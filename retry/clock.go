package retry

import (
	"context"
	"sync"
	"time"
)

const (
	// earlyTolerance is how early a message may come without waiting again.
	earlyTolerance = 200 * time.Millisecond
	// lateTolerance is how late it may come before the clock is doubted.
	lateTolerance = 2 * time.Second
	// clockAge is how long the broker's answer is valid.
	clockAge = 10 * time.Minute
	// reportedSkew is the smallest difference of the clocks that is reported.
	reportedSkew = time.Second
	// clockJump is how much the host's clock may step, or the process sleep.
	clockJump = time.Second
	// maxEarly is how often in a row a message may come early before the broker is
	// considered to ignore the time. It is below the default delivery limit, because
	// brokers before 4.3 count each return.
	maxEarly = 14
	// ignoredFor is how long Native isn't tried then.
	ignoredFor = time.Minute
	maxWaits   = 4096
	// sweepEvery is how often finished waits are removed while all places are taken.
	sweepEvery = time.Second
)

// clock returns the broker's time. All times in messages go by it, since workers' clocks
// differ from it and from each other. The consumer asks for it when it starts. If the
// broker can't be asked, the clock starts with the worker's own time and learns from the
// messages that come back:
//
//   - A message comes early. The queue held it until the time in the message, so the
//     broker's clock has reached that. The message waits for the rest, by this process's
//     own measure. Each time that it comes early again, the next wait is twice as long,
//     so a large difference takes few waits.
//   - A message comes late. Its queue may have been busy, or the broker's clock is
//     behind. The latter is assumed, until a message that comes early disproves it.
//
// Only messages that this process gave back are believed: a sender can forge
// annotations. Time is measured on Go's monotonic clock, so the host's clock may step.
type clock struct {
	own  func() time.Time
	ask  func(context.Context) (time.Time, error) // nil if the broker can't be asked
	tell func(ahead time.Duration)                // nil if there is no listener

	mu sync.Mutex
	// The broker's time was broker when this host's was at. at is zero while nothing is
	// known.
	at, broker time.Time
	told       bool
	asked      time.Time // when the broker was asked last; zero if it has never answered
	answer     ahead     // its last answer
	asking     bool
	waits      map[waitKey]wait
	room       int       // for waits, before finished ones are removed
	full       time.Time // until when it isn't cleared again
	// doubt is set while the guess that the broker's clock is behind is unproved.
	doubt *doubt
	// guessAgain is when the next guess may be made.
	guessAgain time.Time
	ignored    time.Time // until when the broker is considered to ignore times
}

// waitKey identifies a message that was given back until a time. A sender can't make one
// up.
type waitKey struct{ due, first int64 }

// wait is a wait that was asked for.
type wait struct {
	since time.Time // by this host's clock
	delay time.Duration
	early int // times in a row that the message had come early before
}

// ahead is a pair of simultaneous times.
type ahead struct{ own, broker time.Time }

// doubt is what the clock knew before a guess.
type doubt struct {
	since time.Time
	ahead time.Duration
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
	if ahead := c.broker.Sub(own.Round(0)); c.tell != nil && !c.told && ahead.Abs() > reportedSkew {
		c.told = true
		go c.tell(ahead) // without the lock
	}
}

// learn asks the broker.
func (c *clock) learn(ctx context.Context) {
	if c.ask == nil {
		return
	}
	broker, err := c.ask(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		return
	}
	own := c.own()
	c.asked, c.answer, c.doubt = own, ahead{own, broker.Round(0)}, nil
	c.set(own, broker)
}

// refresh asks again, in the background, when the answer is old or the host's clock
// has stepped.
func (c *clock) refresh(own time.Time) {
	if c.asked.IsZero() || c.asking {
		return
	}
	age := own.Sub(c.asked)
	if jumped := own.Round(0).Sub(c.asked.Round(0)) - age; age < clockAge && jumped.Abs() < clockJump {
		return
	}
	c.asking = true
	go func() {
		c.learn(context.Background()) // it is bounded
		c.mu.Lock()
		defer c.mu.Unlock()
		c.asking = false
		c.asked = c.own() // also after a failure: not at once again
	}()
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
		return false // a look at all of them for each message would hold up every handler
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

// arrived learns from a message that was due at a time. It returns the rest of its delay,
// or 0, and how often in a row it came early. asked bounds the claim of a message that
// this process didn't give back.
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
		if c.doubt != nil && late < -earlyTolerance {
			c.set(own, own.Add(c.doubt.ahead)) // the guess was wrong
			c.doubt, c.guessAgain = nil, own.Add(clockAge)
		}
		if c.brokers(own).Before(due) {
			c.set(own, due)
		}
	case late > lateTolerance && c.doubt == nil && c.asked.IsZero() && own.After(c.guessAgain):
		c.doubt = &doubt{since: own, ahead: c.brokers(own).Sub(own)}
		c.set(own, due)
	}
}

// ignores reports whether the broker has shown that it ignores times.
func (c *clock) ignores() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.ignored.IsZero() && c.own().Before(c.ignored)
}
