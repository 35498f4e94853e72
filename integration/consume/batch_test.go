package consume_test

import (
	"context"
	"errors"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/retry"
)

// publishNumbers publishes 0 to n-1.
func publishNumbers(t *testing.T, conn *client.Conn, queue string, n int) {
	t.Helper()
	p := suite.Publisher[int](t, conn, address.Queue(queue))
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
	defer cancel()
	require.NoError(t, p.PublishAll(ctx, all))
}

func TestOnePoisonedMessageOfABatchHopsAndTheOthersAreAcceptedOnce(t *testing.T) {
	const poison = 37
	suite.ForEachStrategy(t, func(t *testing.T, s *suite.Site, policy retry.Policy) {
		conn, _ := s.Connect(t)
		policy.MaxRetries = 2
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		publishNumbers(t, conn, "orders", 100)
		var mu sync.Mutex
		handled := map[int]int{}
		var sizes, attempts []int
		stop := suite.Consume(t, conn, "orders", retry.With(policy)(batch.JSON(batch.Config{Size: 100, Wait: 200 * time.Millisecond}, func(_ context.Context, items []*batch.Item[int]) error {
			mu.Lock()
			defer mu.Unlock()
			sizes = append(sizes, len(items))
			for _, item := range items {
				handled[item.Value]++
				if item.Value == poison {
					attempts = append(attempts, retry.Attempt(item.Context()))
					item.Fail(errors.New("poison"))
				}
			}
			return nil
		})), client.ConsumerConfig{})
		suite.Poll(t, "the poisoned message is dead", func() bool { return suite.Ready(t, conn, "orders.dead") == 1 })
		require.NoError(t, stop())
		mu.Lock()
		defer mu.Unlock()
		assert.Equal(t, []int{1, 2, 3}, attempts)
		for i := range 100 {
			want := 1
			if i == poison {
				want = 3
			}
			assert.Equal(t, want, handled[i], "message %d", i)
		}
		assert.Zero(t, suite.Ready(t, conn, "orders"))
		assert.Greater(t, slices.Max(sizes), 1, "there was a batch")
	})
}

// A batch that waits long enough is full.
func TestABatchFills(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		publishNumbers(t, conn, "orders", 200)
		sizes := make(chan int, 200)
		stop := suite.Consume(t, conn, "orders", batch.JSON(batch.Config{Size: 100, Wait: suite.Patience}, func(_ context.Context, items []*batch.Item[int]) error {
			sizes <- len(items)
			return nil
		}), client.ConsumerConfig{})
		assert.Equal(t, 100, <-sizes)
		assert.Equal(t, 100, <-sizes)
		require.NoError(t, stop())
	})
}

// A batch has messages, and one of them fails once. The connection ends behind each single
// frame in turn, as in TestNoMessageIsLostWhereverTheConnectionEnds.
func TestNoMessageOfABatchIsLostWhereverTheConnectionEnds(t *testing.T) {
	const size = 3
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, edit := range suite.Strategies(s) {
			if !suite.Long() && (name == "ladder" || name == "auto" || name == "dead-letter") {
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(20 * time.Millisecond)}
				edit(&policy)
				direct, _ := s.Connect(t)
				suite.ApplyRetry(t, direct, policy, declare.QuorumQueue{Name: "work", DeliveryLimit: declare.Unlimited})
				wire := suite.NewFrameCutter(t, s.Host())
				conn, _ := suite.ConnectTo(t, s.AMQPURLWith(func(u *url.URL) { u.Host = wire.Addr() }), suite.Soon)
				var mu sync.Mutex
				succeeded := map[int]int{}
				done := make(chan int, 1000)
				suite.Consume(t, conn, "work", retry.With(policy)(batch.JSON(batch.Config{Size: size, Wait: 20 * time.Millisecond}, func(_ context.Context, items []*batch.Item[int]) error {
					mu.Lock()
					defer mu.Unlock()
					for _, item := range items {
						if item.Value%size == 1 && retry.Attempt(item.Context()) == 1 {
							item.Fail(errors.New("not yet"))
							continue
						}
						succeeded[item.Value]++
						done <- item.Value
					}
					return nil
				})), client.ConsumerConfig{NoIsolation: true})
				p := suite.Publisher[int](t, direct, address.Queue("work"))

				round := func(n, behind int) int {
					wire.Arm(behind)
					ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
					defer cancel()
					require.NoError(t, p.PublishAll(ctx, []int{size * n, size*n + 1, size*n + 2}))
					for left := map[int]bool{size * n: true, size*n + 1: true, size*n + 2: true}; len(left) > 0; {
						delete(left, suite.Await(t, done, "a message is handled to its end"))
					}
					for _, q := range []string{"work", "work.dead", "parking_queue"} {
						suite.Poll(t, q+" is empty", func() bool { return suite.Ready(t, direct, q) == 0 })
					}
					frames, _ := wire.Disarm()
					return frames
				}
				frames := round(0, 0)
				require.Greater(t, frames, 3)
				duplicates := 0
				for behind := 1; behind <= frames; behind++ {
					round(behind, behind)
				}
				mu.Lock()
				defer mu.Unlock()
				for id := range size * (frames + 1) {
					assert.Positive(t, succeeded[id], "message %d: lost", id)
					duplicates += succeeded[id] - 1
				}
				t.Logf("REPORT %s: cut behind each of %d frames: lost 0 of %d, handled twice %d", t.Name(), frames, len(succeeded), duplicates)
			})
		}
	})
}

