package claim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errLost = errors.New("link lost")

// fakeQueue is a quorum queue with parked messages, behind the interfaces of package link.
type fakeQueue struct {
	// open, if set, is asked before a session opens; its error is the session's.
	open func() error
	// flow, if set, is called with the tokens of each flow, before the queue has read it; an error
	// loses the link. answered is the same, after the queue has carried the flow out.
	flow, answered func(tokens []string) error
	// wrote, if set, is called after a settlement was carried out; an error loses the link.
	wrote              func() error
	lacksTokens, inert bool // inert: another consumer is the single active one
	// wrap, if set, is what a link is wrapped in.
	wrap func(link.ReceiverLink) link.ReceiverLink

	mu       sync.Mutex
	parked   []*amqp.Message
	ready    []*amqp.Message
	accepted []string
	flows    [][]string // the tokens of each
	frames   int        // settlements since the last flow
	most     int        // of frames
	links    []*fakeLink
	closed   int // sessions
}

// fakeSession has what a Claims needs of a session.
type fakeSession struct {
	link.Session
	q    *fakeQueue
	link *fakeLink
}

// fakeLink is a link to the queue.
type fakeLink struct {
	link.ReceiverLink
	q         *fakeQueue
	o         link.ReceiverOptions
	over      chan struct{}
	claimed   map[*amqp.Message]bool
	arrived   []link.Arrival
	unsettled map[uint32]*amqp.Message
	ids       uint32
	last      uint32 // that was settled
	revoked   map[uint32]bool
}

func (q *fakeQueue) Open(context.Context) (link.Session, error) {
	if q.open != nil {
		if err := q.open(); err != nil {
			return nil, err
		}
	}
	return &fakeSession{q: q}, nil
}

func (q *fakeQueue) Give(s link.Session, _ bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed++
	if l := s.(*fakeSession).link; l != nil {
		l.end()
	}
}

func (s *fakeSession) Exhaust() float64 { return 0 }

func (s *fakeSession) Receiver(_ context.Context, _ string, o link.ReceiverOptions) (link.ReceiverLink, error) {
	l := &fakeLink{q: s.q, o: o, over: make(chan struct{}), claimed: map[*amqp.Message]bool{}, unsettled: map[uint32]*amqp.Message{}, revoked: map[uint32]bool{}}
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	s.q.links = append(s.q.links, l)
	s.link = l
	if s.q.wrap != nil {
		return s.q.wrap(l), nil
	}
	return l, nil
}

// end makes ready what is unsettled, with the queue locked.
func (l *fakeLink) end() {
	if failure.IsClosed(l.over) {
		return
	}
	close(l.over)
	for id, m := range l.unsettled {
		if !l.revoked[id] {
			l.q.ready = append(l.q.ready, m)
		}
	}
	l.unsettled, l.claimed = nil, nil
}

func (l *fakeLink) lose() {
	l.q.mu.Lock()
	defer l.q.mu.Unlock()
	l.end()
}

func (l *fakeLink) Claims() bool { return !l.q.lacksTokens }

func (l *fakeLink) Receive(ctx context.Context) (a link.Arrival, err error) {
	select {
	case <-l.over:
		return a, errLost
	case <-ctx.Done():
		return a, context.Cause(ctx)
	}
}

func (l *fakeLink) Prefetched() (a link.Arrival, ok bool) {
	l.q.mu.Lock()
	defer l.q.mu.Unlock()
	if len(l.arrived) == 0 {
		return a, false
	}
	a = l.arrived[0]
	l.arrived = l.arrived[1:]
	return a, true
}

func (l *fakeLink) Release(int) {}

func (l *fakeLink) Claim(_ context.Context, credit uint32, tokens []string, _ func()) error {
	return l.flow(tokens, func() {
		q := l.q
		for _, m := range q.parked {
			if token, _, _ := token(m); slices.Contains(tokens, token) {
				l.claimed[m] = true
			}
		}
		q.most, q.frames = max(q.most, q.frames), 0
		q.flows = append(q.flows, tokens)
		l.o.Events.State(map[string]any{"rabbitmq:active": !q.inert})
		for i := 0; i < len(q.parked) && credit > 0; i++ {
			m := q.parked[i]
			if l.claimed[m] {
				q.parked = slices.Delete(q.parked, i, i+1)
				i--
				credit--
				l.deliver(m)
			}
		}
		for ; len(q.ready) > 0 && credit > 0; credit-- {
			m := q.ready[0]
			q.ready = q.ready[1:]
			l.deliver(m)
		}
	})
}

// flow carries a flow out between the queue's two faults.
func (l *fakeLink) flow(tokens []string, carryOut func()) error {
	q := l.q
	if len(tokens) > engine.MaxClaims {
		panic("RabbitMQ ends the session")
	}
	if q.flow != nil {
		if err := q.flow(tokens); err != nil {
			l.lose()
			return err
		}
	}
	q.mu.Lock()
	if failure.IsClosed(l.over) {
		q.mu.Unlock()
		return errLost
	}
	carryOut()
	q.mu.Unlock()
	if q.answered != nil {
		if err := q.answered(tokens); err != nil {
			l.lose()
			return err
		}
	}
	return nil
}

