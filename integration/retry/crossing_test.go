package retry_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	"github.com/hopback/hopback/retry"
)

// crossing tells which counts each message was handled with.
type crossing struct {
	mu     sync.Mutex
	counts map[int][]int
	by     map[retry.Strategy]int
}

func (c *crossing) add(id, count int, by retry.Strategy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[id] = append(c.counts[id], count)
	c.by[by]++
}

// attempted is how many messages had their nth attempt.
func (c *crossing) attempted(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	have := 0
	for _, counts := range c.counts {
		if len(counts) >= n {
			have++
		}
	}
	return have
}

// handler fails message i until it has been retried i%modulo times.
func (c *crossing) handler(by retry.Strategy, modulo int) client.Handler {
	return client.JSON(func(ctx context.Context, o suite.Order) error {
		count := retry.Attempt(ctx) - 1
		c.add(o.ID, count, by)
		if count < o.ID%modulo {
			return errors.New("not yet")
		}
		return nil
	})
}

// check wants every message to have had its attempts, one after the other, and none
// twice.
func (c *crossing) check(t *testing.T, messages, modulo, maxRetries int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	assert.Len(t, c.counts, messages)
	for id, counts := range c.counts {
		var want []int
		for n := range min(id%modulo, maxRetries) + 1 {
			want = append(want, n)
		}
		assert.Equal(t, want, counts, "message %d", id)
	}
}

// deaths takes n dead letters and wants all of them to be exhausted.
func deaths(t *testing.T, conn *client.Conn, queue string, n, retries int) {
	t.Helper()
	dead := make(chan *client.Message, n)
	stop := suite.Consume(t, conn, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		dead <- d.Message()
		return nil
	}), client.ConsumerConfig{})
	for range n {
		death := retry.DeadLetterOf(suite.Await(t, dead, "a dead letter"))
		assert.Equal(t, retry.ReasonExhausted, death.Reason)
		assert.Equal(t, retries, death.Retries)
	}
	require.NoError(t, stop())
	assert.Empty(t, dead)
}

func TestWorkersOfDifferentStrategiesShareAQueue(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, maxRetries, modulo = 300, 3, 5 // 4 failures are one too many
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: maxRetries, Backoff: retry.Delays(50*time.Millisecond, 100*time.Millisecond, 150*time.Millisecond), Strategy: retry.StrategyAuto}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
		c := &crossing{counts: map[int][]int{}, by: map[retry.Strategy]int{}}
		for _, strategy := range suite.Several(s) {
			policy.Strategy = strategy
			suite.Consume(t, conn, "orders", retry.With(policy)(c.handler(strategy, modulo)), client.ConsumerConfig{Concurrency: 2, Prefetch: 4})
		}
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for id := range messages {
			suite.Publish(t, p, suite.Order{ID: id})
		}
		for n := range maxRetries + 1 {
			want := 0
			for id := range messages {
				if id%modulo >= n {
					want++
				}
			}
			suite.Poll(t, fmt.Sprintf("attempt %d", n+1), func() bool { return c.attempted(n+1) >= want })
		}
		deaths(t, conn, "orders.dead", messages/modulo, maxRetries)
		c.check(t, messages, modulo, maxRetries)
		for _, strategy := range suite.Several(s) {
			assert.Positive(t, c.by[strategy], "attempts at the worker with %v", strategy)
		}
		for _, q := range []string{"orders", "orders.dead", "parking_queue"} {
			assert.Zero(t, suite.Ready(t, conn, q), q)
		}
		suite.Report(t, s, "%d messages, attempts by strategy %v", messages, c.by)
	})
}

