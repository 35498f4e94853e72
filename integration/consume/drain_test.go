package consume_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/retry"
)

// The broker gives a consumer as many messages as Prefetch says, and Concurrency
// handlers run at once, no more and no fewer.
func TestPrefetchAndConcurrencyHold(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const prefetch, concurrency, messages = 10, 4, 50
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var sent sync.WaitGroup
		for i := range messages {
			sent.Go(func() { assert.NoError(t, p.Publish(t.Context(), suite.Order{ID: i})) })
		}
		sent.Wait()

		var running, peak atomic.Int64
		began := make(chan struct{}, messages)
		finish := make(chan struct{})
		suite.Consume(t, conn, "orders", client.JSON(func(context.Context, suite.Order) error {
			n := running.Add(1)
			defer running.Add(-1)
			for old := peak.Load(); n > old && !peak.CompareAndSwap(old, n); old = peak.Load() {
			}
			began <- struct{}{}
			<-finish
			return nil
		}), client.ConsumerConfig{Concurrency: concurrency, Prefetch: prefetch})
		for range concurrency {
			suite.Await(t, began, "a handler")
		}
		suite.Poll(t, "the prefetch is used", func() bool { return suite.Ready(t, conn, "orders") <= messages-prefetch })
		// Another consumer finds all the others: this one holds no more than that.
		others := s.Peer(t).Take("orders", messages-prefetch)
		assert.Len(t, others, messages-prefetch)
		assert.Zero(t, suite.Ready(t, conn, "orders"))
		assert.Empty(t, began, "as many handlers run as Concurrency says")
		close(finish)
		for range prefetch - concurrency {
			suite.Await(t, began, "the rest")
		}
		suite.Poll(t, "all are settled", func() bool { return running.Load() == 0 })
		assert.EqualValues(t, concurrency, peak.Load())
	})
}

// A queue with a delivery limit dead-letters what was delivered in vain too often.
// Restarts in good order aren't deliveries in vain: with a limit of one, several
// of them, with messages prefetched each time, cost none.
//
// RabbitMQ 4.0 counts what is requeued, so there the drain has the handlers work
// off what is prefetched.
func TestGracefulRestartsCostNoMessageItsDeliveries(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, restarts = 200, 5
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 1})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var sent sync.WaitGroup
		for i := range messages {
			sent.Go(func() { assert.NoError(t, p.Publish(t.Context(), suite.Order{ID: i})) })
		}
		sent.Wait()

		var handled suite.TallyByID
		var counted atomic.Int64
		for n := range restarts {
			worker, log := s.Connect(t) // a separate process
			began := make(chan struct{}, messages)
			hold := make(chan struct{})
			stop := suite.Consume(t, worker, "orders", client.JSON(func(ctx context.Context, o suite.Order) error {
				began <- struct{}{}
				d, _ := client.DeliveryFrom(ctx)
				if d.DeliveryCount() > 0 {
					counted.Add(1)
				}
				<-hold
				handled.Add(o.ID)
				return nil
			}), client.ConsumerConfig{Concurrency: 2, Prefetch: 20})
			left := messages - handled.IDs()
			if left > 0 {
				suite.Await(t, began, "a delivery")
				suite.Poll(t, "the prefetch is full", func() bool { return suite.Ready(t, conn, "orders") <= max(left-20, 0) })
			}
			time.AfterFunc(50*time.Millisecond, func() { close(hold) }) // handlers end while it drains
			if n%2 == 0 {
				require.NoError(t, stop())
			} else {
				ctx, cancel := context.WithTimeout(context.Background(), suite.Patience)
				assert.NoError(t, worker.Close(ctx))
				cancel()
				require.ErrorIs(t, stop(), client.ErrClosed)
			}
			assert.Empty(t, log.With("unsettled"))
		}
		suite.Consume(t, conn, "orders", client.JSON(func(ctx context.Context, o suite.Order) error {
			d, _ := client.DeliveryFrom(ctx)
			if d.DeliveryCount() > 0 {
				counted.Add(1)
			}
			handled.Add(o.ID)
			return nil
		}), client.ConsumerConfig{})
		suite.Poll(t, "every message is handled", func() bool { return handled.IDs() == messages })
		assert.Equal(t, messages, handled.Total(), "each of them once")
		assert.Zero(t, counted.Load(), "none was counted as delivered in vain")
		assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
	})
}

