package retry_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// A publisher of another library, or a forger, can write a delivery time. A queue of RabbitMQ 4.4 holds the message until then,
// and earlier ones deliver it at once. Either way it is then retried and dead-lettered like any other: the time delays
// neither its retries, nor its dead letter, nor its replay.
func TestForeignDeliveryTimesDelayNothingLater(t *testing.T) {
	suite.ForEachStrategy(t, func(t *testing.T, s *suite.Site, policy retry.Policy) {
		policy.MaxRetries, policy.Backoff = 1, retry.Delays(100*time.Millisecond)
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		p := s.Peer(t)
		began := time.Now()
		soon := began.Add(2 * time.Second)
		times := map[string]any{
			"timestamp": soon, "long": soon.UnixMilli(), "ulong": uint64(soon.UnixMilli()),
			"past": began.Add(-time.Hour).UnixMilli(), "negative": int64(-1), "text": "tomorrow", "double": float64(soon.UnixMilli()),
		}
		far := map[string]any{"in an hour": began.Add(time.Hour), "in 100 years": began.AddDate(100, 0, 0).UnixMilli(), "never": int64(1<<63 - 1)}
		if !s.HoldsPublished() {
			for name, at := range far {
				times[name] = at
			}
			far = nil
		}
		put := func(name string, at any) {
			m := amqp.NewMessage([]byte("{}"))
			m.Header = &amqp.MessageHeader{Durable: true, Priority: 4}
			m.Properties = &amqp.MessageProperties{MessageID: name}
			m.Annotations = amqp.Annotations{annotation.DeliveryTime: at}
			p.Put("orders", m)
		}
		for name, at := range far {
			put(name, at)
		}
		for name, at := range times {
			put(name, at)
		}

		type attempt struct {
			id     string
			n      int
			parked bool
			at     time.Time
		}
		attempts := make(chan attempt, 100)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			_, parked := d.Parked()
			id, _ := d.Message().Properties.MessageID.(string)
			attempts <- attempt{id, retry.Attempt(ctx), parked, time.Now()}
			return errors.New("never")
		})), client.ConsumerConfig{})
		seen := map[string][]int{}
		for range 2 * len(times) {
			a := suite.Await(t, attempts, "each message is handled twice")
			seen[a.id] = append(seen[a.id], a.n)
			assert.False(t, a.parked, a.id)
			if held := []string{"timestamp", "long", "ulong"}; s.HoldsPublished() && slices.Contains(held, a.id) {
				assert.False(t, a.at.Before(soon.Truncate(time.Millisecond)), "%s came early", a.id)
			}
		}
		for name := range times {
			assert.Equal(t, []int{1, 2}, seen[name], name)
		}
		suite.Poll(t, "the dead letters are visible", func() bool { return suite.Ready(t, conn, "orders.dead") == len(times) })
		assert.Less(t, time.Since(began), time.Hour/2)

		d := suite.NewDesk(t, s, conn)
		list, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		assert.Empty(t, list.Unread)
		for _, m := range list.Messages {
			assert.Equal(t, retry.ReasonExhausted, m.Reason)
		}
		suite.Poll(t, "those of later times are counted", func() bool {
			survey, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders"}, CountsOnly: true})
			require.NoError(t, err)
			return survey.Queues[0].Delayed == uint64(len(far))
		})
		replay, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true})
		require.NoError(t, err)
		assert.EqualValues(t, len(times), replay.Replayed)
		assert.True(t, replay.Complete)
		for range 2 * len(times) {
			suite.Await(t, attempts, "each replayed message is handled twice, too")
		}
		suite.Poll(t, "they are dead letters again", func() bool { return suite.Ready(t, conn, "orders.dead") == len(times) })
		assert.Empty(t, attempts)
	})
}

// Policy.GiveUpAfter also counts the time for which a handler has parked the message since its first failure. The dead letter is
// visible at once.
func TestGiveUpAfterCountsTheTimeThatAMessageIsParked(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 parks messages")
		}
		conn, _ := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyNative, MaxRetries: 100, Backoff: retry.Delays(100 * time.Millisecond), GiveUpAfter: time.Second}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		attempts := make(chan int, 100)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			_, again := d.Parked()
			attempts <- retry.Attempt(ctx)
			if retry.Attempt(ctx) == 2 && !again {
				return client.Park{Token: "payment", Until: time.Now().Add(2 * time.Second)}
			}
			return errors.New("never")
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "order")
		for _, attempt := range []int{1, 2, 2} {
			assert.Equal(t, attempt, suite.Await(t, attempts, "an attempt"))
		}
		dead := s.Peer(t).Take("orders.dead", 1)[0]
		assert.Equal(t, retry.ReasonExhausted, retry.DeadLetterOf(dead).Reason)
		assert.Empty(t, attempts)
	})
}
