package retry_test

import (
	"context"
	"errors"
	"net/url"
	"sync"
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

// A message fails once and is handled the second time. Between its first delivery
// and the settlement of its last, the consumer's connection ends once behind each
// single frame: the delivery, the transfer of the copy, its confirmation, the
// settlements, and all that lies between. With every strategy, the message is
// handled to its end afterwards. It is handled to its end twice only where docs/guarantees.md
// says so: when the connection ends after that, before the broker has heard of it;
// and, by Republish, when the copy is stored and its original isn't accepted yet.
func TestNoMessageIsLostWhereverTheConnectionEnds(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, edit := range suite.Strategies(s) {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(50 * time.Millisecond)}
				edit(&policy)
				direct, _ := s.Connect(t)
				suite.ApplyRetry(t, direct, policy, declare.QuorumQueue{Name: "work", DeliveryLimit: declare.Unlimited})
				wire := suite.NewFrameCutter(t, s.Host())
				conn, _ := suite.ConnectTo(t, s.AMQPURLWith(func(u *url.URL) { u.Host = wire.Addr() }), suite.Soon)

				var mu sync.Mutex
				succeeded := map[int]int{}
				early := map[int]bool{} // the connection ended before the second delivery had come
				done := make(chan int, 1000)
				// One worker, so that frames come in one order.
				suite.Consume(t, conn, "work", retry.With(policy)(client.JSON(func(ctx context.Context, id int) error {
					if retry.Attempt(ctx) == 1 {
						return errors.New("not yet")
					}
					mu.Lock()
					defer mu.Unlock()
					succeeded[id]++
					done <- id
					return nil
				})), client.ConsumerConfig{Prefetch: 1})
				p := suite.Publisher[int](t, direct, address.Queue("work"))

				one := func(id, behind int) int {
					wire.Arm(behind)
					suite.Publish(t, p, id)
					for suite.Await(t, done, "the message is handled to its end") != id {
					}
					for _, q := range []string{"work", "work.dead", "parking_queue"} {
						suite.Poll(t, q+" is empty", func() bool { return suite.Ready(t, direct, q) == 0 })
					}
					frames, deliveries := wire.Disarm()
					mu.Lock()
					defer mu.Unlock()
					early[id] = deliveries == 1
					return frames
				}
				frames := one(0, 0) // none is cut: how many are there?
				require.Greater(t, frames, 3)
				duplicates, behind := 0, 1
				for ; behind <= frames; behind++ {
					one(behind, behind)
				}
				mu.Lock()
				defer mu.Unlock()
				for id := 1; id < behind; id++ {
					assert.Positive(t, succeeded[id], "cut behind frame %d: lost", id)
					duplicates += succeeded[id] - 1
					if name != "republish" && name != "ladder" && (name != "auto" || s.Newer()) && early[id] {
						assert.Equal(t, 1, succeeded[id], "cut behind frame %d, before the second delivery: no copy, so no duplicate", id)
					}
				}
				t.Logf("REPORT %s: cut behind each of %d frames: lost 0, handled twice %d", t.Name(), frames, duplicates)
			})
		}
	})
}
