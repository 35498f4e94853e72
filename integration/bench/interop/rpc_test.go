package interop

import (
	"context"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/rpc"
)

func (s *site) rpcQueues(t *testing.T) {
	t.Helper()
	_, err := declare.Apply(t.Context(), s.conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "ours", DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "theirs", DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
}

// shouting answers requests of "ours".
func (s *site) shouting(t *testing.T) *rpc.Responder {
	t.Helper()
	r, err := rpc.NewResponder(t.Context(), s.conn, rpc.ResponderConfig{
		Codec: client.RawCodec{},
		Allow: func(to address.Address) bool { return rpc.IsReplyQueue(to) || to == address.Queue("answers") },
	})
	require.NoError(t, err)
	s.consume(t, "ours", rpc.Respond(r, func(_ context.Context, b []byte) ([]byte, error) { return append(b, '!'), nil }), client.ConsumerConfig{})
	return r
}

// asks calls "theirs", by each way that the broker has.
func (s *site) asks(t *testing.T) {
	t.Helper()
	ways := []rpc.Replies{rpc.RepliesByQueue}
	if s.conn.Broker().AtLeast(4, 2) {
		ways = append(ways, rpc.RepliesDirect)
	}
	for _, way := range ways {
		q, err := rpc.NewRequester[[]byte, []byte](t.Context(), s.conn, address.Queue("theirs"), rpc.RequesterConfig{Codec: client.RawCodec{}, Replies: way, Timeout: patience})
		require.NoError(t, err)
		got, err := q.Call(t.Context(), []byte("hello"))
		require.NoError(t, err, way)
		assert.Equal(t, "hello?", string(got), way)
		require.NoError(t, q.Close(t.Context()))
	}
}

// The official client's Requester gets our replies, and its Responder answers us.
func TestRequesterAndResponderOfTheOfficialClient(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.rpcQueues(t)
		s.shouting(t)
		env := rabbitmqamqp.NewEnvironment(s.url.String(), nil)
		conn, err := env.NewConnection(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = env.CloseConnections(context.Background()) })

		answers, err := conn.NewResponder(t.Context(), rabbitmqamqp.ResponderOptions{RequestQueue: "theirs", Handler: func(_ context.Context, m *amqp.Message) (*amqp.Message, error) {
			return amqp.NewMessage(append(m.GetData(), '?')), nil
		}})
		require.NoError(t, err)
		defer func() { _ = answers.Close(context.Background()) }()
		s.asks(t)

		options := &rabbitmqamqp.RequesterOptions{RequestQueueName: "ours"}
		if s.conn.Broker().AtLeast(4, 2) {
			options.SettleStrategy = rabbitmqamqp.DirectReplyTo
		}
		asks, err := conn.NewRequester(t.Context(), options)
		require.NoError(t, err)
		defer func() { _ = asks.Close(context.Background()) }()
		// It remembers a request after it has sent it: a reply that is faster is dropped.
		poll(t, "a reply", func() bool {
			replies, err := asks.Publish(t.Context(), asks.Message([]byte("hello")))
			require.NoError(t, err)
			select {
			case m := <-replies:
				return m != nil && assert.Equal(t, "hello!", string(m.GetData()))
			case <-time.After(2 * time.Second):
				return false
			}
		})
	})
}

// AMQP 0-9-1's direct reply-to works across protocols on RabbitMQ 4.3, in both directions. 4.0
// doesn't bridge it: our reply to it goes nowhere. A reply queue works on both.
func TestRequesterAndResponderOfAMQP091(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.rpcQueues(t)
		r := s.shouting(t)
		s.by091(t, "theirs", func(ch *amqp091.Channel, d amqp091.Delivery) {
			_ = ch.PublishWithContext(context.Background(), "", d.ReplyTo, false, false, amqp091.Publishing{CorrelationId: d.CorrelationId, Body: append(d.Body, '?')})
			_ = d.Ack(false)
		})
		if s.conn.Broker().AtLeast(4, 2) {
			s.asks(t)
		}

		ch := s.channel091(t)
		ask := func(replyTo string) <-chan amqp091.Delivery {
			replies, err := ch.Consume(replyTo, "", true, false, false, false, nil)
			require.NoError(t, err)
			require.NoError(t, ch.PublishWithContext(t.Context(), "", "ours", false, false, amqp091.Publishing{ReplyTo: replyTo, CorrelationId: "c-1", Body: []byte("hello")}))
			return replies
		}
		answered := func(replies <-chan amqp091.Delivery) {
			select {
			case d := <-replies:
				assert.Equal(t, "hello!", string(d.Body))
				assert.Equal(t, "c-1", d.CorrelationId)
			case <-time.After(patience):
				require.Fail(t, "no reply")
			}
		}
		own, err := ch.QueueDeclare("answers", true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
		require.NoError(t, err)
		answered(ask(own.Name))
		direct := ask("amq.rabbitmq.reply-to")
		if s.conn.Broker().AtLeast(4, 2) {
			answered(direct)
		} else {
			poll(t, "a reply that goes nowhere", func() bool { return r.Stats().Unclaimed == 1 })
		}
	})
}
