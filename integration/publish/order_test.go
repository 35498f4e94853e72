package publish_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// A publisher's messages are all there, and each for the first time in the order of
// publishing, however often its connection is cut. Those without an answer are sent
// again, so some are there twice.
func TestPublishingKeepsOrderWhileConnectionsAreCut(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const batch = 5_000
		messages, cuts := 10_000, 15 // at least
		if os.Getenv("HOPBACK_LONG") != "" {
			messages, cuts = 200_000, 300
		}
		direct, _ := s.Connect(t)
		suite.Apply(t, direct, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		wire, through := s.Through(t)
		var lost, unanswered atomic.Int64
		conn, _ := suite.ConnectTo(t, through, suite.Soon, func(c *client.Config) {
			c.OnEvent = func(e client.Event) {
				if e.Op == "publish" && e.Kind == client.EventLost {
					lost.Add(1)
					unanswered.Add(int64(e.Unsettled))
				}
			}
		})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))

		began := time.Now()
		seed := uint64(began.UnixNano())
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		var sent, done atomic.Int64 // made into messages so far; connections cut
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		published := make(chan error, 1)
		go func() {
			var errs []error
			first := 0
			for ; first < messages || done.Load() < int64(cuts) && ctx.Err() == nil; first += batch {
				orders := make([]suite.Order, batch)
				for i := range orders {
					orders[i].ID = first + i
				}
				errs = append(errs, p.PublishAll(ctx, orders, func(suite.Order, *client.Message) { sent.Add(1) }))
			}
			messages = first
			published <- errors.Join(errs...)
		}()
		// The cuts come during the sending, and not by the clock: each a random number of
		// messages after the link was back.
		apart := int64(messages / cuts * 2 / 3)
		for done.Load() < int64(cuts) && len(published) == 0 {
			next := sent.Load() + 1 + random.Int64N(apart)
			suite.Poll(t, "it continues", func() bool { return sent.Load() >= next || len(published) > 0 })
			done.Add(int64(wire.Cut()))
		}
		require.NoError(t, <-published) // within ctx
		took := time.Since(began)

		seen := make([]bool, messages)
		next, duplicates := 0, 0
		arrived := make(chan struct{})
		suite.Consume(t, direct, "orders", client.JSON(func(_ context.Context, o suite.Order) error {
			switch {
			case seen[o.ID]:
				duplicates++
			case o.ID != next:
				t.Errorf("%d comes before %d", o.ID, next)
				fallthrough
			default:
				seen[o.ID] = true
				if next++; next == messages {
					close(arrived)
				}
			}
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: 500})
		select {
		case <-arrived:
		case <-ctx.Done():
			require.FailNow(t, "not all that was published arrives")
		}
		suite.Poll(t, "the queue is empty", func() bool { return suite.Ready(t, direct, "orders") == 0 })
		suite.Report(t, s, "%d messages in order over %d cuts in %v (%v with consuming), %d links lost with %d messages unanswered, %d duplicates",
			messages, done.Load(), took.Round(time.Millisecond), time.Since(began).Round(time.Millisecond), lost.Load(), unanswered.Load(), duplicates)
	})
}
