package retry_test

import (
	"context"
	"errors"
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

// RabbitMQ 4.3 counts a queue's message TTL from the message's arrival, also while the
// message waits for its delivery time. So StrategyNative refuses a work queue whose TTL is
// over before the retries are.
func TestAMessageExpiresWhileItWaitsNatively(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return // there is no StrategyNative
		}
		conn, _ := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyNative, MaxRetries: 2, Backoff: retry.Delays(3 * time.Second)}
		work := declare.QuorumQueue{Name: "orders", MessageTTL: 5 * time.Second} // longer than one delay, not than both
		_, err := retry.Topology(policy, work)
		require.ErrorContains(t, err, "MessageTTL")
		policy.Waive = []retry.Guard{retry.GuardDelayQueue}
		suite.ApplyRetry(t, conn, policy, work)

		policy.Waive = nil
		found := suite.Guarded(t, conn, "orders", policy)
		require.Len(t, found, 1)
		assert.Equal(t, retry.GuardDelayQueue, found[0].Guard)
		assert.Contains(t, found[0].Problem, "x-message-ttl of 5000 ms")
		assert.Contains(t, found[0].Problem, "6s")
		longer := policy
		longer.MaxRetries = 1
		assert.Empty(t, suite.Guarded(t, conn, "orders", longer))

		policy.Waive = []retry.Guard{retry.GuardDelayQueue}
		attempts := make(chan int, 10)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
			attempts <- retry.Attempt(ctx)
			return errors.New("down")
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{ID: 1})
		assert.Equal(t, 1, suite.Await(t, attempts, "the first attempt"))
		dead := s.Peer(t).Take("orders.dead", 1)[0]
		assert.Equal(t, retry.ReasonExpired, retry.DeadLetterOf(dead).Reason, "it has retries left")
		for range len(attempts) {
			assert.Less(t, <-attempts, 3)
		}
	})
}

// A queue with a message TTL that works under StrategyAuto on RabbitMQ 4.0 works on 4.3 as
// well: messages wait in delay queues there, too.
func TestAutoRetriesOnAQueueWithAMessageTTL(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyAuto, MaxRetries: 2, Backoff: retry.Delays(1500 * time.Millisecond)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", MessageTTL: time.Second})
		require.Empty(t, suite.Guarded(t, conn, "orders", policy))
		attempts := make(chan int, 10)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
			attempts <- retry.Attempt(ctx)
			return errors.New("down")
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{ID: 1})
		for n := range 3 {
			assert.Equal(t, n+1, suite.Await(t, attempts, "an attempt"))
		}
		assert.Equal(t, retry.ReasonExhausted, retry.DeadLetterOf(s.Peer(t).Take("orders.dead", 1)[0]).Reason)
	})
}
