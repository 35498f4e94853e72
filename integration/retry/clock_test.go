package retry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/retry"
)

// ahead is a ctx for workers whose clock is ahead of this host's, which is the broker's
// too.
func ahead(by time.Duration) context.Context {
	return brokerclock.WithOwnClock(context.Background(), func() time.Time { return time.Now().Add(by) })
}

// With Native the broker measures the delay, from a time that the worker writes. The
// clocks may differ: no delay is off by a second for that, none of a message's retries is
// lost, and each costs one delivery.
func TestNativeKeepsItsDelaysWithAnyWorkersClock(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return // Native is refused
		}
		const messages = 20
		var mu sync.Mutex
		var off []time.Duration
		t.Run("skews", func(t *testing.T) {
			for _, by := range []time.Duration{-time.Hour, -5 * time.Minute, -2 * time.Second, 2 * time.Second, 5 * time.Minute, time.Hour} {
				t.Run(by.String(), func(t *testing.T) {
					t.Parallel()
					s := suite.NewSite(t, s.Broker)
					differs := make(chan client.Event, 10)
					conn, log := s.Connect(t, func(c *client.Config) {
						c.OnEvent = func(e client.Event) {
							if e.Kind == client.EventClockDiffers {
								differs <- e
							}
						}
					})
					policy := retry.Policy{
						MaxRetries: 3, Backoff: retry.Delays(time.Second, 2*time.Second), Jitter: retry.JitterEqual, Strategy: retry.StrategyNative, GiveUpAfter: 30 * time.Minute,
					}
					suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
					calls := map[string][]time.Time{}
					deliveries := 0
					count := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
						text, _ := client.Body(d.Message())
						mu.Lock()
						defer mu.Unlock()
						calls[string(text)] = append(calls[string(text)], time.Now())
						if retry.Count(d.Message()) == 2 {
							return retry.After(1500*time.Millisecond, errors.New("busy"))
						}
						return errors.New("never")
					})
					decorated := retry.With(policy)(count)
					suite.ConsumeBy(ahead(by), t, conn, "orders", client.Wrap(decorated, func(ctx context.Context, d *client.Delivery) error {
						mu.Lock()
						deliveries++
						mu.Unlock()
						return decorated.Handle(ctx, d)
					}), client.ConsumerConfig{Concurrency: 8})
					dead := make(chan *client.Message, messages)
					suite.Consume(t, conn, "orders.dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
						dead <- d.Message()
						return nil
					}), client.ConsumerConfig{})
					difference := suite.Await(t, differs, "the event").Ahead
					assert.GreaterOrEqual(t, difference, -by-time.Second)
					assert.Less(t, difference, -by+suite.LateLimit)
					p := suite.PublisherOf(t, conn, address.Queue("orders"))
					for i := range messages {
						suite.Publish(t, p, fmt.Sprint(i))
					}
					for range messages {
						death := retry.DeadLetterOf(suite.Await(t, dead, "a dead letter"))
						assert.Equal(t, retry.ReasonExhausted, death.Reason)
						assert.Equal(t, 3, death.Retries)
						assert.WithinDuration(t, time.Now(), death.LastFailure, suite.Patience, "by the broker's clock")
						took := death.LastFailure.Sub(death.FirstFailure)
						assert.GreaterOrEqual(t, took, 2*time.Second)
						assert.Less(t, took, 5*time.Second+3*suite.LateLimit)
					}
					assert.Len(t, log.With("the broker's clock differs"), 1)
					mu.Lock()
					defer mu.Unlock()
					assert.Equal(t, 4*messages, deliveries)
					for _, at := range calls {
						require.Len(t, at, 4)
						for i, limits := range [][2]time.Duration{{500, 1000}, {1000, 2000}, {1500, 1500}} {
							had := at[i+1].Sub(at[i])
							assert.GreaterOrEqual(t, had, limits[0]*time.Millisecond-5*time.Millisecond)
							assert.Less(t, had, limits[1]*time.Millisecond+suite.LateLimit)
							if limits[0] == limits[1] {
								off = append(off, had-limits[0]*time.Millisecond)
							}
						}
					}
				})
			}
		})
		suite.Report(t, s, "delays of 1.5 s, with clocks 2 s to 1 h off: late by %s", suite.Spread(off))
	})
}

// A worker without the permissions to ask for the time finds out by what comes back.
func TestNativeFindsOutAboutTheClocksWithoutPermissions(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		for _, by := range []time.Duration{-2 * time.Second, 2 * time.Second, 5 * time.Second} {
			t.Run(by.String(), func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				admin, _ := s.Connect(t)
				policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(2 * time.Second), Strategy: retry.StrategyNative, Waive: retry.AllGuards()}
				suite.ApplyRetry(t, admin, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 2})
				conn, _ := suite.ConnectTo(t, s.User(t, "", "", "orders"))
				type call struct{ at, due time.Time } // due is until when the queue was asked to hold the message, by the broker's clock: this host's
				calls := make(chan call, 100)
				var off []time.Duration // of all but the first delay
				suite.ConsumeBy(ahead(by), t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					due, _ := d.Annotation(annotation.DeliveryTime).(int64)
					calls <- call{time.Now(), time.UnixMilli(due)}
					return errors.New("never")
				})), client.ConsumerConfig{})
				p := suite.PublisherOf(t, admin, address.Queue("orders"))
				for n := range 2 {
					suite.Publish(t, p, "x")
					last := suite.Await(t, calls, "the first attempt")
					for i := range 3 {
						again := suite.Await(t, calls, "a retry")
						had, asked := again.at.Sub(last.at), again.due.Sub(last.at)
						last = again
						t.Logf("message %d, retry %d after %v, held for %v", n, i, had, asked)
						assert.GreaterOrEqual(t, had, 2*time.Second-200*time.Millisecond)
						if n == 0 && i == 0 {
							continue // late by what the clocks differ by, at the most
						}
						off = append(off, asked-2*time.Second)
					}
					suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, admin, "orders.dead") == n+1 })
				}
				suite.Report(t, s, "a clock %v off, and not allowed to ask: delays are too long by %s", by, suite.Spread(off))
				slices.Sort(off)
				// 2 s are too little to tell a clock from a busy queue; 5 s aren't.
				assert.Less(t, off[len(off)/2], 4*time.Second)
			})
		}
	})
}
