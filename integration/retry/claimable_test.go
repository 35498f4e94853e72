package retry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// A message that waits for its retry is canceled, run now, and rescheduled by its message-id. Its retries are counted as before,
// and coming before its time isn't taken for a fault.
func TestRetriesAreClaimed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		policy := retry.Policy{Strategy: retry.StrategyNative, Claimable: true, MaxRetries: 2, Backoff: retry.Delays(time.Hour)}
		conn, log := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 20})
		type attempt struct {
			body    string
			retries int
		}
		attempts := make(chan attempt, 100)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			body := string(d.Message().GetData())
			n := retry.Count(d.Message())
			attempts <- attempt{body, n}
			if body == "rescheduled" && n == 1 {
				return nil
			}
			return errors.New("not yet")
		})), client.ConsumerConfig{})
		attempted := func(body string, retries int) {
			t.Helper()
			assert.Equal(t, attempt{body, retries}, suite.Await(t, attempts, body))
		}
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		uuid := amqp.UUID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
		for body, id := range map[string]any{"canceled": "order-1", "run": "order-2", "rescheduled": "order-3", "uuid": uuid} {
			suite.Publish(t, p, body, func(m *client.Message) { m.Properties = &client.Properties{MessageID: id} })
			attempted(body, 0)
		}
		ctx := suite.Within(t)
		c, err := client.NewClaimer(ctx, conn, "orders")
		require.NoError(t, err)
		// The handler has returned, but its consumer may not have parked the message yet.
		once := func(what string, change func() (int, error)) {
			t.Helper()
			suite.Poll(t, what, func() bool {
				n, err := change()
				require.NoError(t, err)
				require.LessOrEqual(t, n, 1)
				return n == 1
			})
			n, err := change()
			require.NoError(t, err)
			assert.Zero(t, n, "%s again", what)
		}
		once("cancel", func() (int, error) { return c.Cancel(ctx, "order-1") })
		once("cancel a UUID", func() (int, error) { return c.Cancel(ctx, uuid.String()) })

		suite.Poll(t, "run now", func() bool {
			n, err := c.RunNow(ctx, "order-2")
			require.NoError(t, err)
			return n == 1
		})
		attempted("run", 1)
		suite.Poll(t, "run now for the last time", func() bool {
			n, err := c.RunNow(ctx, "order-2")
			require.NoError(t, err)
			return n == 1
		})
		attempted("run", 2)
		dead := s.Peer(t).Take("orders.dead", 1)[0]
		assert.Equal(t, "run", string(dead.GetData()))
		assert.EqualValues(t, retry.ReasonExhausted, dead.Annotations[client.AnnotationReason])

		at := time.Now().Add(3 * time.Second)
		suite.Poll(t, "reschedule", func() bool {
			at = time.Now().Add(3 * time.Second)
			n, err := c.Reschedule(ctx, "order-3", at)
			require.NoError(t, err)
			return n == 1
		})
		attempted("rescheduled", 1)
		assert.False(t, time.Now().Before(at), "it came before %v", at)
		require.NoError(t, c.Close(ctx))
		suite.AssertEmpty(t, s, "orders")
		assert.Empty(t, attempts, "a canceled message came")
		assert.Empty(t, log.With("come back early"))
		assert.Empty(t, log.With("broker's clock"))
	})
}
