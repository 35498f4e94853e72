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
			b := newBucket(Config{PerSecond: perSecond, Burst: burst}, newShare(false))
			now := b.began
			for range 5 {
				delay := b.take(now, 1)
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
	b := newBucket(Config{PerSecond: 2, Burst: 3}, newShare(false))
	now := b.began.Add(time.Hour)
	var delays []time.Duration
	for range 5 {
		delay := b.take(now, 1)
		if delays = append(delays, delay); delay > 0 {
			now = now.Add(delay)
			assert.Zero(t, b.take(now, 1))
		}
	}
	assert.Equal(t, []time.Duration{0, 0, 0, 500 * time.Millisecond, 500 * time.Millisecond}, delays)
}

// A share that changes while a call waits changes what is left of its time.
func TestAShareChangesWhileACallWaits(t *testing.T) {
	t.Parallel()
	b := newBucket(Config{PerSecond: 1, Burst: 1}, newShare(false))
	now := b.began
	assert.Zero(t, b.take(now, 1))
	assert.Equal(t, time.Second, b.take(now, 1))
	now = now.Add(500 * time.Millisecond)
	assert.Equal(t, 5*time.Second, b.take(now, 0.1))
	now = now.Add(time.Second)
	assert.Equal(t, 400*time.Millisecond, b.take(now, 1))
	now = now.Add(400 * time.Millisecond)
	assert.Zero(t, b.take(now, 1))
}
