package main

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/breaker"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/middleware/ordered"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/middleware/typemux"
	"github.com/hopback/hopback/retry"
)

// handled runs a handler for an hour on one message. It returns when the handler was called, what
// Consume returned, and how many dead letters there are.
func handled(t *testing.T, chain ...client.Middleware) func(h client.HandlerFunc) (at []time.Duration, dead int, consumed error) {
	return func(h client.HandlerFunc) (at []time.Duration, dead int, consumed error) {
		cook(t, func(k *kitchen) {
			key := "customer-1"
			require.NoError(t, k.orders.Publish(k.Context(), Order{ID: "o-1"}, func(m *hopback.Message) { m.Properties.GroupID = &key }))
			began := time.Now()
			ctx, stop := context.WithTimeout(k.Context(), time.Hour)
			defer stop()
			consumed = k.conn.Consume(ctx, "orders", client.Chain(chain...)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
				at = append(at, time.Since(began).Round(time.Second))
				return h(ctx, d)
			})), client.ConsumerConfig{})
			dead = k.broker.Queue("orders.dead").Counts().Ready
		})
		return at, dead, consumed
	}
}

func fails(context.Context, *client.Delivery) error { return errBankDown }

func TestOrderedIsInsideRetry(t *testing.T) {
	inPlace := ordered.With(ordered.Config{Attempts: 3, Pause: time.Second})
	right, _, _ := handled(t, retry.With(policy), inPlace)(fails)
	assert.Equal(t, []time.Duration{0, time.Second, 3 * time.Second}, right[:3], "three attempts in place, then a delay")
	wrong, _, _ := handled(t, inPlace, retry.With(policy))(fails)
	assert.Equal(t, []time.Duration{0, time.Minute, 2 * time.Minute}, wrong, "no attempt in place")
}

func TestBreakerIsInsideRetry(t *testing.T) {
	var opened atomic.Int64
	bank := func() client.Middleware {
		return breaker.With(breaker.Config{Failures: 1, OnChange: func(breaker.Change) { opened.Add(1) }, Logger: slog.New(slog.DiscardHandler)})
	}
	_, _, _ = handled(t, bank(), retry.With(policy))(fails)
	assert.Zero(t, opened.Load(), "outside, it sees outcomes and never opens")
	_, _, _ = handled(t, retry.With(policy), bank())(fails)
	assert.NotZero(t, opened.Load())
}

func TestRecoverIsInsideRetry(t *testing.T) {
	panics := func(context.Context, *client.Delivery) error { panic("oops") }
	right, dead, _ := handled(t, retry.With(policy), client.Recover())(panics)
	assert.Len(t, right, 3, "panics are retried")
	assert.Equal(t, 1, dead)
	wrong, dead, _ := handled(t, client.Recover(), retry.With(policy))(panics)
	assert.Len(t, wrong, 1, "the first panic is the last")
	assert.Equal(t, 1, dead)
}

func TestTimeoutIsInsideTheRateLimit(t *testing.T) {
	for _, right := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			chain := []client.Middleware{ratelimit.With(ratelimit.Config{PerSecond: 0.1}), client.Timeout(5 * time.Second)}
			if !right {
				chain[0], chain[1] = chain[1], chain[0]
			}
			calls := 0
			h := client.Chain(chain...)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
				calls++
				return ctx.Err()
			}))
			d := client.NewDelivery("orders", client.NewMessage(nil))
			require.NoError(t, h.Handle(t.Context(), d))
			err := h.Handle(t.Context(), d) // its turn is in 10 s
			if right {
				require.NoError(t, err)
				assert.Equal(t, 2, calls)
				return
			}
			requeued, is := errors.AsType[client.Requeue](err)
			assert.True(t, is && !requeued.Failed, "it goes back without having been handled")
			assert.Equal(t, 1, calls)
		})
	}
}

func TestAMiddlewareThatHidesPrepareEndsTheConsumer(t *testing.T) {
	hides := func(h client.Handler) client.Handler { return client.HandlerFunc(h.Handle) }
	at, _, err := handled(t, hides, retry.With(policy))(fails)
	_, is := errors.AsType[*argument.Error](err)
	assert.True(t, is, "%v", err)
	assert.ErrorContains(t, err, "client.Wrap")
	assert.Empty(t, at, "the handler wasn't called")
}

// A policy for each type: retry.With may be around each handler of a mux.
func TestAPolicyForEachType(t *testing.T) {
	cook(t, func(k *kitchen) {
		patient := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Hour)}
		require.NoError(t, (&hopback.Queue[Order]{Conn: k.conn, Name: "orders", Retry: patient}).Declare(k.Context()))
		began := time.Now()
		at := map[string][]time.Duration{}
		handlers := map[string]client.Handler{}
		for subject, p := range map[string]retry.Policy{"a": policy, "b": patient} {
			require.NoError(t, k.orders.Publish(k.Context(), Order{}, func(m *hopback.Message) { m.Properties.Subject = &subject }))
			handlers[subject] = retry.With(p)(client.JSON(func(context.Context, Order) error {
				at[subject] = append(at[subject], time.Since(began).Round(time.Second))
				return errBankDown
			}))
		}
		k.during(2*time.Hour, "orders", typemux.New(typemux.Config{Handlers: handlers}))
		assert.Equal(t, map[string][]time.Duration{"a": {0, time.Minute, 2 * time.Minute}, "b": {0, time.Hour}}, at)
	})
}

