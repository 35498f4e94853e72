package ratelimit

import (
	"context"
	"math"
	"sync"
	"time"
)

// bucket is a token bucket. It counts in seconds after began.
type bucket struct {
	began    time.Time
	interval float64 // between two calls of all workers
	burst    float64
	share    *share

	turn chan struct{} // holds the delivery whose turn is next; the others wait in order

	mu   sync.Mutex
	next float64 // when the next call is due if there are no bursts
	part float64 // the share that next is computed with
}

const (
	// longestInterval, some 30,000 years, keeps sums of intervals finite.
	longestInterval = 1e12
	// longestDelay, some 30 years, fits into a time.Duration.
	longestDelay = 1e9
)

func newBucket(c Config, s *share) *bucket {
	b := &bucket{began: time.Now(), burst: float64(c.Burst), share: s, turn: make(chan struct{}, 1), part: 1}
	if c.PerSecond > 0 {
		b.interval = min(1/c.PerSecond, longestInterval)
	}
	return b
}

// wait returns when a call may start, or with the error of ctx. It waits even if ctx has a deadline before that:
// otherwise the message would go back and forth between broker and consumer until the deadline.
func (b *bucket) wait(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case b.turn <- struct{}{}:
		defer func() { <-b.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for {
		part, changed := b.share.get()
		delay := b.take(time.Now(), part)
		if delay == 0 {
			return nil
		}
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-changed:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}

// take starts a call, or returns how long it has to wait with this share.
func (b *bucket) take(now time.Time, part float64) time.Duration {
	at := now.Sub(b.began).Seconds()
	b.mu.Lock()
	defer b.mu.Unlock()
	if part != b.part {
		if b.next > at { // what is still to be waited for takes longer, or not as long
			b.next = at + min((b.next-at)*b.part/part, longestInterval)
		}
		b.part = part
	}
	interval := min(b.interval/part, longestInterval)
	ahead := max(b.burst*part-1, 0) * interval
	if wait := math.Round((max(b.next, at) - ahead - at) * float64(time.Second)); wait > 0 {
		return time.Duration(min(wait, longestDelay*float64(time.Second)))
	}
	b.next = max(b.next, at) + interval
	return 0
}
