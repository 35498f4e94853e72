package client_test

import (
	"context"
	"errors"
	"math/rand/v2"
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
	"github.com/hopback/hopback/retry"
)

// Every message that the broker has accepted is handled, or lies in the
// dead-letter queue, however often and wherever the connections are cut.
func TestNoMessageIsLostWhileConnectionsAreCut(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, cuts, publishers = 2000, 50, 20
		dead := func(id int) bool { return id%10 == 0 } // given up at once
		began := time.Now()
		seed := uint64(began.UnixNano())
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))

		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		direct, _ := s.Connect(t)
		suite.ApplyRetry(t, direct, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})
		wire, through := s.Through(t)
		publishing, _ := suite.ConnectTo(t, through, suite.Soon)
		consuming, log := suite.ConnectTo(t, through, suite.Soon)

		// progress gets every publish and every attempt, so that the cuts come
		// during the work, and not by the clock.
		progress := make(chan struct{}, 100_000)
		var handled, deadLettered suite.TallyByID
		suite.Consume(t, consuming, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			progress <- struct{}{}
			d, _ := client.DeliveryFrom(ctx)
			switch {
			case dead(o.ID):
				return retry.Permanent(errors.New("never"))
			case retry.Count(d.Message()) == 0:
				return errors.New("not yet")
			}
			handled.Add(o.ID)
			return nil
		})), client.ConsumerConfig{Concurrency: 8})
		suite.Consume(t, direct, "orders.dead", client.JSON(func(_ context.Context, o suite.Order) error {
			deadLettered.Add(o.ID)
			return nil
		}), client.ConsumerConfig{})

		p := suite.Publisher[suite.Order](t, publishing, address.Queue("orders"))
		ids := make(chan int)
		var unknown, again atomic.Int64
		var published sync.WaitGroup
		for range publishers {
			published.Go(func() {
				for id := range ids {
					ctx, cancel := context.WithTimeout(context.Background(), 2*suite.Patience)
					for {
						err := p.Publish(ctx, suite.Order{ID: id})
						progress <- struct{}{}
						if err == nil {
							break
						}
						if errors.Is(err, client.ErrOutcomeUnknown) {
							unknown.Add(1) // it may be there: sending it again may make two
						} else {
							again.Add(1)
						}
						if ctx.Err() != nil {
							t.Errorf("message %d isn't taken: %v", id, err)
							break
						}
					}
					cancel()
				}
			})
		}
		cutting := make(chan int)
		go func() {
			done, next := 0, 20+random.IntN(120)
			for n := 0; done < cuts; n++ {
				select {
				case <-progress:
				case <-time.After(suite.Patience):
					cutting <- done
					return
				}
				if n < next {
					continue
				}
				if done++; done%10 == 0 {
					// And now and then nobody answers for a while.
					failures := len(log.With("reconnecting failed"))
					wire.Refuse()
					for len(log.With("reconnecting failed")) == failures {
						wire.Cut() // one may have come in just before
						time.Sleep(5 * time.Millisecond)
					}
					if err := wire.Admit(); err != nil {
						t.Error(err)
					}
				} else {
					wire.Cut()
				}
				next = n + 20 + random.IntN(120)
			}
			cutting <- done
		}()
		for id := range messages {
			ids <- id
		}
		close(ids)
		published.Wait()
		// The cutting ends by itself when nothing moves any more for patience; on a
		// busy machine it takes its time.
		select {
		case done := <-cutting:
			assert.Equal(t, cuts, done, "cuts")
		case <-time.After(6 * suite.Patience):
			require.FailNow(t, "the cutting doesn't end")
		}

		// RabbitMQ's dead-letter worker tries again after 180 s what it couldn't hand
		// on: late is not lost.
		waited, notified := time.Now(), false
		for handled.IDs()+deadLettered.IDs() < messages && time.Since(waited) < 240*time.Second {
			time.Sleep(50 * time.Millisecond)
			if late := time.Since(waited); late > 20*time.Second && !notified {
				notified = true
				s.LogWhereMessagesAre(t)
			}
		}
		if notified {
			suite.Report(t, s, "the last message came %v after all were published (seed %d)", time.Since(waited).Round(time.Second), seed)
		}
		for id := range messages {
			if dead(id) {
				assert.Positive(t, deadLettered.Of(id), "message %d is not in the dead-letter queue", id)
				assert.Zero(t, handled.Of(id), "message %d", id)
			} else {
				assert.Positive(t, handled.Of(id), "message %d was not handled", id)
				assert.Zero(t, deadLettered.Of(id), "message %d", id)
			}
		}
		for _, q := range []string{"orders", "delay_100ms", "orders.dead", "parking_queue"} {
			suite.Poll(t, q+" is empty", func() bool { return suite.Ready(t, direct, q) == 0 })
		}
		suite.Report(t, s, "%d messages, %d cuts (seed %d) in %v: none lost; duplicates: %d handled, %d dead; unknown outcomes %d, certain failures %d; reconnects %d",
			messages, cuts, seed, time.Since(began).Round(100*time.Millisecond),
			handled.Total()-handled.IDs(), deadLettered.Total()-deadLettered.IDs(), unknown.Load(), again.Load(), len(log.With("reconnected")))
	})
}

// A broker that falls silent without closing the connection is taken for lost
// after IdleTimeout, and what runs on the connection comes back with it.
func TestSilentConnectionIsReplaced(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const idle = 2 * time.Second
		wire, through := s.Through(t)
		conn, log := suite.ConnectTo(t, through, suite.Soon, func(c *client.Config) { c.IdleTimeout = idle })
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		got := make(chan int, 16)
		suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: 1})
		require.Equal(t, 1, suite.Await(t, got, "the first message"))

		wire.Stall()
		began := time.Now()
		suite.Poll(t, "the connection is taken for lost", func() bool { return len(log.With("connection lost")) > 0 })
		took := time.Since(began)
		assert.Less(t, took, idle+suite.LateLimit)
		wire.Cut()
		wire.Resume()
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		for {
			err := p.Publish(ctx, suite.Order{ID: 2})
			if err == nil {
				break
			}
			require.ErrorIs(t, err, client.ErrOutcomeUnknown)
			require.NoError(t, ctx.Err())
		}
		for suite.Await(t, got, "the second message") == 1 {
			// Its settlement may not have reached the broker.
		}
		suite.Report(t, s, "idle timeout %v, noticed after %v", idle, took.Round(10*time.Millisecond))
	})
}

// An endpoint that is gone is left for the next one.
func TestConnectionMovesToAnotherEndpoint(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		one, first := s.Through(t)
		two, second := s.Through(t)
		conn, _ := suite.ConnectTo(t, first, suite.Soon, func(c *client.Config) { c.Endpoints = []string{second} })
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: 1})
		require.Zero(t, two.Accepted())
		one.Refuse()
		require.Equal(t, 1, one.Cut())
		for {
			ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
			err := p.Publish(ctx, suite.Order{ID: 2})
			cancel()
			if err == nil {
				break
			}
			require.ErrorIs(t, err, client.ErrOutcomeUnknown)
		}
		assert.Equal(t, 1, two.Accepted())
		assert.NotEmpty(t, conn.Broker().Version)
	})
}
