package retry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// A handler asks for a delay of many delay queues. RabbitMQ 4.3 and later hold the message in its queue
// instead, before that it passes them. It is never early.
func TestADelayOfManyQueuesIsHeldWhereTheQueueCan(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
			t.Run(string(strategy), func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				const asked = 3 * time.Second
				p := retry.Policy{Strategy: strategy, Backoff: retry.Delays(100 * time.Millisecond)}
				conn, log := s.Connect(t)
				suite.ApplyRetry(t, conn, p, declare.QuorumQueue{Name: "work"})
				at := make(chan time.Time, 10)
				suite.Consume(t, conn, "work", retry.With(p)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
					at <- time.Now()
					if retry.Attempt(ctx) == 1 {
						return retry.After(asked, errors.New("busy"))
					}
					return nil
				})), client.ConsumerConfig{})
				suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("work")), suite.Order{ID: 1})
				first := suite.Await(t, at, "the first attempt")
				assert.GreaterOrEqual(t, suite.Await(t, at, "the second").Sub(first), asked-2*time.Millisecond)
				suite.AssertEmpty(t, s, "work")
				held := len(log.With("will be retried", "strategy=native"))
				assert.Equal(t, s.Newer(), held == 1, "%q", log.All())
			})
		}
	})
}
