package client

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/failure"
	perkey "github.com/hopback/hopback/internal/lanes"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

// deliveries are those that came on one link and aren't settled, and where each of them is:
//
//	admit ──▶ isolation ──▶ lane ──▶ workers ──finish──▶ settler ──▶ forget
//	                                    └──▶ results.forward ──settle──┘
//
// The parts have one lock, since a delivery passes several of them at a time: mu guards their state,
// also that of workers, settler, and credit. A delivery takes it four times, or three while others are
// in flight: as it comes (admit), as a worker that was idle takes it (workers.next), as the worker is
// done with it and takes the next (workers.next), and after its settlement is written (settler.written,
// for all settlements that were written together).
//
// Locks are taken in the order Control, forwarder, credit.flow, mu, consumer.mu. No handler, hook,
// link, or logger is called with mu held: what follows from a change is noted in a followUps, and done
// by followUp. The link is called with flow held, and takes the engine's lock, which the engine never
// holds when it calls back.
type deliveries struct {
	consumer *consumer
	link     link.ReceiverLink
	old      oldbroker.Quirks // of the broker
	workers  *workers
	credit   credit
	settler  settler
	// dead is closed when the link is gone: nothing can be settled any more. why is set before.
	dead     chan struct{}
	deadOnce sync.Once
	why      error
	// closing is closed when workers are to take no more deliveries.
	closing     chan struct{}
	closingOnce sync.Once
	// idle is signaled when the window counts nothing unsettled any more.
	idle   chan struct{}
	paused atomic.Bool // the user allows no deliveries

	mu        sync.Mutex
	leases    leases // nil where the broker takes no delivery back
	isolation isolation
	lanes     lanes
	gate      gate
	// aside counts the deliveries whose forwards wait, and that the window doesn't count
	// any more; asideBytes is how large their copies are.
	aside      int
	asideBytes int64
	unreadable []unreadable // kept until the drain
	asking     bool         // whether their queue has a dead-letter exchange
	returning  bool         // what no handler has begun goes back to the queue as it closes
}

// newDeliveries returns those of a link that is still to be attached.
func newDeliveries(k *consumer, old oldbroker.Quirks) *deliveries {
	ds := &deliveries{
		consumer: k, old: old,
		dead: make(chan struct{}), closing: make(chan struct{}), idle: make(chan struct{}, 1),
		isolation: isolation{off: k.cfg.NoIsolation},
	}
	if !old.LacksConsumerTimeout {
		ds.leases = leases{}
	}
	ds.credit = credit{of: ds, window: window{workers: k.cfg.Concurrency, pace: k.estimate}}
	ds.settler = settler{of: ds, next: make(chan settlement, 1), exited: make(chan struct{})}
	return ds
}

// followUps are what is to be done after mu is unlocked.
type followUps struct {
	worker                      *worker     // to be woken
	settle                      settlement  // for the settler, which is idle
	late                        *delivery   // its link was lost
	back                        []*delivery // to be requeued
	release                     int         // bytes that aren't held any more
	gather                      time.Duration
	idle, resize, credit, nudge bool
}

// followUp does what is noted.
func (ds *deliveries) followUp(then *followUps) {
	then.worker.wake()
	if then.settle.delivery != nil {
		ds.settler.next <- then.settle
	}
	if then.late != nil {
		then.late.linkLost()
	}
	ds.release(then.back)
	if then.release > 0 {
		ds.link.Release(then.release)
	}
	if then.idle {
		ds.signalIdle()
	}
	switch {
	case then.resize:
		ds.resize()
	case then.credit:
		ds.credit.grant()
	}
	if then.gather > 0 {
		ds.credit.grantAfter(then.gather)
	}
	if then.nudge {
		ds.credit.nudge()
	}
}

// admit hands d to the workers, now or once nothing else is in its way: first the
// isolation's poison messages, then those before it in its lane.
func (ds *deliveries) admit(d *delivery, unreadable bool, then *followUps) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	trip := ds.credit.window.received(d.received)
	then.resize = trip > 0 && ds.consumer.estimate.measured(trip)
	ds.leases.begin(d)
	if unreadable {
		then.resize = ds.isolation.pass(d) || then.resize
		return
	}
	now, changed := ds.isolation.admit(d)
	then.resize = changed || then.resize
	if now != nil {
		ds.line(now, then)
	}
}

// line hands d to the workers, now or when those before it in its lane are handled. It is
// called with mu held.
func (ds *deliveries) line(d *delivery, then *followUps) {
	if ds.lanes.admit(d) {
		ds.enqueue(d, then)
	}
}

// enqueue hands d to the workers. It is called with mu held.
func (ds *deliveries) enqueue(d *delivery, then *followUps) {
	if w := ds.workers.put(d); w != nil {
		then.worker = w
	}
	ds.noteClosing(then)
}

