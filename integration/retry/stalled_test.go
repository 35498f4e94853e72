package retry_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// A delay queue that is gone blocks the messages that need it, and no others; when it
// is back they go through it, none is dead.
func TestAMissingDelayQueueLeavesHealthyMessagesTheirSpeed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 2000
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(3 * time.Second), Strategy: retry.StrategyRepublish}
		var mu sync.Mutex
		var notified []client.Event
		conn, _ := s.Connect(t, suite.Soon, func(c *client.Config) {
			c.OnEvent = func(e client.Event) {
				mu.Lock()
				defer mu.Unlock()
				if e.Kind == client.EventForwardStalled || e.Kind == client.EventForwardResumed {
					notified = append(notified, e)
				}
			}
		})
		events := func(kind client.EventKind) (n int) {
			mu.Lock()
			defer mu.Unlock()
			for _, e := range notified {
				if e.Kind == kind {
					assert.Equal(t, obstructedAddress, e.Target)
					n++
				}
			}
			return n
		}
		work := declare.QuorumQueue{Name: "orders", DeliveryLimit: 2}
		suite.ApplyRetry(t, conn, policy, work)
		var healthy, retried atomic.Int64
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			d, _ := client.DeliveryFrom(ctx)
			switch {
			case retry.Count(d.Message()) > 0:
				retried.Add(1)
			case o.ID%10 == 0:
				return errors.New("not yet")
			default:
				healthy.Add(1)
			}
			return nil
		})), client.ConsumerConfig{Concurrency: 4, Prefetch: 20, ForwardPatience: 5 * time.Second})
		suite.AwaitConsumers(t, conn, "orders", 1)
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var all, onlyHealthy []suite.Order
		for i := range messages {
			all = append(all, suite.Order{ID: i})
			if i%10 != 0 {
				onlyHealthy = append(onlyHealthy, suite.Order{ID: i})
			}
		}
		handledIn := func(orders []suite.Order) time.Duration {
			began := time.Now()
			healthy.Store(0)
			require.NoError(t, p.PublishAll(t.Context(), orders))
			suite.Poll(t, "the healthy are handled", func() bool { return healthy.Load() == int64(len(onlyHealthy)) })
			return time.Since(began)
		}
		alone := handledIn(onlyHealthy)
		_, err := declare.DeleteQueue(t.Context(), conn.Management(), "delay_3s")
		require.NoError(t, err)
		together := handledIn(all)
		suite.Report(t, s, "%d healthy messages alone: %v; together with %d that can't be forwarded, with Prefetch 20: %v", len(onlyHealthy), alone, messages/10, together)
		// Without room for them to wait it is 2 messages a second: hundreds of times as long.
		assert.Less(t, together, 5*alone+suite.LateLimit)
		suite.Poll(t, "the outage is reported", func() bool { return events(client.EventForwardStalled) == 1 })

		suite.ApplyRetry(t, conn, policy, work)
		suite.Poll(t, "all are retried", func() bool { return retried.Load() >= messages/10 })
		suite.Poll(t, "the end is reported", func() bool { return events(client.EventForwardResumed) == 1 })
		assert.EqualValues(t, messages/10, retried.Load())
		assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
		assert.Equal(t, 1, events(client.EventForwardStalled), "once for the outage")
	})
}