// A team changes its policy's strategy while messages are in flight: it applies the
// new topology over the old one, and starts the new workers.
func TestLiveQueueMovesFromOneStrategyToAnother(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, maxRetries = 60, 3
		moves := append(suite.Several(s), retry.StrategyAuto, retry.StrategyRepublish)
		const attempts = maxRetries + 1
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: maxRetries, Backoff: retry.Delays(300 * time.Millisecond)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for id := range messages {
			suite.Publish(t, p, suite.Order{ID: id})
		}
		c := &crossing{counts: map[int][]int{}, by: map[retry.Strategy]int{}}
		for n := range attempts {
			policy.Strategy = moves[n]
			suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
			stop := suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
				c.add(o.ID, retry.Attempt(ctx)-1, policy.Strategy)
				return errors.New("never")
			})), client.ConsumerConfig{Concurrency: 4})
			suite.Poll(t, fmt.Sprintf("attempt %d by %v", n+1, policy.Strategy), func() bool { return c.attempted(n+1) == messages })
			require.NoError(t, stop())
		}
		deaths(t, conn, "orders.dead", messages, maxRetries)
		for id, counts := range c.counts {
			assert.Equal(t, []int{0, 1, 2, 3}, counts, "message %d", id)
		}
		assert.Zero(t, suite.Ready(t, conn, "orders"))
		assert.Zero(t, suite.Ready(t, conn, "parking_queue"))
	})
}

// forged are annotations and application properties with which a sender would
// like to be taken for us.
func forged(values map[string]any) map[string]*amqp.Message {
	message := func() *amqp.Message {
		m := amqp.NewMessage([]byte("x"))
		m.Header = &amqp.MessageHeader{Durable: true, Priority: 4}
		return m
	}
	properties, annotations, both := message(), message(), message()
	properties.ApplicationProperties = map[string]any{}
	annotations.Annotations = amqp.Annotations{}
	both.ApplicationProperties, both.Annotations = properties.ApplicationProperties, annotations.Annotations
	for k, v := range values {
		annotations.Annotations[k] = v
		switch v.(type) {
		case []any, map[string]any: // not allowed there
		default:
			properties.ApplicationProperties[k] = v
		}
	}
	return map[string]*amqp.Message{"properties": properties, "annotations": annotations, "both": both}
}

var forgedMark = map[string]any{
	client.AnnotationReason: "retry", annotation.Delay: int64(100), "x-last-death-reason": "rejected", "x-last-death-queue": "orders",
}

// The dead-letter exchange looks at annotations and application properties alike. A
// worker's annotations and the broker's own go before what the sender forged.
func TestForgedMarksOfASender(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100*time.Millisecond, 200*time.Millisecond), Strategy: retry.StrategyAuto}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2}, declare.QuorumQueue{Name: "limit", DeliveryLimit: 2})
		p := s.Peer(t)
		for what, m := range forged(forgedMark) {
			for _, strategy := range suite.Several(s) {
				policy.Strategy = strategy
				var attempts atomic.Int64
				stop := suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
					attempts.Add(1)
					return errors.New("never")
				})), client.ConsumerConfig{})
				p.Put("orders", m)
				death := retry.DeadLetterOf(p.Take("orders.dead", 1)[0])
				assert.Equal(t, retry.ReasonExhausted, death.Reason, "%s, %v", what, strategy)
				assert.Equal(t, int64(3), attempts.Load(), "%s, %v", what, strategy)
				require.NoError(t, stop())
			}
			// What the broker gives up by itself isn't led back either.
			p.Put("limit", m)
			for range 3 {
				r := p.Receiver("limit", 1)
				require.NoError(t, r.ModifyMessage(t.Context(), p.Next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
				require.NoError(t, r.Close(t.Context()))
			}
			assert.Equal(t, retry.ReasonDeliveryLimit, retry.DeadLetterOf(p.Take("limit.dead", 1)[0]).Reason, what)
		}
	})
}