// What no handler has begun on goes back to the queue when Grace is over: on 4.3
// with its delivery count untouched.
func TestDrainGivesBackWhatNoHandlerHasBegun(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 20
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		began := make(chan struct{}, messages)
		stop := suite.Consume(t, conn, "orders", client.JSON(func(ctx context.Context, _ suite.Order) error {
			began <- struct{}{}
			<-ctx.Done() // until the grace time is over
			return context.Cause(ctx)
		}), client.ConsumerConfig{Prefetch: messages, Grace: 300 * time.Millisecond})
		suite.Await(t, began, "the first delivery")
		suite.Poll(t, "all are prefetched", func() bool { return suite.Ready(t, conn, "orders") == 0 })
		require.NoError(t, stop())

		ms := s.Peer(t).Take("orders", messages)
		var counted int
		for _, m := range ms {
			if m.Header.DeliveryCount > 0 {
				counted++
			}
		}
		if s.Newer() {
			assert.LessOrEqual(t, counted, 1, "only the one whose handler failed")
		}
		suite.Report(t, s, "of %d messages, 1 in a handler, %d were counted as delivered", messages, counted)
	})
}

// Close returns in its time, no matter what is running and how the broker is.
func TestCloseEndsInEveryState(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, state := range []struct {
			name string
			do   func(t *testing.T, wire *proxy.Proxy, log *suite.Logbook)
		}{
			{"healthy", nil},
			{"broker gone", func(t *testing.T, wire *proxy.Proxy, log *suite.Logbook) {
				wire.Refuse()
				wire.Cut()
				suite.Poll(t, "it tries to reconnect", func() bool { return len(log.With("reconnecting failed")) > 2 })
			}},
			{"just cut", func(_ *testing.T, wire *proxy.Proxy, _ *suite.Logbook) {
				wire.Cut()
			}},
			{"broker silent", func(_ *testing.T, wire *proxy.Proxy, _ *suite.Logbook) {
				wire.Stall()
			}},
			{"reconnecting to silence", func(t *testing.T, wire *proxy.Proxy, log *suite.Logbook) {
				wire.Stall()
				wire.Cut()
				suite.Poll(t, "it has noticed", func() bool { return len(log.With("connection lost")) > 0 })
			}},
		} {
			t.Run(state.name, func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Hour)}
				wire, through := s.Through(t)
				conn, log := suite.ConnectTo(t, through, suite.Soon)
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
				handling := make(chan struct{}, 1000)
				ended := make(chan error, 3)
				for _, h := range []client.Handler{
					client.JSON(func(context.Context, suite.Order) error { handling <- struct{}{}; return nil }),
					client.JSON(func(context.Context, suite.Order) error { handling <- struct{}{}; return errors.New("later") }),
					client.JSON(func(ctx context.Context, _ suite.Order) error { // slow, and heeds its ctx
						handling <- struct{}{}
						<-ctx.Done()
						return ctx.Err()
					}),
				} {
					go func() {
						ended <- conn.Consume(context.Background(), "orders", retry.With(policy)(h), client.ConsumerConfig{Concurrency: 2, Grace: 200 * time.Millisecond})
					}()
				}
				p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
				stopPublishing := make(chan struct{})
				var publishing sync.WaitGroup
				for i := range 4 {
					publishing.Go(func() {
						for n := 0; ; n++ {
							select {
							case <-stopPublishing:
								return
							default:
							}
							if err := p.Publish(context.Background(), suite.Order{ID: n*4 + i}); errors.Is(err, client.ErrClosed) {
								return
							}
						}
					})
				}
				for range 20 {
					suite.Await(t, handling, "work in progress")
				}
				if state.do != nil {
					state.do(t, wire, log)
				}
				limit := 2 * time.Second
				if state.name == "healthy" {
					limit = suite.Patience
				}
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				defer cancel()
				began := time.Now()
				err := conn.Close(ctx)
				took := time.Since(began)
				close(stopPublishing)
				if state.name == "healthy" {
					assert.NoError(t, err)
				}
				assert.Less(t, took, limit+suite.LateLimit)
				suite.Report(t, s, "closed in %v: %v", took.Round(time.Millisecond), err)
				for range cap(ended) {
					assert.ErrorIs(t, suite.Await(t, ended, "Consume returns"), client.ErrClosed)
				}
				done := make(chan struct{})
				go func() { publishing.Wait(); close(done) }()
				suite.Await(t, done, "Publish returns")
				assert.ErrorIs(t, p.Publish(context.Background(), suite.Order{}), client.ErrClosed)
				_, _, err = conn.Management().Request(context.Background(), "GET", "/queues/orders", nil)
				assert.ErrorIs(t, err, client.ErrClosed)
			})
		}
	})
}
