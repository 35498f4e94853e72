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

// A handler forwards a copy of a message that was retried three times to another queue. The message
// starts over there, with each pair of strategies: it has all of its retries, and the time of
// GiveUpAfter begins with its first failure there.
func TestAForwardedCopyStartsOver(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		all := suite.Strategies(s)
		for first, editFirst := range all {
			for second, editSecond := range all {
				if first != second && first != "republish" && second != "republish" {
					continue
				}
				t.Run(first+" "+second, func(t *testing.T) {
					t.Parallel()
					s := suite.NewSite(t, s.Broker)
					const retries = 3
					policies := map[string]retry.Policy{}
					for queue, edit := range map[string]func(*retry.Policy){"a": editFirst, "b": editSecond} {
						p := retry.Policy{MaxRetries: retries, Backoff: retry.Delays(50 * time.Millisecond), Names: retry.Names{Prefix: queue + "."}}
						edit(&p)
						policies[queue] = p
					}
					conn, _ := s.Connect(t)
					suite.ApplyRetry(t, conn, policies["a"], declare.QuorumQueue{Name: "a"})
					suite.ApplyRetry(t, conn, policies["b"], declare.QuorumQueue{Name: "b"})
					attempts := map[string]chan int{"a": make(chan int, 100), "b": make(chan int, 100)}
					suite.Consume(t, conn, "a", retry.With(policies["a"])(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
						n := retry.Attempt(ctx)
						attempts["a"] <- n
						if n <= retries {
							return errors.New("not yet")
						}
						return client.Forward{To: address.Queue("b"), Message: client.Copy(d.Message())}
					})), client.ConsumerConfig{})
					suite.Consume(t, conn, "b", retry.With(policies["b"])(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
						attempts["b"] <- retry.Attempt(ctx)
						return errors.New("never")
					})), client.ConsumerConfig{})
					suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("a")), suite.Order{ID: 1})
					for _, queue := range []string{"a", "b"} {
						for n := range retries + 1 {
							assert.Equal(t, n+1, suite.Await(t, attempts[queue], "an attempt in "+queue), queue)
						}
					}
					suite.Poll(t, "it is dead-lettered", func() bool { return suite.Ready(t, conn, "b.dead") == 1 })
					dead := retry.DeadLetterOf(s.Peer(t).Take("b.dead", 1)[0])
					assert.Equal(t, retry.ReasonExhausted, dead.Reason)
					assert.Equal(t, "b", dead.Queue)
					assert.Equal(t, retries, dead.Retries)
					assert.Empty(t, attempts["b"])
					assert.NotZero(t, dead.FirstFailure)
				})
			}
		}
	})
}
