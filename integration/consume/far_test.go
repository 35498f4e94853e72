package consume_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// 200 ms from the broker, the default Prefetch keeps 16 handlers busier than what it
// was before it followed the round trip: twice Concurrency or 64.
func TestHandlersFarFromTheBrokerAreBusy(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const handlers, takes, messages = 16, 10 * time.Millisecond, 20_000
		conn, _ := s.Connect(t)
		wire, url := s.Through(t)
		wire.Slow(100*time.Millisecond, 0)
		far, _ := suite.ConnectTo(t, url)

		// Both at the same time, so that a loaded machine slows both down. Both queues are full
		// before either is consumed from: the faster consumer needs 12 s for its messages.
		for _, queue := range []string{"default", "fixed"} {
			suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: queue}))
			fill(t, s, queue, messages)
		}
		consumer := func(queue string, prefetch int) *atomic.Int64 {
			busy := new(atomic.Int64) // nanoseconds
			began := make(chan struct{}, messages)
			suite.Consume(t, far, queue, client.HandlerFunc(func(context.Context, *client.Delivery) error {
				began <- struct{}{}
				start := time.Now()
				time.Sleep(takes)
				busy.Add(int64(time.Since(start)))
				return nil
			}), client.ConsumerConfig{Concurrency: handlers, Prefetch: prefetch})
			suite.Await(t, began, "the first delivery")
			return busy
		}
		follows, fixed := consumer("default", 0), consumer("fixed", 64)
		// The window grows with what it measures, a second at a time on a loaded machine.
		suite.Poll(t, "the one that follows is busier", func() bool {
			start, before, beforeFixed := time.Now(), follows.Load(), fixed.Load()
			time.Sleep(time.Second)
			over := float64(time.Since(start))
			running, runningFixed := float64(follows.Load()-before)/over, float64(fixed.Load()-beforeFixed)/over
			suite.Report(t, s, "of %d handlers 200 ms away %.1f were busy; with Prefetch 64 %.1f", handlers, running, runningFixed)
			return running > 1.5*runningFixed && runningFixed > 0
		})
	})
}

// fill puts n messages into a queue, pipelined.
func fill(t *testing.T, s *suite.Site, queue string, n int) {
	t.Helper()
	sender, err := s.Peer(t).Site.NewSender(t.Context(), "/queues/"+queue, nil)
	require.NoError(t, err)
	receipts := make([]amqp.SendReceipt, n)
	for i := range receipts {
		receipts[i], err = sender.SendWithReceipt(t.Context(), amqp.NewMessage([]byte("m")), nil)
		require.NoError(t, err)
	}
	for _, r := range receipts {
		_, err := r.Wait(t.Context())
		require.NoError(t, err)
	}
}
