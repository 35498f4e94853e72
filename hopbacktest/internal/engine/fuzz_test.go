package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// fuzzed is a broker with a session of guest's, and a queue that all is routed to.
func fuzzed(t testing.TB, version string) (*Broker, *Connection, *Session) {
	t.Helper()
	b, err := New(Config{Version: version, MaxBytes: 1 << 20, MaxMessages: 100})
	require.NoError(t, err)
	_, err = b.DeclareQueue("/", "q", QueueSpec{Durable: true, Arguments: map[string]any{"x-queue-type": "quorum"}})
	require.NoError(t, err)
	for _, x := range []string{"amq.topic", "amq.headers"} {
		_, err = b.Bind(BindingInfo{VHost: "/", Source: x, Destination: "q", Key: "#"})
		require.NoError(t, err)
	}
	u, err := b.Authenticate("PLAIN", "guest", "guest")
	require.NoError(t, err)
	c, refused := b.Connect(u, "/", Peer{})
	require.Nil(t, refused)
	return b, c, c.Begin()
}

// Every message to every address gets an answer, and a stored message can be delivered,
// returned, rejected, and read.
func FuzzPublish(f *testing.F) {
	f.Add("/queues/q", encoded(f, nil, "m"), []byte(nil))
	f.Add("/exchanges/amq.topic/a.b", encoded(f, func(m *frames.Message) {
		m.Annotations = frames.Map{{Key: frames.Symbol("x-cc"), Value: frames.List{"q"}}}
		m.Properties = &frames.Properties{To: "/queues/q", UserID: []byte("guest")}
	}, "m"), []byte{0xc1, 1, 0})
	f.Add("", encoded(f, func(m *frames.Message) { m.Properties = &frames.Properties{To: "/exchanges/amq.headers"} }, "m"), []byte(nil))
	f.Fuzz(func(t *testing.T, address string, payload, annotations []byte) {
		for _, version := range []string{"4.3.6", "4.0.5"} {
			b, c, s := fuzzed(t, version)
			target := &frames.Target{}
			if address != "" {
				target.Address = address
			}
			if p, fault := s.OpenPublisher(&frames.Attach{Target: target}); fault == nil {
				_ = p.Publish(1, false, payload)
			}
			s = c.Begin()
			r, fault := s.OpenConsumer(&frames.Attach{Source: &frames.Source{Address: "/queues/q"}})
			require.Nil(t, fault)
			v, _, _ := frames.ReadValue(annotations)
			added, _ := v.(frames.Map)
			for i, state := range []any{&frames.Modified{DeliveryFailed: true, Annotations: added}, &frames.Released{}, &frames.Rejected{}} {
				r.Flow(&frames.Flow{DeliveryCount: frames.Some(uint32(i)), LinkCredit: frames.Some[uint32](1)})
				for _, e := range c.Take(nil) {
					if e.Kind == EventDelivered {
						if _, err := frames.DecodeMessage(e.Delivery.Append(nil)); err != nil {
							if _, whole := frames.DecodeMessage(payload); whole == nil {
								t.Fatalf("what was sent can be decoded, and not what is delivered: %v", err)
							}
						}
						_ = s.Settle([]*Delivery{e.Delivery}, state)
					}
				}
				_, _ = b.Messages("/", "q")
			}
			b.Close()
		}
	})
}

// Every management request is answered, or ends the session.
func FuzzRequest(f *testing.F) {
	f.Add("PUT", "/queues/q", []byte{0xc1, 1, 0})
	f.Add("GET", "/bindings?src=amq.topic&dstq=q&key=%23", []byte{0x40})
	f.Add("DELETE", "/bindings/src=amq.topic;dstq=q;key=%23;args=", []byte{0x40})
	f.Add("PUT", "/exchanges/x", []byte{0xc1, 1, 0})
	f.Add("DELETE", "/queues/q/messages", []byte{0x40})
	f.Fuzz(func(t *testing.T, method, path string, value []byte) {
		for _, version := range []string{"4.3.6", "4.0.5"} {
			b, _, s := fuzzed(t, version)
			v, _, err := frames.ReadValue(value)
			if err != nil {
				v = nil
			}
			body, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x77), Value: v})
			require.NoError(t, err)
			reply, fault := s.Request(&frames.Message{
				Properties: &frames.Properties{MessageID: uint64(1), To: path, Subject: frames.Some(method), ReplyTo: "$me"}, Body: body,
			})
			if reply == nil == (fault == nil) {
				t.Fatalf("%v and %v", reply, fault)
			}
			if reply != nil {
				if _, err := reply.Append(nil); err != nil {
					t.Fatal(err)
				}
			}
			b.Close()
		}
	})
}
