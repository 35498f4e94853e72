package consume

import (
	"sync"

	perkey "github.com/hopback/hopback/internal/lanes"
)

// lanes hands over deliveries of one key one at a time, in the order in which the
// broker has delivered them, and others at once. Those that wait are here and not
// with a worker, so that a busy key takes one slot only. There are never more of
// them than Prefetch.
type lanes struct {
	// ordered says that there are lanes: handled.Lane names a delivery's.
	ordered bool

	mu     sync.Mutex
	byName perkey.Lanes[string, *Delivery]
}

// admit says whether to hand d on now. Otherwise next returns it later.
func (l *lanes) admit(d *Delivery) (now bool) {
	if !l.ordered {
		return true
	}
	key, ok := laneOf(d)
	if !ok {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.byName.Claim(key) {
		l.byName.Wait(key, d, nil)
		return false
	}
	d.lane = &key
	return true
}

// laneOf guards the goroutine that receives from a key that panics.
func laneOf(d *Delivery) (key string, ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	return d.Handled.Lane()
}

// next is told that no handler will be called for d any more, and returns the delivery to
// hand on instead, or none. To be told more than once does no harm.
func (l *lanes) next(d *Delivery) (now *Delivery) {
	if !l.ordered {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if d.lane == nil {
		return nil
	}
	lane := d.lane
	d.lane = nil
	first, ok := l.byName.Leave(*lane)
	if ok {
		first.lane = lane
	}
	return first
}

// empty returns those that wait for a handler that runs, for giving them back.
func (l *lanes) empty() []*Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byName.Empty()
}

// count is how many wait.
func (l *lanes) count() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byName.Waiting(func(queue []*Delivery) { n += countUnsettled(queue) })
	return n
}
