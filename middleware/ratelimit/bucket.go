package ratelimit

import (
	"math"
	"sync"
	"time"
)

// bucket is a token bucket. It counts in seconds after began.
type bucket struct {
	began    time.Time
	interval float64 // between two calls
	ahead    float64 // how much earlier than that a call may begin in a burst

	mu   sync.Mutex
	next float64 // when the next call is due if there are no bursts
}

const (
	// longestInterval, some 30,000 years, keeps sums of intervals finite.
	longestInterval = 1e12
	// longestDelay, some 30 years, fits into a time.Duration.
	longestDelay = 1e9
)

func newBucket(c Config) *bucket {
	b := &bucket{began: time.Now()}
	if c.PerSecond > 0 {
		b.interval = min(1/c.PerSecond, longestInterval)
	}
	b.ahead = float64(c.Burst-1) * b.interval
	return b
}

// take reserves a turn. It returns how long to wait for it.
func (b *bucket) take(now time.Time) (delay time.Duration, turn float64) {
	at := now.Sub(b.began).Seconds()
	b.mu.Lock()
	defer b.mu.Unlock()
	turn = max(b.next, at)
	b.next = turn + b.interval
	wait := min(max(turn-b.ahead-at, 0), longestDelay)
	return time.Duration(math.Round(wait * float64(time.Second))), turn
}

// cancel frees a turn, unless a later one is reserved: that one's time is set already.
func (b *bucket) cancel(turn float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == turn+b.interval {
		b.next = turn
	}
}
