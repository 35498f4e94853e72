package integration

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// The further key looks like those of the retry topology. A copy with it would go to the
// other queue once more.
func TestAMessageWithFurtherRoutingKeysReachesEachQueueOnceWhateverItsRetries(t *testing.T) {
	forEachStrategy(t, func(t *testing.T, s *site, policy retry.Policy) {
		conn, _ := s.connect(t)
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"}, declare.QuorumQueue{Name: "mails"})
		require.NoError(t, err)
		topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "shop", Type: declare.Topic})
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "shop", Queue: "orders", Key: "order.new"}, declare.Binding{Source: "shop", Queue: "mails", Key: "*.*.mails"})
		apply(t, conn, topology)
		p := publisherOf(t, conn, address.Exchange("shop", "order.new"))
		err = p.Publish(t.Context(), "m", client.CC("eu.new.mails", "eu.other.mails"))
		if !s.newer() {
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.1 or later, and the broker is 4.0")
			assert.Zero(t, ready(t, conn, "orders"))
			return
		}
		require.NoError(t, err)
		done := make(chan int, 10)
		consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			if n := retry.Attempt(ctx); n < 3 {
				return errors.New("not yet")
			} else {
				done <- n
			}
			return nil
		})), client.ConsumerConfig{})
		assert.Equal(t, 3, await(t, done, "the message is handled"))
		poll(t, "the queue is empty", func() bool { return ready(t, conn, "orders") == 0 })
		assert.Equal(t, 1, ready(t, conn, "mails"))
	})
}

func TestFurtherRoutingKeysMustBeAListOfStrings(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		p := publisherOf(t, conn, address.Queue("orders"))
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		for _, bad := range []any{"mails", []string{"mails"}, []any{int64(1)}, true} {
			err := p.Publish(ctx, "m", func(m *client.Message) { m.Annotations = map[any]any{"x-cc": bad} })
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "is not a list of strings")
		}
		require.NoError(t, p.Publish(ctx, "m", client.CC("mails"), client.CC()), "without keys it is removed")
		assert.Equal(t, 1, ready(t, conn, "orders"))
	})
}
