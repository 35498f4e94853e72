// How a delivery goes from its link to its settlement:
//
//	link → window → isolation → lane → worker → handler → Resolution → settlement
//
// A consumer keeps a link session for its queue, one after the other, as long as it runs (consumer_run.go).
// What a handler's error means is decided in consumer_handle.go.

package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/keys"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/message"
)

// receive moves what arrives into the inbox. It never blocks on a handler, so it
// notices at once when the link ends.
func (s *linkSession) receive(ctx context.Context) {
	for {
		a, err := s.link.Receive(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.die(err)
				return
			}
			for a, ok := s.link.Prefetched(); ok; a, ok = s.link.Prefetched() {
				s.take(a)
			}
			return
		}
		s.take(a)
	}
}

func (s *linkSession) take(a link.Arrival) {
	now := time.Now()
	if s.sess.Exhaust() >= 1 {
		select {
		case s.exhausted <- struct{}{}:
		default:
		}
	}
	if s.consumer.returns.Notice(a.Msg, s.consumer.deps.Now) {
		s.consumer.log.Warn("hopback: the queue redelivers returned messages too early; deliveries whose copies wait are kept instead")
	}
	d := &delivery{consumer: s.consumer, id: a.ID, link: s, bytes: a.Kept}
	d.Delivery = Delivery{message: a.Msg, queue: s.consumer.queue, received: now, core: d}
	if s.consumer.order != nil && !a.Unreadable {
		d.keyed()
	}
	var then wakes
	s.admit(d, a.Unreadable, &then)
	s.after(&then)
	if a.Unreadable {
		s.hold(d, s.unreadable(a))
	}
}

var errUndecodable = errors.New("the message has a char or a decimal, is nested too deeply, or isn't encoded well, so it can't be decoded")

// unreadable is why no handler can get a message.
func (s *linkSession) unreadable(a link.Arrival) error {
	if a.Size > uint64(a.Kept) {
		return &failure.Error{Op: "consume", Target: s.consumer.queue, Kind: failure.ErrTooLarge, Text: fmt.Sprintf("the message has %d bytes, and Config.MaxMessageSize allows fewer", a.Size)}
	}
	return errUndecodable
}

// admit hands d to the workers, now or once nothing else is in its way: first the
// isolation's poison messages, then those before it in its lane.
func (s *linkSession) admit(d *delivery, unreadable bool, then *wakes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	trip := s.window.received(d.received)
	then.resize = trip > 0 && s.consumer.estimate.measured(trip)
	s.leases.begin(d)
	if unreadable {
		then.resize = s.isolation.pass(d) || then.resize
		return
	}
	now, changed := s.isolation.admit(d)
	then.resize = changed || then.resize
	if now != nil {
		s.line(now, then)
	}
}

// leaseEnded is called by the link when the broker has taken deliveries back, so it hands
// on to a goroutine.
func (s *linkSession) leaseEnded(first, last uint32) {
	s.mu.Lock()
	all := s.leases.revoked(first, last)
	s.mu.Unlock()
	if s.gated() {
		s.gate.stepBack()
		s.stopWorkers() // no later message of the key begins
	}
	if len(all) == 0 {
		go s.nudge() // the settlement and this have crossed
	}
	for _, d := range all {
		go s.revoked(d)
	}
}

// revoked is called when the broker has given d to another consumer, because it was held for
// longer than the queue's consumer timeout. The broker sends this link nothing more until the
// revoked delivery is settled and a flow has followed. So revoked settles it at once. The
// handler's result will be ignored; the handler learns that from its ctx.
func (s *linkSession) revoked(d *delivery) {
	now := time.Now()
	s.consumer.log.WarnContext(d.logCtx(), "hopback: the broker revoked a delivery because it was held for longer than the consumer timeout", "message_id", message.ID(d.message), "held", now.Sub(d.received).Round(time.Millisecond))
	s.consumer.timeouts.learn(d.received, now)
	d.back.Store(true)
	d.end(ErrConsumerTimeout)
	if d.settling.Load() {
		s.mu.Lock()
		written := d.settled
		s.mu.Unlock()
		// Otherwise forget does it. A flow before the settlement is in vain, and a drain then would
		// keep the one behind it from being sent.
		if written {
			s.nudge()
		}
		return
	}
	s.push(d, link.Disposition{Kind: link.DispositionReleased})
}

