package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/message"
)

// results has handlers run, and carries out what they return: it settles a delivery at once, after its copy
// is confirmed, or when more is known. What a handler's error means is decided in consumer_delivery.go.
//
// Its methods run on many goroutines: the workers', the forwarder's, and its own in deciding and
// holding. They share only the atomic fields. What they change of a delivery, they change through
// deliveries, under its lock, which none of them holds while it calls a handler or asks the broker.
type results struct {
	consumer   *consumer
	deliveries *deliveries
	// handlerCtx is what handlers' ctxs derive from. run sets it before the first delivery.
	handlerCtx context.Context
	// hasDLX is set once the broker has confirmed that the queue has a dead-letter exchange. A queue's
	// arguments don't change while a link to it lasts.
	hasDLX atomic.Bool
	// lastTarget is where the last forward went to: mostly the next goes there, too.
	lastTarget atomic.Pointer[builtAddress]
	// holding are the goroutines of hold, which only the goroutine that receives starts. deciding are
	// all others that wait for something: the broker's answer, or a handler's later decision.
	holding  sync.WaitGroup
	deciding group
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

// prompt returns a ctx for what the link session asks the broker on the way. It ends with it,
// or when the drain begins, and after askLimit.
func (rs *results) prompt() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	go func() {
		defer cancel()
		select {
		case <-rs.deliveries.closing:
		case <-rs.deliveries.dead:
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// work is what a worker does with a delivery.
func (rs *results) work(d *delivery) finished {
	// What came in on a link that is over will be delivered again: handling it now makes
	// a duplicate.
	if rs.deliveries.over() || d.settling.Load() {
		return finished{delivery: d}
	}
	begin, release := rs.mayBegin(d, nil)
	switch {
	case begin:
		return rs.handle(d)
	case rs.consumer.gated():
		return finished{delivery: d, again: true}
	case release:
		return d.finished(link.Disposition{Kind: link.DispositionReleased})
	}
	return finished{delivery: d}
}

// mayBegin waits while the consumer is paused, or says that the delivery is to be released where
// that costs it nothing.
func (rs *results) mayBegin(d *delivery, canceled <-chan struct{}) (begin, release bool) {
	if rs.consumer.gated() {
		return rs.awaitGate(d, canceled), false
	}
	resumed, paused := rs.paused(d)
	if !paused {
		return true, false
	}
	if rs.deliveries.old.CountsReturns { // so it stays here, unless the consumer drains
		if begin, lost := rs.resumed(resumed, canceled); begin || lost {
			return begin, false
		}
	}
	return false, true
}

// paused reports whether the consumer's Control keeps d from its handler, and returns a channel that is closed when it is
// resumed.
func (rs *results) paused(d *delivery) (resumed <-chan struct{}, paused bool) {
	if rs.consumer.gated() {
		g := rs.consumer.gate
		resumed, paused = g.control.gate()
		return resumed, paused && !g.Handler.Unpausable(&d.Delivery)
	}
	if !rs.deliveries.paused.Load() {
		return nil, false
	}
	return rs.consumer.follow.gate()
}

// Paused implements inside.Pauses.
func (d *delivery) Paused() bool {
	_, paused := d.results.paused(d)
	return paused
}

// AwaitResume implements inside.Pauses.
func (d *delivery) AwaitResume(ctx context.Context) bool {
	begin, _ := d.results.mayBegin(d, ctx.Done())
	return begin
}

// resumed keeps a delivery until its consumer is resumed. It returns false if that drains, and lost if the link has ended,
// or the handler's ctx.
func (rs *results) resumed(resume, canceled <-chan struct{}) (begin, lost bool) {
	select {
	case <-resume:
		return true, false
	case <-rs.deliveries.dead:
		return false, true
	case <-canceled:
		return false, true
	case <-rs.deliveries.closing:
		return false, false
	}
}

func (rs *results) handle(d *delivery) (f finished) {
	defer d.end(nil) // frees what its ctx holds
	d.inner.Context, d.inner.delivery, d.inner.deadline = d.observe(rs.handlerCtx), d, rs.consumer.timeouts.deadline(d.received)
	began := time.Now()
	d.began.Store(began.UnixNano())
	d.handle()
	d.began.Store(0)
	took := max(time.Since(began), 1)
	f = rs.decided(d, d.decide())
	f.took = took
	return f
}

// exited is called by a worker that ends, since its handler has ended the goroutine.
func (rs *results) exited(d *delivery) {
	f := rs.decided(d, d.decide())
	var then followUps
	rs.deliveries.mu.Lock()
	rs.deliveries.finish(f, &then)
	then.worker = rs.deliveries.workers.call()
	rs.deliveries.workers.replace()
	rs.deliveries.mu.Unlock()
	rs.deliveries.followUp(&then)
}

// decided begins to carry out r.
func (rs *results) decided(d *delivery, r Resolution) finished {
	if r.Kind == resolutionAgain && rs.consumer.gated() {
		d.kept = r.Annotations
		return finished{delivery: d, again: true, after: r.delay}
	}
	if disp, settle := rs.outcome(d, r); settle {
		return d.finished(disp)
	}
	return finished{delivery: d}
}

// finished is a delivery that is to be settled, unless it is already.
func (d *delivery) finished(disp link.Disposition) finished {
	disp, ok := d.claimSettlement(disp)
	return finished{delivery: d, settle: ok, d: disp}
}

// carryOut does what was decided, without waiting for the broker.
func (rs *results) carryOut(d *delivery, r Resolution) {
	if disp, settle := rs.outcome(d, r); settle {
		rs.deliveries.settle(d, disp)
	}
}

// outcome is how to settle d as r says; false: not yet, since a copy has to be confirmed or r is for later.
func (rs *results) outcome(d *delivery, r Resolution) (disp link.Disposition, settle bool) {
	switch r.Kind {
	case ResolutionAccept:
		return link.Disposition{Kind: link.DispositionAccepted}, true
	case ResolutionRelease:
		return link.Disposition{Kind: link.DispositionReleased}, true
	case ResolutionForward:
		rs.forward(d, r.Forward.To, r.Forward.Message)
		return disp, false
	case resolutionLater:
		rs.postpone(d, r.ready)
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
		if (r.DeadLetter || r.Failed && !timed) && !rs.deliveries.old.DeliversPublishedAtOnce && timeToCome(d.message) {
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
func (rs *results) postpone(d *delivery, ready <-chan struct{}) {
	if _, returned := rs.setAside(d, sizeOf(d.message), true); returned {
		return
	}
	rs.deciding.start(func() {
		select {
		case <-ready:
			rs.carryOut(d, d.decide())
		case <-rs.consumer.draining:
			rs.deliveries.settle(d, link.Disposition{Kind: link.DispositionReleased})
		case <-rs.deliveries.dead:
		}
	})
}

// setAside takes a delivery that has to wait out of the window, so that it blocks no other. When there
// is no room for more, the delivery returns to its queue, to be delivered later, if the queue supports
// that and the copy wasn't sent.
func (rs *results) setAside(d *delivery, size int64, mayReturn bool) (aside, returned bool) {
	if rs.consumer.gated() {
		return false, false // what a gated consumer holds is in its window: see consumerTurn
	}
	aside, full := rs.deliveries.setAside(d, size)
	return aside, full && mayReturn && rs.returnLater(d)
}

// returnLater has a delivery go back to its queue, which isn't to deliver it soon. It
// counts as no failure. Where the broker would count it, or deliver it at once, or as long
// as the broker's time isn't known, the delivery isn't returned.
func (rs *results) returnLater(d *delivery) bool {
	if rs.deliveries.old.CountsReturns || rs.deliveries.old.IgnoresDeliveryTime || rs.consumer.returns.Ignored.Load() {
		return false
	}
	now, known := rs.consumer.deps.Now()
	if !known {
		return false
	}
	rs.consumer.returns.Any.Store(true)
	rs.deliveries.settle(d, link.Disposition{Kind: link.DispositionModified, Annotations: amqp.Annotations{annotation.DeliveryTime: now.Add(returnFor).UnixMilli()}})
	return true
}

// forward hands the copy, which is valid, to the forwarder and accepts the original when
// the copy is confirmed.
func (rs *results) forward(d *delivery, to address.Address, m *amqp.Message) {
	built := rs.lastTarget.Load()
	if built == nil || built.of != to {
		encoded, err := to.Build()
		if err != nil {
			rs.unforwardable(d, to, err)
			return
		}
		built = &builtAddress{to, encoded}
		rs.lastTarget.Store(built)
	}
	sent := m
	if followed := d.watched.Load(); followed != nil {
		sent = followed.Forwarding(to, m)
	}
	f := &forwarding{by: rs, d: d, to: to, copy: m, pendingForward: pendingForward{
		Target: built.encoded, Msg: sent, Patience: patienceFor(rs.consumer.cfg.ForwardPatience, d.failures()), Abandoned: rs.deliveries.dead,
	}}
	f.forwardOriginal = f
	rs.consumer.forwarder.Send(&f.pendingForward)
}

// builtAddress is an address with what Build makes of it.
type builtAddress struct {
	of      address.Address
	encoded string
}

// forwarding is a delivery that waits for its copy to be confirmed, with the forward
// of the copy, so that they are one allocation.
type forwarding struct {
	pendingForward
	by *results
	d  *delivery
	// to is where the copy goes.
	to   address.Address
	copy *amqp.Message
}

func (f *forwarding) Report(err error, again time.Duration) {
	if errors.Is(err, failure.ErrUnauthorized) {
		// A permission for a topic is known to be missing only now.
		f.by.consumer.log.ErrorContext(f.d.logCtx(), "hopback: failed messages can't be retried, because the user may not publish retry copies; the original is kept, and its copy is tried again", "message_id", message.ID(f.d.message), "to", f.to.String(), "error", err, "again_in", again)
		return
	}
	level := slog.LevelWarn
	if link.EndedConnection(err) {
		level = slog.LevelDebug // as for the consumer's link
	}
	f.by.consumer.log.Log(f.d.logCtx(), level, "hopback: a copy was not accepted; the original is kept, and its copy is tried again", "message_id", message.ID(f.d.message), "to", f.to.String(), "error", err, "again_in", again)
}

func (f *forwarding) SetAside(mayReturn bool) (aside, returned bool) {
	return f.by.setAside(f.d, sizeOf(f.copy), mayReturn)
}

func (f *forwarding) Done(err error) {
	f.d.watched.Load().Forwarded(err)
	switch {
	case err == nil:
		f.by.deliveries.settle(f.d, link.Disposition{Kind: link.DispositionAccepted})
	case errors.Is(err, failure.ErrTooLarge) || errors.As(err, new(*argument.Error)):
		f.by.unforwardable(f.d, f.to, err)
	default:
		f.by.deciding.start(func() { f.by.notForwarded(f.d, f.to, f.copy, err) })
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
func (rs *results) notForwarded(d *delivery, to address.Address, m *amqp.Message, err error) {
	keeps, unknown := rs.hasDeadLetterExchange()
	switch {
	case keeps && !rs.consumer.gated():
	case rs.deliveries.over():
		return
	case failure.IsClosed(rs.deliveries.closing):
		rs.deliveries.settle(d, link.Disposition{Kind: link.DispositionReleased})
		return
	case rs.consumer.gated():
		rs.forward(d, to, m)
		return
	case unknown != nil:
		rs.consumer.log.WarnContext(d.logCtx(), "hopback: a forward failed; the original is kept, because the broker hasn't answered whether its queue has a dead-letter exchange, and its copy is tried again", "message_id", message.ID(d.message), "to", to.String(), "error", err, "unanswered", unknown)
		rs.forward(d, to, m)
		return
	default:
		rs.consumer.log.ErrorContext(d.logCtx(), "hopback: a forward failed; the original is kept, because its queue isn't known to have a dead-letter exchange, and its copy is tried again", "message_id", message.ID(d.message), "to", to.String(), "error", err)
		rs.forward(d, to, m)
		return
	}
	rs.consumer.log.ErrorContext(d.logCtx(), "hopback: a forward failed; the original returns to its queue", "message_id", message.ID(d.message), "to", to.String(), "error", err, "then", "as a failed delivery, which the queue's delivery limit sends to its dead-letter exchange")
	r := d.unaccepted(err)
	if r.Refused != nil {
		rs.consumer.log.ErrorContext(d.logCtx(), "hopback: annotations were refused; the message returns to its queue without them", "message_id", message.ID(d.message), "error", r.Refused)
	}
	rs.carryOut(d, r)
}

// hasDeadLetterExchange reports whether the queue certainly has a dead-letter exchange. The error is
// that the broker couldn't be asked.
func (rs *results) hasDeadLetterExchange() (bool, error) {
	if rs.hasDLX.Load() {
		return true, nil
	}
	ctx, cancel := rs.prompt()
	defer cancel()
	keeps, err := rs.consumer.deps.Queues.deadLetters(ctx, rs.consumer.queue)
	if keeps {
		rs.hasDLX.Store(true)
	}
	return keeps, err
}

// unforwardable deals with an original whose copy can never be sent.
func (rs *results) unforwardable(d *delivery, to address.Address, err error) {
	r := d.unsendable(err)
	rs.consumer.log.ErrorContext(d.logCtx(), "hopback: a copy can't be sent; another outcome replaces the forward", "message_id", message.ID(d.message), "to", to.String(), "error", err, "instead", r.Kind, "dead_lettered", r.DeadLetter)
	rs.carryOut(d, r)
}

// claimSettlement returns how d is settled, and makes sure that it is settled once: it returns false if
// that was decided before.
func (d *delivery) claimSettlement(disp link.Disposition) (link.Disposition, bool) {
	if !d.settling.CompareAndSwap(false, true) {
		d.consumer.log.WarnContext(d.logCtx(), "hopback: a delivery was handled after its consumer timeout; the broker delivers it again", "message_id", message.ID(d.message))
		d.consumer.event(Event{Kind: EventLate, Err: ErrConsumerTimeout})
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

// linkLost reports that d was handled, and that its link ended before its settlement was written.
func (d *delivery) linkLost() {
	d.watched.Load().Settled(failure.ErrConnectionLost)
	d.consumer.log.WarnContext(d.logCtx(), "hopback: a delivery was handled, but its link was lost; the broker delivers it again", "message_id", message.ID(d.message))
	d.consumer.event(Event{Kind: EventLate, Err: failure.ErrConnectionLost})
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
		a[message.BoxedKey(k)] = v
	}
	return a
}

// settling returns the disposition with what the Instrument adds to it.
func settling(o *observedDelivery, d link.Disposition) link.Disposition {
	s := instrument.Settlement{Kind: instrument.SettlementAccepted, Failed: d.Failed, DeadLetter: d.Dead}
	switch d.Kind {
	case link.DispositionReleased:
		s.Kind = instrument.SettlementReleased
	case link.DispositionModified:
		s.Kind = instrument.SettlementModified
		s.Reason, _ = d.Annotations[annotation.Reason].(string)
	}
	added := o.Settling(s)
	if len(added) == 0 {
		return d
	}
	maps.Copy(added, d.Annotations) // what decides about the message wins
	d.Annotations = added
	return d
}

var errUndecodable = errors.New("the message has a char or a decimal, is nested too deeply, or isn't encoded well, so it can't be decoded")

// unreadable is why no handler can get a message.
func (rs *results) unreadable(a link.Arrival) error {
	if a.Size > uint64(a.Kept) {
		return &failure.Error{Op: "consume", Target: rs.consumer.queue, Kind: failure.ErrTooLarge, Text: fmt.Sprintf("the message has %d bytes, and Config.MaxMessageSize allows fewer", a.Size)}
	}
	return errUndecodable
}

// hold processes a message that can't be decoded or is too large, so that no handler can handle it. It
// dead-letters the original bytes if the queue is known to have a dead-letter exchange. Without
// one, the queue would drop the message; so hold keeps it unsettled until the consumer stops, or until the broker
// revokes it after the consumer timeout and delivers it again. If the broker doesn't answer, as in an alarm, hold
// keeps it until it does.
func (rs *results) hold(d *delivery, a link.Arrival) {
	err := rs.unreadable(a)
	rs.holding.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), askLimit)
		defer cancel()
		keeps, unknown := rs.consumer.deps.Queues.deadLetters(ctx, rs.consumer.queue)
		switch {
		case keeps:
			rs.deadLetterUnreadable(unreadable{d, err})
			return
		case unknown != nil:
			rs.consumer.log.Warn("hopback: a message can't be decoded, and the broker hasn't answered whether its queue has a dead-letter exchange; it is held until then", "message_id", message.ID(d.message), "error", errors.Join(err, unknown))
		default:
			rs.consumer.log.Error("hopback: a message can't be decoded, and its queue isn't known to have a dead-letter exchange; it is held until the consumer stops", "message_id", message.ID(d.message), "error", err)
		}
		if rs.deliveries.keepUnreadable(d, err, unknown != nil) {
			rs.deciding.start(rs.askForUnreadable)
		}
	})
}

func (rs *results) deadLetterUnreadable(u unreadable) {
	rs.consumer.log.Error("hopback: a message can't be decoded; it is dead-lettered", "message_id", message.ID(u.message), "error", u.err)
	u.observe(rs.handlerCtx)
	rs.carryOut(u.delivery, u.undecodable(u.err))
}

// askForUnreadable asks whether the queue has a dead-letter exchange until the broker answers, and dead-letters what is
// kept if it has one.
func (rs *results) askForUnreadable() {
	keeps, err := rs.hasDeadLetterExchange()
	for pause := time.Second; err != nil; pause = min(2*pause, askLimit*4) {
		select {
		case <-time.After(pause):
			keeps, err = rs.hasDeadLetterExchange()
		case <-rs.deliveries.closing:
			return
		case <-rs.deliveries.dead:
			return
		}
	}
	n := rs.deliveries.answered()
	if !keeps {
		rs.consumer.log.Error("hopback: a message can't be decoded, and its queue isn't known to have a dead-letter exchange; it is held until the consumer stops", "messages", n)
		return
	}
	for _, u := range rs.deliveries.takeUnreadable() {
		rs.deadLetterUnreadable(u)
	}
}

// requeueUnreadable returns what hold has kept to the queue. It is called by the drain, and before the
// session is replaced.
func (rs *results) requeueUnreadable() {
	rs.holding.Wait()
	var kept []*delivery
	for _, u := range rs.deliveries.takeUnreadable() {
		kept = append(kept, u.delivery)
	}
	rs.deliveries.release(kept)
}
