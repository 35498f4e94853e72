package consume_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
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
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/middleware/breaker"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/middleware/ordered"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/retry"
)

// arrivals is a Middleware that reports each delivery before it handles it.
func arrivals(notify func(*client.Delivery)) client.Middleware {
	return func(h client.Handler) client.Handler {
		return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
			notify(d)
			return h.Handle(ctx, d)
		})
	}
}

// Every message is sent three times, under the same message-id, and fails at first:
// it hops back, and succeeds once.
func TestDuplicatesAreHandledOnceThoughTheirMessageHopsBack(t *testing.T) {
	ids := []any{"o-1", uint64(17), amqp.UUID{1, 2, 3}, []byte{0, 255}}
	orders := map[string]func(policy retry.Policy, once client.Middleware) client.Middleware{
		"inside of retry": func(p retry.Policy, once client.Middleware) client.Middleware {
			return client.Chain(retry.With(p), once)
		},
		"outside of retry": func(p retry.Policy, once client.Middleware) client.Middleware {
			return client.Chain(once, retry.With(p))
		},
	}
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, chain := range orders {
			for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
				t.Run(fmt.Sprintf("%s/%v", name, strategy), func(t *testing.T) {
					t.Parallel()
					s := suite.NewSite(t, s.Broker)
					policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(50 * time.Millisecond), Strategy: strategy}
					conn, _ := s.Connect(t)
					suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
					p := s.Peer(t)
					const copies = 3
					for range copies {
						for i, id := range ids {
							p.Put("orders", &amqp.Message{
								Properties: &amqp.MessageProperties{MessageID: id},
								Data:       [][]byte{fmt.Appendf(nil, `{"id":%d}`, i)},
							})
						}
					}

					var mu sync.Mutex
					calls := map[int]int{}
					ended := make(chan int, 100) // a message that succeeded, or -1 for a duplicate
					once := dedupe.With(dedupe.Config{OnDuplicate: func(*client.Delivery) { ended <- -1 }})
					suite.Consume(t, conn, "orders", chain(policy, once)(client.JSON(func(_ context.Context, o suite.Order) error {
						mu.Lock()
						defer mu.Unlock()
						if calls[o.ID]++; calls[o.ID] <= 2 {
							return errors.New("not yet")
						}
						ended <- o.ID
						return nil
					})), client.ConsumerConfig{Concurrency: 8})
					got := map[int]int{}
					for range len(ids) * copies {
						got[suite.Await(t, ended, "the end of a copy")]++
					}
					assert.Equal(t, map[int]int{-1: len(ids) * (copies - 1), 0: 1, 1: 1, 2: 1, 3: 1}, got)
					assert.Zero(t, suite.Ready(t, conn, "orders"))
					assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
				})
			}
		}
	})
}

// A connection is lost while a handler runs. The broker delivers its message again,
// and the copy waits until the handler is done.
func TestAMessageWhoseConnectionIsLostIsHandledOnce(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, err := proxy.New(s.Host())
		require.NoError(t, err)
		t.Cleanup(wire.Close)
		direct, _ := s.Connect(t)
		suite.Apply(t, direct, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		conn, _ := suite.ConnectTo(t, s.AMQPURLWith(func(u *url.URL) { u.Host = wire.Addr() }), func(c *client.Config) {
			c.Reconnect = client.ReconnectBackoff{Min: 10 * time.Millisecond, Max: 200 * time.Millisecond}
		})

		arrived, began, resume := make(chan int, 10), make(chan int, 10), make(chan struct{})
		duplicates := make(chan int, 10)
		var calls atomic.Int32
		h := client.Chain(
			arrivals(func(*client.Delivery) { arrived <- 1 }),
			dedupe.With(dedupe.Config{OnDuplicate: func(*client.Delivery) { duplicates <- 1 }}),
		)(client.JSON(func(context.Context, suite.Order) error {
			calls.Add(1)
			began <- 1
			<-resume
			return nil
		}))
		suite.Consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 2})
		suite.Publish(t, suite.Publisher[suite.Order](t, direct, address.Queue("orders")), suite.Order{ID: 1})
		suite.Await(t, arrived, "the message")
		suite.Await(t, began, "its handler")
		wire.Cut()
		suite.Await(t, arrived, "the message, again")
		close(resume)
		suite.Await(t, duplicates, "the copy being told")
		suite.Poll(t, "an empty queue", func() bool { return suite.Ready(t, direct, "orders") == 0 })
		assert.EqualValues(t, 1, calls.Load())
	})
}

