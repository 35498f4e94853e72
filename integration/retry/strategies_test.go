package retry_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
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
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

func TestEveryStrategyHopsBackOnTimeAndTellsWhyAMessageDied(t *testing.T) {
	suite.ForEachStrategy(t, func(t *testing.T, s *suite.Site, policy retry.Policy) {
		conn, _ := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})

		var mu sync.Mutex
		seen := map[string][]time.Time{}
		handled := make(chan string, 100)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.Typed(client.RawCodec{}, func(ctx context.Context, what string) error {
			d, _ := client.DeliveryFrom(ctx)
			count := retry.Count(d.Message())
			mu.Lock()
			seen[what] = append(seen[what], time.Now())
			mu.Unlock()
			switch what {
			case "late":
				if count < 3 {
					return fmt.Errorf("not yet: %d", count)
				}
				handled <- what
			case "exhausted":
				return errors.New("never")
			case "permanent":
				return retry.Permanent(errors.New("no use"))
			case "panics later":
				if count == 1 {
					panic("boo")
				}
				return errors.New("once")
			case "exits later":
				if count == 1 {
					runtime.Goexit()
				}
				return errors.New("once")
			case "undecodable later":
				if count == 1 {
					return client.DeadLetter{Reason: client.ReasonUndecodable, Err: errors.New("what is this")}
				}
				return errors.New("once")
			case "rejected later":
				if count == 1 {
					return client.Modify{DeadLetter: true}
				}
				return errors.New("once")
			}
			return nil
		})), client.ConsumerConfig{Concurrency: 8})

		p := suite.PublisherOf(t, conn, address.Exchange("amq.topic", "made.by.test"))
		suite.Apply(t, conn, declare.Topology{Bindings: []declare.Binding{{Source: "amq.topic", Queue: "orders", Key: "made.#"}}})
		reasons := map[string]client.Reason{
			"exhausted": "exhausted", "permanent": "permanent", "panics later": "panicked", "exits later": "panicked",
			"undecodable later": "undecodable", "rejected later": retry.ReasonRejected,
		}
		began := time.Now()
		suite.Publish(t, p, "late", func(m *client.Message) { m.ApplicationProperties = map[string]any{"kept": "yes"} })
		for what := range reasons {
			suite.Publish(t, p, what, func(m *client.Message) { m.ApplicationProperties = map[string]any{"kept": "yes"} })
		}

		dead := make(chan *client.Message, 100)
		suite.Consume(t, conn, "orders.dead", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			dead <- d.Message()
			return nil
		}), client.ConsumerConfig{})
		for range reasons {
			m := suite.Await(t, dead, "a dead letter")
			what, err := client.Body(m)
			require.NoError(t, err)
			death := retry.DeadLetterOf(m)
			assert.Equal(t, reasons[string(what)], death.Reason, "%s: %v", what, m.Annotations)
			assert.Equal(t, "yes", m.ApplicationProperties["kept"], "%s", what)
			assert.Equal(t, "orders", death.Queue, "%s", what)
			assert.Equal(t, "tester", death.Worker, "%s", what)
			assert.Equal(t, "amq.topic", death.Exchange, "%s", what)
			assert.Equal(t, "made.by.test", death.RoutingKey, "%s", what)
			assert.False(t, death.FirstFailure.Before(began.Add(-time.Second)) || death.FirstFailure.After(death.LastFailure) || death.LastFailure.After(time.Now().Add(time.Second)), "%s: %v to %v", what, death.FirstFailure, death.LastFailure)
			want := map[string]int{"exhausted": 3, "permanent": 0}
			if n, ok := want[string(what)]; ok {
				assert.Equal(t, n, death.Retries, "%s", what)
			} else {
				assert.Equal(t, 1, death.Retries, "%s", what)
			}
			if what := string(what); what == "exhausted" {
				assert.Equal(t, "never", death.Error)
				attempts := retry.AttemptsOf(m)
				require.Len(t, attempts, 4, "%v", m.Annotations)
				for i, delay := range []time.Duration{100, 200, 300, 0} {
					assert.Equal(t, delay*time.Millisecond, attempts[i].Delay)
					assert.Equal(t, "never", attempts[i].Error)
					if i > 0 {
						assert.GreaterOrEqual(t, attempts[i].At.Sub(attempts[i-1].At), attempts[i-1].Delay-5*time.Millisecond)
					}
				}
				assert.Equal(t, death.FirstFailure, attempts[0].At)
				assert.Equal(t, death.LastFailure, attempts[3].At)
				assert.Equal(t, "*errors.errorString", death.ErrorType)
			}
		}
		assert.Equal(t, "late", suite.Await(t, handled, "the handled message"))
		mu.Lock()
		defer mu.Unlock()
		require.Len(t, seen["late"], 4)
		for i, asked := range []time.Duration{100, 200, 300} {
			had := seen["late"][i+1].Sub(seen["late"][i])
			assert.GreaterOrEqual(t, had, asked*time.Millisecond-5*time.Millisecond)
			assert.Less(t, had, asked*time.Millisecond+suite.LateLimit)
			t.Logf("REPORT %s: asked %v, had %v", t.Name(), asked*time.Millisecond, had.Round(time.Millisecond))
		}
		require.Len(t, seen["exhausted"], 4)
		suite.AssertEmpty(t, s, "orders")
		suite.AssertEmpty(t, s, "parking_queue")
	})
}

