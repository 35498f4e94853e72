package fair

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
)

// slots are the rights to run a handler. Those who wait get them in this order:
//
//   - a lane, if no slot serves one, so that lanes never stand still;
//   - the message of a quiet tenant that has waited longest;
//   - the lane that has used the least time, as long as the reserve is left.
type slots struct {
	mu      sync.Mutex
	all     int
	reserve int
	fixed   bool // the reserve
	quiet   int  // slots in use for quiet tenants
	bulk    int  // and for others
	waiting []*waiter
	lanes   []turns // the last one is for noisy messages that stay in the main queue

	// load is the mean number of slots in use for quiet tenants, at a time since start.
	load      float64
	at, start time.Time
	// quietTime and bulkTime are how long handlers take, in seconds; 0: not known.
	quietTime, bulkTime float64
	freed               time.Time // when a bulk handler has last returned or begun
}

// quiet is where the slot of a quiet tenant's message comes from. Other values are indices of
// slots.lanes.
const quiet = -1

type waiter struct {
	from    int
	granted bool
	ready   chan struct{}
}

// turns is a lane in line for slots.
type turns struct {
	waiting []*waiter
	running int
	used    float64 // seconds of handlers, divided by the weights of their tenants
}

// loadTime is over how many seconds the load of quiet tenants is averaged.
const loadTime = 5.0

func newSlots(all, reserve, lanes int, now time.Time) *slots {
	return &slots{all: all, reserve: max(reserve, 1), fixed: reserve > 0, lanes: make([]turns, lanes+1), at: now, start: now}
}

// observe keeps the load up to date. Call it before quiet changes.
func (s *slots) observe(now time.Time) {
	if d := now.Sub(s.at).Seconds(); d > 0 {
		s.load += (float64(s.quiet) - s.load) * (1 - math.Exp(-d/loadTime))
		s.at = now
	}
}

// take waits for a slot. It returns false if the consumer stops before: the message returns to its
// queue.
func (s *slots) take(ctx context.Context, from int) bool {
	w := &waiter{from: from}
	s.mu.Lock()
	if from == quiet {
		s.waiting = append(s.waiting, w)
	} else {
		l := &s.lanes[from]
		if len(l.waiting) == 0 && l.running == 0 {
			l.used = max(l.used, s.least()) // it has nothing saved up
		}
		l.waiting = append(l.waiting, w)
	}
	s.grant()
	if w.granted {
		s.mu.Unlock()
		return true
	}
	w.ready = make(chan struct{})
	s.mu.Unlock()
	select {
	case <-w.ready:
		return true
	case <-ctx.Done():
	case <-client.Draining(ctx):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.granted {
		return true
	}
	is := func(other *waiter) bool { return other == w }
	if from == quiet {
		s.waiting = slices.DeleteFunc(s.waiting, is)
	} else {
		s.lanes[from].waiting = slices.DeleteFunc(s.lanes[from].waiting, is)
	}
	return false
}

// try reserves a slot for a noisy message if nobody else needs one.
func (s *slots) try() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) > 0 || s.next() >= 0 || s.quiet+s.bulk >= s.all || s.bulk >= s.all-s.reserve {
		return false
	}
	s.begin(s.stay())
	return true
}

// stay is where the slots of noisy messages come from that stay in the main queue.
func (s *slots) stay() int { return len(s.lanes) - 1 }

// demote has a quiet slot serve a noisy message, or gives it to others if they need it.
func (s *slots) demote() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observe(time.Now())
	s.quiet--
	if s.bulk < s.all-s.reserve {
		s.begin(s.stay())
		return true
	}
	s.grant()
	return false
}

// shift notes that the tenant of so many quiet messages in handlers is noisy, so that these use none
// of the reserve.
func (s *slots) shift(n int) {
	if n == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observe(time.Now())
	s.quiet -= n
	for range n {
		s.begin(s.stay())
	}
}