func (l *fakeLink) deliver(m *amqp.Message) {
	l.ids++
	l.unsettled[l.ids] = m
	l.arrived = append(l.arrived, link.Arrival{Msg: m, ID: l.ids})
}

func (l *fakeLink) Settle(id uint32, d link.Disposition) error {
	q := l.q
	q.mu.Lock()
	if failure.IsClosed(l.over) {
		q.mu.Unlock()
		return errLost
	}
	m := l.unsettled[id]
	if m == nil {
		panic(fmt.Sprintf("delivery %d is settled twice", id))
	}
	delete(l.unsettled, id)
	if d.Kind != link.DispositionAccepted || id != l.last+1 { // otherwise the engine joins it with the one before
		q.frames++
	}
	l.last = id
	switch parked := d.Annotations[annotation.DeferralToken] != nil; {
	case l.revoked[id]: // it has no effect
	case d.Kind == link.DispositionAccepted:
		q.accepted = append(q.accepted, body(m))
	case parked:
		m = message(body(m), d.Annotations[annotation.DeferralToken], d.Annotations[annotation.DeliveryTime])
		q.parked = append(q.parked, m)
	default:
		q.ready = append([]*amqp.Message{m}, q.ready...)
	}
	q.mu.Unlock()
	if q.wrote != nil {
		if err := q.wrote(); err != nil {
			l.lose()
			return nil // a write is known to have failed only later
		}
	}
	return nil
}

func (l *fakeLink) Close(context.Context) error {
	l.lose()
	return nil
}

// revoke takes a delivery back after the consumer timeout.
func (l *fakeLink) revoke(id uint32) {
	l.q.mu.Lock()
	l.revoked[id] = true
	l.q.ready = append(l.q.ready, l.unsettled[id])
	l.q.mu.Unlock()
	l.o.Events.Revoked(id, id)
}

func (q *fakeQueue) last() *fakeLink {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.links[len(q.links)-1]
}

func message(body string, token, at any) *amqp.Message {
	m := &amqp.Message{Data: [][]byte{[]byte(body)}, Annotations: amqp.Annotations{}}
	if token != nil {
		m.Annotations[annotation.DeferralToken] = token
	}
	if at != nil {
		m.Annotations[annotation.DeliveryTime] = at
	}
	return m
}

func body(m *amqp.Message) string { return string(m.GetData()) }

func bodies(all []*amqp.Message) []string {
	names := make([]string, 0, len(all))
	for _, m := range all {
		names = append(names, body(m))
	}
	slices.Sort(names)
	return names
}

// park parks messages under a token for a time from now on.
func (q *fakeQueue) park(token string, wait time.Duration, bodies ...string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, b := range bodies {
		q.parked = append(q.parked, message(b, token, time.Now().Add(wait).UnixMilli()))
	}
}

func (q *fakeQueue) publish(all ...*amqp.Message) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ready = append(q.ready, all...)
}

// holds checks which messages are parked, ready, and accepted.
func (q *fakeQueue) holds(t *testing.T, parked, ready, accepted []string) {
	t.Helper()
	q.mu.Lock()
	defer q.mu.Unlock()
	assert.ElementsMatch(t, parked, bodies(q.parked), "parked")
	assert.ElementsMatch(t, ready, bodies(q.ready), "ready")
	assert.ElementsMatch(t, accepted, q.accepted, "accepted")
}

// claims starts a Claims of the queue, and waits for its link.
func (q *fakeQueue) claims(t *testing.T, settings ...func(*Settings)) *Claims {
	t.Helper()
	s := Settings{
		Queue: "orders", Source: "/queues/orders", Sessions: q, Backoff: backoff.Exponential{Min: time.Second, Max: time.Minute},
		Observer: ignore{}, Log: slog.New(slog.DiscardHandler),
	}
	for _, set := range settings {
		set(&s)
	}
	c := New(s)
	t.Cleanup(func() {
		c.cancel()
		<-c.done
	})
	require.NoError(t, c.Await(t.Context()))
	return c
}

// claim claims what must be there.
func claim(t *testing.T, c *Claims, token string) []*Message {
	t.Helper()
	found, _, err := c.Claim(t.Context(), token)
	require.NoError(t, err)
	return found
}

func names(found []*Message) []string {
	all := make([]*amqp.Message, 0, len(found))
	for _, m := range found {
		all = append(all, m.Message)
	}
	return bodies(all)
}

type ignore struct{}

func (ignore) Now() (time.Time, bool) { return time.Now(), true }

// clock is an Observer with another time.
type clock func() (time.Time, bool)

func (c clock) Now() (time.Time, bool) { return c() }
func (clock) Up(int, time.Duration)    {}
func (clock) Lost(int, error)          {}
func (clock) Refused(int, error)       {}
func (clock) Ended(int)                {}

func (ignore) Up(int, time.Duration) {}
func (ignore) Lost(int, error)       {}
func (ignore) Refused(int, error)    {}
func (ignore) Ended(int)             {}

var accept = link.Disposition{Kind: link.DispositionAccepted}
