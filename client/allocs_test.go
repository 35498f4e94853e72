package client

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/userid"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/link"

	"github.com/hopback/hopback/internal/link/linktest"
)

// idle is a link that allocates nothing, takes what it is sent at once, and delivers
// what next is given.
type idle struct {
	next    chan *Message
	settled chan link.Disposition
	credits uint32
}

func newIdle() *idle {
	return &idle{next: make(chan *Message), settled: make(chan link.Disposition, 1)}
}

func (l *idle) Receiver(context.Context, string, link.ReceiverOptions) (link.ReceiverLink, error) {
	return l, nil
}
func (l *idle) Sender(context.Context, string) (link.SenderLink, error) { return idleSender{}, nil }
func (l *idle) Broken() <-chan struct{}                                 { return nil }
func (l *idle) Quirks() oldbroker.Quirks                                { return oldbroker.Quirks{} }
func (l *idle) Prefetched() (a link.Arrival, ok bool)                   { return a, false }
func (l *idle) Release(int)                                             {}
func (l *idle) Full() bool                                              { return false }
func (l *idle) Arrived() uint64                                         { return 0 }
func (l *idle) IssueCredit(n uint32) error                              { l.credits += n; return nil }
func (l *idle) Drain(context.Context) error                             { return nil }
func (l *idle) Claims() bool                                            { return false }
func (l *idle) Claim(context.Context, uint32, []string, func()) error   { return nil }

func (l *idle) Receive(ctx context.Context) (link.Arrival, error) {
	select {
	case m := <-l.next:
		return link.Arrival{Msg: m}, nil
	case <-ctx.Done():
		return link.Arrival{}, ctx.Err()
	}
}

func (l *idle) Settle(_ uint32, d link.Disposition) error {
	l.settled <- d
	return nil
}

type idleSender struct{}

func (idleSender) Send(_ *Message, to link.Receipt) (x link.Sending, lost bool, err error) {
	to.Answer(link.StateAccepted, nil)
	return nil, false, nil
}
func (idleSender) Close(context.Context) error { return nil }

func (l *idle) Close(context.Context) error { return nil }

// idleSession is an idle with a session's close.
type idleSession struct{ *idle }

func (idleSession) Close(context.Context)                         {}
func (idleSession) Login() *userid.Login                          { return anybody }
func (idleSession) Exhaust() float64                              { return 0 }
func (idleSession) Intake() *link.Intake                          { return neverBlocked }
func (idleSession) Heard() uint64                                 { return 0 }
func (idleSession) GiveUp()                                       {}
func (idleSession) Answering(context.Context, time.Duration) bool { return true }

var anybody = userid.NewLogin("", false)

var neverBlocked = link.NewIntake()

// idleSenderOf is a sender whose messages are accepted at once.
func idleSenderOf() *sender {
	return newSender("publish", "/queues/q", senderConfig{Depth: 256, Bytes: 64 << 20, Pause: testBackoff.Pause, Resend: true},
		linktest.SessionsOf(func(context.Context) (link.Session, error) { return idleSession{newIdle()}, nil }))
}

// countAllocs is how many allocations a call of f takes, in all goroutines together.
// Those of the background are fewer than one a call, and rounded off.
func countAllocs(t *testing.T, f func()) int {
	t.Helper()
	for range 100 {
		f() // what is kept is kept from here on
	}
	return int(testing.AllocsPerRun(1000, f))
}

// The bounds are what it takes: one more fails. What go-amqp allocates comes on top.
func TestAllocationsOfPublishing(t *testing.T) {
	notUnderRace(t)
	s := idleSenderOf()
	require.NoError(t, <-s.First)
	defer func() { require.NoError(t, s.Close(t.Context())) }()
	core := coreOf(s)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	raw := &Publisher[[]byte]{core: core, codec: RawCodec{}}
	body := make([]byte, 256)
	got := countAllocs(t, func() {
		if raw.Publish(ctx, body) != nil {
			t.Error("not published")
		}
	})
	require.LessOrEqual(t, got, 6, "bytes")

	typed := &Publisher[allocOrder]{core: core, codec: JSONCodec{}}
	o := allocOrder{ID: "o-1", Cents: 1995}
	inCodec := countAllocs(t, func() { _, _ = json.Marshal(o) })
	got = countAllocs(t, func() {
		if typed.Publish(ctx, o) != nil {
			t.Error("not published")
		}
	})
	require.LessOrEqual(t, got-inCodec, 6, "JSON")

	bodies := make([][]byte, 100)
	for i := range bodies {
		bodies[i] = body
	}
	got = countAllocs(t, func() {
		if raw.PublishAll(ctx, bodies) != nil {
			t.Error("not published")
		}
	})
	require.LessOrEqual(t, got, 100*7+5, "a batch of 100")
}

