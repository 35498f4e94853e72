package hopbacktest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

var quiet = slog.New(slog.DiscardHandler)

// eachVersion runs a test in virtual time with each version.
func eachVersion(t *testing.T, cfg hopbacktest.Config, f func(t *testing.T, b *hopbacktest.Broker)) {
	for _, version := range []string{"4.3.6", "4.0.5"} {
		cfg := cfg
		cfg.Version = version
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, hopbacktest.Start(t, cfg)) })
		})
	}
}

func connect(t *testing.T, b *hopbacktest.Broker, cfg client.Config) *client.Conn {
	t.Helper()
	cfg.Dial = b.Dial
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	conn, err := client.Connect(t.Context(), b.URL(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

func declared(t *testing.T, conn *client.Conn, topology declare.Topology) {
	t.Helper()
	_, err := declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
}

// oneQueue is a work queue with its dead-letter queue.
func oneQueue(t *testing.T, name string) declare.Topology {
	t.Helper()
	topology, err := retry.Topology(retry.Policy{}, declare.QuorumQueue{Name: name, DeliveryLimit: 20})
	require.NoError(t, err)
	return topology
}

func TestClientPublishesAndConsumesAThousand(t *testing.T) {
	eachVersion(t, hopbacktest.Config{}, func(t *testing.T, b *hopbacktest.Broker) {
		conn := connect(t, b, client.Config{})
		assert.Equal(t, b.Version(), conn.Broker().Version)
		declared(t, conn, oneQueue(t, "work"))
		p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		const messages = 1000
		all := make([]int, messages)
		for i := range all {
			all[i] = i
		}
		require.NoError(t, p.PublishAll(t.Context(), all))
		ctx, stop := context.WithCancel(t.Context())
		var got []int
		require.NoError(t, conn.Consume(ctx, "work", client.JSON(func(_ context.Context, n int) error {
			if got = append(got, n); len(got) == messages {
				stop()
			}
			return nil
		}), client.ConsumerConfig{}))
		assert.Equal(t, all, got)
	})
}

func strategies(version string) []retry.Strategy {
	all := []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative}
	if version == "4.0.5" {
		return all[:2]
	}
	return all
}

func TestMessagesHopBackAfterHours(t *testing.T) {
	delays := []time.Duration{10 * time.Minute, time.Hour, 3 * time.Hour}
	for _, version := range []string{"4.3.6", "4.0.5"} {
		for _, strategy := range strategies(version) {
			t.Run(fmt.Sprint(version, " ", strategy), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := hopbacktest.Start(t, hopbacktest.Config{Version: version})
					// Signs of life would take most of the time that the hours take.
					conn := connect(t, b, client.Config{IdleTimeout: 12 * time.Hour})
					policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(delays...), Strategy: strategy}
					topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work", DeliveryLimit: 20})
					require.NoError(t, err)
					declared(t, conn, topology)
					p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
					require.NoError(t, err)
					require.NoError(t, p.Publish(t.Context(), "order"))
					ctx, stop := context.WithCancel(t.Context())
					last := time.Now()
					var waited []time.Duration
					require.NoError(t, conn.Consume(ctx, "work", retry.With(policy)(client.JSON(func(context.Context, string) error {
						waited = append(waited, time.Since(last))
						last = time.Now()
						if len(waited) == 4 {
							time.AfterFunc(time.Second, stop)
						}
						return errors.New("declined")
					})), client.ConsumerConfig{}))
					require.Len(t, waited, 4)
					for i, d := range delays {
						assert.InDelta(t, float64(d), float64(waited[i+1]), float64(10*time.Millisecond), "%v", waited[i+1])
					}
					var death retry.DeadLetter
					ctx, stop = context.WithCancel(t.Context())
					require.NoError(t, conn.Consume(ctx, "work.dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
						death = retry.DeadLetterOf(d.Message())
						stop()
						return nil
					}), client.ConsumerConfig{}))
					assert.Equal(t, retry.ReasonExhausted, death.Reason)
					assert.Equal(t, 3, death.Retries)
					assert.Equal(t, "declined", death.Error)
					assert.Equal(t, "work", death.Queue)
				})
			})
		}
	}
}

// produce publishes numbers until ctx ends, and returns how many were confirmed. every is
// the time between two.
func produce(ctx context.Context, t *testing.T, p *client.Publisher[int], every func() time.Duration) int {
	for n := 0; ; n++ {
		if err := p.Publish(ctx, n); err != nil {
			assert.True(t, ctx.Err() != nil, err)
			return n
		}
		select {
		case <-time.After(every()):
		case <-ctx.Done():
			return n + 1
		}
	}
}

