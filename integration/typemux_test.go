package integration

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/typemux"
	"github.com/hopback/hopback/retry"
)

func TestAMessageOfAnUnknownTypeIsDeadWithItsReason(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		applyRetry(t, conn, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
		p := publisherOf(t, conn, address.Queue("orders"))
		for _, subject := range []string{"lost", "placed"} {
			publish(t, p, "17", func(m *client.Message) { m.Properties.Subject = &subject })
		}
		placed := make(chan int, 10)
		consume(t, conn, "orders", retry.With(retry.Policy{})(typemux.New(typemux.Config{Handlers: map[string]client.Handler{
			"placed": client.JSON(func(_ context.Context, id int) error {
				placed <- id
				return nil
			}),
		}})), client.ConsumerConfig{})
		assert.Equal(t, 17, await(t, placed, "the known message"))
		dead := make(chan *client.Message, 10)
		consume(t, conn, "orders.dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			dead <- d.Message()
			return nil
		}), client.ConsumerConfig{})
		m := await(t, dead, "the unknown message")
		require.NotNil(t, m.Properties.Subject)
		assert.Equal(t, "lost", *m.Properties.Subject)
		assert.Equal(t, string(typemux.ReasonUnknownType), m.Annotations[client.AnnotationReason])
		assert.Contains(t, m.Annotations[client.AnnotationError], `"lost"`)
	})
}