// askTimeout learns the queue's own consumer timeout.
func (s *linkSession) askTimeout() {
	k := s.consumer
	if s.old.LacksConsumerTimeout || k.cfg.ConsumerTimeout > 0 || k.deps.ConsumerTimeout == nil || k.timeoutAsked.Load() {
		return
	}
	s.deciding.start(func() {
		ctx, cancel := s.prompt()
		defer cancel()
		if limit, err := k.deps.ConsumerTimeout(ctx, k.queue); err == nil {
			k.timeouts.know(limit)
			k.timeoutAsked.Store(true)
		}
	})
}

// nearTimeout has a handler's failure count while it can: see timeouts.
func (s *linkSession) nearTimeout(d *delivery, last bool) {
	held := time.Since(d.received).Round(time.Millisecond)
	if !last {
		s.consumer.log.WarnContext(d.logCtx(), "hopback: a handler has run for nearly as long as the consumer timeout; its ctx ends", "message_id", message.ID(d.message), "held", held)
		if d.inner.deadline.IsZero() { // the timeout wasn't known when it began
			d.end(ErrConsumerTimeoutNear)
		}
		return
	}
	d.end(ErrConsumerTimeoutNear)
	if s.gated() {
		s.gate.stepBack() // with its link, the message returns in its order
		return
	}
	s.deciding.start(func() {
		keeps, _ := s.keepsDead()
		switch {
		case d.began.Load() == 0 || d.settling.Load() || s.over(): // the handler has returned
		case !keeps:
			s.consumer.log.ErrorContext(d.logCtx(), "hopback: a handler ignores the end of its ctx, and the consumer timeout is nearly over; the broker will deliver the message again without counting a failure, because its queue isn't known to have a dead-letter exchange", "message_id", message.ID(d.message), "held", held)
		default:
			s.consumer.log.ErrorContext(d.logCtx(), "hopback: a handler ignores the end of its ctx, and the consumer timeout is nearly over; its message returns to the queue as a failed delivery", "message_id", message.ID(d.message), "held", held)
			s.push(d, link.Disposition{Kind: link.DispositionModified, Failed: true})
		}
	})
}

// work is what a worker does with a delivery.
func (s *linkSession) work(d *delivery) finished {
	// What came in on a link that is over will be delivered again: handling it now makes
	// a duplicate.
	if s.over() || d.settling.Load() {
		return finished{delivery: d}
	}
	begin, release := s.mayBegin()
	switch {
	case begin:
		return s.handle(d)
	case release:
		return s.finished(d, link.Disposition{Kind: link.DispositionReleased})
	}
	return finished{delivery: d}
}

// mayBegin waits while the consumer is paused, or says that the delivery is to be released where
// that costs it nothing.
func (s *linkSession) mayBegin() (begin, release bool) {
	if !s.paused.Load() {
		return true, false
	}
	resumed, paused := s.consumer.follow.gate()
	if !paused {
		return true, false
	}
	if s.old.CountsReturns {
		if begin, lost := s.resumed(resumed); begin || lost {
			return begin, false
		}
	}
	return false, true
}

func (s *linkSession) handle(d *delivery) (f finished) {
	defer d.end(nil) // frees what its ctx holds
	d.inner.Context, d.inner.delivery, d.inner.deadline = d.observe(s.handlerCtx), d, s.consumer.timeouts.deadline(d.received)
	began := time.Now()
	d.began.Store(began.UnixNano())
	d.handle()
	d.began.Store(0)
	took := max(time.Since(began), 1)
	f = s.decided(d, d.decide())
	f.took = took
	return f
}

func (s *linkSession) parks() bool { return s.link.Claims() }

// exited is called by a worker that ends, since its handler has ended the goroutine.
func (s *linkSession) exited(d *delivery) {
	f := s.decided(d, d.decide())
	var then wakes
	s.mu.Lock()
	s.finish(f, &then)
	then.worker = s.workers.call()
	s.workers.replace()
	s.mu.Unlock()
	s.after(&then)
}

