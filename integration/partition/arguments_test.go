package partition_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// The number of partitions and the window are arguments of the queues, which RabbitMQ keeps
// although it doesn't know them. Another group on the same queues is refused.
func TestPartitionsAreArguments(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		group := func(window int) partition.Group { return partition.Group{Name: "g", Partitions: 2, Window: window} }
		queues := func(window int) declare.Topology {
			all, err := group(window).Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: declare.Unlimited})
			require.NoError(t, err)
			return declare.Topology{Queues: all.Queues}
		}
		_, err := declare.Apply(t.Context(), conn.Management(), queues(10))
		require.NoError(t, err)
		info, err := declare.Inspect(t.Context(), conn.Management(), group(10).Queues()[0])
		require.NoError(t, err)
		assert.EqualValues(t, 2, info.Arguments["x-hopback-partitions"])
		assert.EqualValues(t, 10, info.Arguments["x-hopback-window"])
		_, err = declare.Apply(t.Context(), conn.Management(), queues(20))
		require.ErrorIs(t, err, declare.ErrConflict)
	})
}

// A message's delay can be longer than the consumer timeout, and than its worker lives: the next
// worker waits for the rest of it. The message keeps its place and the number of its attempts.
func TestADelayOutlastsTheConsumerTimeout(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		// The worker returns what it holds a second before the timeout, and has that second for it.
		const timeout, delay = 10 * time.Second, 21 * time.Second
		conn, _ := s.Connect(t)
		g := partition.Group{Name: "slow", Partitions: 1}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{ConsumerTimeout: timeout})
		var (
			mu     sync.Mutex
			calls  []string
			failed time.Time
			waited time.Duration
		)
		done := make(chan struct{})
		run := func(worker string) (stop func()) {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			h := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
				mu.Lock()
				defer mu.Unlock()
				text := string(d.Message().GetData())
				calls = append(calls, fmt.Sprint(text, " ", retry.Attempt(ctx), " ", worker))
				switch {
				case text == "a1" && failed.IsZero():
					failed = time.Now()
					return errors.New("busy")
				case text == "a1":
					waited = time.Since(failed)
				case text == "a2":
					close(done)
				}
				return nil
			})
			own, _ := s.Connect(t)
			go func() {
				ended <- partition.Consume(ctx, own, g, h, partition.Config{Worker: worker, Retry: retry.Policy{MaxRetries: 1, Backoff: retry.Exponential(delay, 1)}})
			}()
			return func() {
				cancel()
				assert.NoError(t, <-ended)
			}
		}
		p, err := client.NewPublisher[string](t.Context(), conn, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		for _, text := range []string{"a1", "a2", "b1"} {
			require.NoError(t, p.Publish(t.Context(), text, func(m *client.Message) {
				m.Data = [][]byte{[]byte(text)}
				client.PublishTo(g.Address(text[:1]))(m)
			}))
		}
		first := run("w1")
		time.Sleep(timeout + timeout/2)
		second := run("w2")
		time.Sleep(time.Second)
		first()
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Error("a2 wasn't handled")
		}
		second()
		require.Len(t, calls, 4)
		assert.ElementsMatch(t, []string{"a1 1 w1", "b1 1 w1"}, calls[:2])
		assert.Equal(t, []string{"a1 2 w2", "a2 1 w2"}, calls[2:])
		assert.GreaterOrEqual(t, waited, delay)
		suite.Report(t, s, "partitions: an attempt %v after the one before, with a delay of %v and a consumer timeout of %v", waited.Round(time.Millisecond), delay, timeout)
	})
}