// A backlog stays where it is while the bank is down: the outage uses up few
// retries, and no message's delivery count rises, on 4.0 neither.
func TestAnOutageLeavesTheBacklogInItsQueue(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, consumers, slots, failures, probes = 500, 2, 8, 5, 4
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(50 * time.Millisecond)}
		conn, log := s.Connect(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 1})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var sent sync.WaitGroup
		for i := range messages {
			sent.Go(func() { suite.Publish(t, p, suite.Order{ID: i}) })
		}
		sent.Wait()

		errDown := errors.New("bank is down")
		var down atomic.Bool
		down.Store(true)
		// The first deliveries fail, while others are with workers already, which come
		// to a circuit that is open.
		opened, together := make(chan struct{}), make(chan struct{})
		open := sync.OnceFunc(func() { close(opened) })
		var failed, arrived, returned atomic.Int32
		var handled sync.Map
		all := make(chan struct{}, 2*messages)
		changes := make(chan breaker.Change, 100)
		bank := breaker.With(breaker.Config{
			Failures: failures, OpenFor: 300 * time.Millisecond, MaxOpenFor: 300 * time.Millisecond,
			Trips:    func(err error) bool { return errors.Is(err, errDown) },
			OnChange: func(c breaker.Change) { open(); changes <- c },
			Logger:   slog.New(log),
		})
		watch := func(h client.Handler) client.Handler {
			return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
				assert.Zero(t, d.DeliveryCount(), "what is requeued must not count")
				switch n := arrived.Add(1); {
				case n <= failures:
					<-together
				case n == failures+1:
					close(together)
					fallthrough
				default:
					<-opened
				}
				err := h.Handle(ctx, d)
				if errors.Is(err, breaker.ErrOpen) {
					returned.Add(1)
				}
				return err
			})
		}
		chain := client.Chain(retry.With(policy), watch, bank)
		for range consumers {
			suite.Consume(t, conn, "orders", chain(client.JSON(func(_ context.Context, o suite.Order) error {
				if down.Load() {
					failed.Add(1)
					return errDown
				}
				if _, twice := handled.LoadOrStore(o.ID, true); !twice {
					all <- struct{}{}
				}
				return nil
			})), client.ConsumerConfig{Concurrency: slots})
		}

		for n := 0; n <= probes; {
			if c := suite.Await(t, changes, "a change of the circuit"); c.To == "open" {
				n++
				assert.ErrorIs(t, c.Err, errDown)
			}
		}
		const most = failures + probes + 1 // one more probe may have begun
		assert.LessOrEqual(t, int(failed.Load()), most)
		if s.Newer() {
			suite.Poll(t, "the backlog being ready, for others to take", func() bool { return suite.Ready(t, conn, "orders") >= messages-most })
			assert.Positive(t, returned.Load())
		} else {
			assert.Zero(t, returned.Load(), "it would count")
		}
		down.Store(false)
		for range messages {
			suite.Await(t, all, "a message handled")
		}
		suite.Poll(t, "empty queues", func() bool { return suite.Ready(t, conn, "orders")+suite.Ready(t, conn, "delay_50ms") == 0 })
		assert.LessOrEqual(t, int(failed.Load()), most+1)
		assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
		suite.Report(t, s, "an outage of %d probes, %d messages: %d failed calls, %d deliveries requeued", probes, messages, failed.Load(), returned.Load())
	})
}

// With a broker where giving back is free, a consumer that ends while the circuit is
// open ends at once; with another one, what is held waits for the grace time.
func TestAConsumerEndsWhileTheCircuitIsOpen(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 20
		conn, log := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		open := make(chan breaker.Change, 10)
		h := breaker.With(breaker.Config{Failures: 1, OpenFor: time.Hour, OnChange: func(c breaker.Change) { open <- c }, Logger: slog.New(log)})(
			client.JSON(func(context.Context, suite.Order) error { return errors.New("bank is down") }))
		grace := 200 * time.Millisecond
		if s.Newer() {
			grace = time.Hour
		}
		stop := suite.Consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 1, Grace: grace})
		suite.Await(t, open, "the circuit to open")
		require.NoError(t, stop())
		suite.Poll(t, "all messages back", func() bool { return suite.Ready(t, conn, "orders") == messages })
		if s.Newer() {
			counted := 0
			for _, m := range s.Peer(t).Take("orders", messages) {
				counted += int(m.Header.DeliveryCount)
			}
			assert.Equal(t, 1, counted, "only the failure")
		}
	})
}