// decided begins to carry out r.
func (s *linkSession) decided(d *delivery, r Resolution) finished {
	if r.Kind == resolutionAgain && s.gated() {
		d.kept = r.Annotations
		return finished{delivery: d, again: true, after: r.delay}
	}
	if disp, settle := s.outcome(d, r); settle {
		return s.finished(d, disp)
	}
	return finished{delivery: d}
}

// finished is a delivery that is to be settled, unless it is already.
func (s *linkSession) finished(d *delivery, disp link.Disposition) finished {
	disp, ok := s.prepare(d, disp)
	return finished{delivery: d, settle: ok, d: disp}
}

// carryOut does what was decided, without waiting for the broker.
func (s *linkSession) carryOut(d *delivery, r Resolution) {
	if disp, settle := s.outcome(d, r); settle {
		s.push(d, disp)
	}
}

// outcome is how to settle d as r says; false: not yet, since a copy has to be confirmed or r is for later.
func (s *linkSession) outcome(d *delivery, r Resolution) (disp link.Disposition, settle bool) {
	switch r.Kind {
	case ResolutionAccept:
		return link.Disposition{Kind: link.DispositionAccepted}, true
	case ResolutionRelease:
		return link.Disposition{Kind: link.DispositionReleased}, true
	case ResolutionForward:
		s.forward(d, r.Forward.To, r.Forward.Message)
		return disp, false
	case resolutionLater:
		s.postpone(d, r.ready)
		return disp, false
	default:
		disp = link.Disposition{Kind: link.DispositionModified, Failed: r.Failed, Dead: r.DeadLetter}
		if len(r.Annotations) > 0 || r.Reason != "" || r.Error != "" {
			disp.Annotations = annotations(r.Annotations, 3)
			if r.Reason != "" {
				disp.Annotations[annotation.Reason] = string(r.Reason)
			}
			if r.Error != "" {
				disp.Annotations[annotation.Error] = r.Error
			}
		}
		_, timed := disp.Annotations[annotation.DeliveryTime]
		if (r.DeadLetter || r.Failed && !timed) && !s.old.DeliversPublishedAtOnce && timeToCome(d.message) {
			// It was claimed before its time, or published before the broker was upgraded to 4.4.
			// Otherwise the queue that it is dead-lettered to, now or at its delivery limit, would
			// hold it until then, and nobody would see it.
			if disp.Annotations == nil {
				disp.Annotations = amqp.Annotations{}
			}
			disp.Annotations[annotation.DeliveryTime] = int64(0)
		}
		return disp, true
	}
}

// timeToCome reports whether a message's delivery time is to come, or may be by the broker's clock.
// Another client may have written it in any of the types that RabbitMQ reads.
func timeToCome(m *amqp.Message) bool {
	passed := time.Now().Add(-clockSkew)
	switch at := m.Annotations[annotation.DeliveryTime].(type) {
	case int64:
		return at > passed.UnixMilli()
	case uint64:
		return at > uint64(passed.UnixMilli())
	case time.Time:
		return at.After(passed)
	}
	return false
}

// clockSkew is how much the clocks of the broker and of this host may differ.
const clockSkew = time.Minute

// postpone keeps d until it is known what becomes of it, outside of the window if there is room.
func (s *linkSession) postpone(d *delivery, ready <-chan struct{}) {
	if _, returned := s.setAside(d, sizeOf(d.message), true); returned {
		return
	}
	s.deciding.start(func() {
		select {
		case <-ready:
			s.carryOut(d, d.decide())
		case <-s.consumer.draining:
			s.push(d, link.Disposition{Kind: link.DispositionReleased})
		case <-s.dead:
		}
	})
}

// forward hands the copy, which is valid, to the forwarder and accepts the original when
// the copy is confirmed.
func (s *linkSession) forward(d *delivery, to address.Address, m *amqp.Message) {
	built := s.lastTarget.Load()
	if built == nil || built.of != to {
		encoded, err := to.Build()
		if err != nil {
			s.unforwardable(d, to, err)
			return
		}
		built = &builtAddress{to, encoded}
		s.lastTarget.Store(built)
	}
	sent := m
	if followed := d.watched.Load(); followed != nil {
		sent = followed.Forwarding(to, m)
	}
	f := &forwarding{s: s, d: d, to: to, copy: m, pendingForward: pendingForward{
		Target: built.encoded, Msg: sent, Patience: patienceFor(s.consumer.cfg.ForwardPatience, d.failures()), Abandoned: s.dead,
	}}
	f.forwardOriginal = f
	s.consumer.forwarder.Send(&f.pendingForward)
}

