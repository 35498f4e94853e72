package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/userid"
)

// openSession opens a session for the machinery itself, of those that are spared for it,
// and waits for one. The session should carry after deliveries.
func (w *wire) openSession(ctx context.Context, after uint64) (session, error) {
	select {
	case w.spare <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-w.amqp.Done():
		return nil, w.over()
	}
	return w.session(ctx, after, func() { <-w.spare })
}

// session opens a session on a place that the caller has. ended is called once: when the
// session has ended, or can't begin any more.
func (w *wire) session(ctx context.Context, after uint64, ended func()) (session, error) {
	var decided atomic.Bool // the session will begin, or it won't
	s, err := bounded(ctx, w,
		func(ctx context.Context) (*wireSession, error) {
			if !decided.CompareAndSwap(false, true) {
				return nil, context.Canceled
			}
			s, err := w.begin(ctx, after, ended)
			if err != nil {
				ended()
				return nil, err
			}
			return s, nil
		},
		func(s *wireSession) { s.close(w.ctx) })
	if err != nil {
		if decided.CompareAndSwap(false, true) {
			ended()
		}
		return nil, err
	}
	return s, nil
}

func (w *wire) begin(ctx context.Context, after uint64, ended func()) (*wireSession, error) {
	s := &wireSession{w: w, in: newIntake(), after: after, ended: ended}
	var begun atomic.Pointer[engine.Session]
	e, err := w.amqp.Begin(ctx, engine.SessionConfig{OnBlocked: func(bool) {
		if e := begun.Load(); e != nil {
			w.intakes.change(s.in, e.Blocked)
		}
	}})
	if err != nil {
		return nil, transport(err)
	}
	s.s = e
	w.sessions.Add(1)
	w.intakes.add(s.in, func() bool {
		begun.Store(e)
		return e.Blocked()
	})
	return s, nil
}

type wireSession struct {
	w  *wire
	s  *engine.Session
	in *intake
	// used counts the deliveries that went over the session, in either direction;
	// after is how many it should carry.
	used  atomic.Uint64
	after uint64
	// attaching says that a receiver waits for its queue: until that has answered,
	// RabbitMQ doesn't look at the end of the session either.
	attaching atomic.Bool
	// unheard says that the end of a link had no answer in time: RabbitMQ waits for a
	// queue there, too, and looks at the end of the session after that.
	unheard atomic.Bool
	ended   func() // see wire.session
}

func (s *wireSession) broken() <-chan struct{} { return s.w.amqp.Done() }
func (s *wireSession) intake() *intake         { return s.in }
func (s *wireSession) broker() Broker          { return s.w.broker }
func (s *wireSession) login() *userid.Login    { return s.w.login }
func (s *wireSession) heard() uint64           { return s.w.heard.Load() }
func (s *wireSession) giveUp()                 { s.w.giveUp(errOverdue) }
func (s *wireSession) answering(ctx context.Context, limit time.Duration) bool {
	return s.w.answering(ctx, limit)
}

// errOverdue is why a connection is given up whose queues take messages and don't answer.
var errOverdue = errors.New("the broker leaves messages unanswered")

func (s *wireSession) wear() float64 { return float64(s.used.Load()) / float64(s.after) }

// count counts a delivery or an answer.
func (s *wireSession) count(heard *atomic.Uint64) {
	s.used.Add(1)
	heard.Add(1)
}

// close waits for the end of the session within ctx; it is closed in any case, when
// its turn comes, or else the connection would hold it for ever.
func (s *wireSession) close(ctx context.Context) {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		end := bounded[struct{}]
		if s.attaching.Load() || s.unheard.Load() {
			end = patient[struct{}]
		}
		_, _ = end(s.w.ctx, s.w, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, s.s.End(ctx)
		}, func(struct{}) {})
		s.w.sessions.Add(-1)
		s.w.intakes.remove(s.in)
		s.ended()
	}()
	select {
	case <-closed:
	case <-ctx.Done():
	}
}

