package client

import (
	"sync"
	"time"
)

// appetite is how many deliveries a consumer should have when nobody has said:
// enough to keep its handlers busy for a while, and no more, since what waits for a
// slow handler here could be with another consumer. It follows the handlers' times.
type appetite struct {
	workers, most int

	mu   sync.Mutex
	mean time.Duration // of the handlers' times, over the last dozen or so; 0: none yet
	now  int
}

// ahead is for how long what waits should keep the handlers busy: far longer than the
// way to the broker and back.
const ahead = 200 * time.Millisecond

// newAppetite begins small: the first handler says more.
func newAppetite(workers, most int) *appetite {
	return &appetite{workers: workers, most: most, now: min(2*workers, most)}
}

func (a *appetite) size() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now
}

// handled is told how long a handler took, and says whether the size has changed.
// It changes by a third at least, so that it seldom does.
func (a *appetite) handled(d time.Duration) bool {
	d = max(d, time.Microsecond)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mean == 0 {
		a.mean = d
	} else {
		a.mean += (d - a.mean) / 8
	}
	waiting := int(min(int64(a.workers)*int64(ahead)/int64(max(a.mean, 1)), int64(a.most)))
	want := min(a.workers+max(waiting, 1), a.most)
	if want == a.now || want < a.now*3/2 && want > a.now*2/3 && want != a.most {
		return false
	}
	a.now = want
	return true
}
