package client

import (
	"context"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// instant is a session, a link and a receipt that accept everything at once.
type instant struct{ in *intake }

func (instant) receiver(context.Context, string, func([]byte)) (receiverLink, error) {
	panic("not used")
}
func (instant) broken() <-chan struct{} { return nil }
func (i instant) intake() *intake       { return i.in }
func (instant) wear() float64           { return 0 }
func (instant) broker() Broker          { return Broker{} }

func (instant) send(context.Context, *Message) (receipt, bool, error) { return accepts, true, nil }

type instantSession struct{ instant }

func (instantSession) close(context.Context) {}

type instantLink struct{ instant }

func (instantLink) close(context.Context) error { return nil }

func (i instantSession) sender(context.Context, string) (senderLink, error) {
	return instantLink(i), nil
}

type instantReceipt struct{}

var accepts receipt = instantReceipt{}

func (instantReceipt) wait(context.Context) (amqp.DeliveryState, error) {
	return &acceptedState, nil
}

var acceptedState amqp.StateAccepted

func instantSender() *sender {
	return newSender("publish", "/queues/q", senderConfig{depth: 256, bytes: 64 << 20, backoff: testBackoff, resend: true},
		func(context.Context) (session, error) { return instantSession{instant{newIntake()}}, nil },
		func(session, bool) {})
}

func TestSendingAllocatesNothingOfItsOwn(t *testing.T) {
	s := instantSender()
	m := withID("m")
	require.NoError(t, s.do(t.Context(), m))
	assert.LessOrEqual(t, testing.AllocsPerRun(1000, func() { _ = s.do(t.Context(), m) }), 1.0)

	p := &Publisher[*Message]{core: &publisher{s: s}}
	ms := make([]*Message, 1000)
	for i := range ms {
		ms[i] = m
	}
	prepared := testing.AllocsPerRun(10, func() { _, _ = p.prepare(m, nil) })
	perBatch := testing.AllocsPerRun(10, func() { _ = p.PublishAll(t.Context(), ms) })
	assert.LessOrEqual(t, perBatch, 1000*prepared+20)
	require.NoError(t, s.close(t.Context()))
}

func BenchmarkSend(b *testing.B) {
	s := instantSender()
	m := withID("m")
	ctx := b.Context()
	b.ReportAllocs()
	b.SetParallelism(64)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			_ = s.do(ctx, m)
		}
	})
	_ = s.close(context.Background())
}

func BenchmarkPublishAll(b *testing.B) {
	s := instantSender()
	p := &Publisher[[]byte]{core: &publisher{s: s}, codec: RawCodec{}}
	body := make([]byte, 256)
	bodies := make([][]byte, b.N)
	for i := range bodies {
		bodies[i] = body
	}
	b.ReportAllocs()
	b.ResetTimer()
	if err := p.PublishAll(context.Background(), bodies); err != nil {
		b.Fatal(err)
	}
	_ = s.close(context.Background())
}
