package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
)

// kitchen is a broker in memory, in virtual time, with the queue orders.
type kitchen struct {
	*testing.T
	broker *hopbacktest.Broker
	conn   *hopback.Conn
	orders *hopback.Queue[Order]
}

func cook(t *testing.T, recipe func(*kitchen)) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{MaxMessageSize: 100_000})
		k := &kitchen{T: t, broker: b}
		k.connect()
		defer func() { assert.NoError(t, k.conn.Close(context.Background())) }()
		k.orders = &hopback.Queue[Order]{Conn: k.conn, Name: "orders", Retry: policy}
		require.NoError(t, k.orders.Declare(t.Context()))
		recipe(k)
	})
}

func (k *kitchen) connect() {
	var err error
	k.conn, err = hopback.Connect(k.Context(), k.broker.URL(), hopback.Config{Dial: k.broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(k, err)
}

// during consumes from a queue for a time.
func (k *kitchen) during(d time.Duration, queue string, h client.Handler) {
	ctx, stop := context.WithTimeout(k.Context(), d)
	defer stop()
	require.NoError(k, k.conn.Consume(ctx, queue, h, client.ConsumerConfig{}))
}

func TestHeaders(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, publishWithHeaders(k.Context(), k.orders))
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "o-2"}))
		k.during(time.Minute, "orders", k.orders.Handler(readHeaders))
		dead := k.broker.Queue("orders.dead").Messages()
		require.Len(k, dead, 1, "the one without a tenant")
		assert.Equal(k, retry.ReasonPermanent, retry.DeadLetterOf(dead[0].Message).Reason)
	})
}

func TestPriorities(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "usual"}))
		require.NoError(k, publishUrgent(k.Context(), k.orders))
		var got []string
		k.during(time.Minute, "orders", client.JSON(func(_ context.Context, o Order) error {
			got = append(got, o.ID)
			return nil
		}))
		assert.Equal(k, []string{"o-1", "usual"}, got)
	})
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

func TestUntilStopped(t *testing.T) { // in real time: a signal doesn't wait for virtual time
	b, err := hopbacktest.New(hopbacktest.Config{})
	require.NoError(t, err)
	defer b.Close()
	conn, err := hopback.Connect(t.Context(), b.URL(), hopback.Config{Dial: b.Dial})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	orders := &hopback.Queue[Order]{Conn: conn, Name: "orders", Retry: policy}
	require.NoError(t, orders.Declare(t.Context()))
	require.NoError(t, orders.Publish(t.Context(), Order{ID: "o-1"}))
	finished := false
	require.NoError(t, untilStopped(orders, func(ctx context.Context, _ Order) error {
		self, err := os.FindProcess(os.Getpid())
		require.NoError(t, err)
		require.NoError(t, self.Signal(os.Interrupt))
		select { // the handler's ctx hasn't ended
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
			finished = true
		}
		return nil
	}))
	assert.True(t, finished)
	assert.Zero(t, b.Queue("orders").Counts().Messages)
}

func TestTimeouts(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, publishWithin(k.Context(), k.orders, Order{ID: "o-1"}))
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
		err := publishWithin(k.Context(), k.orders, Order{ID: "o-2"})
		require.ErrorIs(k, err, client.ErrOutcomeUnknown)
		assert.ErrorContains(k, err, "may have order o-2")
	})
}

func TestLargeBodies(t *testing.T) {
	cook(t, func(k *kitchen) {
		reports := &hopback.Queue[Report]{Conn: k.conn, Name: "orders"}
		upload := func(context.Context, []byte) (string, error) { return "https://store/1", nil }
		require.NoError(k, publishLarge(k.Context(), reports, make([]byte, 100), upload))
		require.NoError(k, publishLarge(k.Context(), reports, make([]byte, 200_000), upload))
		messages := k.broker.Queue("orders").Messages()
		require.Len(k, messages, 2)
		body, err := client.Body(messages[1].Message)
		require.NoError(k, err)
		assert.Equal(k, `{"url":"https://store/1"}`, string(body))
	})
}

func TestPublishMany(t *testing.T) {
	cook(t, func(k *kitchen) {
		require.NoError(k, publishMany(k.Context(), k.orders, make([]Order, 1000)))
		assert.Equal(k, 1000, k.broker.Queue("orders").Counts().Ready)
	})
}

func TestConsumeBoth(t *testing.T) {
	cook(t, func(k *kitchen) {
		emails := &hopback.Queue[Order]{Conn: k.conn, Name: "emails"}
		require.NoError(k, emails.Declare(k.Context()))
		require.NoError(k, emails.Publish(k.Context(), Order{}))
		ctx, stop := context.WithCancel(k.Context())
		done := client.JSON(func(context.Context, Order) error {
			stop()
			return nil
		})
		require.NoError(k, consumeBoth(ctx, k.conn, done, done))

		invalid := client.JSON[Order](nil) // refused at once: the other one stops, too
		require.Error(k, consumeBoth(k.Context(), k.conn, done, invalid))
	})
}

func TestReportDeadLetters(t *testing.T) {
	cook(t, func(k *kitchen) {
		archive := declare.QuorumQueue{Name: "orders.archive", DeadLetter: declare.Drop()}
		_, err := declare.Apply(k.Context(), k.conn.Management(), declare.Topology{Queues: []declare.Queue{archive}})
		require.NoError(k, err)
		require.NoError(k, k.orders.Publish(k.Context(), Order{ID: "o-1"}))
		k.during(time.Minute, "orders", k.orders.Handler(func(context.Context, Order) error { return hopback.Permanent(errors.New("no such customer")) }))
		var reasons []client.Reason
		ctx, stop := context.WithTimeout(k.Context(), time.Minute)
		defer stop()
		require.NoError(k, reportDeadLetters(ctx, k.conn, func(d retry.DeadLetter) { reasons = append(reasons, d.Reason) }))
		assert.Equal(k, []client.Reason{retry.ReasonPermanent}, reasons)
		assert.Zero(k, k.broker.Queue("orders.dead").Counts().Messages)
		kept := k.broker.Queue("orders.archive").Messages()
		require.Len(k, kept, 1)
		assert.Equal(k, "no such customer", retry.DeadLetterOf(kept[0].Message).Error)
	})
}

func TestRemindLater(t *testing.T) {
	cook(t, func(k *kitchen) {
		reminders := &hopback.Queue[Order]{Conn: k.conn, Name: "reminders", Retry: policy}
		require.NoError(k, reminders.Declare(k.Context()))
		began := time.Now()
		due, err := remindLater(k.Context(), k.conn)
		require.NoError(k, err)
		assert.WithinDuration(k, began.Add(14*24*time.Hour), due, time.Second)
		require.NoError(k, k.conn.Close(k.Context())) // nobody needs to be connected
		time.Sleep(14*24*time.Hour - time.Minute)
		k.connect()
		var at time.Duration
		k.during(time.Hour, "reminders", reminders.Handler(func(context.Context, Order) error {
			at = time.Since(began)
			return nil
		}))
		assert.InDelta(k, 14*24*time.Hour, at, float64(2*time.Second))
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

// unreachable is a database that can't be reached. The tests of postgres/outbox have one that can.
type unreachable struct{}

func (unreachable) Begin(context.Context) (pgx.Tx, error) { return nil, errors.New("no database") }

func TestPlaceOrder(t *testing.T) {
	t.Parallel()
	require.EqualError(t, placeOrder(t.Context(), unreachable{}, Order{ID: "o-1"}), "no database")
}
