package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Deliveries that have come before the answer to a drain, and weren't received yet, have used credit: a consumer
// that doesn't count them holds more than its window.
func TestADrainTakesBackWhatIsLeftOfTheCredit(t *testing.T) {
	now := time.Now()
	w := window{workers: 4, limit: 16}
	credit, _ := w.nextCredit(now, false)
	require.Equal(t, 16, credit)
	for range 5 {
		w.received(now)
	}
	w.draining = make(chan struct{})
	w.drained(true, 12) // 7 wait
	assert.Equal(t, 16-12, w.room())
	credit, _ = w.nextCredit(now, true)
	assert.Equal(t, 16-12, credit)
	for range 7 + credit {
		w.received(now)
		assert.LessOrEqual(t, w.unsettled+w.granted, 16)
	}
	assert.Equal(t, 16, w.unsettled)
	assert.Zero(t, w.granted)
}

// Where there are as many workers as the window is large, credit is granted for all that
// is settled at once, and not one by one. Nothing is left ungranted at the end.
func TestSettlementsThatComeTogetherAreGrantedTogether(t *testing.T) {
	const limit = 16
	w := window{workers: limit, limit: limit}
	now := time.Now()
	var granted []int
	peek := func(more bool) {
		if w.due(more) {
			n, reclaim := w.nextCredit(now, false)
			assert.False(t, reclaim)
			granted = append(granted, n)
		}
	}
	settle := func(n int) {
		for range n {
			w.received(now)
		}
		for i := range n {
			w.unsettled--
			peek(i < n-1)
		}
	}
	peek(false)
	settle(1)
	settle(limit / 2)
	settle(limit)
	assert.Equal(t, []int{16, 1, 8, 8, 8}, granted, "half a window at the most")
	w.received(now)
	w.unsettled--
	assert.False(t, w.due(true))
	assert.True(t, w.due(false))
}

// A limit that falls below what is granted takes credit back, once.
func TestALowerLimitTakesCreditBack(t *testing.T) {
	now := time.Now()
	w := window{workers: 4, limit: 16}
	credit, _ := w.nextCredit(now, false)
	assert.Equal(t, 16, credit)
	w.limit = 2
	assert.True(t, w.due(false))
	credit, reclaim := w.nextCredit(now, false)
	assert.Zero(t, credit)
	assert.True(t, reclaim)
	w.draining = make(chan struct{})
	assert.False(t, w.due(false))
	w.drained(true, 0)
	credit, reclaim = w.nextCredit(now, false)
	assert.Equal(t, 2, credit)
	assert.False(t, reclaim)
	w.stopped = true
	w.limit = 16
	assert.False(t, w.due(false))
}

// Where there are as many workers as the window is large, quick handlers wait for half a window, and
// slow ones for nothing: no worker is without work for longer than half a round trip.
func TestCreditOfQuickHandlersIsGathered(t *testing.T) {
	for _, c := range []struct {
		workers, limit int
		mean, trip     time.Duration
		batch          int
		gathers        bool // with room for one
	}{
		{workers: 16, limit: 16, mean: 10 * time.Microsecond, trip: 300 * time.Microsecond, batch: 8, gathers: true},
		{workers: 16, limit: 16, mean: time.Millisecond, trip: 600 * time.Microsecond, batch: 4, gathers: true},
		{workers: 16, limit: 16, mean: 100 * time.Millisecond, trip: 300 * time.Microsecond, batch: 1},
		{workers: 16, limit: 16, trip: 300 * time.Microsecond, batch: 1},
		{workers: 1, limit: 1, mean: 10 * time.Microsecond, trip: time.Second, batch: 1},
		{workers: 2, limit: 2, mean: 10 * time.Microsecond, trip: time.Second, batch: 1},
		{workers: 100, limit: 100, mean: 2 * time.Millisecond, trip: time.Second, batch: 50, gathers: true},
		{workers: 16, limit: 64, mean: 10 * time.Microsecond, trip: 300 * time.Microsecond, batch: 32},
		{workers: 16, limit: 20, mean: 100 * time.Millisecond, trip: 300 * time.Microsecond, batch: 4},
	} {
		w := window{workers: c.workers, limit: c.limit, granted: c.limit - 1, pace: &prefetchEstimate{pinned: true, workers: c.workers}}
		w.pace.mean.set(c.mean)
		w.pace.trip.set(c.trip)
		assert.Equal(t, c.batch, w.batch(), "%+v", c)
		assert.Equal(t, c.gathers, w.gathers(), "%+v", c)
		assert.LessOrEqual(t, w.pace.gather(), longestGather)
	}
	assert.Equal(t, 1, (&window{workers: 4, limit: 4}).batch())
}
