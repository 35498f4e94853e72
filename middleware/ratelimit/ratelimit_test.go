package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/ratelimit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func delivery(queue, id string) *client.Delivery {
	m := client.NewMessage([]byte(id))
	m.Properties.MessageID = id
	return client.NewDelivery(queue, m)
}

// clock notes when a handler was called, since it was made.
type clock struct {
	began time.Time
	mu    sync.Mutex
	at    map[string][]time.Duration
}

func newClock() *clock { return &clock{began: time.Now(), at: map[string][]time.Duration{}} }

func (c *clock) Handle(_ context.Context, d *client.Delivery) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at[d.Queue()] = append(c.at[d.Queue()], time.Since(c.began).Round(time.Millisecond))
	return nil
}

// handle calls h for n deliveries of a queue at once.
func handle(t *testing.T, h client.Handler, queue string, n int) *sync.WaitGroup {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { assert.NoError(t, h.Handle(t.Context(), delivery(queue, fmt.Sprint(i)))) })
	}
	return &wg
}

func ms(all ...int) []time.Duration {
	ds := make([]time.Duration, len(all))
	for i, n := range all {
		ds[i] = time.Duration(n) * time.Millisecond
	}
	return ds
}

func TestCallsKeepToTheRateAfterABurst(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		cfg  ratelimit.Config
		want []time.Duration
	}{
		{"no limit", ratelimit.Config{}, ms(0, 0, 0, 0, 0, 0)},
		{"even", ratelimit.Config{PerSecond: 10}, ms(0, 100, 200, 300, 400, 500)},
		{"with a burst", ratelimit.Config{PerSecond: 10, Burst: 3}, ms(0, 0, 0, 100, 200, 300)},
		{"less than one in a second", ratelimit.Config{PerSecond: 0.5}, ms(0, 2000, 4000, 6000, 8000, 10000)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				k := newClock()
				handle(t, ratelimit.With(c.cfg)(k), "q", len(c.want)).Wait()
				assert.Equal(t, c.want, k.at["q"])
			})
		})
	}
}

func TestOneMiddlewareIsOneLimitForAllItsHandlers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newClock()
		limit := ratelimit.With(ratelimit.Config{PerSecond: 10})
		a, b := handle(t, limit(k), "a", 10), handle(t, limit(k), "b", 10)
		a.Wait()
		b.Wait()
		assert.Equal(t, 1900*time.Millisecond, time.Since(k.began), "twenty calls at ten a second")

		k = newClock()
		a, b = handle(t, ratelimit.With(ratelimit.Config{PerSecond: 10})(k), "a", 10), handle(t, ratelimit.With(ratelimit.Config{PerSecond: 10})(k), "b", 10)
		a.Wait()
		b.Wait()
		assert.Equal(t, 900*time.Millisecond, time.Since(k.began), "each with a separate limit")
	})
}

func TestEachKeyHasALimitOfItsOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newClock()
		h := ratelimit.With(ratelimit.Config{PerSecond: 10, Key: func(d *client.Delivery) (string, bool) {
			return d.Queue(), d.Queue() != "free"
		}})(k)
		var all []*sync.WaitGroup
		for _, q := range []string{"a", "b", "free"} {
			all = append(all, handle(t, h, q, 4))
		}
		for _, wg := range all {
			wg.Wait()
		}
		assert.Equal(t, ms(0, 100, 200, 300), k.at["a"])
		assert.Equal(t, ms(0, 100, 200, 300), k.at["b"])
		assert.Equal(t, ms(0, 0, 0, 0), k.at["free"])
	})
}

func TestAKeyThatWasForgottenStartsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newClock()
		h := ratelimit.With(ratelimit.Config{PerSecond: 1, MaxKeys: 2, Key: func(d *client.Delivery) (string, bool) { return d.Queue(), true }})(k)
		for _, q := range []string{"a", "b", "a", "c", "b"} {
			require.NoError(t, h.Handle(t.Context(), delivery(q, "1")))
		}
		assert.Equal(t, ms(0, 1000), k.at["a"], "remembered")
		assert.Equal(t, ms(0, 1000), k.at["b"], "forgotten for c, so it doesn't wait at 1 s")
	})
}

func TestADeliveryWhoseContextEndsGoesBackUncountedAndLeavesItsPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newClock()
		h := ratelimit.With(ratelimit.Config{PerSecond: 1})(k)
		require.NoError(t, h.Handle(t.Context(), delivery("q", "1")))

		why := errors.New("grace is over")
		for _, end := range []func() (context.Context, context.CancelFunc){
			func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancelCause(t.Context())
				time.AfterFunc(500*time.Millisecond, func() { cancel(why) })
				return ctx, func() { cancel(nil) }
			},
			// A deadline that is too near to wait for must not end the wait at
			// once: the message would spin.
			func() (context.Context, context.CancelFunc) {
				return context.WithDeadlineCause(t.Context(), k.began.Add(800*time.Millisecond), why)
			},
			func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancelCause(t.Context())
				cancel(why)
				return ctx, func() {}
			},
		} {
			ctx, cancel := end()
			err := h.Handle(ctx, delivery("q", "2"))
			cancel()
			requeue, ok := client.OutcomeOf(err).(client.Requeue)
			require.True(t, ok, "%v", err)
			assert.False(t, requeue.Failed)
			assert.ErrorIs(t, err, why)
		}
		assert.Equal(t, 800*time.Millisecond, time.Since(k.began))
		require.NoError(t, h.Handle(t.Context(), delivery("q", "3")))
		assert.Equal(t, ms(0, 1000), k.at["q"], "the places of those that left are free")
	})
}

func TestAConfigThatCanNotBeUsedStopsTheConsumer(t *testing.T) {
	t.Parallel()
	k := newClock()
	for name, cfg := range map[string]ratelimit.Config{
		"ratelimit.Config.PerSecond": {PerSecond: -1},
		"ratelimit.Config.Burst":     {PerSecond: 1, Burst: -1},
		"ratelimit.Config.MaxKeys":   {PerSecond: 1, MaxKeys: -1},
	} {
		h := ratelimit.With(cfg)(k)
		var bad *argument.Error
		require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{}), &bad)
		assert.Equal(t, name, bad.Path.String())
		assert.Equal(t, client.Requeue{Failed: true, Err: bad}, h.Handle(t.Context(), delivery("q", "1")), "where Prepare isn't called")
	}
	for _, rate := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		require.ErrorAs(t, client.Prepare(t.Context(), ratelimit.With(ratelimit.Config{PerSecond: rate})(k), client.Start{}), new(*argument.Error))
	}
	require.ErrorAs(t, client.Prepare(t.Context(), ratelimit.With(ratelimit.Config{})(nil), client.Start{}), new(*argument.Error))
	assert.Empty(t, k.at)
}

// preparing is a Handler with a Prepare.
type preparing struct {
	client.Handler
	start client.Start
	err   error
}

func (p *preparing) Prepare(_ context.Context, s client.Start) error {
	p.start = s
	return p.err
}

func TestPrepareIsPassedOn(t *testing.T) {
	t.Parallel()
	p := &preparing{Handler: newClock(), err: errors.New("not ready")}
	err := client.Prepare(t.Context(), ratelimit.With(ratelimit.Config{})(p), client.Start{Queue: "orders"})
	assert.Equal(t, p.err, err)
	assert.Equal(t, "orders", p.start.Queue)
}