func TestCallsOfAllConsumersKeepToTheRate(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, rate, burst = 60, 40, 10
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		calls := make(chan time.Time, messages)
		limit := ratelimit.With(ratelimit.Config{PerSecond: rate, Burst: burst})
		for range 2 {
			suite.Consume(t, conn, "orders", limit(client.JSON(func(context.Context, suite.Order) error {
				calls <- time.Now()
				return nil
			})), client.ConsumerConfig{Concurrency: 8})
		}
		at := make([]time.Time, messages)
		for i := range at {
			at[i] = suite.Await(t, calls, "a call")
		}
		slices.SortFunc(at, time.Time.Compare)
		// A call that was let through may be late, but never early. So from the
		// first one on there are never more than the bucket has held.
		for i, call := range at {
			allowed := burst + rate*(call.Sub(at[0])+20*time.Millisecond).Seconds()
			assert.LessOrEqual(t, float64(i+1), allowed+1, "calls within %v", call.Sub(at[0]))
		}
		suite.Report(t, s, "%d calls at %d a second after a burst of %d took %v", messages, rate, burst, at[messages-1].Sub(at[0]).Round(time.Millisecond))
	})
}

func TestWhatWaitsForTheRateGoesBackInADrain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 10
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		calls, arrived := make(chan int, messages), make(chan int, messages)
		h := client.Chain(arrivals(func(*client.Delivery) { arrived <- 1 }), ratelimit.With(ratelimit.Config{PerSecond: 0.001}))(
			client.JSON(func(context.Context, suite.Order) error { calls <- 1; return nil }))
		stop := suite.Consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 4, Grace: 200 * time.Millisecond})
		suite.Await(t, calls, "the first call")
		for range 4 {
			suite.Await(t, arrived, "a delivery")
		}
		require.NoError(t, stop())
		assert.Empty(t, calls)
		suite.Poll(t, "the others back", func() bool { return suite.Ready(t, conn, "orders") == messages-1 })
		if s.Newer() {
			for _, m := range s.Peer(t).Take("orders", messages-1) {
				assert.Zero(t, m.Header.DeliveryCount, "not counted")
			}
		}
	})
}

// Messages of one key are never handled at once, nor does another of its key begin
// between two attempts; those of different keys are handled at the same time.
func TestMessagesOfOneKeyAreHandledOneAfterTheOther(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const keys, each = 8, 50
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range keys * each {
			suite.Publish(t, p, suite.Order{ID: i}, func(m *client.Message) { m.Properties.GroupID = new(fmt.Sprint(i % keys)) })
		}

		var mu sync.Mutex
		holds := map[int]int{} // the message that a key is at, by key
		last, swapped := map[int]int{}, 0
		together := make(chan struct{})
		var meet atomic.Int32
		done := make(chan struct{}, keys*each)
		attempts := map[int]int{}
		h := ordered.With(ordered.Config{Attempts: 3, Pause: time.Millisecond})(client.JSON(func(_ context.Context, o suite.Order) error {
			key := o.ID % keys
			if o.ID < 2 { // the first two keys meet: none waits for the other's handler
				if meet.Add(1) == 2 {
					close(together)
				}
				select {
				case <-together:
				case <-time.After(suite.Patience):
					assert.Fail(t, "different keys wait for one another")
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if at, busy := holds[key]; busy && at != o.ID {
				assert.Failf(t, "two of a key at once", "%d and %d", at, o.ID)
			}
			holds[key] = o.ID
			if attempts[o.ID]++; attempts[o.ID] < 3 && o.ID%10 == 9 {
				return errors.New("not yet")
			}
			delete(holds, key)
			if o.ID < last[key] {
				swapped++
			}
			last[key] = o.ID
			done <- struct{}{}
			return nil
		}))
		suite.Consume(t, conn, "orders", h, client.ConsumerConfig{Concurrency: 2 * keys})
		for range keys * each {
			suite.Await(t, done, "a message")
		}
		assert.Zero(t, swapped, "of %d deliveries with %d slots", keys*each, 2*keys)
	})
}