// A delay that lies between two delay queues, or beyond the longest, takes several of them. The
// message is never early, and each attempt is one call of the handler.
func TestAskedDelayThatNoQueueHasIsMadeUpOfSeveral(t *testing.T) {
	suite.ForEachStrategy(t, func(t *testing.T, s *suite.Site, policy retry.Policy) {
		conn, _ := s.Connect(t)
		policy.Backoff = retry.Delays(200*time.Millisecond, 600*time.Millisecond)
		if policy.AnyDelay != nil {
			policy.AnyDelay = &retry.Ladder{Unit: 50 * time.Millisecond, Levels: 4} // up to 750 ms
		}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
		calls := map[string]chan time.Time{}
		delays := map[string]time.Duration{"between": 400 * time.Millisecond, "beyond": 1500 * time.Millisecond}
		for what := range delays {
			calls[what] = make(chan time.Time, 10)
		}
		suite.Consume(t, conn, "orders", retry.With(policy)(client.Typed(client.RawCodec{}, func(ctx context.Context, what string) error {
			calls[what] <- time.Now()
			if retry.Attempt(ctx) == 1 {
				return retry.After(delays[what], errors.New("busy"))
			}
			return nil
		})), client.ConsumerConfig{Concurrency: 4})
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		for what := range delays {
			suite.Publish(t, p, what)
		}
		for what, asked := range delays {
			first := suite.Await(t, calls[what], "the first attempt")
			had := suite.Await(t, calls[what], "the second attempt").Sub(first)
			assert.GreaterOrEqual(t, had, asked-5*time.Millisecond, what)
			assert.Less(t, had, asked*9/8+200*time.Millisecond+suite.LateLimit, what)
		}
		suite.AssertEmpty(t, s, "orders")
		suite.AssertEmpty(t, s, "orders.dead")
		for what := range delays {
			assert.Empty(t, calls[what], "the handler was called once more")
		}
	})
}

func TestAttemptsAreCountedAcrossStrategies(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		base := retry.Policy{MaxRetries: 6, Backoff: retry.Delays(time.Second), Strategy: retry.StrategyAuto}
		suite.ApplyRetry(t, conn, base, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
		order := []retry.Strategy{retry.StrategyDeadLetter, retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyDeadLetter, retry.StrategyRepublish, retry.StrategyRepublish}
		if s.Newer() {
			order = []retry.Strategy{retry.StrategyNative, retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative, retry.StrategyNative, retry.StrategyDeadLetter}
		}
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "x", func(m *client.Message) {
			m.ApplicationProperties = map[string]any{retry.CountProperty: "0"} // a worker that writes strings
		})
		// One worker for each attempt, each with the next strategy.
		for i, strategy := range append(order, retry.StrategyRepublish) {
			policy := base
			policy.Strategy = strategy
			counts := make(chan int, 10)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			h := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
				cancel()
				counts <- retry.Count(d.Message())
				return errors.New("again")
			})
			go func() { done <- conn.Consume(ctx, "orders", retry.With(policy)(h), client.ConsumerConfig{Prefetch: 1}) }()
			assert.Equal(t, i, suite.Await(t, counts, "an attempt"), "%v", strategy)
			require.NoError(t, suite.Await(t, done, "the end of Consume"))
		}
		dead := make(chan *client.Message, 10)
		suite.Consume(t, conn, "orders.dead", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			dead <- d.Message()
			return nil
		}), client.ConsumerConfig{})
		death := retry.DeadLetterOf(suite.Await(t, dead, "a dead letter"))
		assert.Equal(t, retry.ReasonExhausted, death.Reason)
		assert.Equal(t, 6, death.Retries)
	})
}

func TestNativeIsRefusedWhereItWouldSpin(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyNative}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if s.Newer() {
			s.HTTP(t, "PUT", "/queues/"+s.VHost+"/classic", map[string]any{"durable": true, "arguments": map[string]any{"x-queue-type": "classic"}}, nil)
			err := conn.Consume(ctx, "classic", retry.With(policy)(suite.Nop), client.ConsumerConfig{})
			var guard *retry.GuardError
			require.ErrorAs(t, err, &guard)
			assert.Equal(t, retry.GuardStrategy, guard.Guard)
			return
		}
		err := conn.Consume(ctx, "orders", retry.With(policy)(suite.Nop), client.ConsumerConfig{})
		var guard *retry.GuardError
		require.ErrorAs(t, err, &guard)
		assert.Equal(t, retry.GuardStrategy, guard.Guard)
		assert.Contains(t, err.Error(), "4.0")
	})
}