// Nothing that was confirmed is lost by what a test does to the broker.
func TestNoFaultOfTheBrokerLosesAMessage(t *testing.T) {
	for name, harm := range map[string]func(b *hopbacktest.Broker){
		"cut":     func(b *hopbacktest.Broker) { b.Connections()[0].Cut() },
		"killed":  func(b *hopbacktest.Broker) { b.Kill(); time.Sleep(time.Minute); b.Restart() },
		"stopped": func(b *hopbacktest.Broker) { b.Stop(); time.Sleep(time.Minute); b.Restart() },
		"silent": func(b *hopbacktest.Broker) {
			b.Connections()[0].Silence(hopbacktest.DirectionFromClient)
			b.Connections()[0].Silence(hopbacktest.DirectionToClient)
		},
		"deaf": func(b *hopbacktest.Broker) { b.Connections()[0].Silence(hopbacktest.DirectionFromClient) },
		"mute": func(b *hopbacktest.Broker) { b.Connections()[0].Silence(hopbacktest.DirectionToClient) },
		"alarm": func(b *hopbacktest.Broker) {
			b.SetMemoryAlarm(true)
			time.Sleep(time.Minute)
			b.SetMemoryAlarm(false)
		},
		"slow": func(b *hopbacktest.Broker) {
			b.SetLatency(500 * time.Millisecond)
			time.Sleep(time.Minute)
			b.SetLatency(0)
		},
		"no answers": func(b *hopbacktest.Broker) {
			release := b.HoldAnswers()
			time.Sleep(20 * time.Second)
			release()
		},
		"late answers": func(b *hopbacktest.Broker) {
			b.DelayAnswers(time.Second)
			time.Sleep(time.Minute)
			b.DelayAnswers(0)
		},
		"cut before a frame": func(b *hopbacktest.Broker) { b.Connections()[0].CutBefore(hopbacktest.DirectionFromClient, 5) },
		"cut after a frame":  func(b *hopbacktest.Broker) { b.Connections()[0].CutAfter(hopbacktest.DirectionToClient, 5) },
	} {
		t.Run(name, func(t *testing.T) {
			eachVersion(t, hopbacktest.Config{}, func(t *testing.T, b *hopbacktest.Broker) {
				conn := connect(t, b, client.Config{})
				declared(t, conn, oneQueue(t, "work"))
				p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
				require.NoError(t, err)
				producing, stopProducing := context.WithCancel(t.Context())
				consuming, stopConsuming := context.WithCancel(t.Context())
				var both sync.WaitGroup
				var published int
				got := map[int]int{}
				// Many messages while something is done, and shortly after it. What comes
				// later shows that it continues.
				var calm atomic.Bool
				both.Go(func() {
					published = produce(producing, t, p, func() time.Duration {
						if calm.Load() {
							return 500 * time.Millisecond
						}
						return 100 * time.Millisecond
					})
				})
				both.Go(func() {
					assert.NoError(t, conn.Consume(consuming, "work", client.JSON(func(_ context.Context, n int) error {
						got[n]++
						return nil
					}), client.ConsumerConfig{}))
				})
				time.Sleep(10 * time.Second)
				harm(b)
				time.Sleep(15 * time.Second)
				calm.Store(true)
				time.Sleep(3*time.Minute - 15*time.Second)
				stopProducing()
				time.Sleep(time.Minute)
				stopConsuming()
				both.Wait()
				assert.Greater(t, published, 300)
				for n := range published {
					if got[n] == 0 {
						assert.Fail(t, "lost", "message %d", n)
					}
				}
			})
		})
	}
}

// A connection that is lost while a consumer starts, at any frame, doesn't end
// Consume.
func TestAConsumerStartsWhereverTheConnectionEnds(t *testing.T) {
	for _, direction := range []hopbacktest.Direction{hopbacktest.DirectionFromClient, hopbacktest.DirectionToClient} {
		eachVersion(t, hopbacktest.Config{}, func(t *testing.T, b *hopbacktest.Broker) {
			policy := retry.Policy{Backoff: retry.Delays(time.Second)}
			topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work", DeliveryLimit: 20})
			require.NoError(t, err)
			admin := connect(t, b, client.Config{})
			declared(t, admin, topology)
			p, err := client.NewPublisher[int](t.Context(), admin, address.Queue("work"), client.PublisherConfig{})
			require.NoError(t, err)
			for n := 1; n <= 60; n++ {
				conn := connect(t, b, client.Config{})
				all := b.Connections()
				all[len(all)-1].CutBefore(direction, n)
				require.NoError(t, p.Publish(t.Context(), n))
				ctx, stop := context.WithTimeout(t.Context(), time.Minute)
				handled := false
				require.NoError(t, conn.Consume(ctx, "work", retry.With(policy)(client.JSON(func(context.Context, int) error {
					handled = true
					stop()
					return nil
				})), client.ConsumerConfig{}), "frame %d %s", n, direction)
				require.True(t, handled, "frame %d %s", n, direction)
			}
		})
	}
}
