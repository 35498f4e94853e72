package consume

import (
	"sync"
	"sync/atomic"
	"time"
)

// crew is a stint's workers: goroutines that run its handlers, at most Concurrency of
// them, one delivery at a time each.
//
// Each goroutine that takes part in a burst costs a switch, and a stack that the CPU's
// caches don't hold. So no more take part than have to: a delivery wakes the worker that
// has become idle last, or starts one if none is idle, and wakes nobody while another is
// on its way. Handlers that are done at once are so run by a few workers, those that
// block by as many as there are deliveries, and surplus workers sleep undisturbed.
//
// The invariant, whenever mu is free: if deliveries wait, then
//
//   - a worker is on its way (coming), or
//   - Concurrency workers live, and none of them is idle, or
//   - the crew is stopped.
//
// A worker that is on its way takes a delivery before it does anything else, and calls
// the next one if there are more (next). A worker whose handler has returned looks for
// a delivery before it is idle, and calls one, too, if it leaves any. What can hold up
// one on its way is only the slot that a new worker needs, which a handler of an earlier
// link may have; then it isn't on its way any more, and calls another (takeSlot).
type crew struct {
	of    interface{ work(*Delivery) } // whose deliveries they are
	most  int
	slots chan struct{} // see consumer.slots
	all   *Roster

	mu      sync.Mutex
	waiting Fifo[*Delivery]
	idle    []*worker // the one that became so last is the last
	alive   int
	coming  bool // a worker is on its way that was called and has taken no delivery yet
	stopped bool
	ended   chan struct{} // closed when it is stopped

	running sync.WaitGroup
}

func newCrew(of interface{ work(*Delivery) }, most int, slots chan struct{}, all *Roster) *crew {
	return &crew{of: of, most: most, slots: slots, all: all, ended: make(chan struct{})}
}

// worker is one goroutine of a crew.
type worker struct {
	// called has one value when the worker is to look for a delivery.
	called chan struct{}
	// current is the delivery that it has; nil: none.
	current atomic.Pointer[Delivery]
}

// roster is the workers of a consumer, on whatever link. A worker is entered once, not for
// each delivery.
type Roster struct {
	mu      sync.Mutex
	workers map[*worker]struct{}
}

func (r *Roster) enter(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.workers == nil {
		r.workers = map[*worker]struct{}{}
	}
	r.workers[w] = struct{}{}
}

func (r *Roster) leave(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.workers, w)
}

// running returns how many handlers run, and when the first and the last of them began.
func (r *Roster) running() (n int, oldest, newest time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var first, last int64
	for w := range r.workers {
		d := w.current.Load()
		if d == nil {
			continue
		}
		began := d.began.Load()
		if began == 0 {
			continue
		}
		if n == 0 {
			first, last = began, began
		}
		n, first, last = n+1, min(first, began), max(last, began)
	}
	if n == 0 {
		return 0, time.Time{}, time.Time{}
	}
	return n, time.Unix(0, first), time.Unix(0, last)
}

// deliveries returns those that workers have.
func (r *Roster) deliveries() (all []*Delivery) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.workers {
		if d := w.current.Load(); d != nil {
			all = append(all, d)
		}
	}
	return all
}

// put hands d to the workers. It doesn't block.
func (c *crew) put(d *Delivery) {
	c.mu.Lock()
	c.waiting.Push(d)
	w := c.call()
	c.mu.Unlock()
	w.wake()
}

// pop takes back the delivery that has waited longest; nil if none waits.
func (c *crew) pop() *Delivery {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting.Pop()
}

// count is how many wait.
func (c *crew) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return countUnsettled(c.waiting.All[c.waiting.head:])
}

// call has a worker come, if one is wanted and none is on its way. It is called with mu
// held, and returns the idle worker to wake once it isn't; nil if there is none.
func (c *crew) call() *worker {
	if c.coming || c.stopped || c.waiting.Empty() {
		return nil
	}
	if last := len(c.idle) - 1; last >= 0 {
		w := c.idle[last]
		c.idle[last] = nil
		c.idle = c.idle[:last]
		c.coming = true
		return w
	}
	if c.alive < c.most {
		c.alive++
		c.coming = true
		c.running.Go(func() { c.work(true) })
	}
	return nil
}

// wake is called for a worker that isn't idle any more. It doesn't block.
func (w *worker) wake() {
	if w != nil {
		w.called <- struct{}{}
	}
}

// work runs handlers until the crew is stopped. coming says that the crew counts on this
// worker to take a delivery.
func (c *crew) work(coming bool) {
	took, coming := c.takeSlot(coming)
	if !took {
		return
	}
	defer func() { <-c.slots }()
	w := &worker{called: make(chan struct{}, 1)}
	c.all.enter(w)
	defer c.all.leave(w)
	for d := c.next(w, coming); d != nil; d = c.next(w, false) {
		w.current.Store(d)
		c.of.work(d)
		w.current.Store(nil)
	}
}

// takeSlot takes the right to run handlers. It says whether it did, or the stint has
// ended; and whether the worker is on its way still.
func (c *crew) takeSlot(coming bool) (took, still bool) {
	select {
	case c.slots <- struct{}{}:
		return true, coming
	default:
	}
	if coming { // not any more
		c.mu.Lock()
		c.coming = false
		w := c.call()
		c.mu.Unlock()
		w.wake()
	}
	select {
	case c.slots <- struct{}{}:
		return true, false
	case <-c.ended:
	}
	return false, false
}

// next returns the next delivery for w, and waits for one; nil: the crew is stopped.
func (c *crew) next(w *worker, coming bool) *Delivery {
	c.mu.Lock()
	for {
		if coming {
			c.coming = false
		}
		if c.stopped {
			c.mu.Unlock()
			return nil
		}
		if d := c.waiting.Pop(); d != nil {
			other := c.call()
			c.mu.Unlock()
			other.wake()
			return d
		}
		c.idle = append(c.idle, w)
		c.mu.Unlock()
		<-w.called
		c.mu.Lock()
		coming = true
	}
}

// replace starts a worker in place of one that is about to end, since its handler has
// ended the goroutine. The old one has its slot until then.
func (c *crew) replace() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopped {
		c.running.Go(func() { c.work(false) })
	}
}

// stop has all workers end that run no handler, and the others when it returns. No worker
// begins from now on.
func (c *crew) stop() {
	c.mu.Lock()
	idle := c.idle
	c.idle = nil
	if !c.stopped {
		c.stopped = true
		close(c.ended)
	}
	c.mu.Unlock()
	for _, w := range idle {
		w.wake()
	}
}

// wait returns when all workers have ended, once the crew is stopped.
func (c *crew) wait() { c.running.Wait() }

// fifo is a queue. Its zero value is empty.
type Fifo[T any] struct {
	All  []T
	head int // the index of the first
}

func (q *Fifo[T]) Empty() bool { return q.head == len(q.All) }

func (q *Fifo[T]) Push(v T) {
	if len(q.All) == cap(q.All) && q.head > len(q.All)/2 {
		n := copy(q.All, q.All[q.head:])
		clear(q.All[n:])
		q.All, q.head = q.All[:n], 0
	}
	q.All = append(q.All, v)
}

// pop returns the first; the zero value if there is none.
func (q *Fifo[T]) Pop() (v T) {
	if q.Empty() {
		return v
	}
	var none T
	v, q.All[q.head] = q.All[q.head], none
	if q.head++; q.head == len(q.All) {
		q.All, q.head = q.All[:0], 0
	}
	return v
}
