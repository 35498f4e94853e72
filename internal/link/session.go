package link

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/fifo"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/userid"

	"github.com/hopback/hopback/internal/failure"
)

// OpenSession opens one of the sessions that are kept for the client itself. If all are in use, it waits. after is
// how many deliveries the session should carry.
func (w *Wire) OpenSession(ctx context.Context, after uint64) (*WireSession, error) {
	select {
	case w.Spare <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-w.AMQP.Done():
		return nil, w.over()
	}
	return w.Session(ctx, after, func() { <-w.Spare })
}

// Session opens a session, for which the caller has reserved a slot. ended is called once: when the session has
// ended, or if it couldn't be opened.
func (w *Wire) Session(ctx context.Context, after uint64, ended func()) (*WireSession, error) {
	s := &WireSession{w: w, in: NewIntake(), after: after}
	w.sessions.Add(1)
	cfg := engine.SessionConfig{
		OnBlocked: func(blocked bool) { w.intakes.set(s.in, blocked) },
		OnOver: func() {
			w.intakes.remove(s.in)
			w.sessions.Add(-1)
			ended()
		},
	}
	err := w.Answered(ctx, LinkTimeout, func(ctx context.Context) (err error) {
		s.s, err = w.AMQP.Begin(ctx, cfg)
		return err
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// WireSession is a Session on a Wire. Only used changes.
type WireSession struct {
	w     *Wire
	s     *engine.Session
	in    *Intake
	used  atomic.Uint64 // deliveries that the session has carried, in both directions
	after uint64        // how many it should carry
}

func (s *WireSession) Broken() <-chan struct{}  { return s.w.AMQP.Done() }
func (s *WireSession) Intake() *Intake          { return s.in }
func (s *WireSession) Quirks() oldbroker.Quirks { return s.w.Old }
func (s *WireSession) Login() *userid.Login     { return s.w.login }
func (s *WireSession) Heard() uint64            { return s.w.heard.Load() }
func (s *WireSession) GiveUp()                  { s.w.giveUp(errOverdue) }
func (s *WireSession) Answering(ctx context.Context, limit time.Duration) bool {
	return s.w.answering(ctx, limit)
}

// errOverdue is why a connection is closed on which the broker doesn't confirm messages.
const errOverdue silence = "the broker leaves messages unanswered"

func (s *WireSession) Exhaust() float64 { return float64(s.used.Load()) / float64(s.after) }

// count counts a delivery.
func (s *WireSession) count(heard *atomic.Uint64) {
	s.used.Add(1)
	heard.Add(1)
}

// Close ends the session, and waits within ctx until the broker has ended it, too. RabbitMQ does so at once, unless
// a link of the session waits for a queue that doesn't answer. If the session hasn't ended attachTimeout later, the
// connection is closed.
func (s *WireSession) Close(ctx context.Context) {
	if s.s.End(ctx) == nil {
		return
	}
	time.AfterFunc(attachTimeout, func() {
		if !failure.IsClosed(s.s.Done()) {
			s.w.giveUp(noAnswer(attachTimeout))
		}
	})
}

func (s *WireSession) Receiver(ctx context.Context, source string, o ReceiverOptions) (ReceiverLink, error) {
	cfg := engine.ReceiverConfig{Source: &frames.Source{Address: source}, Properties: linkProperties(o.Properties)}
	if o.MaxBytes > 0 {
		s.s.Limit(o.MaxBytes)
	}
	cfg.MaxKept = s.w.maxMessage
	r := newWireReceiver(s, &s.w.heard)
	r.events = o.Events
	if err := r.attach(ctx, attachTimeout, cfg); err != nil {
		return nil, err
	}
	return r, nil
}

func linkProperties(all map[string]any) (m frames.Map) {
	for k, v := range all {
		m = append(m, frames.Entry{Key: frames.Symbol(k), Value: v})
	}
	return m
}

func (s *WireSession) Sender(ctx context.Context, target string) (SenderLink, error) {
	cfg := engine.SenderConfig{}
	if target != "" {
		cfg.Target = &frames.Target{Address: target}
	}
	l := &WireSender{of: s}
	if err := l.attach(ctx, cfg); err != nil {
		return nil, err
	}
	return l, nil
}

// Pair attaches a sender for requests to a node and a receiver for the replies. Requests and replies are sent
// settled. RabbitMQ pairs links by their name. Replies don't count as heard, since they say nothing about queues.
func (s *WireSession) Pair(ctx context.Context, name, node string, credit uint32) (*WireSender, *wireReceiver, error) {
	paired := frames.Map{{Key: frames.Symbol("paired"), Value: true}}
	replies, requests := newWireReceiver(s, new(atomic.Uint64)), &WireSender{of: s}
	// The receiver comes first: RabbitMQ 4.0 ends the session if a request comes before the credit
	// for its reply.
	err := replies.attach(ctx, LinkTimeout, engine.ReceiverConfig{
		Name: name, Source: &frames.Source{Address: node}, Target: &frames.Target{Address: node}, Properties: paired, Settled: true,
	})
	if err == nil {
		err = replies.IssueCredit(credit)
	}
	if err == nil {
		err = requests.attach(ctx, engine.SenderConfig{
			Name: name, Source: &frames.Source{Address: node}, Target: &frames.Target{Address: node}, Properties: paired, Settled: true,
		})
	}
	return requests, replies, err
}

// wireReceiver queues deliveries between the goroutine that reads from the connection and the one that calls
// Receive. The link's credit bounds how many there are, and ReceiverOptions.MaxBytes bounds their bytes.
type wireReceiver struct {
	r      *engine.Receiver // set by attach; the methods that the engine calls don't use it
	of     *WireSession
	heard  *atomic.Uint64 // Wire.heard; another counter for Pair
	events ReceiverEvents // nil: nobody listens
	wake   chan struct{}  // has room for one: a delivery has arrived
	drains chan uint32    // has room for one: the count of the last drain that is over
	over   chan struct{}  // closed when the link has ended

	mu      sync.Mutex
	queue   fifo.Queue[Arrival] // guarded by mu
	arrived uint64              // how many came into queue; guarded by mu
}

func newWireReceiver(s *WireSession, heard *atomic.Uint64) *wireReceiver {
	return &wireReceiver{of: s, heard: heard, wake: make(chan struct{}, 1), drains: make(chan uint32, 1), over: make(chan struct{})}
}

func (l *wireReceiver) attach(ctx context.Context, limit time.Duration, cfg engine.ReceiverConfig) error {
	cfg.Events = l
	return l.of.w.Answered(ctx, limit, func(ctx context.Context) (err error) {
		l.r, err = l.of.s.Receiver(ctx, cfg)
		return err
	})
}

// Delivered is called by the engine, on the goroutine that reads, as are the other methods of its ReceiverEvents.
func (l *wireReceiver) Delivered(d *engine.Delivery) {
	l.of.count(l.heard)
	a := arrived(d)
	l.mu.Lock()
	l.queue.Push(a)
	l.arrived++
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *wireReceiver) Drained(count uint32) {
	select {
	case <-l.drains:
	default:
	}
	l.drains <- count
}

func (l *wireReceiver) Flowed(properties frames.Map) {
	if l.events != nil {
		l.events.State(plainMap(properties))
	}
}

func (l *wireReceiver) StateChanged(first, last uint32) {
	if l.events != nil {
		l.events.Revoked(first, last)
	}
}

func (l *wireReceiver) Ended(error) { close(l.over) }

func (l *wireReceiver) Prefetched() (a Arrival, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queue.Len() == 0 {
		return a, false
	}
	return l.queue.Pop(), true
}

func (l *wireReceiver) Receive(ctx context.Context) (Arrival, error) {
	for {
		ended := failure.IsClosed(l.over)
		a, ok := l.Prefetched()
		switch {
		case ok:
			return a, nil
		case ended:
			return a, transport(l.r.Err())
		}
		select {
		case <-l.wake:
		case <-l.over:
		case <-ctx.Done():
			return a, context.Cause(ctx)
		}
	}
}

func (l *wireReceiver) Release(bytes int) { l.r.Taken(bytes) }

func (l *wireReceiver) Arrived() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.arrived
}

func (l *wireReceiver) Full() bool { return l.of.s.Full() }

func (l *wireReceiver) IssueCredit(n uint32) error { return transport(l.r.AddCredit(n)) }

func (l *wireReceiver) Claims() bool { return l.r.Claims() }

func (l *wireReceiver) Drain(ctx context.Context) error { return l.Claim(ctx, 0, nil, nil) }

func (l *wireReceiver) Claim(ctx context.Context, credit uint32, tokens []string, came func()) error {
	count, err := l.r.Claim(credit, tokens)
	if err != nil {
		return transport(err)
	}
	var wake <-chan struct{}
	if came != nil {
		wake = l.wake
	}
	for {
		select {
		case <-wake:
			came()
		case n := <-l.drains:
			if n == count {
				return nil
			}
		case <-l.over:
			return transport(l.r.Err())
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *wireReceiver) Close(ctx context.Context) error { return l.r.Detach(ctx) }

func (l *wireReceiver) Settle(id uint32, d Disposition) error {
	o := engine.Accepted
	switch d.Kind {
	case DispositionAccepted:
	case DispositionReleased:
		o = engine.Released
	default:
		annotations, err := annotationMap(d.Annotations)
		if err != nil {
			return err
		}
		o = engine.Modified(d.Failed, d.Dead, annotations)
	}
	return transport(l.r.Settle(id, id, o))
}

type WireSender struct {
	s  *engine.Sender
	of *WireSession
}

func (l *WireSender) attach(ctx context.Context, cfg engine.SenderConfig) error {
	return l.of.w.Answered(ctx, LinkTimeout, func(ctx context.Context) (err error) {
		l.s, err = l.of.s.Sender(ctx, cfg)
		return err
	})
}

// wireSending is a message that is sent, and who gets its answer. The sender's goroutine owns it until engine.Send;
// after that, Withdraw or Answered frees it.
type wireSending struct {
	engine.Sending
	by *WireSender
	to Receipt
}

func (x *wireSending) Withdraw() bool {
	unsent, withdrawn := x.by.s.Withdraw(&x.Sending)
	if withdrawn { // otherwise Answered frees it
		x.free()
	}
	return unsent
}

func (l *WireSender) Send(m *amqp.Message, to Receipt) (handle Sending, lost bool, err error) {
	x := sendings.Get().(*wireSending)
	if lost, err = l.put(x, m, to); err != nil {
		x.free()
		return nil, lost, err
	}
	return x, false, nil
}

func (l *WireSender) put(x *wireSending, m *amqp.Message, to Receipt) (lost bool, err error) {
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

func (l *WireSender) Close(ctx context.Context) error { return l.s.Detach(ctx) }

// sendings is a pool of wireSendings that have been answered.
var sendings = sync.Pool{New: func() any { return &wireSending{} }}

// maxReused is the largest payload buffer that stays in the pool, in bytes.
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

// Answered is called by the engine, once.
func (x *wireSending) Answered(_ *engine.Sending, a engine.Answer) {
	defer x.free() // a Sending isn't used after its answer
	switch {
	case a.Err == nil:
		x.by.of.w.heard.Add(1)
		x.to.Answer(deliveryState(a.State), nil)
	case a.Sent:
		x.to.Answer(nil, transport(a.Err))
	default:
		x.to.Answer(nil, &NeverSent{Err: transport(a.Err)})
	}
}

var (
	StateAccepted = &amqp.StateAccepted{}
	stateReleased = &amqp.StateReleased{}
)

// deliveryState converts the broker's answer to go-amqp's types. It returns nil if the answer isn't an outcome.
func deliveryState(state any) amqp.DeliveryState {
	switch s := state.(type) {
	case *frames.Accepted:
		return StateAccepted
	case *frames.Released:
		return stateReleased
	case *frames.Rejected:
		return &amqp.StateRejected{Error: remoteError(s.Error)}
	case *frames.Modified:
		return &amqp.StateModified{DeliveryFailed: s.DeliveryFailed, UndeliverableHere: s.UndeliverableHere}
	}
	return nil
}