// finish notes what a worker has done, and enqueues those that wait for it. It is called with mu
// held by one that takes the next delivery then.
func (ds *deliveries) finish(f finished, then *followUps) {
	if f.delivery == nil {
		return
	}
	if f.settle {
		ds.settler.queue(settlement{f.delivery, f.d}, then)
	}
	if f.took > 0 && !ds.over() && ds.consumer.estimate.handled(f.took) {
		then.resize = true
	}
	switch {
	case f.again:
		ds.gate.keep(ds, f.delivery, f.after)
		ds.noteClosing(then)
	case ds.consumer.gated() && !f.settle && !f.delivery.settling.Load() && !ds.over():
		f.delivery.forwarding = true // its lane waits for the copy: see settle
	default:
		ds.leaveLane(f.delivery, then)
	}
}

// leaveLane lets the next in d's lane continue. It is called with mu held by one that takes the
// next delivery then.
func (ds *deliveries) leaveLane(d *delivery, then *followUps) {
	if next := ds.lanes.next(d); next != nil {
		ds.workers.waiting.Push(next)
		ds.noteClosing(then)
	}
}

// settle has d settled by the settler, unless it is already.
func (ds *deliveries) settle(d *delivery, disp link.Disposition) {
	disp, ok := d.claimSettlement(disp)
	if !ok {
		return
	}
	var then followUps
	ds.mu.Lock()
	ds.settler.queue(settlement{d, disp}, &then)
	if d.forwarding {
		d.forwarding = false
		if next := ds.lanes.next(d); next != nil {
			ds.enqueue(next, &then)
		}
	}
	ds.mu.Unlock()
	ds.followUp(&then)
}

// release has deliveries go back to the queue.
func (ds *deliveries) release(all []*delivery) {
	for _, d := range all {
		ds.settle(d, d.unbegun(ds.consumer.gated()))
	}
}

// forget is called with mu held when d's settlement is written.
func (ds *deliveries) forget(d *delivery, then *followUps) {
	ds.leases.end(d)
	ds.gate.settled(d)
	if next := ds.isolation.settled(d); next != nil {
		ds.line(next, then)
	}
	if len(ds.unreadable) > 0 { // the broker has revoked d, and delivers its message again
		ds.unreadable = slices.DeleteFunc(ds.unreadable, func(u unreadable) bool { return u.delivery == d })
	}
	then.nudge = then.nudge || d.back.Load()
	d.settled = true
	switch {
	case !d.uncounted:
		ds.uncount(d, then)
	case d.aside > 0:
		ds.asideBytes -= d.aside
		ds.aside--
		then.idle = true
	}
}

// uncount notes that a delivery isn't the window's any more. It is called with mu held.
func (ds *deliveries) uncount(d *delivery, then *followUps) {
	d.uncounted = true
	ds.credit.window.unsettled--
	then.release += d.bytes
	d.bytes = 0
	if ds.credit.window.unsettled == 0 || failure.IsClosed(ds.closing) {
		then.idle = true
	}
}

// setAside takes a delivery out of the window. full says that there is no room for that.
func (ds *deliveries) setAside(d *delivery, size int64) (aside, full bool) {
	var then followUps
	defer ds.followUp(&then)
	ds.mu.Lock()
	room := ds.aside < maxAside && ds.asideBytes+size <= maxAsideBytes
	switch {
	case d.settled: // the broker has taken it back
	case d.uncounted: // its copy has waited before
		aside = true
	case room:
		aside = true
		d.aside = size
		ds.aside++
		ds.asideBytes += size
		ds.uncount(d, &then)
		ds.credit.check(false, &then)
	}
	ds.mu.Unlock()
	return aside, !aside && !room
}

const (
	// maxAside and maxAsideBytes are how many deliveries may wait for their forwards
	// in addition to the window.
	maxAside      = 4096
	maxAsideBytes = 64 << 20
)

// unreadable is a delivery that no handler can get, and why.
type unreadable struct {
	*delivery
	err error
}

// keepUnreadable keeps a delivery that no handler can get until takeUnreadable is called. unknown says that it isn't
// known whether its queue has a dead-letter exchange. It reports whether the caller has to find out.
func (ds *deliveries) keepUnreadable(d *delivery, err error, unknown bool) (ask bool) {
	var then followUps
	ds.mu.Lock()
	if d.settled { // the broker has revoked it
		ds.mu.Unlock()
		return false
	}
	ds.unreadable = append(ds.unreadable, unreadable{d, err})
	ask = unknown && !ds.asking
	ds.asking = ds.asking || ask
	d.message.Data = nil
	then.release, d.bytes = d.bytes, 0
	if len(ds.unreadable) <= ds.consumer.cfg.Prefetch && !ds.consumer.gated() { // leave room for messages that can be handled
		ds.uncount(d, &then)
		ds.credit.check(false, &then)
	}
	ds.mu.Unlock()
	ds.followUp(&then)
	return ask
}

func (ds *deliveries) takeUnreadable() []unreadable {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	kept := ds.unreadable
	ds.unreadable = nil
	return kept
}