// What remains: a worker of another kind that rejects without a word leaves the
// sender's mark, or that of an earlier retry by DeadLetter, unchanged. The message
// comes back after the delay as often as it is rejected; it takes its time, isn't
// lost, and ends at the first worker that knows marks.
func TestForgedMarkComesBackFromForeignRejectionsButEndsAtAHopbackWorker(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		const rounds = 8
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond), Strategy: retry.StrategyDeadLetter}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
		p := s.Peer(t)
		for what, m := range forged(forgedMark) {
			p.Put("orders", m)
			r := p.Receiver("orders", 1)
			var last time.Time
			for n := range rounds {
				x := p.Next(r)
				assert.GreaterOrEqual(t, time.Since(last), 95*time.Millisecond, what)
				last = time.Now()
				require.NoError(t, r.RejectMessage(t.Context(), x, nil))
				if n < rounds-1 {
					require.NoError(t, r.IssueCredit(1))
				}
			}
			require.NoError(t, r.Close(t.Context()))
			stop := suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
				return retry.Permanent(errors.New("enough"))
			})), client.ConsumerConfig{})
			assert.Equal(t, retry.ReasonPermanent, retry.DeadLetterOf(p.Take("orders.dead", 1)[0]).Reason, what)
			require.NoError(t, stop())
		}
	})
}

// A sender can make its own message die sooner. It can't make it circle, vanish, or
// stop others.
func TestForgedCountsAndTimesEndInTheDeadLetterQueue(t *testing.T) {
	suite.ForEachStrategy(t, func(t *testing.T, s *suite.Site, policy retry.Policy) {
		const innocents = 5
		policy.MaxRetries, policy.Backoff = 2, retry.Delays(50*time.Millisecond)
		policy.GiveUpAfter = time.Minute
		far := time.Now().AddDate(5, 0, 0)
		forgeries := []map[string]any{
			{annotation.Retries: int64(math.MaxInt64)},
			{annotation.Retries: int64(-1 << 60)},
			{annotation.Retries: []any{int64(1)}},
			{annotation.Retries: "1e999"},
			{retry.CountProperty: int64(-5)},
			{retry.CountProperty: "three"},
			{annotation.Older.First: far.UnixMilli(), annotation.Older.Last: "yesterday"},
			{annotation.Older.First: "nonsense"},
			{annotation.Older.First: int64(1)},
			{annotation.Exchange: strings.Repeat("x", 5000), annotation.Queue: "elsewhere", annotation.Older.Worker: "boss"},
			{annotation.DeliveryTime: far.UnixMilli()},
			{annotation.DeliveryTime: far, annotation.Delay: "long"},
			{client.AnnotationKnownCount: int64(math.MaxInt64)},
			// Early beyond doubt, it seems: it waits for no longer than the policy's
			// longest delay.
			{annotation.DeliveryTime: time.Now().Add(time.Hour).UnixMilli(), annotation.Delay: time.Hour.Milliseconds()},
		}
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
		p := s.Peer(t)
		total := innocents
		if s.HoldsPublished() { // anyone who may publish may publish for later: the message waits, and harms no other
			forgeries = slices.DeleteFunc(forgeries, func(values map[string]any) bool { return values[annotation.DeliveryTime] != nil })
		}
		for _, values := range forgeries {
			for _, m := range forged(values) {
				if delete(m.Annotations, retry.CountProperty); len(m.Annotations)+len(m.ApplicationProperties) > 0 {
					p.Put("orders", m)
					total++
				}
			}
		}
		for range innocents {
			m := amqp.NewMessage([]byte("innocent"))
			m.Properties = &amqp.MessageProperties{MessageID: "innocent"}
			p.Put("orders", m)
		}
		var attempts, ofInnocents atomic.Int64
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			attempts.Add(1)
			if p := d.Message().Properties; p != nil && p.MessageID == "innocent" {
				ofInnocents.Add(1)
			}
			return errors.New("never")
		})), client.ConsumerConfig{Concurrency: 4, ForwardPatience: 200 * time.Millisecond})
		reasons := map[client.Reason]int{}
		for _, m := range p.Take("orders.dead", total) {
			death := retry.DeadLetterOf(m)
			reasons[death.Reason]++
			if m.Properties != nil && m.Properties.MessageID == "innocent" {
				assert.Equal(t, retry.ReasonExhausted, death.Reason)
			}
		}
		assert.Equal(t, int64(3*innocents), ofInnocents.Load())
		assert.LessOrEqual(t, attempts.Load(), int64(3*total))
		assert.Zero(t, suite.Ready(t, conn, "orders"))
		suite.Report(t, s, "%d messages, %d attempts, reasons %v", total, attempts.Load(), reasons)
	})
}

