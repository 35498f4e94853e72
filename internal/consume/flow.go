// Package consume carries deliveries from a link to their settlement:
//
//	link → window → isolation → lane → worker → handler → decision → settlement
//
// A Consumer keeps a link session for its queue, one after the other, as long as it runs (run.go).
// The caller's handler returns a decision; what a handler's error means is decided in package client.
package consume

import (
	"context"
	"errors"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/event"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/keys"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/publish"
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
	d := s.consumer.deps.Arrived(a.Msg, now)
	d.Message, d.id, d.received, d.link = a.Msg, a.ID, now, s
	if s.consumer.cfg.Ordered && !a.Unreadable {
		d.keyed()
	}
	var then wakes
	s.admit(d, a.Unreadable, &then)
	s.after(&then)
	if a.Unreadable {
		s.hold(d)
	}
}

// admit hands d to the workers, now or once nothing else is in its way: first the
// isolation's poison messages, then those before it in its lane.
func (s *linkSession) admit(d *Delivery, unreadable bool, then *wakes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	trip, estimate := s.window.received(d.received), s.consumer.estimate
	then.resize = trip > 0 && estimate != nil && estimate.measured(trip)
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
func (s *linkSession) revoked(d *Delivery) {
	now := time.Now()
	s.consumer.log.WarnContext(d.LogCtx(), "hopback: the broker revoked a delivery because it was held for longer than the consumer timeout", "message_id", publish.MessageID(d.Message), "held", now.Sub(d.received).Round(time.Millisecond))
	s.consumer.timeouts.learn(d.received, now)
	d.back.Store(true)
	d.End(ErrRevoked)
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
func (s *linkSession) nearTimeout(d *Delivery, last bool) {
	held := time.Since(d.received).Round(time.Millisecond)
	if !last {
		s.consumer.log.WarnContext(d.LogCtx(), "hopback: a handler has run for nearly as long as the consumer timeout; its ctx ends", "message_id", publish.MessageID(d.Message), "held", held)
		if d.ctx.deadline.IsZero() { // the timeout wasn't known when it began
			d.End(ErrTimeoutNear)
		}
		return
	}
	d.End(ErrTimeoutNear)
	if s.gated() {
		s.gate.stepBack() // with its link, the message returns in its order
		return
	}
	s.deciding.start(func() {
		keeps, _ := s.keepsDead()
		switch {
		case d.began.Load() == 0 || d.settling.Load() || s.over(): // the handler has returned
		case !keeps:
			s.consumer.log.ErrorContext(d.LogCtx(), "hopback: a handler ignores the end of its ctx, and the consumer timeout is nearly over; the broker will deliver the message again without counting a failure, because its queue isn't known to have a dead-letter exchange", "message_id", publish.MessageID(d.Message), "held", held)
		default:
			s.consumer.log.ErrorContext(d.LogCtx(), "hopback: a handler ignores the end of its ctx, and the consumer timeout is nearly over; its message returns to the queue as a failed delivery", "message_id", publish.MessageID(d.Message), "held", held)
			s.push(d, link.Disposition{Kind: link.DispositionModified, Failed: true})
		}
	})
}

// work is what a worker does with a delivery.
func (s *linkSession) work(d *Delivery) finished {
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
	resumed, paused := s.consumer.deps.Gate()
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

func (s *linkSession) handle(d *Delivery) (f finished) {
	defer d.End(nil) // frees what its ctx holds
	d.ctx.Context, d.ctx.delivery, d.ctx.deadline = d.Handled.Observe(s.handlerCtx), d, s.consumer.timeouts.deadline(d.received)
	began := time.Now()
	d.began.Store(began.UnixNano())
	d.Handled.Handle(&d.ctx)
	d.began.Store(0)
	took := max(time.Since(began), 1)
	f = s.decided(d, d.Handled.Decide())
	f.took = took
	return f
}

func (s *linkSession) parks() bool { return s.link.Claims() }

// exited is called by a worker that ends, since its handler has ended the goroutine.
func (s *linkSession) exited(d *Delivery) {
	f := s.decided(d, d.Handled.Decide())
	var then wakes
	s.mu.Lock()
	s.finish(f, &then)
	then.worker = s.workers.call()
	s.workers.replace()
	s.mu.Unlock()
	s.after(&then)
}

// decided is what follows from a decision. A forward is begun.
func (s *linkSession) decided(d *Delivery, r Decision) finished {
	if r.Kind == DecisionAgain && s.gated() {
		d.kept = r.Annotations
		return finished{delivery: d, again: true, after: r.Delay}
	}
	if disp, settle := s.outcome(d, r); settle {
		return s.finished(d, disp)
	}
	return finished{delivery: d}
}

// finished is a delivery that is to be settled, unless it is already.
func (s *linkSession) finished(d *Delivery, disp link.Disposition) finished {
	disp, ok := s.prepare(d, disp)
	return finished{delivery: d, settle: ok, d: disp}
}

// carryOut does what was decided, without waiting for the broker.
func (s *linkSession) carryOut(d *Delivery, r Decision) {
	if disp, settle := s.outcome(d, r); settle {
		s.push(d, disp)
	}
}

// outcome is how to settle d by a decision; false: it is forwarded first.
func (s *linkSession) outcome(d *Delivery, r Decision) (disp link.Disposition, settle bool) {
	switch r.Kind {
	case DecisionAccept:
		return link.Disposition{Kind: link.DispositionAccepted}, true
	case decisionRelease:
		return link.Disposition{Kind: link.DispositionReleased}, true
	case decisionForward:
		s.forward(d, r.To, r.Copy)
		return disp, false
	default:
		disp = link.Disposition{Kind: link.DispositionModified, Failed: r.Failed, Dead: r.DeadLetter}
		if len(r.Annotations) > 0 || r.Reason != "" || r.ErrorText != "" {
			disp.Annotations = annotations(r.Annotations, 3)
			if r.Reason != "" {
				disp.Annotations[annotation.Reason] = r.Reason
			}
			if r.ErrorText != "" {
				disp.Annotations[annotation.Error] = r.ErrorText
			}
		}
		_, timed := disp.Annotations[annotation.DeliveryTime]
		if (r.DeadLetter || r.Failed && !timed) && !s.old.DeliversPublishedAtOnce && timeToCome(d.Message) {
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

// forward hands the copy, which is valid, to the forwarder and accepts the original when
// the copy is confirmed.
func (s *linkSession) forward(d *Delivery, to address.Address, m *amqp.Message) {
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
	if followed := d.observed.Load(); followed != nil {
		sent = followed.Forwarding(to, m)
	}
	f := &forwarding{s: s, d: d, to: to, copy: m, Forward: publish.Forward{
		Target: built.encoded, Msg: sent, Patience: PatienceFor(s.consumer.cfg.ForwardPatience, d.failures()), Abandoned: s.dead,
	}}
	f.Original = f
	s.consumer.forwards.Send(&f.Forward)
}

// forwarding is a delivery that waits for its copy to be confirmed, with the forward
// of the copy, so that they are one allocation.
type forwarding struct {
	publish.Forward
	s *linkSession
	d *Delivery
	// to is where the copy goes.
	to   address.Address
	copy *amqp.Message
}

func (f *forwarding) Report(err error, again time.Duration) {
	f.s.consumer.log.WarnContext(f.d.LogCtx(), "hopback: a copy was not accepted; the original is kept, and its copy is tried again", "to", f.to.String(), "error", err, "again_in", again)
}

func (f *forwarding) SetAside(mayReturn bool) (aside, returned bool) {
	return f.s.setAside(f.d, publish.SizeOf(f.copy), mayReturn)
}

func (f *forwarding) Done(err error) {
	s := f.s
	f.d.observed.Load().Forwarded(err)
	switch {
	case err == nil:
		s.push(f.d, link.Disposition{Kind: link.DispositionAccepted})
	case errors.Is(err, failure.ErrTooLarge) || errors.As(err, new(*argument.Error)):
		s.unforwardable(f.d, f.to, err)
	default:
		s.deciding.start(func() { s.notForwarded(f.d, f.to, f.copy, err) })
	}
}

// PatienceFor doubles the patience with each failed delivery, up to an hour, so that a
// message that only waits for an address to come back doesn't use up the queue's
// delivery limit, and one that can never be forwarded does in the end.
func PatienceFor(patience time.Duration, failed uint32) time.Duration {
	for ; failed > 0 && patience < time.Hour/2; failed-- {
		patience *= 2
	}
	return patience
}

// notForwarded ends the patience for a copy. Never both are gone: the original goes
// back, as a failed delivery, so that the queue's delivery limit ends what can't be
// forwarded; or it is kept, where that would drop it.
func (s *linkSession) notForwarded(d *Delivery, to address.Address, m *amqp.Message, err error) {
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
		s.consumer.log.WarnContext(d.LogCtx(), "hopback: a forward failed; the original is kept, because the broker hasn't answered whether its queue has a dead-letter exchange, and its copy is tried again", "to", to.String(), "error", err, "unanswered", unknown)
		s.forward(d, to, m)
		return
	default:
		s.consumer.log.ErrorContext(d.LogCtx(), "hopback: a forward failed; the original is kept, because its queue isn't known to have a dead-letter exchange, and its copy is tried again", "to", to.String(), "error", err)
		s.forward(d, to, m)
		return
	}
	s.consumer.log.ErrorContext(d.LogCtx(), "hopback: a forward failed; the original returns to its queue", "to", to.String(), "error", err, "then", "as a failed delivery, which the queue's delivery limit sends to its dead-letter exchange")
	r := d.Handled.Unaccepted(err)
	if r.Refused != nil {
		s.consumer.log.ErrorContext(d.LogCtx(), "hopback: annotations were refused; the message returns to its queue without them", "message_id", publish.MessageID(d.Message), "error", r.Refused)
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
func (s *linkSession) unforwardable(d *Delivery, to address.Address, err error) {
	r := d.Handled.Unsendable(err)
	s.consumer.log.ErrorContext(d.LogCtx(), "hopback: a copy can't be sent; another outcome replaces the forward", "message_id", publish.MessageID(d.Message), "to", to.String(), "error", err, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	s.carryOut(d, r)
}

// push hands a settlement to the settling goroutine.
func (s *linkSession) push(d *Delivery, disp link.Disposition) {
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
func (s *linkSession) release(all []*Delivery) {
	for _, d := range all {
		s.push(d, d.unbegun())
	}
}

// prepare decides how d is settled. It returns false if that was decided before.
func (s *linkSession) prepare(d *Delivery, disp link.Disposition) (link.Disposition, bool) {
	if !d.settling.CompareAndSwap(false, true) {
		s.consumer.log.WarnContext(d.LogCtx(), "hopback: a delivery was handled after its consumer timeout; the broker delivers it again", "message_id", publish.MessageID(d.Message))
		s.consumer.event(event.StateEvent{Kind: event.EventLate, Err: ErrRevoked})
		return disp, false
	}
	if disp.Kind == link.DispositionModified {
		disp.Annotations = withKnownCount(d, disp)
	}
	if followed := d.observed.Load(); followed != nil {
		disp = settling(followed, disp)
	}
	return disp, true
}

func (s *linkSession) late(d *Delivery) {
	d.observed.Load().Settled(failure.ErrConnectionLost)
	s.consumer.log.WarnContext(d.LogCtx(), "hopback: a delivery was handled, but its link was lost; the broker delivers it again", "message_id", publish.MessageID(d.Message))
	s.consumer.event(event.StateEvent{Kind: event.EventLate, Err: failure.ErrConnectionLost})
}

// withKnownCount adds the delivery count that the message will have, so that the next consumer
// knows that all those failures were reported.
func withKnownCount(d *Delivery, disp link.Disposition) amqp.Annotations {
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
	// MaxAside and maxAsideBytes are how many deliveries may wait for their forwards
	// in addition to the window.
	MaxAside      = 4096
	maxAsideBytes = 64 << 20
)

// setAside takes a delivery whose forward has to wait out of the window, so that it blocks no
// other. When there is no room for more, the delivery returns to its queue, to be delivered
// later, if the queue supports that and the copy wasn't sent.
func (s *linkSession) setAside(d *Delivery, size int64, mayReturn bool) (aside, returned bool) {
	if s.gated() {
		return false, false // what a gated consumer holds is in its window: see Turn
	}
	var then wakes
	defer s.after(&then)
	s.mu.Lock()
	room := s.aside < MaxAside && s.asideBytes+size <= maxAsideBytes
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
		then.credit = s.window.due(false)
	}
	s.mu.Unlock()
	return aside, !aside && !room && mayReturn && s.returnLater(d)
}

// returnLater has a delivery go back to its queue, which isn't to deliver it soon. It
// counts as no failure. Where the broker would count it, or deliver it at once, or as long
// as the broker's time isn't known, the delivery isn't returned.
func (s *linkSession) returnLater(d *Delivery) bool {
	if s.old.CountsReturns || s.old.IgnoresDeliveryTime || s.consumer.returns.Ignored.Load() {
		return false
	}
	now, known := s.consumer.deps.Now()
	if !known {
		return false
	}
	s.consumer.returns.Any.Store(true)
	s.push(d, link.Disposition{Kind: link.DispositionModified, Annotations: amqp.Annotations{annotation.DeliveryTime: now.Add(ReturnFor).UnixMilli()}})
	return true
}

// settle writes settlements until finishSettling is called.
func (s *linkSession) settle(first settlement) {
	defer close(s.settler.exited)
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
		x, ok := <-s.settler.next
		if !ok {
			return
		}
		one[0] = x
		batch = one
	}
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
		x.delivery.observed.Load().Settled(nil)
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
	then.credit = s.window.due(more != nil)
	s.mu.Unlock()
	s.after(&then)
	return more, ended
}

// forget is called with mu held when d's settlement is written.
func (s *linkSession) forget(d *Delivery, then *wakes) {
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
	if e := s.consumer.estimate; e != nil {
		n = min(n, e.size())
	}
	if s.isolation.probing {
		n = min(n, 1)
	}
	s.window.limit = n
	s.paused.Store(limit == 0)
	if limit == 0 && !s.old.CountsReturns {
		then.back = s.unbegun()
	}
	then.credit = s.window.due(false)
	s.mu.Unlock()
	s.after(&then)
}

// hold processes a message that can't be decoded, so that no handler can handle it. It
// dead-letters the original bytes if the queue is known to have a dead-letter exchange. Without
// one, the queue would drop the message; so hold keeps it unsettled until the consumer stops.
func (s *linkSession) hold(d *Delivery) {
	s.holding.Go(func() {
		err := errors.New("the message has a char or a decimal, is nested too deeply, or isn't encoded well, so it can't be decoded")
		ctx, cancel := context.WithTimeout(context.Background(), askLimit)
		defer cancel()
		keeps, unknown := false, error(nil)
		if s.consumer.deps.DeadLetters != nil {
			keeps, unknown = s.consumer.deps.DeadLetters(ctx, s.consumer.queue)
		}
		if keeps {
			s.consumer.log.Error("hopback: a message can't be decoded; it is dead-lettered", "error", err)
			d.Handled.Observe(s.handlerCtx)
			s.carryOut(d, d.Handled.Undecodable(err))
			return
		}
		s.consumer.log.Error("hopback: a message can't be decoded, and its queue isn't known to have a dead-letter exchange; it is held until the consumer stops", "error", errors.Join(err, unknown))
		var then wakes
		s.mu.Lock()
		s.held = append(s.held, d)
		if len(s.held) <= s.consumer.cfg.Prefetch && !s.gated() { // leave room for messages that can be handled
			d.Message.Data = nil
			s.uncount(d, &then)
			then.credit = s.window.due(false)
		}
		s.mu.Unlock()
		s.after(&then)
	})
}