// forwarding is a delivery that waits for its copy to be confirmed, with the forward
// of the copy, so that they are one allocation.
type forwarding struct {
	pendingForward
	s *linkSession
	d *delivery
	// to is where the copy goes.
	to   address.Address
	copy *amqp.Message
}

func (f *forwarding) Report(err error, again time.Duration) {
	if errors.Is(err, failure.ErrUnauthorized) {
		// A permission for a topic is known to be missing only now.
		f.s.consumer.log.ErrorContext(f.d.logCtx(), "hopback: failed messages can't be retried, because the user may not publish retry copies; the original is kept, and its copy is tried again", "message_id", message.ID(f.d.message), "to", f.to.String(), "error", err, "again_in", again)
		return
	}
	level := slog.LevelWarn
	if link.EndedConnection(err) {
		level = slog.LevelDebug // as for the consumer's link
	}
	f.s.consumer.log.Log(f.d.logCtx(), level, "hopback: a copy was not accepted; the original is kept, and its copy is tried again", "message_id", message.ID(f.d.message), "to", f.to.String(), "error", err, "again_in", again)
}

func (f *forwarding) SetAside(mayReturn bool) (aside, returned bool) {
	return f.s.setAside(f.d, sizeOf(f.copy), mayReturn)
}

func (f *forwarding) Done(err error) {
	s := f.s
	f.d.watched.Load().Forwarded(err)
	switch {
	case err == nil:
		s.push(f.d, link.Disposition{Kind: link.DispositionAccepted})
	case errors.Is(err, failure.ErrTooLarge) || errors.As(err, new(*argument.Error)):
		s.unforwardable(f.d, f.to, err)
	default:
		s.deciding.start(func() { s.notForwarded(f.d, f.to, f.copy, err) })
	}
}

// patienceFor doubles the patience with each failed delivery, up to an hour, so that a
// message that only waits for an address to come back doesn't use up the queue's
// delivery limit, and one that can never be forwarded does in the end.
func patienceFor(patience time.Duration, failed uint32) time.Duration {
	for ; failed > 0 && patience < time.Hour/2; failed-- {
		patience *= 2
	}
	return patience
}

// notForwarded ends the patience for a copy. Never both are gone: the original goes
// back, as a failed delivery, so that the queue's delivery limit ends what can't be
// forwarded; or it is kept, where that would drop it.
func (s *linkSession) notForwarded(d *delivery, to address.Address, m *amqp.Message, err error) {
	keeps, unknown := s.keepsDead()
	switch {
	case keeps && !s.gated():
	case s.over():
		return
	case failure.IsClosed(s.closing):
		s.push(d, link.Disposition{Kind: link.DispositionReleased})
		return
	case s.gated():
		s.forward(d, to, m)
		return
	case unknown != nil:
		s.consumer.log.WarnContext(d.logCtx(), "hopback: a forward failed; the original is kept, because the broker hasn't answered whether its queue has a dead-letter exchange, and its copy is tried again", "message_id", message.ID(d.message), "to", to.String(), "error", err, "unanswered", unknown)
		s.forward(d, to, m)
		return
	default:
		s.consumer.log.ErrorContext(d.logCtx(), "hopback: a forward failed; the original is kept, because its queue isn't known to have a dead-letter exchange, and its copy is tried again", "message_id", message.ID(d.message), "to", to.String(), "error", err)
		s.forward(d, to, m)
		return
	}
	s.consumer.log.ErrorContext(d.logCtx(), "hopback: a forward failed; the original returns to its queue", "message_id", message.ID(d.message), "to", to.String(), "error", err, "then", "as a failed delivery, which the queue's delivery limit sends to its dead-letter exchange")
	r := d.unaccepted(err)
	if r.Refused != nil {
		s.consumer.log.ErrorContext(d.logCtx(), "hopback: annotations were refused; the message returns to its queue without them", "message_id", message.ID(d.message), "error", r.Refused)
	}
	s.carryOut(d, r)
}

