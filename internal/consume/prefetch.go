package consume

import "time"

// prefetchEstimate is how many deliveries a consumer should have when nobody has said:
// enough to keep its handlers busy for a while, and no more, since what waits for a
// slow handler here could be with another consumer. It follows the handlers' times and
// the round trip to the broker. The mu of the consumer's link session guards it.
type prefetchEstimate struct {
	// near is the most where the broker is near, far where it is far away.
	workers, near, far int

	mean time.Duration // of the handlers' times, over the last dozen or so; 0: none yet
	trip time.Duration // from a grant of credit to its first delivery
	now  int
}

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
	return &prefetchEstimate{workers: workers, near: near, far: max(near, far), now: min(2*workers, near)}
}

func (a *prefetchEstimate) size() int { return a.now }

// handled records how long a handler took, and reports whether the size has changed.
func (a *prefetchEstimate) handled(d time.Duration) bool {
	d = max(d, time.Microsecond)
	if a.mean == 0 {
		a.mean = d
	} else {
		a.mean += (d - a.mean) / 8
	}
	return a.follow()
}

// attached records how long it took to attach a new link: the round trip is no longer than that.
func (a *prefetchEstimate) attached(d time.Duration) {
	a.trip = min(d, longestTrip)
}

// measured records a round trip on the link, and reports whether the size has changed.
func (a *prefetchEstimate) measured(d time.Duration) bool {
	d = min(d, longestTrip)
	if d < a.trip {
		a.trip += (d - a.trip) / 2
	} else {
		a.trip += (d - a.trip) / 8
	}
	return a.mean > 0 && a.follow()
}

// follow says whether the size has changed. The size changes by a third at least, so that it
// seldom does.
func (a *prefetchEstimate) follow() bool {
	mean := max(a.mean, 1)
	waiting := func(ahead time.Duration, most int) int {
		n := min(int64(a.workers)*int64(ahead)/int64(mean), int64(most))
		return min(a.workers+max(int(n), 1), most)
	}
	want := max(waiting(ahead, a.near), waiting(time.Duration(tripsAhead*float64(a.trip)), a.far))
	if want == a.now || want < a.now*3/2 && want > a.now*2/3 && want != a.near && want != a.far {
		return false
	}
	a.now = want
	return true
}
