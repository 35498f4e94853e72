package client

import (
	"context"
	"errors"
	"runtime/debug"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/argument"
)

// deliveryLink is what a delivery came in on.
type deliveryLink interface{ over() bool }

type settlement struct {
	delivery *Delivery
	d        disposition
}

// receive moves what arrives into the inbox. It never blocks on a handler, so it
// notices at once when the link ends.
func (s *stint) receive(ctx context.Context) {
	for {
		m, err := s.link.receive(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.die(err)
				return
			}
			for m := s.link.prefetched(); m != nil; m = s.link.prefetched() {
				s.take(m)
			}
			return
		}
		s.take(m)
	}
}

func (s *stint) take(m *Message) {
	s.window.received()
	if s.sess.wear() >= 1 {
		select {
		case s.worn <- struct{}{}:
		default:
		}
	}
	d := &Delivery{message: m, queue: s.queue, received: time.Now(), link: s}
	s.leases.begin(d)
	if undecodable(m) {
		s.hold(d)
		return
	}
	s.quarantine.admit(d)
}

// takenBack is told that the broker has given d to somebody else, since it was
// held for longer than the queue's consumer timeout. The broker gives this link
// nothing more until the stale delivery is settled, so that is done at once; what
// the handler decides on it comes to nothing, and the handler is told by its ctx.
func (s *stint) takenBack(d *Delivery) {
	s.log.Warn("hopback: the broker took a delivery back: it was held for longer than the consumer timeout", "message_id", messageID(d.message), "held", time.Since(d.received).Round(time.Millisecond))
	d.end(ErrTakenBack)
	s.push(d, disposition{kind: released})
}

func (s *stint) enqueue(d *Delivery) {
	select {
	case s.inbox <- d:
	case <-s.dead:
	}
	if isClosed(s.closing) {
		s.giveBack() // a suspect whose turn came after the drain had looked
	}
}

// work runs handlers, one at a time, until the stint ends.
func (s *stint) work(ctx context.Context) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-s.dead:
		return
	case <-s.closing:
		return
	}
	for !isClosed(s.closing) {
		var d *Delivery
		select {
		case d = <-s.inbox: // what is mostly so, and cheaper to ask for by itself
		default:
			select {
			case d = <-s.inbox:
			case <-s.dead:
				return
			case <-s.closing:
				return
			}
		}
		if s.over() {
			return // it will be delivered again: handling it now makes a duplicate
		}
		if !d.settling.Load() && s.mayBegin(d) {
			s.handle(ctx, d)
		} else {
			s.lanes.next(d)
		}
	}
}

// mayBegin waits while the consumer is paused, or gives d back where that costs it
// nothing.
func (s *stint) mayBegin(d *Delivery) bool {
	resumed, paused := s.control.gate()
	if !paused {
		return true
	}
	if s.counts {
		select {
		case <-resumed:
			return true
		case <-s.dead:
			return false
		case <-s.closing:
		}
	}
	s.push(d, disposition{kind: released})
	return false
}

func (s *stint) handle(ctx context.Context, d *Delivery) {
	defer s.lanes.next(d)
	defer d.end(nil) // frees what its ctx holds
	d.ctx.Context, d.ctx.delivery = ctx, d
	if s.appetite == nil {
		s.carryOut(d, s.call(&d.ctx, d))
		return
	}
	began := time.Now()
	err := s.call(&d.ctx, d)
	if s.appetite.handled(time.Since(began)) {
		s.resize()
	}
	s.carryOut(d, err)
}

// call runs the handler and turns whatever it does into an error.
func (s *stint) call(ctx context.Context, d *Delivery) (err error) {
	returned := false
	defer func() {
		if returned {
			return
		}
		// A panic, or runtime.Goexit: recover gives nil for that, and the
		// goroutine ends whatever is done here.
		p := &PanicError{Value: recover(), Stack: debug.Stack()}
		err = DeadLetter{Reason: ReasonPanicked, Err: p}
		if p.Value == nil {
			if d.lastWord != nil {
				err = d.lastWord
			}
			s.carryOut(d, err)
			s.workers.Go(func() { s.work(s.handlerCtx) })
		}
	}()
	err = s.handler.Handle(ctx, d)
	returned = true
	return err
}

// carryOut does what the outcome says, without waiting for the broker.
func (s *stint) carryOut(d *Delivery, err error) {
	switch o := OutcomeOf(err).(type) {
	case nil:
		s.push(d, disposition{kind: accepted})
	case Requeue:
		if o.Failed {
			s.push(d, disposition{kind: modified, failed: true})
		} else {
			s.push(d, disposition{kind: released})
		}
	case DeadLetter:
		if _, panicked := errors.AsType[*PanicError](o.Err); !panicked { // which tells more
			text := ""
			if o.Err != nil {
				text = ErrorText(o.Err)
			}
			s.log.Warn("hopback: a message is dead-lettered", "message_id", messageID(d.message), "reason", clip(string(o.Reason), 255), "error", text)
		}
		s.deadLetter(d, o)
	case Modify:
		if err := checkModified(o.Annotations); err != nil {
			s.log.Error("hopback: annotations refused, the message is requeued", "error", err)
			s.push(d, disposition{kind: modified, failed: true})
			return
		}
		s.push(d, disposition{kind: modified, failed: o.Failed, dead: o.DeadLetter, annotations: annotations(o.Annotations, 1)})
	case Forward:
		s.forward(d, o)
	default: // OutcomeOf knows no other
		s.push(d, disposition{kind: modified, failed: true})
	}
}

