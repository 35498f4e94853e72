package consume_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/middleware/typemux"
	"github.com/hopback/hopback/retry"
)

func TestAMessageOfAnUnknownTypeIsDeadWithItsReason(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		for _, subject := range []string{"lost", "placed"} {
			suite.Publish(t, p, "17", func(m *client.Message) { m.Properties.Subject = &subject })
		}
		placed := make(chan int, 10)
		suite.Consume(t, conn, "orders", retry.With(retry.Policy{})(typemux.New(typemux.Config{Handlers: map[string]client.Handler{
			"placed": client.JSON(func(_ context.Context, id int) error {
				placed <- id
				return nil
			}),
		}})), client.ConsumerConfig{})
		assert.Equal(t, 17, suite.Await(t, placed, "the known message"))
		dead := make(chan *client.Message, 10)
		suite.Consume(t, conn, "orders.dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			dead <- d.Message()
			return nil
		}), client.ConsumerConfig{})
		m := suite.Await(t, dead, "the unknown message")
		require.NotNil(t, m.Properties.Subject)
		assert.Equal(t, "lost", *m.Properties.Subject)
		assert.Equal(t, string(client.ReasonUnknownType), m.Annotations[client.AnnotationReason])
		assert.Contains(t, m.Annotations[client.AnnotationError], `"lost"`)
	})
}

// A publisher of AMQP 0-9-1 sets the property type, which RabbitMQ delivers as an annotation.
func TestTheTypeOfAnAMQP091MessageFindsItsHandler(t *testing.T) {
	t.Parallel()
	for _, b := range suite.Brokers { // the one in memory has no AMQP 0-9-1
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			s := suite.NewSite(t, b)
			conn, _ := s.Connect(t)
			suite.ApplyRetry(t, conn, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
			const n = 19
			for range n {
				s.HTTP(t, "POST", "/exchanges/"+s.VHost+"/amq.default/publish", map[string]any{
					"routing_key": "orders", "payload": "17", "payload_encoding": "string", "properties": map[string]any{"type": "placed"},
				}, nil)
			}
			placed := make(chan int, n)
			suite.Consume(t, conn, "orders", retry.With(retry.Policy{})(typemux.New(typemux.Config{Handlers: map[string]client.Handler{
				"placed": client.JSON(func(_ context.Context, id int) error {
					placed <- id
					return nil
				}),
			}})), client.ConsumerConfig{})
			for range n {
				assert.Equal(t, 17, suite.Await(t, placed, "a message"))
			}
			assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
		})
	}
}