// keepsDead says whether the queue certainly has a dead-letter exchange; an error says that
// the broker couldn't be asked. A queue's arguments don't change while a link to it lasts.
func (s *linkSession) keepsDead() (bool, error) {
	if s.keeps.Load() {
		return true, nil
	}
	if s.consumer.deps.DeadLetters == nil {
		return false, nil
	}
	ctx, cancel := s.prompt()
	defer cancel()
	keeps, err := s.consumer.deps.DeadLetters(ctx, s.consumer.queue)
	if keeps {
		s.keeps.Store(true)
	}
	return keeps, err
}

// unforwardable deals with an original whose copy can never be sent.
func (s *linkSession) unforwardable(d *delivery, to address.Address, err error) {
	r := d.unsendable(err)
	s.consumer.log.ErrorContext(d.logCtx(), "hopback: a copy can't be sent; another outcome replaces the forward", "message_id", message.ID(d.message), "to", to.String(), "error", err, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	s.carryOut(d, r)
}

// push hands a settlement to the settling goroutine.
func (s *linkSession) push(d *delivery, disp link.Disposition) {
	disp, ok := s.prepare(d, disp)
	if !ok {
		return
	}
	var then wakes
	s.mu.Lock()
	s.put(settlement{d, disp}, &then)
	if d.forwarding {
		d.forwarding = false
		if next := s.lanes.next(d); next != nil {
			s.enqueue(next, &then)
		}
	}
	s.mu.Unlock()
	s.after(&then)
}

// release has deliveries go back to the queue.
func (s *linkSession) release(all []*delivery) {
	for _, d := range all {
		s.push(d, d.unbegun(s.gated()))
	}
}

// prepare decides how d is settled. It returns false if that was decided before.
func (s *linkSession) prepare(d *delivery, disp link.Disposition) (link.Disposition, bool) {
	if !d.settling.CompareAndSwap(false, true) {
		s.consumer.log.WarnContext(d.logCtx(), "hopback: a delivery was handled after its consumer timeout; the broker delivers it again", "message_id", message.ID(d.message))
		s.consumer.event(Event{Kind: EventLate, Err: ErrConsumerTimeout})
		return disp, false
	}
	if disp.Kind == link.DispositionModified {
		disp.Annotations = withKnownCount(d, disp)
	}
	if followed := d.watched.Load(); followed != nil {
		disp = settling(followed, disp)
	}
	return disp, true
}

func (s *linkSession) late(d *delivery) {
	d.watched.Load().Settled(failure.ErrConnectionLost)
	s.consumer.log.WarnContext(d.logCtx(), "hopback: a delivery was handled, but its link was lost; the broker delivers it again", "message_id", message.ID(d.message))
	s.consumer.event(Event{Kind: EventLate, Err: failure.ErrConnectionLost})
}

// withKnownCount adds the delivery count that the message will have, so that the next consumer
// knows that all those failures were reported.
func withKnownCount(d *delivery, disp link.Disposition) amqp.Annotations {
	n := int64(d.failures())
	if disp.Failed {
		n++
	}
	if n == 0 {
		return disp.Annotations
	}
	a := disp.Annotations
	if a == nil {
		a = make(amqp.Annotations, 1)
	}
	a[annotation.KnownCount] = n
	return a
}

// annotations copies what a handler gave, with room for some more.
func annotations(given map[string]any, more int) amqp.Annotations {
	a := make(amqp.Annotations, len(given)+more)
	for k, v := range given {
		a[keys.Boxed(k)] = v
	}
	return a
}

const (
	// maxAside and maxAsideBytes are how many deliveries may wait for their forwards
	// in addition to the window.
	maxAside      = 4096
	maxAsideBytes = 64 << 20
)

// setAside takes a delivery whose forward has to wait out of the window, so that it blocks no
// other. When there is no room for more, the delivery returns to its queue, to be delivered
// later, if the queue supports that and the copy wasn't sent.
func (s *linkSession) setAside(d *delivery, size int64, mayReturn bool) (aside, returned bool) {
	if s.gated() {
		return false, false // what a gated consumer holds is in its window: see consumerTurn
	}
	var then wakes
	defer s.after(&then)
	s.mu.Lock()
	room := s.aside < maxAside && s.asideBytes+size <= maxAsideBytes
	switch {
	case d.settled: // the broker has taken it back
	case d.uncounted: // its copy has waited before
		aside = true
	case room:
		aside = true
		d.aside = size
		s.aside++
		s.asideBytes += size
		s.uncount(d, &then)
		s.checkCredit(false, &then)
	}
	s.mu.Unlock()
	return aside, !aside && !room && mayReturn && s.returnLater(d)
}

// returnLater has a delivery go back to its queue, which isn't to deliver it soon. It
// counts as no failure. Where the broker would count it, or deliver it at once, or as long
// as the broker's time isn't known, the delivery isn't returned.
func (s *linkSession) returnLater(d *delivery) bool {
	if s.old.CountsReturns || s.old.IgnoresDeliveryTime || s.consumer.returns.Ignored.Load() {
		return false
	}
	now, known := s.consumer.deps.Now()
	if !known {
		return false
	}
	s.consumer.returns.Any.Store(true)
	s.push(d, link.Disposition{Kind: link.DispositionModified, Annotations: amqp.Annotations{annotation.DeliveryTime: now.Add(returnFor).UnixMilli()}})
	return true
}

// settle writes settlements until finishSettling is called, or the link session rests.
func (s *linkSession) settle(first settlement) {
	restful := time.NewTimer(restAfter)
	defer restful.Stop()
	one := []settlement{first}
	for batch := one; batch != nil; {
		for i := range batch {
			s.write(&batch[i])
		}
		more, ended := s.written(batch)
		if more != nil || ended {
			batch = more
			continue
		}
		x, ok := s.nextSettlement(restful)
		if !ok {
			return
		}
		if x.delivery == nil {
			break
		}
		one[0] = x
		batch = one
	}
	close(s.settler.exited)
}

// nextSettlement waits for a settlement. It returns none if no others follow, and false if the settler
// has stopped until there is another.
func (s *linkSession) nextSettlement(restful *time.Timer) (x settlement, ok bool) {
	for {
		select {
		case x = <-s.settler.next:
			return x, true
		case <-restful.C:
			left := s.rest()
			if left == 0 {
				return x, false
			}
			restful.Reset(left)
		}
	}
}

// restAfter is how long nothing may have been delivered until an idle consumer stops the goroutines
// that it starts when it needs them.
const restAfter = 15 * time.Second

// rest stops the settler and the workers that are idle, if nothing is unsettled and nothing has been
// delivered for a while. Otherwise it returns when to look again.
func (s *linkSession) rest() (left time.Duration) {
	s.mu.Lock()
	t := &s.settler
	left = restAfter - time.Since(s.window.last)
	if !t.idle || t.finishing || left <= 0 && s.window.unsettled+s.aside > 0 {
		left = restAfter
	}
	if left > 0 {
		s.mu.Unlock()
		return left
	}
	t.started, t.idle = false, false
	t.backlog, t.spare = nil, nil
	if s.leases != nil && len(s.leases) == 0 {
		s.leases = leases{}
	}
	idle := s.workers.retire()
	s.mu.Unlock()
	for _, w := range idle {
		w.wake()
	}
	return 0
}

// write writes a settlement, or reports that it is too late for it. x has no delivery then.
func (s *linkSession) write(x *settlement) {
	var err error
	if s.over() {
		err = s.why
	} else {
		err = s.link.Settle(x.delivery.id, x.d)
	}
	if err == nil {
		x.delivery.watched.Load().Settled(nil)
		return
	}
	s.die(err)
	s.late(x.delivery)
	x.delivery = nil
}

// written notes that settlements were written, which gives the broker room for more. It
// returns those that follow; ended says that no others do.
func (s *linkSession) written(batch []settlement) (more []settlement, ended bool) {
	var then wakes
	s.mu.Lock()
	for _, x := range batch {
		if x.delivery != nil {
			s.forget(x.delivery, &then)
		}
	}
	t := &s.settler
	if len(t.backlog) > 0 {
		more = t.backlog
		clear(t.spare)
		t.backlog, t.spare = t.spare[:0], more
	} else {
		t.idle, ended = !t.finishing, t.finishing
	}
	s.checkCredit(more != nil, &then)
	s.mu.Unlock()
	s.after(&then)
	return more, ended
}

// forget is called with mu held when d's settlement is written.
func (s *linkSession) forget(d *delivery, then *wakes) {
	s.leases.end(d)
	if next := s.isolation.settled(d); next != nil {
		s.line(next, then)
	}
	then.nudge = then.nudge || d.back.Load()
	d.settled = true
	switch {
	case !d.uncounted:
		s.uncount(d, then)
	case d.aside > 0:
		s.asideBytes -= d.aside
		s.aside--
		then.idle = true
	}
}

// resize sets the window to the lowest of all that limits it.
func (s *linkSession) resize() {
	var then wakes
	s.mu.Lock()
	limit := s.consumer.allowed()
	n := min(limit, s.consumer.cfg.Prefetch)
	if s.gated() && !s.gate.serves {
		n = 0
	}
	n = min(n, s.consumer.estimate.size())
	if s.isolation.probing {
		n = min(n, 1)
	}
	s.window.limit = n
	s.paused.Store(limit == 0)
	if limit == 0 && !s.old.CountsReturns {
		then.back = s.unbegun()
	}
	s.checkCredit(false, &then)
	s.mu.Unlock()
	s.after(&then)
}

// hold processes a message that can't be decoded or is too large, so that no handler can handle it. It
// dead-letters the original bytes if the queue is known to have a dead-letter exchange. Without
// one, the queue would drop the message; so hold keeps it unsettled until the consumer stops. If the broker
// doesn't answer, as in an alarm, hold keeps it until it does.
func (s *linkSession) hold(d *delivery, err error) {
	s.holding.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), askLimit)
		defer cancel()
		keeps, unknown := false, error(nil)
		if s.consumer.deps.DeadLetters != nil {
			keeps, unknown = s.consumer.deps.DeadLetters(ctx, s.consumer.queue)
		}
		if keeps {
			s.consumer.log.Error("hopback: a message can't be decoded; it is dead-lettered", "message_id", message.ID(d.message), "error", err)
			d.observe(s.handlerCtx)
			s.carryOut(d, d.undecodable(err))
			return
		}
		if unknown != nil {
			s.consumer.log.Warn("hopback: a message can't be decoded, and the broker hasn't answered whether its queue has a dead-letter exchange; it is held until then", "message_id", message.ID(d.message), "error", errors.Join(err, unknown))
		} else {
			s.consumer.log.Error("hopback: a message can't be decoded, and its queue isn't known to have a dead-letter exchange; it is held until the consumer stops", "message_id", message.ID(d.message), "error", err)
		}
		var then wakes
		s.mu.Lock()
		s.held = append(s.held, heldMessage{d, err})
		ask := unknown != nil && !s.asking
		s.asking = s.asking || ask
		d.message.Data = nil
		then.release, d.bytes = d.bytes, 0
		if len(s.held) <= s.consumer.cfg.Prefetch && !s.gated() { // leave room for messages that can be handled
			s.uncount(d, &then)
			s.checkCredit(false, &then)
		}
		s.mu.Unlock()
		s.after(&then)
		if ask {
			s.deciding.start(func() { askForHeld(s) })
		}
	})
}

// heldMessage is a message that no handler can get, and why.
type heldMessage struct {
	*delivery
	err error
}

// askForHeld asks whether the queue has a dead-letter exchange until the broker answers, and dead-letters what is held
// if it has one.
func askForHeld(s *linkSession) {
	keeps, err := s.keepsDead()
	for pause := time.Second; err != nil; pause = min(2*pause, askLimit*4) {
		select {
		case <-time.After(pause):
			keeps, err = s.keepsDead()
		case <-s.closing:
			return
		case <-s.dead:
			return
		}
	}
	s.mu.Lock()
	s.asking = false
	all := s.held
	if keeps {
		s.held = nil
	}
	s.mu.Unlock()
	if !keeps {
		s.consumer.log.Error("hopback: a message can't be decoded, and its queue isn't known to have a dead-letter exchange; it is held until the consumer stops", "messages", len(all))
		return
	}
	for _, h := range all {
		s.consumer.log.Error("hopback: a message can't be decoded; it is dead-lettered", "message_id", message.ID(h.message), "error", h.err)
		h.observe(s.handlerCtx)
		s.carryOut(h.delivery, h.undecodable(h.err))
	}
}