// A middleware that is a bare function hides what it wraps. Nothing is lost, and the
// message isn't handled without its guards.
func TestMiddlewareThatHidesPrepareEndsConsume(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "one")
		inner := retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			t.Error("handled")
			return nil
		}))
		err := conn.Consume(t.Context(), "orders", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error { return inner.Handle(ctx, d) }), client.ConsumerConfig{})
		require.ErrorAs(t, err, new(*argument.Error))
		handled := make(chan string, 1)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.Typed(client.RawCodec{}, func(_ context.Context, what string) error {
			handled <- what
			return nil
		})), client.ConsumerConfig{})
		assert.Equal(t, "one", suite.Await(t, handled, "the message"))
	})
}

// On a broker that ignores x-opt-delivery-time, a message that was returned with
// it comes back at once. The decorator notices and republishes it.
func TestIgnoredDeliveryTimeIsNoticedAndRepublished(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if s.Newer() {
			return // it heeds the time: TestEveryStrategy shows that
		}
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(time.Second)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 50})
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "x")
		// What the Native strategy does on a broker that it took for a newer one.
		ctx, cancel := context.WithCancel(t.Context())
		once := make(chan time.Time, 1)
		require.NoError(t, conn.Consume(ctx, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			cancel()
			now := time.Now()
			once <- now
			return client.Modify{Annotations: map[string]any{
				// Long, so that on a slow machine it isn't mistaken for a difference of clocks.
				annotation.Delay: int64(60_000), annotation.DeliveryTime: now.Add(time.Minute).UnixMilli(), annotation.Retries: int64(1),
			}}
		}), client.ConsumerConfig{Prefetch: 1}))
		given := suite.Await(t, once, "the first delivery")
		came := make(chan int, 10)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			came <- retry.Count(d.Message())
			return nil
		})), client.ConsumerConfig{})
		assert.Equal(t, 1, suite.Await(t, came, "the republished message"), "the detour uses up no retry")
		assert.GreaterOrEqual(t, time.Since(given), 900*time.Millisecond)
	})
}

func TestGuardsRefuseTopologyThatLosesOrStalls(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(time.Second, 2*time.Second)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "good"})
		suite.Apply(t, conn, declare.Topology{
			Queues: []declare.Queue{
				declare.QuorumQueue{Name: "drops", DeadLetter: declare.Drop()},
				declare.QuorumQueue{Name: "forgets", DeadLetter: declare.DeadLetterTarget{Exchange: "dead_letter_exchange", AtMostOnce: true}},
				declare.QuorumQueue{Name: "fills", MaxLength: 10, DeadLetter: declare.DeadLetterTarget{Exchange: "dead_letter_exchange"}},
				declare.QuorumQueue{Name: "unbound", DeadLetter: declare.DeadLetterTarget{Exchange: "dead_letter_exchange"}},
			},
			Bindings: []declare.Binding{
				{Source: "requeue_exchange", Queue: "drops", Key: "*.*.drops"},
				{Source: "requeue_exchange", Queue: "forgets", Key: "*.*.forgets"},
				{Source: "requeue_exchange", Queue: "fills", Key: "*.*.fills"},
			},
		})
		longer := policy
		longer.Backoff = retry.Delays(time.Second, 3*time.Second)
		for _, c := range []struct {
			queue  string
			policy retry.Policy
			guard  retry.Guard
		}{
			{"good", policy, ""},
			{"drops", policy, retry.GuardDeadLetter},
			{"forgets", policy, retry.GuardAtMostOnce},
			{"fills", policy, retry.GuardMaxLength},
			{"unbound", policy, retry.GuardDelayQueue},
			{"good", longer, retry.GuardDelayQueue},
		} {
			start := func(p retry.Policy) error {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				// It ends as soon as it has begun: what is asked is whether it begins.
				h := client.Wrap(retry.With(p)(suite.Nop), nil)
				err := client.Prepare(ctx, h, client.Start{Queue: c.queue, Broker: conn.Broker(), Management: conn.Management()})
				return err
			}
			err := start(c.policy)
			if c.guard == "" {
				require.NoError(t, err, c.queue)
				continue
			}
			var found *retry.GuardError
			require.ErrorAs(t, err, &found, c.queue)
			assert.Equal(t, c.guard, found.Guard, "%v", err)
			waived := c.policy
			waived.Waive = []retry.Guard{c.guard}
			assert.NoError(t, start(waived), c.queue)
		}
		var bad *argument.Error
		require.ErrorAs(t, conn.Consume(t.Context(), "a.#", retry.With(policy)(suite.Nop), client.ConsumerConfig{}), &bad)
	})
}
