package client

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

// linkSession is the life of one receiver link. Four kinds of goroutines share the
// work, so that none waits for another's broker:
//
//	receive ──workers.put──▶ workers ──finish──▶ settle
//	                           └──▶ forwarder ──────┘
//
// What they share is guarded by mu, which a delivery takes four times, or three while others are
// in flight: as it comes (take), as a worker that was idle takes it (workers.next), as the
// worker is done with it and takes the next (workers.next), and after its settlement is written
// (written, for all settlements that were written together).
//
// Locks are taken in the order Control, forwarder, flow, mu, consumer.mu. No handler, hook,
// link, or logger is called with mu held: what follows from a change is noted in a wakes, and
// done by after. The link is called with flow held, and takes the engine's lock, which the
// engine never holds when it calls back.
type linkSession struct {
	consumer *consumer
	sess     link.Session
	link     link.ReceiverLink
	old      oldbroker.Quirks // of the broker
	workers  *workers
	// dead is closed when the link is gone: nothing can be settled any more.
	dead     chan struct{}
	deadOnce sync.Once
	why      error
	// unsettled is how many deliveries were when the link was lost.
	unsettled int
	// idle is signaled when the window counts nothing unsettled any more.
	idle   chan struct{}
	paused atomic.Bool // the user allows no deliveries
	silent atomic.Bool // the broker answers nothing
	// exhausted is signaled when the session has carried as many deliveries as it should.
	exhausted chan struct{}
	// holding are the deliveries that are about to be held, which only the goroutine that
	// receives adds to. deciding are the goroutines that deal with forwards that were given up.
	holding  sync.WaitGroup
	deciding group
	// keeps says that the queue is known to have a dead-letter exchange.
	keeps atomic.Bool
	// lastTarget is where the last forward went to: mostly the next goes there, too.
	lastTarget atomic.Pointer[builtAddress]
	// closing is closed when workers are to take no more deliveries.
	closing     chan struct{}
	closingOnce sync.Once
	handlerCtx  context.Context
	// flow: see credit.go. gathered is set and reset by the one that sets gathering.
	flow     sync.Mutex
	gathered *time.Timer

	mu        sync.Mutex
	window    window
	leases    leases // nil where the broker takes no delivery back
	isolation isolation
	lanes     lanes
	settler   settler
	// aside counts the deliveries whose forwards wait, and that the window doesn't count
	// any more; asideBytes is how large their copies are.
	aside      int
	asideBytes int64
	held       []heldMessage // that nobody can read
	asking     bool          // whether their queue has a dead-letter exchange
	returning  bool          // what no handler has begun goes back to the queue as it closes
	gathering  bool          // credit is granted when gathered fires
	gate       gate
}

// settler is the state of the goroutine that settles.
type settler struct {
	next      chan settlement // to it while it is idle; has room for one
	exited    chan struct{}   // closed when it has ended, and doesn't start again
	started   bool            // it runs
	idle      bool
	finishing bool // no further settlement will come
	// backlog is what waits while it isn't idle, in order. spare was before.
	backlog, spare []settlement
}

type settlement struct {
	delivery *delivery
	d        link.Disposition
}

// finished is what a worker has done.
type finished struct {
	delivery *delivery // nil: nothing
	// settle says that d is to be written.
	settle bool
	d      link.Disposition
	// again says that the handler is called again after a delay.
	again bool
	after time.Duration
	// took is for how long the handler has run; 0: it hasn't.
	took time.Duration
}

// wakes is what is to be done after mu is unlocked.
type wakes struct {
	worker                      *worker     // to be woken
	settle                      settlement  // for the settler, which is idle
	late                        *delivery   // its link was lost
	back                        []*delivery // to be requeued
	release                     int         // bytes that aren't held any more
	gather                      time.Duration
	idle, resize, credit, nudge bool
}

// after does it.
func (s *linkSession) after(then *wakes) {
	then.worker.wake()
	if then.settle.delivery != nil {
		s.settler.next <- then.settle
	}
	if then.late != nil {
		s.late(then.late)
	}
	s.release(then.back)
	if then.release > 0 {
		s.link.Release(then.release)
	}
	if then.idle {
		s.signalIdle()
	}
	switch {
	case then.resize:
		s.resize()
	case then.credit:
		s.grant()
	}
	if then.gather > 0 {
		s.grantAfter(then.gather)
	}
	if then.nudge {
		s.nudge()
	}
}

// put has x settled. It is called with mu held.
func (s *linkSession) put(x settlement, then *wakes) {
	t := &s.settler
	switch {
	case s.over():
		then.late = x.delivery
	case t.finishing:
	case !t.started:
		t.started = true
		go s.settle(x)
	case t.idle:
		t.idle = false
		then.settle = x
	default:
		t.backlog = append(t.backlog, x)
	}
}

