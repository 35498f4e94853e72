package publish_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// The further key looks like those of the retry topology. A copy with it would go to the
// other queue once more.
func TestAMessageWithFurtherRoutingKeysReachesEachQueueOnceWithAnyNumberOfRetries(t *testing.T) {
	suite.ForEachStrategy(t, func(t *testing.T, s *suite.Site, policy retry.Policy) {
		conn, _ := s.Connect(t)
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"}, declare.QuorumQueue{Name: "mails"})
		require.NoError(t, err)
		topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "shop", Type: declare.ExchangeTopic})
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "shop", Queue: "orders", Key: "order.new"}, declare.Binding{Source: "shop", Queue: "mails", Key: "*.*.mails"})
		suite.Apply(t, conn, topology)
		p := suite.PublisherOf(t, conn, address.Exchange("shop", "order.new"))
		err = p.Publish(t.Context(), "m", client.CC("eu.new.mails", "eu.other.mails"))
		if !s.AtLeast("4.1") {
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.1 or later, and the broker is 4.0")
			assert.Zero(t, suite.Ready(t, conn, "orders"))
			return
		}
		require.NoError(t, err)
		done := make(chan int, 10)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			if n := retry.Attempt(ctx); n < 3 {
				return errors.New("not yet")
			} else {
				done <- n
			}
			return nil
		})), client.ConsumerConfig{})
		assert.Equal(t, 3, suite.Await(t, done, "the message is handled"))
		suite.Poll(t, "the queue is empty", func() bool { return suite.Ready(t, conn, "orders") == 0 })
		assert.Equal(t, 1, suite.Ready(t, conn, "mails"))
	})
}

func TestFurtherRoutingKeysMustBeAListOfStrings(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		ctx := suite.Within(t)
		for _, bad := range []any{"mails", []string{"mails"}, []any{int64(1)}, true} {
			err := p.Publish(ctx, "m", func(m *client.Message) { m.Annotations = map[any]any{"x-cc": bad} })
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "is not a list of strings")
		}
		require.NoError(t, p.Publish(ctx, "m", client.CC("mails"), client.CC()), "without keys it is removed")
		assert.Equal(t, 1, suite.Ready(t, conn, "orders"))
	})
}
