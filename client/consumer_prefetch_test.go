package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestPrefetchEstimateFollowsTheHandlers(t *testing.T) {
	a := newPrefetchEstimate(1, 64, 1024)
	assert.Equal(t, 2, a.size(), "before the first handler has told")
	assert.True(t, a.handled(10*time.Microsecond))
	assert.Equal(t, 64, a.size(), "fast handlers get all at once")
	changes := 0
	for range 100 {
		if a.handled(10 * time.Microsecond) {
			changes++
		}
	}
	assert.Zero(t, changes)
	for range 100 {
		if a.handled(time.Second) {
			changes++
		}
	}
	assert.Equal(t, 2, a.size(), "one at work, and one that waits")
	assert.Less(t, changes, 8)
	for range 100 {
		a.handled(10 * time.Millisecond)
	}
	assert.InDelta(t, 21, a.size(), 10, "20 of 10 ms last 200 ms")

	a = newPrefetchEstimate(16, 64, 1024)
	assert.Equal(t, 32, a.size())
	a.handled(time.Hour)
	assert.Equal(t, 17, a.size(), "never less than keeps every handler at work")
	a.handled(-time.Hour)
	a.handled(0)
	assert.GreaterOrEqual(t, a.size(), 17)

	a = newPrefetchEstimate(100_000, 200_000, 1024)
	a.handled(time.Nanosecond)
	assert.Equal(t, 200_000, a.size())
	a.handled(1 << 62)
	assert.Equal(t, 100_001, a.size())
}