func (s *wireSession) receiver(ctx context.Context, source string, o receiverOptions) (receiverLink, error) {
	cfg := engine.ReceiverConfig{Source: &frames.Source{Address: source}, Properties: linkProperties(o.properties)}
	if o.takenBack != nil {
		cfg.OnState = func(first, last uint32, _ any) { o.takenBack(first, last) }
	}
	if o.state != nil {
		cfg.OnFlow = func(m frames.Map) { o.state(plainMap(m)) }
	}
	r := newWireReceiver(s, &s.w.heard)
	s.attaching.Store(true)
	return patient(ctx, s.w,
		func(ctx context.Context) (receiverLink, error) {
			defer s.attaching.Store(false)
			if err := r.attach(ctx, cfg); err != nil {
				return nil, err
			}
			return r, nil
		},
		func(r receiverLink) { _ = r.close(s.w.ctx) })
}

func linkProperties(all map[string]any) (m frames.Map) {
	for k, v := range all {
		m = append(m, frames.Entry{Key: frames.Symbol(k), Value: v})
	}
	return m
}

func (s *wireSession) sender(ctx context.Context, target string) (senderLink, error) {
	return bounded(ctx, s.w,
		func(ctx context.Context) (senderLink, error) {
			cfg := engine.SenderConfig{}
			if target != "" {
				cfg.Target = &frames.Target{Address: target}
			}
			l, err := s.s.Sender(ctx, cfg)
			if err != nil {
				return nil, transport(err)
			}
			return &wireSender{l, s}, nil
		},
		func(l senderLink) { _ = l.close(s.w.ctx) })
}

// endOfLink notes whether the end of a link was answered within ctx.
func (s *wireSession) endOfLink(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		s.unheard.Store(true)
	}
	return err
}

// wireReceiver keeps deliveries between the goroutine that reads from the connection and the
// one that takes them. The link's credit bounds how many there are.
type wireReceiver struct {
	r     *engine.Receiver
	of    *wireSession
	heard *atomic.Uint64 // the connection's, unless what comes tells nothing of queues

	mu      sync.Mutex
	queue   []arrival
	head    int
	drained uint32 // the count of the last drain that is over
	has     bool   // there was one
	ended   bool
	changed chan struct{} // closed when drained, has or ended have changed; nil: nobody waits
	wake    chan struct{} // has room for one: a delivery has come, or the link has ended
}

func newWireReceiver(s *wireSession, heard *atomic.Uint64) *wireReceiver {
	return &wireReceiver{of: s, heard: heard, wake: make(chan struct{}, 1)}
}

func (l *wireReceiver) attach(ctx context.Context, cfg engine.ReceiverConfig) (err error) {
	cfg.OnDelivery = l.delivered
	cfg.OnDrained = func(count uint32) { l.change(func() { l.drained, l.has = count, true }) }
	cfg.OnEnd = func(error) { l.change(func() { l.ended = true }) }
	if l.r, err = l.of.s.Receiver(ctx, cfg); err != nil {
		return transport(err)
	}
	return nil
}

// delivered is called on the goroutine that reads, as is all that calls change.
func (l *wireReceiver) delivered(d *engine.Delivery) {
	l.of.count(l.heard)
	a := arrived(d)
	l.mu.Lock()
	l.queue = append(l.queue, a)
	l.mu.Unlock()
	l.signal()
}

func (l *wireReceiver) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *wireReceiver) change(f func()) {
	l.mu.Lock()
	f()
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
	l.mu.Unlock()
	l.signal()
}

func (l *wireReceiver) prefetched() (a arrival, ok bool) {
	a, ok, _ = l.next()
	return a, ok
}

func (l *wireReceiver) next() (a arrival, ok, ended bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.head == len(l.queue) {
		return a, false, l.ended
	}
	a = l.queue[l.head]
	l.queue[l.head] = arrival{}
	if l.head++; l.head == len(l.queue) {
		l.queue, l.head = l.queue[:0], 0
	}
	return a, true, false
}

func (l *wireReceiver) receive(ctx context.Context) (arrival, error) {
	for {
		a, ok, ended := l.next()
		switch {
		case ok:
			return a, nil
		case ended:
			return a, transport(l.r.Err())
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
			return a, context.Cause(ctx)
		}
	}
}