// answered ends the question whether the queue has a dead-letter exchange, and returns how many deliveries are kept.
func (ds *deliveries) answered() int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.asking = false
	return len(ds.unreadable)
}

// resize sets the window to the lowest of all that limits it.
func (ds *deliveries) resize() {
	var then followUps
	ds.mu.Lock()
	limit := ds.consumer.allowed()
	n := min(limit, ds.consumer.cfg.Prefetch)
	if ds.consumer.gated() && !ds.gate.serves {
		n = 0
	}
	n = min(n, ds.consumer.estimate.size())
	if ds.isolation.probing {
		n = min(n, 1)
	}
	ds.credit.window.limit = n
	ds.paused.Store(limit == 0)
	if limit == 0 && !ds.old.CountsReturns {
		then.back = ds.unbegun()
	}
	ds.credit.check(false, &then)
	ds.mu.Unlock()
	ds.followUp(&then)
}

// noteClosing makes the drain check again: a delivery's turn came after the last check.
func (ds *deliveries) noteClosing(then *followUps) {
	if failure.IsClosed(ds.closing) {
		if ds.returning {
			then.back = append(then.back, ds.unbegun()...)
		}
		then.idle = true
	}
}

// close has workers take no more deliveries.
func (ds *deliveries) close() {
	ds.closingOnce.Do(func() { close(ds.closing) })
	ds.workers.stop()
}

// returnUnbegun has everything go back that no handler has begun.
func (ds *deliveries) returnUnbegun() {
	ds.mu.Lock()
	ds.returning = true
	all := ds.unbegun()
	ds.mu.Unlock()
	ds.release(all)
}

// unbegun removes what no handler has started, in the order in which it came. It is called with
// mu held.
func (ds *deliveries) unbegun() (all []*delivery) {
	for d := ds.workers.waiting.Pop(); d != nil; d = ds.workers.waiting.Pop() {
		for ; d != nil; d = ds.lanes.next(d) { // with those that wait for it
			all = append(all, d)
		}
	}
	for _, d := range ds.gate.empty() {
		for ; d != nil; d = ds.lanes.next(d) {
			all = append(all, d)
		}
	}
	all = append(all, ds.lanes.empty()...)
	if ds.returning {
		all = append(all, ds.isolation.empty()...)
	}
	slices.SortFunc(all, func(a, b *delivery) int { return int(int32(a.id - b.id)) }) // serial numbers, which may wrap
	return all
}

// signalIdle has the drain look whether everything is settled.
func (ds *deliveries) signalIdle() {
	select {
	case ds.idle <- struct{}{}:
	default:
	}
}

// ready is how many deliveries wait for a handler. It is called with mu held.
func (ds *deliveries) ready() int {
	return ds.workers.count() + ds.lanes.count() + ds.isolation.count() + ds.gate.count()
}

// open counts the deliveries that are neither settled nor held for good.
func (ds *deliveries) open() int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return ds.credit.window.unsettled + ds.aside
}

// begun counts those of them that don't wait for a handler.
func (ds *deliveries) begun() int {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return ds.credit.window.unsettled + ds.aside - ds.ready()
}

// count adds the link session's numbers.
func (ds *deliveries) count(c *instrument.ConsumerStats) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.credit.window.count(c)
	c.Unsettled += ds.aside
	c.Ready = ds.ready()
	c.Owner = ds.consumer.gated() && ds.gate.serves
}

// over reports whether the link is gone.
func (ds *deliveries) over() bool { return failure.IsClosed(ds.dead) }

// die notes why the link is gone. The first call counts.
func (ds *deliveries) die(err error) {
	ds.deadOnce.Do(func() {
		ds.why = err
		close(ds.dead)
		ds.workers.stop()
		ds.mu.Lock()
		ds.gate.empty() // stops its timers
		ds.mu.Unlock()
	})
}

// lanes hands over deliveries of one key one at a time, in the order in which the
// broker has delivered them, and others at once. Those that wait are here and not
// with a worker, so that a busy key takes one slot only. There are never more of
// them than Prefetch. deliveries.mu guards it.
type lanes struct {
	byName perkey.Lanes[string, *delivery]
}

// admit says whether to hand d on now. Otherwise next returns it later.
func (l *lanes) admit(d *delivery) (now bool) {
	if d.key == nil {
		return true
	}
	if !l.byName.Claim(*d.key) {
		l.byName.Wait(*d.key, d, nil)
		return false
	}
	d.lane = d.key
	return true
}

// keyed notes d's key.
func (d *delivery) keyed() {
	if key, ok := d.laneKey(); ok {
		d.key = &key
	}
}

// next is called when no handler will be called for d any more. It returns the delivery to hand on instead, or none. Calling it more than once does no harm.
func (l *lanes) next(d *delivery) (now *delivery) {
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
func (l *lanes) empty() []*delivery { return l.byName.Empty() }

// count is how many wait.
func (l *lanes) count() (n int) {
	l.byName.Waiting(func(queue []*delivery) { n += countUnsettled(queue) })
	return n
}