func BenchmarkPublish(b *testing.B) {
	s := idleSenderOf()
	p := &Publisher[[]byte]{core: coreOf(s), codec: RawCodec{}}
	body := make([]byte, 256)
	ctx := b.Context()
	b.ReportAllocs()
	b.SetParallelism(64)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			_ = p.Publish(ctx, body)
		}
	})
	_ = s.Close(context.Background())
}

func BenchmarkPublishAll(b *testing.B) {
	s := idleSenderOf()
	p := &Publisher[[]byte]{core: coreOf(s), codec: RawCodec{}}
	bodies := make([][]byte, b.N)
	for i := range bodies {
		bodies[i] = make([]byte, 256)
	}
	b.ReportAllocs()
	b.ResetTimer()
	if err := p.PublishAll(b.Context(), bodies); err != nil {
		b.Fatal(err)
	}
	_ = s.Close(context.Background())
}

type allocOrder struct {
	ID    string `json:"id"`
	Cents int    `json:"cents"`
}

func TestAllocationsOfConsuming(t *testing.T) {
	notUnderRace(t)
	failed := errors.New("failed")
	target := address.Exchange("x", "key")
	copied := NewMessage([]byte("copy"))
	annotations := map[string]any{AnnotationReason: "waiting", AnnotationError: "failed"}
	delayed := map[string]any{AnnotationReason: "waiting", "x-opt-delivery-time": int64(1)}
	body := []byte(`{"id":"o-1","cents":1995}`)
	inCodec := countAllocs(t, func() { _ = json.Unmarshal(body, new(allocOrder)) })
	for _, c := range []struct {
		name    string
		handler Handler
		most    int
	}{
		{"raw", returns(nil), 1},
		{"JSON", JSON(func(context.Context, allocOrder) error { return nil }), 1 + inCodec},
		{"a failure", returns(failed), 4},
		{"Modify", returns(Modify{Annotations: delayed, Err: failed}), 3},
		{"DeadLetter", returns(DeadLetter{Reason: "exhausted", Err: failed, Annotations: annotations}), 7},
		{"Forward", returns(Forward{To: target, Message: copied, Err: failed}), 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			one, end := consumeIdly(t, c.handler)
			got := countAllocs(t, one)
			end()
			require.LessOrEqual(t, got, c.most)
		})
	}
}

// consumeIdly returns a function that has one message handled and settled.
func consumeIdly(t testing.TB, h Handler) (one, end func()) {
	l := newIdle()
	cfg, err := ConsumerConfig{}.withDefaults()
	require.NoError(t, err)
	k := newConsumer("q", "/queues/q", h, cfg, asked{}, nil, consumerDeps{
		Sessions: linktest.SessionsOf(func(context.Context) (link.Session, error) { return idleSession{l}, nil }),
		Queues:   fakeQueue{}, Backoff: backoff.Exponential{Min: time.Second, Max: time.Second}, Log: quiet,
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := async(func() error { return k.run(ctx) })
	m := &Message{Header: &Header{Durable: true}, Data: [][]byte{[]byte(`{"id":"o-1","cents":1995}`)}, DeliveryTag: []byte{1, 2, 3, 4}}
	return func() {
			l.next <- m
			<-l.settled
		}, func() {
			cancel()
			require.NoError(t, <-ended)
		}
}

func BenchmarkConsume(b *testing.B) {
	for name, h := range map[string]Handler{"raw": returns(nil), "JSON": JSON(func(context.Context, allocOrder) error { return nil })} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			one, end := consumeIdly(b, h)
			for b.Loop() {
				one()
			}
			end()
		})
	}
}

// An Instrument's properties take a map that was used before, so only their values are
// allocated.
func TestAllocationsOfProperties(t *testing.T) {
	notUnderRace(t)
	m := &Message{}
	value := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	n := testing.AllocsPerRun(1000, func() {
		s := message.PooledSending(address.Address{}, m, nil)
		s.SetProperty("traceparent", value)
		require.Len(t, m.ApplicationProperties, 1)
		s.Recycle()
	})
	require.Nil(t, m.ApplicationProperties)
	require.LessOrEqual(t, n, 1.0)
}
