package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

func benchLab(b *testing.B) (*Broker, *Connection, *Session) {
	b.Helper()
	broker, err := New(Config{})
	require.NoError(b, err)
	b.Cleanup(broker.Close)
	u, err := broker.Authenticate("PLAIN", "guest", "guest")
	require.NoError(b, err)
	c, refused := broker.Connect(u, "/", Peer{})
	require.Nil(b, refused)
	s := c.Begin()
	v, _ := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x77), Value: frames.Map{
		{Key: "arguments", Value: frames.Map{{Key: "x-queue-type", Value: "quorum"}}},
	}})
	_, fault := s.Request(&frames.Message{Properties: &frames.Properties{To: "/queues/q", Subject: frames.Some("PUT"), ReplyTo: "$me"}, Body: v})
	require.Nil(b, fault)
	return broker, c, s
}

func benchPayload(b *testing.B) []byte {
	return encoded(b, func(m *frames.Message) {
		m.Header.Priority = frames.Some[uint8](4)
		m.Properties = &frames.Properties{MessageID: "0123456789abcdef0123456789abcdef", ContentType: frames.Some(frames.Symbol("application/json"))}
		m.ApplicationProperties = frames.Map{{Key: "type", Value: "order"}}
	}, string(make([]byte, 256)))
}

// BenchmarkPublish publishes, and takes the outcomes.
func BenchmarkPublish(b *testing.B) {
	_, c, s := benchLab(b)
	p, fault := s.OpenPublisher(&frames.Attach{Target: &frames.Target{Address: "/queues/q"}})
	require.Nil(b, fault)
	payload := benchPayload(b)
	var events []Event
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if p.Publish(uint32(i), false, payload) != nil {
			b.Fatal()
		}
		if i++; i%100 == 0 {
			events = c.Take(events[:0])
		}
	}
}

// BenchmarkThrough publishes, delivers, encodes and settles.
func BenchmarkThrough(b *testing.B) {
	_, c, s := benchLab(b)
	p, fault := s.OpenPublisher(&frames.Attach{Target: &frames.Target{Address: "/queues/q"}})
	require.Nil(b, fault)
	r, fault := s.OpenConsumer(&frames.Attach{Source: &frames.Source{Address: "/queues/q"}})
	require.Nil(b, fault)
	payload := benchPayload(b)
	var events []Event
	var held []*Delivery
	var out []byte
	b.ReportAllocs()
	i := uint32(0)
	r.Flow(&frames.Flow{LinkCredit: frames.Some[uint32](1000)})
	for b.Loop() {
		if p.Publish(i, false, payload) != nil {
			b.Fatal()
		}
		if i++; i%100 == 0 {
			events, held = c.Take(events[:0]), held[:0]
			for _, e := range events {
				if e.Kind == EventDelivered {
					held = append(held, e.Delivery)
					out = e.Delivery.Append(out[:0])
				}
			}
			if s.Settle(held, accepted) != nil {
				b.Fatal()
			}
			r.Flow(&frames.Flow{DeliveryCount: frames.Some(i), LinkCredit: frames.Some[uint32](1000)})
		}
	}
}
