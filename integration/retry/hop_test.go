package retry_test

import (
	"context"
	"errors"
	"fmt"
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

func TestFailedMessageHopsBackAfterEachDelayUntilItSucceeds(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 20
		delays := []time.Duration{100 * time.Millisecond, 250 * time.Millisecond, time.Second}
		policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(delays...)}
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})

		type attempt struct {
			id, count int
			counter   any
			deliveryN uint32
			began     time.Time
			failed    time.Time
		}
		attempts := make(chan attempt, messages*8)
		handler := client.JSON(func(ctx context.Context, o suite.Order) error {
			d, ok := client.DeliveryFrom(ctx)
			if !ok {
				return errors.New("no delivery in the handler's ctx")
			}
			a := attempt{
				id: o.ID, count: retry.Count(d.Message()), counter: d.Property(retry.CountProperty),
				deliveryN: d.DeliveryCount(), began: d.Received(), failed: time.Now(),
			}
			defer func() { attempts <- a }()
			if a.count < len(delays) {
				return fmt.Errorf("attempt %d", a.count+1)
			}
			return nil
		})
		suite.Consume(t, conn, "orders", retry.With(policy)(handler), client.ConsumerConfig{Concurrency: 4})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}

		last := map[int]attempt{}
		late := map[time.Duration][]time.Duration{}
		for range messages * (len(delays) + 1) {
			a := suite.Await(t, attempts, "an attempt")
			before, again := last[a.id]
			last[a.id] = a
			assert.Zero(t, a.deliveryN, "a hop is a new message to the queue")
			if !again {
				assert.Zero(t, a.count)
				assert.Nil(t, a.counter)
				continue
			}
			require.Equal(t, before.count+1, a.count, "message %d", a.id)
			assert.Equal(t, int64(a.count), a.counter)
			asked := delays[a.count-1]
			had := a.began.Sub(before.failed)
			assert.GreaterOrEqual(t, had, asked-2*time.Millisecond, "came back early")
			assert.Less(t, had, asked+suite.LateLimit, "came back late")
			late[asked] = append(late[asked], had-asked)
		}
		for _, d := range delays {
			suite.Report(t, s, "asked %v, late by %s", d, suite.Spread(late[d]))
		}
		assert.Len(t, last, messages)
		for _, q := range []string{"orders", "orders.dead", "parking_queue", "delay_100ms", "delay_250ms", "delay_1s"} {
			assert.Zero(t, suite.Ready(t, conn, q), "messages in %s", q)
		}
	})
}

func TestHandlerAsksForItsOwnDelay(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(50*time.Millisecond, 400*time.Millisecond, 900*time.Millisecond)}
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})

		asks := []time.Duration{
			300 * time.Millisecond, // between two delays
			0,                      // below the first: the first
			2 * time.Second,        // over the last: several, one after the other
		}
		wants := []time.Duration{300 * time.Millisecond, 50 * time.Millisecond, 2 * time.Second}
		type attempt struct {
			began, ended time.Time
		}
		attempts := make(chan attempt, 8)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			defer func() { attempts <- attempt{d.Received(), time.Now()} }()
			if n := retry.Count(d.Message()); n < len(asks) {
				return retry.After(asks[n], errors.New("rate limit"))
			}
			return nil
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{ID: 1})

		before := suite.Await(t, attempts, "the first attempt")
		for _, want := range wants {
			a := suite.Await(t, attempts, "the next attempt")
			had := a.began.Sub(before.ended)
			assert.GreaterOrEqual(t, had, want-2*time.Millisecond, "came back early")
			assert.Less(t, had, want+want/2+suite.LateLimit, "came back late")
			before = a
		}
	})
}

// Two messages whose delays cross: with one queue for each delay the later one,
// whose delay is short, overtakes the earlier one (pattern P3's fault).
func TestShortDelayIsNotHeldUpByALongOne(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const long, short = 2 * time.Second, 200 * time.Millisecond
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(short, long)}
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})

		failed := make(chan int, 2)
		back := make(chan int, 2)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			d, _ := client.DeliveryFrom(ctx)
			if retry.Count(d.Message()) > 0 {
				back <- o.ID
				return nil
			}
			failed <- o.ID
			if o.ID == 1 {
				return retry.After(long, nil)
			}
			return retry.After(short, nil)
		})), client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: 1})
		require.Equal(t, 1, suite.Await(t, failed, "the first failure"))
		suite.Poll(t, "the first message waits in the queue for the long delay", func() bool { return suite.Ready(t, conn, "delay_2s") == 1 })
		suite.Publish(t, p, suite.Order{ID: 2})
		assert.Equal(t, 2, suite.Await(t, back, "the message with the short delay"))
		assert.Equal(t, 1, suite.Await(t, back, "the message with the long delay"))
	})
}
