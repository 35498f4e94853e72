package broker_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// An exchange on the way back is gone when messages want to pass it. The broker
// holds them, and tries again after its dead_letter_worker_publisher_confirm_timeout:
// 180 s by default, and 10 s on the brokers that docker-compose.yml starts.
func TestRetriesComeSoonAfterARepair(t *testing.T) {
	t.Parallel()
	for name, strategy := range map[string]retry.Strategy{"requeue exchange": retry.StrategyRepublish, "return exchange": retry.StrategyDeadLetter} {
		t.Run(name, func(t *testing.T) {
			suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
				setting := s.EvalOK(t, "application:get_env(rabbit, dead_letter_worker_publisher_confirm_timeout).")
				require.Equal(t, "{ok,10000}", strings.TrimSpace(setting))
				conn, _ := s.Connect(t)
				policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second), Strategy: strategy}
				topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
				require.NoError(t, err)
				suite.Apply(t, conn, topology)
				ready, came := make(chan struct{}, 1), make(chan time.Time, 1)
				suite.Consume(t, conn, "work", retry.With(policy)(client.JSON(func(ctx context.Context, n int) error {
					switch {
					case n == 0:
						ready <- struct{}{} // the consumer's checks are over
					case retry.Attempt(ctx) == 1:
						return errors.New("not yet")
					default:
						came <- time.Now()
					}
					return nil
				})), client.ConsumerConfig{})
				p := suite.Publisher[int](t, conn, address.Queue("work"))
				suite.Publish(t, p, 0)
				select {
				case <-ready:
				case <-time.After(suite.Patience):
					require.Fail(t, "nothing is consumed")
				}
				gone := map[retry.Strategy]string{retry.StrategyRepublish: "requeue_exchange", retry.StrategyDeadLetter: "return_exchange"}[strategy]
				require.NoError(t, declare.DeleteExchange(t.Context(), conn.Management(), gone))
				suite.Publish(t, p, 1)
				// The broker has tried once, in vain.
				suite.Poll(t, "the broker holds the message", func() bool {
					snapshot, err := check.Read(t.Context(), check.Sources{HTTP: s.API(t)}, declare.Topology{})
					require.NoError(t, err)
					for _, q := range snapshot.Queues {
						if q.MessagesDeadLettering == 1 {
							return true
						}
					}
					return false
				})
				suite.Apply(t, conn, topology)
				repaired := time.Now()
				select {
				case at := <-came:
					t.Logf("REPORT %s: %.1f s after the repair", s.Version, at.Sub(repaired).Seconds())
				case <-time.After(2 * suite.Patience):
					assert.Fail(t, "the message hasn't come back")
				}
			})
		})
	}
}