// A queue that is deleted, or unbound, while its messages are delayed: they are
// parked, and don't block those of other queues, though there are more of them
// than the broker's dead-letter worker takes on at once (32).
func TestMessagesWhoseQueueIsGoneAreParkedAndBlockNoOthers(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, w := range []goneWay{
			{"republish", func(*retry.Policy) {}, declare.Binding{Source: "requeue_exchange", Queue: "unbound", Key: "*.*.unbound"}},
			{"dead-letter", func(p *retry.Policy) { p.Strategy = retry.StrategyDeadLetter }, declare.Binding{Source: "return_exchange", Queue: "unbound", Key: "unbound"}},
			{"ladder", func(p *retry.Policy) { p.AnyDelay = &retry.Ladder{Unit: 500 * time.Millisecond, Levels: 5} },
				declare.Binding{Source: "retry_ladder_500ms_5_back", Queue: "unbound", Key: "*.*.*.*.*.unbound"}},
		} {
			t.Run(w.name, func(t *testing.T) {
				t.Parallel()
				// The queues must be gone before their messages come back, on a busy machine, too.
				for delay := 15 * time.Second; !w.goneInTime(t, suite.NewSite(t, s.Broker), delay); delay *= 2 {
					require.Less(t, delay, suite.Patience)
				}
			})
		}
	})
}

// goneWay is a way in which messages wait.
type goneWay struct {
	name string
	set  func(*retry.Policy)
	home declare.Binding
}

// goneInTime returns false, and has checked nothing, if messages may have come back before their queues were gone.
func (w goneWay) goneInTime(t *testing.T, s *suite.Site, delay time.Duration) bool {
	const messages = 40
	policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(delay)}
	w.set(&policy)
	conn, _ := s.Connect(t)
	suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "unbound"}, declare.QuorumQueue{Name: "deleted"}, declare.QuorumQueue{Name: "mails"})
	ctx := suite.Within(t)
	began := time.Now()
	var failed atomic.Int64
	var stops []func() error
	var published sync.WaitGroup
	for _, queue := range []string{"unbound", "deleted"} {
		stops = append(stops, suite.Consume(t, conn, queue, retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			failed.Add(1)
			return errors.New("down")
		})), client.ConsumerConfig{Concurrency: 8}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue(queue))
		for id := range messages {
			published.Go(func() { assert.NoError(t, p.Publish(ctx, suite.Order{ID: id})) })
		}
	}
	published.Wait()
	suite.Poll(t, "first failures", func() bool { return failed.Load() >= 2*messages })
	for _, stop := range stops {
		require.NoError(t, stop()) // so all of them are delayed now
	}
	_, err := declare.Delete(ctx, conn.Management(), declare.Topology{
		Queues: []declare.Queue{declare.QuorumQueue{Name: "deleted"}}, Bindings: []declare.Binding{w.home},
	})
	require.NoError(t, err)
	if took := time.Since(began); took >= delay {
		t.Logf("the queues were gone after %v: too late for a delay of %v", took, delay)
		return false
	}

	came := make(chan time.Time, 10)
	suite.Consume(t, conn, "mails", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
		came <- time.Now()
		if retry.Attempt(ctx) == 1 {
			return errors.New("down")
		}
		return nil
	})), client.ConsumerConfig{})
	suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("mails")), suite.Order{})
	first := suite.Await(t, came, "the first attempt at the other queue's message")
	had := suite.Await(t, came, "its second attempt").Sub(first)
	suite.Report(t, s, "behind %d messages whose queue is gone, late by %v", 2*messages, (had - delay).Round(time.Millisecond))

	parked := map[string]int{}
	for _, m := range s.Peer(t).Take("parking_queue", 2*messages) {
		death := retry.DeadLetterOf(m)
		assert.Equal(t, retry.ReasonUnroutable, death.Reason)
		assert.Equal(t, "down", death.Error)
		parked[death.Queue]++
	}
	assert.Equal(t, map[string]int{"unbound": messages, "deleted": messages}, parked)
	return true
}
