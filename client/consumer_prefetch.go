package client

import (
	"math"
	"sync/atomic"
	"time"
)

// prefetchEstimate is how many deliveries a consumer should have when nobody has said:
// enough to keep its handlers busy for a while, and no more, since what waits for a
// slow handler here could be with another consumer. It follows the handlers' times and
// the round trip to the broker. Link sessions share it, and late settlements of an earlier one read it while a later
// one measures: so what changes is atomic. An update that another one overwrites is no loss.
//
// With a pinned size it only measures.
type prefetchEstimate struct {
	pinned bool
	// near is the most where the broker is near, far where it is far away.
	workers, near, far int

	mean duration // of the handlers' times, over the last dozen or so; 0: none yet
	trip duration // from a grant of credit to its first delivery
	now  atomic.Int64
}

type duration struct{ atomic.Int64 }

func (d *duration) get() time.Duration  { return time.Duration(d.Load()) }
func (d *duration) set(t time.Duration) { d.Store(int64(t)) }

// ahead is for how long what waits should keep the handlers busy: far longer than the
// way to the broker and back.
const ahead = 200 * time.Millisecond

// tripsAhead is for how many round trips, at least, what waits should keep them busy.
// Credit is granted for half a window at a time, so while a grant is on its way half of
// the window has to last for a round trip. The rest is for what isn't even.
const tripsAhead = 2.5

// longestTrip bounds what a slow answer of the broker can do.
const longestTrip = time.Second

// newPrefetchEstimate begins small: the first handler says more.
func newPrefetchEstimate(workers, near, far int) *prefetchEstimate {
	a := &prefetchEstimate{workers: workers, near: near, far: max(near, far)}
	a.now.Store(int64(min(2*workers, near)))
	return a
}

// size is how many deliveries there should be; more than any window for a pinned one.
func (a *prefetchEstimate) size() int {
	if a.pinned {
		return math.MaxInt
	}
	return int(a.now.Load())
}

// longestGather bounds how long credit may wait for more.
const longestGather = 2 * time.Millisecond

// gather is how long credit may wait for more, and soon how many deliveries the handlers are expected to
// finish in that time. A worker that is done waits for a round trip anyway; so it waits for half of one
// more.
func (a *prefetchEstimate) gather() time.Duration { return min(a.trip.get()/2, longestGather) }

func (a *prefetchEstimate) soon() int {
	if a == nil {
		return 0
	}
	mean := a.mean.Load()
	if mean == 0 {
		return 0
	}
	return int(min(int64(a.workers)*int64(a.gather())/mean, int64(a.workers)))
}

// handled records how long a handler took, and reports whether the size has changed.
func (a *prefetchEstimate) handled(d time.Duration) bool {
	d = max(d, time.Microsecond)
	if mean := a.mean.get(); mean == 0 {
		a.mean.set(d)
	} else {
		a.mean.set(mean + (d-mean)/8)
	}
	return a.follow()
}

// attached records how long it took to attach a new link: the round trip is no longer than that.
func (a *prefetchEstimate) attached(d time.Duration) {
	a.trip.set(min(d, longestTrip))
}

// measured records a round trip on the link, and reports whether the size has changed.
func (a *prefetchEstimate) measured(d time.Duration) bool {
	d = min(d, longestTrip)
	if trip := a.trip.get(); d < trip {
		a.trip.set(trip + (d-trip)/2)
	} else {
		a.trip.set(trip + (d-trip)/8)
	}
	return a.mean.get() > 0 && a.follow()
}

// follow says whether the size has changed. The size changes by a third at least, so that it
// seldom does.
func (a *prefetchEstimate) follow() bool {
	if a.pinned {
		return false
	}
	mean, now := max(a.mean.get(), 1), int(a.now.Load())
	waiting := func(ahead time.Duration, most int) int {
		n := min(int64(a.workers)*int64(ahead)/int64(mean), int64(most))
		return min(a.workers+max(int(n), 1), most)
	}
	want := max(waiting(ahead, a.near), waiting(time.Duration(tripsAhead*float64(a.trip.get())), a.far))
	if want == now || want < now*3/2 && want > now*2/3 && want != a.near && want != a.far {
		return false
	}
	a.now.Store(int64(want))
	return true
}