// finishSettling returns when all that was to be settled is written.
func (s *linkSession) finishSettling() {
	s.mu.Lock()
	t := &s.settler
	t.finishing = true
	started, idle := t.started, t.idle
	s.mu.Unlock()
	if idle {
		close(t.next)
	}
	if started {
		<-t.exited
	}
}

// finish notes what a worker has done, and puts those that wait for it. It is called with mu
// held by one that takes the next delivery then.
func (s *linkSession) finish(f finished, then *wakes) {
	if f.delivery == nil {
		return
	}
	if f.settle {
		s.put(settlement{f.delivery, f.d}, then)
	}
	if f.took > 0 && !s.over() && s.consumer.estimate.handled(f.took) {
		then.resize = true
	}
	switch {
	case f.again:
		s.gate.keep(s, f.delivery, f.after)
		s.noteClosing(then)
	case s.gated() && !f.settle && !f.delivery.settling.Load() && !s.over():
		f.delivery.forwarding = true // its lane waits for the copy: see put
	default:
		s.leaveLane(f.delivery, then)
	}
}

// leaveLane lets the next in d's lane continue. It is called with mu held by one that takes the
// next delivery then.
func (s *linkSession) leaveLane(d *delivery, then *wakes) {
	if next := s.lanes.next(d); next != nil {
		s.workers.waiting.Push(next)
		s.noteClosing(then)
	}
}

// enqueue hands d to the workers. It is called with mu held.
func (s *linkSession) enqueue(d *delivery, then *wakes) {
	if w := s.workers.put(d); w != nil {
		then.worker = w
	}
	s.noteClosing(then)
}

// noteClosing makes the drain check again: a delivery's turn came after the last check.
func (s *linkSession) noteClosing(then *wakes) {
	if failure.IsClosed(s.closing) {
		if s.returning {
			then.back = append(then.back, s.unbegun()...)
		}
		then.idle = true
	}
}

// line hands d to the workers, now or when those before it in its lane are handled. It is
// called with mu held.
func (s *linkSession) line(d *delivery, then *wakes) {
	if s.lanes.admit(d) {
		s.enqueue(d, then)
	}
}

// uncount notes that a delivery isn't the window's any more. It is called with mu held.
func (s *linkSession) uncount(d *delivery, then *wakes) {
	d.uncounted = true
	s.window.unsettled--
	then.release += d.bytes
	d.bytes = 0
	if s.window.unsettled == 0 || failure.IsClosed(s.closing) {
		then.idle = true
	}
}

// ready is how many deliveries wait for a handler. It is called with mu held.
func (s *linkSession) ready() int {
	return s.workers.count() + s.lanes.count() + s.isolation.count() + s.gate.count()
}

// unbegun removes what no handler has started, in the order in which it came. It is called with
// mu held.
func (s *linkSession) unbegun() (all []*delivery) {
	for d := s.workers.waiting.Pop(); d != nil; d = s.workers.waiting.Pop() {
		for ; d != nil; d = s.lanes.next(d) { // with those that wait for it
			all = append(all, d)
		}
	}
	for _, d := range s.gate.empty() {
		for ; d != nil; d = s.lanes.next(d) {
			all = append(all, d)
		}
	}
	all = append(all, s.lanes.empty()...)
	if s.returning {
		all = append(all, s.isolation.empty()...)
	}
	slices.SortFunc(all, func(a, b *delivery) int { return int(int32(a.id - b.id)) }) // serial numbers, which may wrap
	return all
}

// signalIdle has the drain look whether everything is settled.
func (s *linkSession) signalIdle() {
	select {
	case s.idle <- struct{}{}:
	default:
	}
}

// group is goroutines that may be started until finish is called.
type group struct {
	mu       sync.Mutex
	finished bool
	running  sync.WaitGroup
}

// start runs f on a goroutine, unless finish was called.
func (g *group) start(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.finished {
		g.running.Go(f)
	}
}

// finish returns when all have ended. No more are started.
func (g *group) finish() {
	g.mu.Lock()
	g.finished = true
	g.mu.Unlock()
	g.running.Wait()
}

func (s *linkSession) over() bool {
	select {
	case <-s.dead:
		return true
	default:
		return false
	}
}

func (s *linkSession) die(err error) {
	s.deadOnce.Do(func() {
		s.why = err
		close(s.dead)
		s.workers.stop()
		s.mu.Lock()
		s.gate.empty() // stops its timers
		s.mu.Unlock()
	})
}

// open counts the deliveries that are neither settled nor held for good.
func (s *linkSession) open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.window.unsettled + s.aside
}

// begun counts those of them that don't wait for a handler.
func (s *linkSession) begun() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.window.unsettled + s.aside - s.ready()
}

// prompt returns a ctx for what the link session asks the broker on the way. It ends with it,
// or when the drain begins, and after askLimit.
func (s *linkSession) prompt() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	go func() {
		defer cancel()
		select {
		case <-s.closing:
		case <-s.dead:
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// builtAddress is an address with what Build makes of it.
type builtAddress struct {
	of      address.Address
	encoded string
}
