package ratelimit

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// No rate that Config allows makes a delay negative or endless once the burst is over.
func TestRatesAtTheEnds(t *testing.T) {
	t.Parallel()
	for _, perSecond := range []float64{math.SmallestNonzeroFloat64, 1e-9, 1e9, math.MaxFloat64} {
		for _, burst := range []int{1, 3, math.MaxInt32} {
			b := newBucket(Config{PerSecond: perSecond, Burst: burst})
			now := b.began
			for range 5 {
				delay, _ := b.take(now)
				assert.GreaterOrEqual(t, delay, time.Duration(0))
				assert.LessOrEqual(t, delay, longestDelay*time.Second)
				if burst > 5 {
					assert.Zero(t, delay)
				}
			}
		}
	}
}

// A quiet time fills the bucket up to the burst, and no further.
func TestQuietTimeFillsTheBucket(t *testing.T) {
	t.Parallel()
	b := newBucket(Config{PerSecond: 2, Burst: 3})
	now := b.began.Add(time.Hour)
	var delays []time.Duration
	for range 5 {
		delay, _ := b.take(now)
		delays = append(delays, delay)
	}
	assert.Equal(t, []time.Duration{0, 0, 0, 500 * time.Millisecond, time.Second}, delays)
}

// A canceled turn goes to the next call, unless a later turn is reserved.
func TestCancelledTurn(t *testing.T) {
	t.Parallel()
	b := newBucket(Config{PerSecond: 1, Burst: 1})
	b.take(b.began)
	_, second := b.take(b.began)
	third, turn := b.take(b.began)
	assert.Equal(t, 2*time.Second, third)
	b.cancel(second)
	b.cancel(turn)
	again, _ := b.take(b.began)
	assert.Equal(t, 2*time.Second, again, "the third turn is free; the second wasn't the last when it was canceled")
}