// With one slot the order is the queue's, through all failures.
func TestAFailureKeepsItsTurn(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 50
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var want []int
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i}, func(m *client.Message) { m.Properties.GroupID = new("all") })
			want = append(want, i)
		}
		done, attempts := make(chan int, messages), map[int]int{}
		h := ordered.With(ordered.Config{Attempts: -1, Pause: time.Millisecond})(client.JSON(func(_ context.Context, o suite.Order) error {
			if attempts[o.ID]++; attempts[o.ID] <= o.ID%3 {
				return errors.New("not yet")
			}
			done <- o.ID
			return nil
		}))
		suite.Consume(t, conn, "orders", h, client.ConsumerConfig{})
		var got []int
		for range messages {
			got = append(got, suite.Await(t, done, "a message"))
		}
		assert.Equal(t, want, got)
	})
}

// All of them at once, in the order that their documentation asks for, with
// duplicates, failures, outages and lost connections: every message is handled with
// success once, and none is lost or dead.
func TestAllMiddlewareTogetherLoseNothing(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, keys, cuts = 300, 10, 5
		wire, err := proxy.New(s.Host())
		require.NoError(t, err)
		t.Cleanup(wire.Close)
		direct, log := s.Connect(t)
		conn, _ := suite.ConnectTo(t, s.AMQPURLWith(func(u *url.URL) { u.Host = wire.Addr() }), func(c *client.Config) {
			c.Reconnect = client.ReconnectBackoff{Min: 10 * time.Millisecond, Max: 200 * time.Millisecond}
		})
		policy := retry.Policy{MaxRetries: 10, Backoff: retry.Delays(50 * time.Millisecond)}
		suite.ApplyRetry(t, direct, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})

		errDown := errors.New("bank is down")
		var mu sync.Mutex
		calls, succeeded := map[int]int{}, map[int]int{}
		total := 0
		progress := make(chan struct{}, 100_000)
		chain := client.Chain(
			retry.With(policy),
			ordered.With(ordered.Config{Attempts: 2, Pause: time.Millisecond}),
			breaker.With(breaker.Config{
				Failures: 3, OpenFor: 50 * time.Millisecond, MaxOpenFor: 100 * time.Millisecond,
				Trips: func(err error) bool { return errors.Is(err, errDown) }, Logger: slog.New(log),
			}),
			ratelimit.With(ratelimit.Config{PerSecond: 500, Burst: 50}),
			dedupe.With(dedupe.Config{}),
		)
		p := suite.Publisher[suite.Order](t, direct, address.Queue("orders"))
		for range 2 {
			for i := range messages {
				suite.Publish(t, p, suite.Order{ID: i}, func(m *client.Message) {
					m.Properties.MessageID = fmt.Sprint(i)
					m.Properties.GroupID = new(fmt.Sprint(i % keys))
				})
			}
		}
		suite.Consume(t, conn, "orders", chain(client.JSON(func(_ context.Context, o suite.Order) error {
			mu.Lock()
			defer mu.Unlock()
			calls[o.ID]++
			total++
			switch {
			case total%150 < 4: // in a row
				return errDown
			case o.ID%7 == 0 && calls[o.ID] <= 3:
				return errors.New("not yet")
			}
			succeeded[o.ID]++
			progress <- struct{}{}
			return nil
		})), client.ConsumerConfig{Concurrency: 8})
		for n := range messages {
			suite.Await(t, progress, "a message handled")
			if n%(messages/cuts) == messages/cuts/2 {
				wire.Cut()
			}
		}
		suite.Poll(t, "empty queues", func() bool { return suite.Ready(t, direct, "orders")+suite.Ready(t, direct, "delay_50ms") == 0 })
		mu.Lock()
		defer mu.Unlock()
		for i := range messages {
			assert.Equal(t, 1, succeeded[i], "message %d", i)
		}
		assert.Zero(t, suite.Ready(t, direct, "orders.dead"))
		suite.Report(t, s, "%d messages, twice each, with %d lost connections: %d calls, each succeeded once", messages, cuts, total)
	})
}
