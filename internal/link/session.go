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

// OpenSession opens a session for the machinery itself, of those that are spared for it,
// and waits for one. The session should carry after deliveries.
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

// Session opens a session on a place that the caller has. ended is called once: when the
// session has ended, or can't begin any more.
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

type WireSession struct {
	w  *Wire
	s  *engine.Session
	in *Intake
	// used counts the deliveries that went over the session, in either direction;
	// after is how many it should carry.
	used  atomic.Uint64
	after uint64
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

// errOverdue is why a connection is given up whose queues take messages and don't answer.
const errOverdue silence = "the broker leaves messages unanswered"

func (s *WireSession) Exhaust() float64 { return float64(s.used.Load()) / float64(s.after) }

// count counts a delivery or an answer.
func (s *WireSession) count(heard *atomic.Uint64) {
	s.used.Add(1)
	heard.Add(1)
}

// Close waits for the end of the session within ctx. Without a link to a queue that doesn't
// answer, RabbitMQ ends it at once.
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

// Pair attaches a sender and a receiver for the requests to a node and their replies, both
// settled: RabbitMQ pairs links by their name. What comes doesn't count as heard.
func (s *WireSession) Pair(ctx context.Context, name, node string, credit uint32) (*WireSender, *wireReceiver, error) {
	paired := frames.Map{{Key: frames.Symbol("paired"), Value: true}}
	replies, requests := newWireReceiver(s, new(atomic.Uint64)), &WireSender{of: s}
	// The receiver first: RabbitMQ 4.0 ends the session over a request that comes before
	// the credit for its reply.
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

// wireReceiver keeps deliveries between the goroutine that reads from the connection and the
// one that takes them. The link's credit bounds how many there are, and ReceiverOptions.MaxBytes
// how many bytes.
type wireReceiver struct {
	r      *engine.Receiver
	of     *WireSession
	heard  *atomic.Uint64 // the connection's, unless what comes tells nothing of queues
	events ReceiverEvents // nil: nobody listens

	mu     sync.Mutex
	queue  fifo.Queue[Arrival]
	wake   chan struct{} // has room for one: a delivery has come
	drains chan uint32   // has room for one: the count of the last drain that is over
	over   chan struct{} // closed when the link has ended
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

// wireSending is a message on its way, with its answer's way back.
type wireSending struct {
	engine.Sending
	by *WireSender
	to Receipt
}

func (x *wireSending) Withdraw() bool {
	unsent, withdrawn := x.by.s.Withdraw(&x.Sending)
	if withdrawn { // else Answered frees it
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

// deliveryState is the broker's answer in go-amqp's types; nil if it is none of the outcomes.
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
