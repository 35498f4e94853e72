package client

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/internal/fifo"
)

// workers is a link session's worker pool: goroutines that run its handlers, at most Concurrency of
// them, one delivery at a time each.
//
// Each goroutine that takes part in a burst costs a switch, and a stack that the CPU's
// caches don't hold. So no more take part than have to: a delivery followUps the worker that
// has become idle last, or starts one if none is idle, and followUps nobody while another is
// on its way. Handlers that are done at once are so run by a few workers, those that
// block by as many as there are deliveries, and surplus workers sleep undisturbed.
//
// The invariant, whenever deliveries.mu is free: if deliveries wait, then
//
//   - a worker is on its way (coming), or
//   - Concurrency workers live, and none of them is idle, or
//   - the workers are stopped.
//
// A worker that is on its way takes a delivery before it does anything else, and calls
// the next one if there are more (next). A worker whose handler has returned looks for
// a delivery before it is idle, and calls one, too, if it leaves any. What can block
// one on its way is only the slot that a new worker needs, which a handler of an earlier
// link may have; then it isn't on its way any more, and calls another (takeSlot).
type workers struct {
	of    *deliveries
	do    *results // runs the handlers
	most  int
	slots chan struct{} // see consumer.slots
	all   *workerSet

	// Guarded by deliveries.mu.
	waiting fifo.Queue[*delivery]
	idle    []*worker // the one that became so last is the last
	alive   int
	coming  bool // a worker is on its way that was called and has taken no delivery yet
	stopped bool

	ended   chan struct{} // closed when they are stopped
	running sync.WaitGroup
}

func newWorkers(of *deliveries, do *results, most int, slots chan struct{}, all *workerSet) *workers {
	return &workers{of: of, do: do, most: most, slots: slots, all: all, ended: make(chan struct{})}
}

// worker is one goroutine of them.
type worker struct {
	// called has one value when the worker should check for a delivery.
	called chan struct{}
	// retired says that it should end. deliveries.mu guards it.
	retired bool
	// current is the delivery that it has; nil: none.
	current atomic.Pointer[delivery]
}

// workerSet is the workers of a consumer, of all its link sessions. A worker is entered once, not
// for each delivery.
type workerSet struct {
	mu      sync.Mutex
	workers map[*worker]struct{}
}

func (r *workerSet) enter(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.workers == nil {
		r.workers = map[*worker]struct{}{}
	}
	r.workers[w] = struct{}{}
}

func (r *workerSet) leave(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.workers, w)
}

// running returns how many handlers run, and when the first and the last of them began.
func (r *workerSet) running() (n int, oldest, newest time.Time) {
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
func (r *workerSet) deliveries() (all []*delivery) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.workers {
		if d := w.current.Load(); d != nil {
			all = append(all, d)
		}
	}
	return all
}

// put hands d to the workers. It is called with mu held, and returns the worker to wake once
// it isn't, as call does.
func (c *workers) put(d *delivery) *worker {
	c.waiting.Push(d)
	return c.call()
}

// count is how many wait. It is called with mu held.
func (c *workers) count() int { return countUnsettled(c.waiting.All()) }

// call has a worker come, if one is wanted and none is on its way. It is called with mu
// held, and returns the idle worker to wake once it isn't; nil if there is none.
func (c *workers) call() *worker {
	if c.coming || c.stopped || c.waiting.Len() == 0 {
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

// work runs handlers until the workers are stopped. coming says that they count on this one to
// take a delivery.
func (c *workers) work(coming bool) {
	took, coming := c.takeSlot(coming)
	if !took {
		return
	}
	defer func() { <-c.slots }()
	w := &worker{called: make(chan struct{}, 1)}
	c.all.enter(w)
	defer c.all.leave(w)
	for d := c.next(w, coming, finished{}); d != nil; {
		w.current.Store(d)
		done := c.do.work(d)
		w.current.Store(nil)
		d = c.next(w, false, done)
	}
}

// takeSlot takes the right to run handlers. It says whether it did, or the link session has
// ended; and whether the worker is on its way still.
func (c *workers) takeSlot(coming bool) (took, still bool) {
	select {
	case c.slots <- struct{}{}:
		return true, coming
	default:
	}
	if coming { // not any more
		c.of.mu.Lock()
		c.coming = false
		w := c.call()
		c.of.mu.Unlock()
		w.wake()
	}
	select {
	case c.slots <- struct{}{}:
		return true, false
	case <-c.ended:
	}
	return false, false
}

// next ends what w did, and returns the next delivery for it, and waits for one; nil: the
// workers are stopped.
func (c *workers) next(w *worker, coming bool, done finished) *delivery {
	var then followUps
	c.of.mu.Lock()
	c.of.finish(done, &then)
	for {
		if coming {
			c.coming = false
		}
		if c.stopped {
			c.of.mu.Unlock()
			c.of.followUp(&then)
			return nil
		}
		if d := c.waiting.Pop(); d != nil {
			if other := c.call(); other != nil {
				then.worker = other
			}
			c.of.mu.Unlock()
			c.of.followUp(&then)
			return d
		}
		c.idle = append(c.idle, w)
		c.of.mu.Unlock()
		c.of.followUp(&then)
		then = followUps{}
		<-w.called
		c.of.mu.Lock()
		if w.retired {
			c.of.mu.Unlock()
			return nil
		}
		coming = true
	}
}

// retire has the workers end that are idle. It is called with mu held, and returns those to wake once
// it isn't.
func (c *workers) retire() []*worker {
	idle := c.idle
	c.idle = nil
	if c.waiting.Len() == 0 {
		c.waiting = fifo.Queue[*delivery]{}
	}
	c.alive -= len(idle)
	for _, w := range idle {
		w.retired = true
	}
	return idle
}

// replace starts a worker in place of one that is about to end, since its handler has
// ended the goroutine. The old one has its slot until then. It is called with mu held.
func (c *workers) replace() {
	if !c.stopped {
		c.running.Go(func() { c.work(false) })
	}
}

// stop has all workers end that run no handler, and the others when it returns. No worker
// begins from now on.
func (c *workers) stop() {
	c.of.mu.Lock()
	idle := c.idle
	c.idle = nil
	if !c.stopped {
		c.stopped = true
		close(c.ended)
	}
	c.of.mu.Unlock()
	for _, w := range idle {
		w.wake()
	}
}

// wait returns when all workers have ended, once they are stopped.
func (c *workers) wait() { c.running.Wait() }