// give returns a slot after a handler that took so long, of a tenant with this weight.
func (s *slots) give(from int, took time.Duration, weight float64) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	seconds := took.Seconds()
	if from == quiet {
		s.observe(now)
		s.quiet--
		s.quietTime = averaged(s.quietTime, seconds)
	} else {
		s.bulk--
		s.lanes[from].running--
		s.lanes[from].used += (seconds - s.expected()) / weight
		s.bulkTime, s.freed = averaged(s.bulkTime, seconds), now
	}
	s.grant()
}

// cancel returns a slot whose handler wasn't called.
func (s *slots) cancel(from int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if from == quiet {
		s.observe(time.Now())
		s.quiet--
	} else {
		s.bulk--
		s.lanes[from].running--
		s.lanes[from].used -= s.expected()
	}
	s.grant()
}

// averaged is a moving average of handlers' times.
func averaged(mean, sample float64) float64 {
	if mean == 0 {
		return max(sample, 1e-6)
	}
	return mean + (sample-mean)/16
}

// expected is what a lane is charged when a handler begins.
func (s *slots) expected() float64 { return s.bulkTime }

// grant hands out slots that are free.
func (s *slots) grant() {
	for s.quiet+s.bulk < s.all {
		lane := s.next()
		switch {
		case lane >= 0 && s.bulk == 0:
			s.pass(lane)
		case len(s.waiting) > 0:
			w := s.waiting[0]
			s.waiting = slices.Delete(s.waiting, 0, 1)
			s.observe(time.Now())
			s.quiet++
			w.grant()
		case lane >= 0 && s.bulk < s.all-s.reserve:
			s.pass(lane)
		default:
			return
		}
	}
}

func (s *slots) pass(lane int) {
	l := &s.lanes[lane]
	w := l.waiting[0]
	l.waiting = slices.Delete(l.waiting, 0, 1)
	s.begin(lane)
	w.grant()
}

func (s *slots) begin(lane int) {
	if s.bulk == 0 {
		s.freed = time.Now()
	}
	s.bulk++
	s.lanes[lane].running++
	s.lanes[lane].used += s.expected()
}

func (w *waiter) grant() {
	w.granted = true
	if w.ready != nil {
		close(w.ready)
	}
}

// next is the lane whose turn it is; -1: none waits.
func (s *slots) next() int {
	lane := -1
	for i := range s.lanes {
		if len(s.lanes[i].waiting) > 0 && (lane < 0 || s.lanes[i].used < s.lanes[lane].used) {
			lane = i
		}
	}
	return lane
}

// least is what the lanes have used at least that are in use.
func (s *slots) least() float64 {
	least := math.Inf(1)
	for _, l := range s.lanes {
		if len(l.waiting)+l.running > 0 {
			least = min(least, l.used)
		}
	}
	if math.IsInf(least, 1) {
		return 0
	}
	return least
}

// adapt sets the reserve. Arrivals of many tenants are random, so the number of quiet messages at a
// time has a variance of about its mean. A quiet message that finds the reserve in use gets the
// next slot that becomes free. If that is soon, compared with its own handler, it needs no more
// reserve than the mean.
func (s *slots) adapt(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observe(now)
	if s.fixed {
		return
	}
	load := s.load / (1 - math.Exp(-max(now.Sub(s.start).Seconds(), 0.1)/loadTime)) // it began with zero
	need := load
	soon := math.Inf(1)
	if s.bulkTime > 0 {
		soon = s.bulkTime / float64(max(s.bulk, 1))
	}
	// Handlers that began together return together, so only a longer pause than theirs is a slow one.
	if since := now.Sub(s.freed).Seconds(); s.bulk > 0 && since > s.bulkTime {
		soon = max(soon, since)
	}
	if soon > s.quietTime/2 {
		need += 2 * math.Sqrt(load)
	}
	s.reserve = min(max(int(math.Ceil(need)), 1), s.all-1)
	s.grant()
}
