package retry_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// Policies on the broker change a live topology: one shortens a delay, and one deletes the
// dead-letter queue, which nobody uses at the moment. AMQP doesn't show them, but a running
// worker notices.
func TestWorkerNoticesWhatPoliciesDo(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
			t.Run(string(strategy), func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				conn, log := s.Connect(t)
				policy := retry.Policy{Strategy: strategy, MaxRetries: 1000, Backoff: retry.Delays(4 * time.Second)}
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
				suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
					return errors.New("never")
				})), client.ConsumerConfig{})
				p := suite.PublisherOf(t, conn, address.Queue("orders"))
				suite.Publish(t, p, "x") // the consumer has started, and looked, once it fails
				assert.Eventually(t, func() bool { return len(log.With("an attempt failed")) > 0 }, suite.Patience, 50*time.Millisecond)
				for name, definition := range map[string]map[string]any{
					"^(delay|hold)_4s$": {"message-ttl": 200},
					`^orders\.dead$`:    {"expires": 500},
				} {
					s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/p"+definitionKey(definition), map[string]any{"pattern": name, "apply-to": "queues", "definition": definition}, nil)
				}
				suite.Publish(t, p, "y")
				for _, text := range []string{"a retry came back early", "the dead-letter queue is gone"} {
					assert.Eventually(t, func() bool { return len(log.With(text)) == 1 }, suite.Patience, 100*time.Millisecond, text)
				}
			})
		}
	})
}

// definitionKey is the one key of a policy's definition.
func definitionKey(definition map[string]any) string {
	for key := range definition {
		return key
	}
	return ""
}