func TestABatchThatIsNotFullIsHandledWhenTheConsumerDrains(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		publishNumbers(t, conn, "orders", 7)
		got := make(chan int, 10)
		stop := suite.Consume(t, conn, "orders", batch.JSON(batch.Config{Wait: time.Hour}, func(_ context.Context, items []*batch.Item[int]) error {
			got <- len(items)
			return nil
		}), client.ConsumerConfig{})
		suite.Poll(t, "all wait in the batch", func() bool {
			all := conn.Stats().Consumers
			return len(all) == 1 && all[0].Handling == 7
		})
		require.NoError(t, stop())
		assert.Equal(t, 7, suite.Await(t, got, "the batch"))
		assert.Zero(t, suite.Ready(t, conn, "orders"))
	})
}

// A batch knows which of its messages the broker has taken back. These are delivered again, and
// the others aren't. RabbitMQ 4.3.6 takes back the one that was delivered first; it may leave the
// other where it is until something else happens in the queue.
func TestABatchTellsWhichMessagesTheBrokerHasTakenBack(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return // 4.0 has no consumer timeout over AMQP 1.0
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "slow", ConsumerTimeout: time.Second}))
		publishNumbers(t, conn, "slow", 2)
		taken := make(chan map[int]*batch.Item[int], 1)
		again := make(chan int, 10)
		var once sync.Once
		suite.Consume(t, conn, "slow", batch.JSON(batch.Config{Size: 2, Wait: 100 * time.Millisecond}, func(ctx context.Context, items []*batch.Item[int]) error {
			first := false
			once.Do(func() { first = true })
			if !first {
				for _, item := range items {
					again <- item.Value
				}
				return nil
			}
			<-ctx.Done() // shortly before the first is taken back or, if the process has stalled, then
			why := context.Cause(ctx)
			assert.True(t, errors.Is(why, client.ErrConsumerTimeoutNear) || errors.Is(why, client.ErrConsumerTimeout), "%v", why)
			suite.Poll(t, "a message is taken back", func() bool {
				return slices.ContainsFunc(items, (*batch.Item[int]).Revoked)
			})
			all := map[int]*batch.Item[int]{}
			for _, item := range items {
				all[item.Value] = item
			}
			taken <- all
			return nil
		}), client.ConsumerConfig{})
		all := suite.Await(t, taken, "the first batch")
		want := map[int]bool{}
		for value, item := range all {
			if item.Revoked() {
				want[value] = true
			}
		}
		assert.NotEmpty(t, want)
		for len(want) > 0 { // the other may be taken back in between, and come before
			value := suite.Await(t, again, "what was taken back is delivered again")
			if item := all[value]; item != nil { // on a busy machine, the first batch may have only one
				assert.True(t, item.Revoked(), "%d", value)
			}
			delete(want, value)
		}
		suite.Poll(t, "the queue is empty", func() bool { return suite.Ready(t, conn, "slow") == 0 })
	})
}

func TestAPrefetchThatHoldsNoWholeBatchIsRefused(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		h := batch.JSON(batch.Config{Size: 50}, func(context.Context, []*batch.Item[int]) error { return nil })
		var bad *argument.Error
		err := conn.Consume(t.Context(), "orders", h, client.ConsumerConfig{Prefetch: 49})
		require.ErrorAs(t, err, &bad)
		assert.ErrorContains(t, err, "ConsumerConfig.Prefetch = 49 is less than the 50 deliveries")
	})
}