// Each example of the page, inside retry.With.
func TestEachExample(t *testing.T) {
	twice := func() client.HandlerFunc {
		calls := 0
		return func(context.Context, *client.Delivery) error {
			if calls++; calls == 1 {
				return errBankDown
			}
			return nil
		}
	}
	for name, c := range map[string]struct {
		m    func() client.Middleware
		want []time.Duration
	}{
		"breaker":   {pauses, []time.Duration{0, time.Minute}},
		"ratelimit": {limits, []time.Duration{0, time.Minute}},
		"ordered":   {orders, []time.Duration{0, time.Second}},
		"dedupe":    {dedupes, []time.Duration{0, time.Minute}},
		"timed":     {func() client.Middleware { return timed(slog.New(slog.DiscardHandler)) }, []time.Duration{0, time.Minute}},
	} {
		inBubble := func(h client.Handler) client.Handler { return c.m()(h) } // a rate has a clock
		at, dead, err := handled(t, retry.With(policy), inBubble)(twice())
		require.NoError(t, err, name)
		assert.Equal(t, c.want, at, name)
		assert.Zero(t, dead, name)
	}
}

func TestBatchExample(t *testing.T) {
	var sizes []int
	insert := func(_ context.Context, orders []Order) error {
		sizes = append(sizes, len(orders))
		for _, o := range orders {
			if o.ID == "o-2" {
				return retry.Permanent(errors.New("no such customer"))
			}
		}
		return nil
	}
	orders := hopbacktest.Run(t, policy, batches(insert), Order{ID: "o-1"}, Order{ID: "o-2"}, Order{ID: "o-3"})
	orders.Message(0).WantHandled().WantAttempts(1)
	orders.Message(1).WantDead(retry.ReasonPermanent)
	orders.Message(2).WantHandled().WantAttempts(1)
	assert.Equal(t, []int{3, 1, 1, 1}, sizes)
}

func TestMuxExample(t *testing.T) {
	var got []string
	into := func(what string) func(context.Context, Order) error {
		return func(context.Context, Order) error {
			got = append(got, what)
			return nil
		}
	}
	mux := byType(into("placed"), into("canceled"))
	message := func(subject string) *client.Message {
		m := client.NewMessage([]byte("{}"))
		m.Properties.Subject = &subject
		return m
	}
	orders := hopbacktest.Run(t, policy, mux, message("order.placed"), message("order.canceled"), message("order.lost"))
	assert.Equal(t, []string{"placed", "canceled"}, got)
	orders.Message(2).WantDead(client.ReasonUnknownType)
}

func TestPerTenant(t *testing.T) {
	cook(t, func(k *kitchen) {
		for _, tenant := range []string{"acme", "acme", "acme", "acme", "acme", "acme", "acme", "acme", "acme", "acme", "acme", "zeta"} {
			require.NoError(k, k.orders.Publish(k.Context(), Order{}, func(m *hopback.Message) { m.ApplicationProperties = map[string]any{"tenant": tenant} }))
		}
		began, at := time.Now(), []time.Duration{}
		k.during(time.Minute, "orders", perTenant()(client.JSON(func(context.Context, Order) error {
			at = append(at, time.Since(began).Round(10*time.Millisecond))
			return nil
		})))
		require.Len(k, at, 12)
		assert.Zero(k, at[9], "ten at once")
		assert.Equal(k, 200*time.Millisecond, at[10], "then five a second")
	})
}

func TestTimeouts(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "o-1"}))
		calls := 0
		k.during(time.Hour, "orders", withTimeout(func(ctx context.Context, _ Order) error {
			if calls++; calls == 1 {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}))
		assert.Equal(k, 2, calls)

		release := k.broker.HoldAnswers()
		defer release()
		ctx, stop := context.WithTimeout(k.Context(), 5*time.Second)
		defer stop()
		err := k.orders.Publish(ctx, Order{ID: "o-2"})
		require.ErrorIs(k, err, client.ErrOutcomeUnknown)
		assert.False(k, client.SafeToRetry(err), "docs/guarantees.md says so")
	})
}

func TestOnce(t *testing.T) {
	cook(t, func(k *kitchen) {
		for range 3 {
			require.NoError(k, publishOnce(k.Context(), k.orders, Order{ID: "o-1"}))
		}
		var calls atomic.Int64
		k.during(time.Hour, "orders", handleOnce(dedupe.NewMemory(0), func(context.Context, Order) error {
			if calls.Add(1) == 1 {
				return errors.New("the bank timed out") // a retry isn't a duplicate
			}
			return nil
		}))
		assert.EqualValues(k, 2, calls.Load())
		assert.Zero(k, k.broker.Queue("orders").Counts().Messages)
	})
}
