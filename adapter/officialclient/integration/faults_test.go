package integration

import (
	"context"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// The tests of this file pin what version 1.0.0 of the official client does, as
// far as the adapter is built around it. Where one fails with a later version,
// the adapter's guard may have become needless.

func TestOfficialPublishHasNoErrorForReleased(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{Exchanges: []declare.Exchange{{Name: "empty", Type: declare.ExchangeTopic}}})
		conn := s.connection(t, rabbitmqamqp.RecoveryConfiguration{})
		p, err := conn.NewPublisher(within(t), &rabbitmqamqp.ExchangeAddress{Exchange: "empty", Key: "k"}, nil)
		require.NoError(t, err)
		m := amqp.NewMessage([]byte("body"))
		r, err := p.Publish(within(t), m)
		require.NoError(t, err)
		assert.IsType(t, &rabbitmqamqp.StateReleased{}, r.Outcome)
		assert.Equal(t, &amqp.MessageHeader{Durable: true}, m.Header, "priority 0 is below that of no header, on 4.3")
	})
}

func TestOfficialAttachToNothingEndsTheSessionOn40(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		conn := s.connection(t, rabbitmqamqp.RecoveryConfiguration{})
		good, err := conn.NewPublisher(within(t), &rabbitmqamqp.QueueAddress{Queue: "orders"}, nil)
		require.NoError(t, err)
		_, err = conn.NewPublisher(within(t), &rabbitmqamqp.ExchangeAddress{Exchange: "missing"}, nil)
		require.Error(t, err)
		_, err = good.Publish(within(t), message("o-1"))
		if s.newer() {
			assert.NoError(t, err)
		} else {
			assert.Error(t, err)
		}
		assert.IsType(t, &rabbitmqamqp.StateOpen{}, conn.State())
	})
}

func TestOfficialRequeueIsNotCountedOn43(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.work(t, retry.Policy{}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
		s.publish(t, "orders", message("o-1"))
		c, err := s.connection(t, rabbitmqamqp.RecoveryConfiguration{}).NewConsumer(within(t), "orders", nil)
		require.NoError(t, err)
		n := 0
		for ; n < 10; n++ {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			d, err := c.Receive(ctx)
			cancel()
			if err != nil {
				break
			}
			require.NoError(t, d.RequeueWithAnnotations(t.Context(), amqp.Annotations{"x-opt-a": "b"}))
		}
		if s.newer() {
			assert.Equal(t, 10, n, "without end")
		} else {
			assert.Equal(t, 3, n, "a limit of 2 allows 3 deliveries")
		}
	})
}

func TestOfficialDiscardWithAnnotationsIsCounted(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.work(t, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
		s.publish(t, "orders", message("o-1"))
		c, err := s.connection(t, rabbitmqamqp.RecoveryConfiguration{}).NewConsumer(within(t), "orders", nil)
		require.NoError(t, err)
		d, err := c.Receive(within(t))
		require.NoError(t, err)
		require.NoError(t, d.DiscardWithAnnotations(t.Context(), amqp.Annotations{"x-opt-a": "b"}))
		m := s.take(t, "orders.dead", 1)[0]
		if assert.NotNil(t, m.Header) {
			assert.EqualValues(t, 1, m.Header.DeliveryCount)
		}
	})
}

func TestOfficialPanics(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		c, err := s.connection(t, rabbitmqamqp.RecoveryConfiguration{}).NewConsumer(within(t), "orders", nil)
		require.NoError(t, err)
		s.publish(t, "orders", message("good"))
		d, err := c.Receive(within(t))
		require.NoError(t, err)
		assert.Panics(t, func() { _ = d.RequeueWithAnnotations(t.Context(), amqp.Annotations{"x": 1}) })
		require.NoError(t, d.Accept(t.Context()))
		m := message("bad")
		m.Annotations = amqp.Annotations{"x-stream-offset": "not a number"}
		s.publish(t, "orders", m)
		assert.Panics(t, func() { _, _ = c.Receive(within(t)) })
	})
}
