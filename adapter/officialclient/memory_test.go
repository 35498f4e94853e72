package officialclient_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/adapter/officialclient"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// memory is RabbitMQ's own client with a broker in memory, over TCP.
func memory(t *testing.T, version string) (*hopbacktest.Broker, *rabbitmqamqp.AmqpConnection) {
	b := hopbacktest.Start(t, hopbacktest.Config{Version: version})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	env := rabbitmqamqp.NewEnvironment(url, &rabbitmqamqp.AmqpConnOptions{
		RecoveryConfiguration: &rabbitmqamqp.RecoveryConfiguration{ActiveRecovery: false},
	})
	conn, err := env.NewConnection(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = env.CloseConnections(ctx)
	})
	return b, conn
}

// RabbitMQ's own client declares, publishes, consumes and dead-letters with a broker in
// memory as with a real one.
func TestTheOfficialClientWithABrokerInMemory(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			b, conn := memory(t, version)
			m := conn.Management()
			_, err := m.DeclareExchange(ctx, &rabbitmqamqp.TopicExchangeSpecification{Name: "shop"})
			require.NoError(t, err)
			_, err = m.DeclareQueue(ctx, &rabbitmqamqp.QuorumQueueSpecification{Name: "dead"})
			require.NoError(t, err)
			q, err := m.DeclareQueue(ctx, &rabbitmqamqp.QuorumQueueSpecification{Name: "orders", DeadLetterExchange: "shop", DeadLetterRoutingKey: "dead", DeliveryLimit: 5})
			require.NoError(t, err)
			assert.Equal(t, "orders", q.Name())
			bound, err := m.Bind(ctx, &rabbitmqamqp.ExchangeToQueueBindingSpecification{SourceExchange: "shop", DestinationQueue: "orders", BindingKey: "order.#"})
			require.NoError(t, err)
			_, err = m.Bind(ctx, &rabbitmqamqp.ExchangeToQueueBindingSpecification{SourceExchange: "shop", DestinationQueue: "dead", BindingKey: "dead"})
			require.NoError(t, err)

			p, err := conn.NewPublisher(ctx, &rabbitmqamqp.ExchangeAddress{Exchange: "shop", Key: "order.placed"}, nil)
			require.NoError(t, err)
			const messages = 200
			for i := range messages {
				result, err := p.Publish(ctx, rabbitmqamqp.NewMessage(fmt.Appendf(nil, "%d", i)))
				require.NoError(t, err)
				require.IsType(t, &rabbitmqamqp.StateAccepted{}, result.Outcome)
			}
			nobody, err := conn.NewPublisher(ctx, &rabbitmqamqp.ExchangeAddress{Exchange: "shop", Key: "nobody"}, nil)
			require.NoError(t, err)
			result, err := nobody.Publish(ctx, rabbitmqamqp.NewMessage([]byte("x")))
			require.NoError(t, err)
			assert.IsType(t, &rabbitmqamqp.StateReleased{}, result.Outcome)

			c, err := conn.NewConsumer(ctx, "orders", &rabbitmqamqp.ConsumerOptions{InitialCredits: 50})
			require.NoError(t, err)
			for i := range messages {
				d, err := c.Receive(ctx)
				require.NoError(t, err)
				assert.Equal(t, fmt.Sprint(i), string(d.Message().GetData()))
				if i == 7 {
					require.NoError(t, d.Discard(ctx, nil))
				} else {
					require.NoError(t, d.Accept(ctx))
				}
			}
			require.NoError(t, b.Queue("dead").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready == 1 }))
			require.NoError(t, b.Queue("orders").Await(ctx, func(c hopbacktest.Counts) bool { return c.Messages == 0 }))
			dead, err := conn.NewConsumer(ctx, "dead", nil)
			require.NoError(t, err)
			d, err := dead.Receive(ctx)
			require.NoError(t, err)
			assert.Equal(t, "7", string(d.Message().GetData()))
			assert.Equal(t, "orders", d.Message().Annotations["x-first-death-queue"])
			assert.Equal(t, "rejected", d.Message().Annotations["x-first-death-reason"])
			require.NoError(t, d.Accept(ctx))
			require.NoError(t, c.Close(ctx))
			require.NoError(t, dead.Close(ctx))
			require.NoError(t, p.Close(ctx))

			require.NoError(t, m.Unbind(ctx, bound))
			n, err := m.PurgeQueue(ctx, "orders")
			require.NoError(t, err)
			assert.Zero(t, n)
			require.NoError(t, m.DeleteQueue(ctx, "orders"))
			require.NoError(t, m.DeleteExchange(ctx, "shop"))
			assert.False(t, b.Queue("orders").Exists())
		})
	}
}

// Our handlers and retries on the official client's connections.
func TestTheAdapterWithABrokerInMemory(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			b, conn := memory(t, version)
			policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(50 * time.Millisecond)}
			topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 20})
			require.NoError(t, err)
			own, err := client.Connect(t.Context(), b.URL(), client.Config{})
			require.NoError(t, err)
			defer func() { _ = own.Close(context.Background()) }()
			_, err = declare.Apply(t.Context(), own.Management(), topology)
			require.NoError(t, err)
			p, err := conn.NewPublisher(t.Context(), &rabbitmqamqp.QueueAddress{Queue: "orders"}, nil)
			require.NoError(t, err)
			_, err = p.Publish(t.Context(), rabbitmqamqp.NewMessage([]byte(`"order"`)))
			require.NoError(t, err)

			ctx, stop := context.WithTimeout(t.Context(), time.Minute)
			attempts := 0
			go func() {
				defer stop()
				_ = b.Queue("orders.dead").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready == 1 })
			}()
			consumer, err := conn.NewConsumer(t.Context(), "orders", nil)
			require.NoError(t, err)
			require.NoError(t, officialclient.Serve(ctx, own, consumer, "orders", retry.With(policy)(client.JSON(func(context.Context, string) error {
				attempts++
				return errors.New("declined")
			})), officialclient.Config{}))
			assert.Equal(t, 3, attempts)
			all := b.Queue("orders.dead").Messages()
			require.Len(t, all, 1)
			assert.Equal(t, retry.ReasonExhausted, retry.DeadLetterOf(all[0].Message).Reason)
		})
	}
}
