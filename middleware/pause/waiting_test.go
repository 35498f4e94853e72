package pause_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/middleware/breaker"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/middleware/ordered"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/retry"
)

// Messages wait in a middleware for a limit, their turn, or a service. When the queue is paused, none of their handlers
// begins any more, however late their turn comes. After the pause, each message is handled once.
func TestMessagesThatWaitInAMiddlewareArePaused(t *testing.T) {
	const messages = 12
	one := func(*client.Delivery) (string, bool) { return "one", true }
	down := errors.New("the bank is down")
	kinds := map[string]func() client.Middleware{
		"at once":    func() client.Middleware { return ratelimit.With(ratelimit.Config{AtOnce: 1}) },
		"shared":     func() client.Middleware { return ratelimit.With(ratelimit.Config{AtOnce: 1, Shared: true}) },
		"per second": func() client.Middleware { return ratelimit.With(ratelimit.Config{PerSecond: 0.05}) },
		"ordered":    func() client.Middleware { return ordered.With(ordered.Config{Key: one}) },
		"dedupe": func() client.Middleware {
			return dedupe.With(dedupe.Config{Key: one, Store: dedupe.NewMemory(10), Handled: func(error) bool { return false }})
		},
		"breaker": func() client.Middleware {
			return breaker.With(breaker.Config{Failures: 1, OpenFor: 20 * time.Second, Trips: func(err error) bool { return errors.Is(err, down) }, Logger: silent})
		},
		"batch": nil,
		"fair":  func() client.Middleware { return func(h client.Handler) client.Handler { return h } },
	}
	for name, middleware := range kinds {
		for _, version := range []string{"4.3.6", "4.0.5"} {
			if name == "fair" && version == "4.0.5" {
				continue // it needs 4.3
			}
			t.Run(name+"/"+version, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newScene(t, hopbacktest.Config{Version: version}, declare.Topology{})
					var mu sync.Mutex
					var began []time.Time
					handled := map[int]int{}
					handle := func(n int) error {
						mu.Lock()
						began = append(began, time.Now())
						first := len(began) == 1
						mu.Unlock()
						if name == "breaker" && first {
							return client.Requeue{Failed: true, Err: down}
						}
						time.Sleep(30 * time.Second)
						mu.Lock()
						defer mu.Unlock()
						handled[n]++
						return nil
					}
					var h client.Handler
					if middleware != nil {
						h = middleware()(client.JSON(func(_ context.Context, n int) error { return handle(n) }))
					} else {
						h = batch.JSON(batch.Config{Size: 1}, func(_ context.Context, items []*batch.Item[int]) error { return handle(items[0].Value) })
					}
					to, consume := client.PublishTo(address.Queue("orders")), func(ctx context.Context) error {
						return s.conn.Consume(ctx, "orders", pause.With(pause.Config{})(h), client.ConsumerConfig{Concurrency: 8})
					}
					queue := "orders"
					if name == "fair" {
						policy := retry.Policy{Strategy: retry.StrategyNative}
						q := fair.Queue{Name: "shared", Lanes: 2}
						queue = q.Name
						topology, err := q.Topology(policy, declare.QuorumQueue{})
						require.NoError(t, err)
						_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
						require.NoError(t, err)
						to, consume = q.To("one"), func(ctx context.Context) error {
							return fair.Consume(ctx, s.conn, q, pause.With(pause.Config{Queue: q.Name})(h), fair.Config{Concurrency: 2, Retry: policy})
						}
					}
					p, err := client.NewPublisher[int](t.Context(), s.connect(), address.Address{}, client.PublisherConfig{})
					require.NoError(t, err)
					all := make([]int, messages)
					for i := range all {
						all[i] = i
					}
					ctx, cancel := context.WithCancel(t.Context())
					done := make(chan error, 1)
					go func() { done <- consume(ctx) }()
					require.NoError(t, p.PublishAll(t.Context(), all, func(_ int, m *client.Message) { to(m) }))
					time.Sleep(5 * time.Second)
					require.NoError(t, pause.Pause(t.Context(), s.conn, queue, pause.PauseConfig{}))
					time.Sleep(2 * time.Second)
					mu.Lock()
					before := len(began)
					mu.Unlock()
					assert.NotZero(t, before)
					assert.Less(t, before, messages)
					time.Sleep(5 * time.Minute)
					mu.Lock()
					assert.Len(t, began, before, "handlers that began")
					mu.Unlock()
					require.NoError(t, pause.Resume(t.Context(), s.conn, queue))
					time.Sleep(10 * time.Minute)
					mu.Lock()
					assert.Len(t, handled, messages)
					for n, times := range handled {
						assert.Equal(t, 1, times, "message %d", n)
					}
					mu.Unlock()
					cancel()
					require.NoError(t, <-done)
				})
			})
		}
	}
}
