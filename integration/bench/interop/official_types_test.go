package interop

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
)

// Each type that the official client can send, in each place of a message, to hopback and back.
// It sends what hopback refuses, too: lists, maps and arrays as application properties arrive, and
// an array of negative ints arrives as other numbers.
func TestEveryTypeBetweenTheOfficialClientAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.queues(t, "hopback", "official")
		env := rabbitmqamqp.NewEnvironment(s.url.String(), nil)
		conn, err := env.NewConnection(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = env.CloseConnections(context.Background()) })
		official, err := conn.NewPublisher(t.Context(), &rabbitmqamqp.QueueAddress{Queue: "hopback"}, nil)
		require.NoError(t, err)
		pub := s.publisher(t, "official")
		type sending struct {
			k     kind
			there func(m *client.Message) any
		}
		all := map[string]sending{}
		backs := 0
		for _, k := range kinds() {
			for _, pl := range places() {
				peeked := pl.name == "annotation" || pl.name == "application property" && k.name != "null"
				if k.here == nil || peeked && refused("annotation", k) { // RabbitMQ can't read it, and ends the link or the session
					continue
				}
				name := pl.name + " of " + k.name
				m := &amqp.Message{Properties: &amqp.MessageProperties{MessageID: name}}
				pl.here(m, k.here)
				result, err := official.Publish(t.Context(), m)
				require.NoError(t, err, name)
				require.IsType(t, &rabbitmqamqp.StateAccepted{}, result.Outcome, name)
				all[name] = sending{k, pl.there}
				if !refused(pl.name, k) {
					backs++
					m = &client.Message{Properties: &client.Properties{MessageID: name}}
					pl.here(m, k.here)
					require.NoError(t, pub.Publish(t.Context(), m), name)
				}
			}
		}
		same := func(name string, m *amqp.Message) {
			x := all[name]
			want := x.k.here
			if x.k.read != nil {
				want = x.k.read
			}
			if x.k.name == "array of negative ints" {
				want = []int32{96, 2} // of -100,000
			}
			assert.Equal(t, fmt.Sprint(sorted(noted(noteOf(want)))), fmt.Sprint(sorted(noted(noteOf(x.there(m))))), name)
		}
		for name, m := range s.take(t, "hopback", len(all)) {
			same(name, m)
		}
		consumer, err := conn.NewConsumer(t.Context(), "official", nil)
		require.NoError(t, err)
		for range backs {
			d, err := consumer.Receive(t.Context())
			require.NoError(t, err)
			same(d.Message().Properties.MessageID.(string), d.Message())
			require.NoError(t, d.Accept(t.Context()))
		}
	})
}

// Headers and properties of every kind, and the outcomes of either client as the other one sees
// them.
func TestPropertiesAndOutcomesBetweenTheOfficialClientAndHopback(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.queues(t, "q")
		env := rabbitmqamqp.NewEnvironment(s.url.String(), nil)
		conn, err := env.NewConnection(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = env.CloseConnections(context.Background()) })
		official, err := conn.NewPublisher(t.Context(), &rabbitmqamqp.QueueAddress{Queue: "q"}, nil)
		require.NoError(t, err)
		pub := s.publisher(t, "q")
		utc := func(p *amqp.MessageProperties) *amqp.MessageProperties {
			for _, at := range []**time.Time{&p.AbsoluteExpiryTime, &p.CreationTime} {
				if *at != nil {
					*at = new((*at).UTC())
				}
			}
			return p
		}
		receive := func(handle func(d rabbitmqamqp.IDeliveryContext) error) {
			t.Helper()
			consumer, err := conn.NewConsumer(t.Context(), "q", &rabbitmqamqp.ConsumerOptions{InitialCredits: 1})
			require.NoError(t, err)
			d, err := consumer.Receive(t.Context())
			require.NoError(t, err)
			require.NoError(t, handle(d))
			require.NoError(t, consumer.Close(t.Context()))
		}
		for name, props := range protonProperties() {
			m := func() *amqp.Message {
				return &amqp.Message{Header: &amqp.MessageHeader{Durable: true, Priority: 7, TTL: time.Hour, DeliveryCount: 3}, Properties: new(*props.here), Data: [][]byte{[]byte("a"), {}, []byte("b")}}
			}
			want := &amqp.MessageHeader{Durable: true, Priority: 7, TTL: time.Hour, FirstAcquirer: true}
			_, err = official.Publish(t.Context(), m())
			require.NoError(t, err)
			got := s.next(t, "q", 1)[0]
			assert.Equal(t, props.here, utc(got.Properties), name)
			assert.Equal(t, want, got.Header, name)
			assert.Equal(t, "a||b", string(got.Data[0])+"|"+string(got.Data[1])+"|"+string(got.Data[2]))
			require.NoError(t, pub.Publish(t.Context(), m()))
			receive(func(d rabbitmqamqp.IDeliveryContext) error {
				assert.Equal(t, props.here, utc(d.Message().Properties), name)
				assert.Equal(t, want, d.Message().Header, name)
				return d.Accept(t.Context())
			})
		}
		s.outcomesOfBoth(t, pub, receive)
	})
}

// outcomesOfBoth has the official client and hopback settle deliveries.
func (s *site) outcomesOfBoth(t *testing.T, pub *client.Publisher[*client.Message], receive func(func(d rabbitmqamqp.IDeliveryContext) error)) {
	t.Helper()
	mark := amqp.Annotations{"x-opt-mark": "m"}
	for name, settle := range map[string]func(d rabbitmqamqp.IDeliveryContext) error{
		"requeued":  func(d rabbitmqamqp.IDeliveryContext) error { return d.Requeue(t.Context()) },
		"annotated": func(d rabbitmqamqp.IDeliveryContext) error { return d.RequeueWithAnnotations(t.Context(), mark) },
		"discarded": func(d rabbitmqamqp.IDeliveryContext) error { return d.Discard(t.Context(), nil) },
		"discarded with annotations": func(d rabbitmqamqp.IDeliveryContext) error {
			return d.DiscardWithAnnotations(t.Context(), mark)
		},
	} {
		require.NoError(t, pub.Publish(t.Context(), client.NewMessage([]byte(name))))
		receive(settle)
		queue := "q"
		if name[0] == 'd' {
			queue = "dead"
		}
		m := s.next(t, queue, 1)[0]
		assert.Equal(t, name, string(m.GetData()))
		if name == "annotated" || name == "discarded with annotations" {
			assert.Equal(t, "m", m.Annotations["x-opt-mark"], name)
		}
	}
	for name, outcome := range map[string]error{"failed": errors.New("broken"), "requeued": client.Requeue{}, "modified": client.Modify{Failed: true, Annotations: map[string]any{"x-opt-mark": "m"}}} {
		require.NoError(t, pub.Publish(t.Context(), client.NewMessage([]byte(name))))
		s.handleOnce(t, "q", outcome)
		receive(func(d rabbitmqamqp.IDeliveryContext) error {
			assert.Equal(t, name, string(d.Message().GetData()))
			counts := uint32(1)
			if name == "requeued" {
				counts = 0
			}
			assert.Equal(t, counts, d.Message().Header.DeliveryCount, name)
			if name == "modified" {
				assert.Equal(t, "m", d.Message().Annotations["x-opt-mark"])
			}
			return d.Accept(t.Context())
		})
	}
}