func (l *wireReceiver) issueCredit(n uint32) error { return transport(l.r.AddCredit(n)) }

func (l *wireReceiver) drain(ctx context.Context) error {
	count, err := l.r.Drain(0)
	if err != nil {
		return transport(err)
	}
	for {
		l.mu.Lock()
		if l.has && l.drained == count {
			l.mu.Unlock()
			return nil
		}
		if l.ended {
			l.mu.Unlock()
			return transport(l.r.Err())
		}
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *wireReceiver) close(ctx context.Context) error {
	return l.of.endOfLink(ctx, l.r.Detach(ctx))
}

func (l *wireReceiver) settle(id uint32, d disposition) error {
	o := engine.Accepted
	switch d.kind {
	case accepted:
	case released:
		o = engine.Released
	default:
		annotations, err := annotationMap(d.annotations)
		if err != nil {
			return err
		}
		o = engine.Modified(d.failed, d.dead, annotations)
	}
	return transport(l.r.Settle(id, id, o))
}

type wireSender struct {
	s  *engine.Sender
	of *wireSession
}

// wireSending is a message on its way, with its answer's way back.
type wireSending struct {
	engine.Sending
	by *wireSender
	to receipt
}

func (x *wireSending) withdraw() bool {
	if !x.by.s.Withdraw(&x.Sending) {
		return false
	}
	x.free()
	return true
}

func (l *wireSender) send(m *Message, to receipt) (handle sending, lost bool, err error) {
	x := sendings.Get().(*wireSending)
	if lost, err = l.put(x, m, to); err != nil {
		x.free()
		return nil, lost, err
	}
	return x, false, nil
}

func (l *wireSender) put(x *wireSending, m *Message, to receipt) (lost bool, err error) {
	if x.Payload, err = message.Append(x.Payload[:0], m); err != nil {
		return false, err
	}
	if limit := l.s.Attached().MaxMessageSize; limit > 0 && uint64(len(x.Payload)) > limit {
		return false, &amqp.Error{
			Condition:   amqp.ErrCondMessageSizeExceeded,
			Description: fmt.Sprintf("encoded message size %d exceeds max of %d", len(x.Payload), limit),
		}
	}
	x.by, x.to, x.To = l, to, x
	if err := l.s.Send(&x.Sending); err != nil {
		return true, transport(err)
	}
	l.of.used.Add(1)
	return false, nil
}

func (l *wireSender) close(ctx context.Context) error { return l.of.endOfLink(ctx, l.s.Detach(ctx)) }

// sendings are for reuse: those that were answered.
var sendings = sync.Pool{New: func() any { return &wireSending{} }}

// maxReused is the largest payload whose memory is used again.
const maxReused = 32 << 10

func (x *wireSending) free() {
	payload := x.Payload
	if cap(payload) > maxReused {
		payload = nil
	}
	*x = wireSending{}
	x.Payload = payload
	sendings.Put(x)
}

// Answered is called by the engine.
func (x *wireSending) Answered(_ *engine.Sending, a engine.Answer) {
	defer x.free() // nobody withdraws it any more
	switch {
	case a.Err == nil:
		x.by.of.w.heard.Add(1)
		x.to.answer(deliveryState(a.State), nil)
	case a.Sent:
		x.to.answer(nil, transport(a.Err))
	default:
		x.to.answer(nil, &neverSent{transport(a.Err)})
	}
}

var (
	stateAccepted = &amqp.StateAccepted{}
	stateReleased = &amqp.StateReleased{}
)

// deliveryState is the broker's answer in go-amqp's types; nil if it is none of the outcomes.
func deliveryState(state any) amqp.DeliveryState {
	switch s := state.(type) {
	case *frames.Accepted:
		return stateAccepted
	case *frames.Released:
		return stateReleased
	case *frames.Rejected:
		return &amqp.StateRejected{Error: remoteError(s.Error)}
	case *frames.Modified:
		return &amqp.StateModified{DeliveryFailed: s.DeliveryFailed, UndeliverableHere: s.UndeliverableHere}
	}
	return nil
}
