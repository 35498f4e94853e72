package partition

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/brokerclock"
)

// clock is the broker's clock, as a worker knows it. Times in messages follow it, because the next worker
// of a message may have another clock. Without the permission to ask for it, it is the worker's own.
type clock struct {
	own   func() time.Time
	ready chan struct{} // closed when the broker has answered, or hasn't for too long

	mu   sync.Mutex
	read brokerclock.Reading // the last answer; zero if there is none
}

// clockAge is how long an answer is used, and a refusal holds.
const clockAge = 10 * time.Minute

func newClock(own func() time.Time) *clock { return &clock{own: own, ready: make(chan struct{})} }

// run asks the broker again and again until ctx ends.
func (c *clock) run(ctx context.Context, ask func(context.Context) (brokerclock.Reading, error)) {
	for unready := true; ; {
		r, err := ask(ctx)
		pause := clockAge
		if err == nil {
			r.Broker = r.Broker.Round(0)
			c.mu.Lock()
			c.read = r
			c.mu.Unlock()
		} else if after, ok := brokerclock.AskAgain(err); ok {
			pause = after
		}
		// Without a connection there is nothing to handle.
		if unready && !errors.Is(err, client.ErrConnectionLost) {
			unready = false
			close(c.ready)
		}
		if !backoff.Sleep(ctx, pause) {
			return
		}
	}
}

// now returns the broker's time, or a little later, so that what is computed from it isn't early.
func (c *clock) now() time.Time {
	now, _ := c.times()
	return now
}

// passed returns the broker's time, or a little earlier: a time before it has passed.
func (c *clock) passed() time.Time {
	now, late := c.times()
	return now.Add(-late)
}

func (c *clock) times() (now time.Time, late time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.read.Own.IsZero() {
		return c.own(), 0
	}
	return c.read.Broker.Add(time.Since(c.read.Own)), c.read.Late
}