// deadLetter uses modified with undeliverable-here, which RabbitMQ dead-letters
// like a rejected message, and which can carry annotations. delivery-failed stays
// false, or on 4.3 the delivery-count would add up over the dead-letter queue.
func (s *stint) deadLetter(d *Delivery, o DeadLetter) {
	if p, ok := errors.AsType[*PanicError](o.Err); ok {
		s.log.Error("hopback: handler panicked, the message is dead-lettered", "message_id", messageID(d.message), "panic", ErrorText(p), "stack", string(p.Stack))
	}
	a := annotations(o.Annotations, 3)
	err := checkModified(o.Annotations)
	if err != nil {
		s.log.Error("hopback: annotations refused, the message is dead-lettered without them", "error", err)
		a = annotations(nil, 3)
	}
	// What is added fits: it is bounded, and checkModified leaves room for it.
	if o.Reason != "" || err != nil {
		a[AnnotationReason] = clip(string(o.Reason), 255)
	}
	if o.Err != nil {
		a[AnnotationError] = ErrorText(o.Err)
	}
	s.push(d, disposition{kind: modified, dead: true, annotations: a})
}

// forward hands the copy to the forwarder and accepts the original when the copy
// is confirmed.
func (s *stint) forward(d *Delivery, o Forward) {
	if err := Validate(o.Message); err != nil {
		s.unforwardable(d, o, err)
		return
	}
	target, err := o.To.Build()
	if err != nil {
		s.unforwardable(d, o, err)
		return
	}
	s.forwards.send(&forward{
		target: target, msg: o.Message, patience: s.cfg.ForwardPatience,
		abandoned: s.dead,
		report: func(err error, again time.Duration) {
			s.log.Warn("hopback: a forward was not taken, the original is kept", "to", o.To.String(), "error", err, "again_in", again)
		},
		done: func(err error) {
			switch {
			case err == nil:
				s.push(d, disposition{kind: accepted})
			case errors.Is(err, ErrTooLarge) || errors.As(err, new(*argument.Error)):
				s.unforwardable(d, o, err)
			default:
				// Never both gone: the original goes back, as a failed delivery, so
				// that the queue's delivery limit ends what can't be forwarded.
				s.log.Error("hopback: a forward failed, the original goes back to its queue", "to", o.To.String(), "error", err)
				s.push(d, disposition{kind: modified, failed: true})
			}
		},
	})
}

func (s *stint) unforwardable(d *Delivery, o Forward, err error) {
	s.log.Error("hopback: a message can't be forwarded, it is dead-lettered", "to", o.To.String(), "error", err)
	s.deadLetter(d, DeadLetter{Reason: ReasonUnforwardable, Err: errors.Join(err, o.Err)})
}

// push hands a settlement to the settling goroutine.
func (s *stint) push(d *Delivery, disp disposition) {
	if !d.settling.CompareAndSwap(false, true) {
		s.log.Warn("hopback: a delivery was handled after the broker had taken it back: it delivers it again", "message_id", messageID(d.message))
		s.event(Event{Kind: Late, Err: ErrTakenBack})
		return
	}
	if disp.kind == modified {
		disp.annotations = withKnownCount(d, disp)
	}
	if !s.over() {
		select {
		case s.settles <- settlement{d, disp}:
			return
		case <-s.dead:
		}
	}
	s.late(d)
}

func (s *stint) late(d *Delivery) {
	s.log.Warn("hopback: a delivery was handled, but its link is gone: the broker delivers it again", "message_id", messageID(d.message))
	s.event(Event{Kind: Late, Err: ErrConnectionLost})
}

// withKnownCount notes the delivery count that the message will have, so that
// whoever gets it next knows that nothing went wrong unseen.
func withKnownCount(d *Delivery, disp disposition) amqp.Annotations {
	n := int64(d.DeliveryCount())
	if disp.failed {
		n++
	}
	if n == 0 {
		return disp.annotations
	}
	a := disp.annotations
	if a == nil {
		a = make(amqp.Annotations, 1)
	}
	a[AnnotationKnownCount] = n
	return a
}

// annotations copies what a handler gave, with room for some more.
func annotations(given map[string]any, more int) amqp.Annotations {
	a := make(amqp.Annotations, len(given)+more)
	for k, v := range given {
		a[keys.boxed(k)] = v
	}
	return a
}

// uncount is told of a delivery that isn't the window's any more.
func (s *stint) uncount() {
	if s.window.settled() == 0 {
		select {
		case s.idle <- struct{}{}:
		default:
		}
	}
}

// settle writes dispositions, which gives the broker room for more.
func (s *stint) settle(finish <-chan struct{}) {
	one := func(x settlement) {
		var err error
		if s.over() {
			err = s.why
		} else {
			err = s.link.settle(x.delivery.message, x.d)
		}
		if err != nil {
			s.die(err)
			s.late(x.delivery)
			return
		}
		s.leases.end(x.delivery)
		s.quarantine.settled(x.delivery)
		if !x.delivery.uncounted.Load() {
			s.uncount()
		}
	}
	for {
		select {
		case x := <-s.settles: // what is mostly so, and cheaper to ask for by itself
			one(x)
			continue
		default:
		}
		select {
		case x := <-s.settles:
			one(x)
		case <-finish:
			for {
				select {
				case x := <-s.settles:
					one(x)
				default:
					return
				}
			}
		}
	}
}
