package hopback_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type order struct {
	ID string `json:"id"`
}

// connect returns a connection to a broker in memory.
func connect(t *testing.T) (*hopbacktest.Broker, *hopback.Conn) {
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := hopback.Connect(t.Context(), broker.URL(), hopback.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
	return broker, conn
}

// One import is enough to declare, publish, fail, retry, and handle.
func TestAMessageIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := connect(t)
		orders := hopback.Queue[order]{Conn: conn, Name: "orders", Retry: hopback.Policy{Backoff: hopback.Delays(time.Second, time.Minute)}}
		require.NoError(t, orders.Declare(t.Context()))
		require.NoError(t, orders.Declare(t.Context()), "Declare can be repeated")
		require.NoError(t, orders.Publish(t.Context(), order{ID: "o-1"}))
		began := time.Now()
		ctx, stop := context.WithCancel(t.Context())
		var log []string
		require.NoError(t, orders.Consume(ctx, func(ctx context.Context, o order) error {
			n := hopback.Attempt(ctx)
			log = append(log, fmt.Sprintf("%s attempt %d after %s", o.ID, n, time.Since(began).Round(time.Second)))
			if n == 3 {
				stop()
				return nil
			}
			return errors.New("the bank timed out")
		}, hopback.ConsumerConfig{}))
		assert.Equal(t, []string{"o-1 attempt 1 after 0s", "o-1 attempt 2 after 1s", "o-1 attempt 3 after 1m1s"}, log)
	})
}

// What can't work is refused before anything is sent, with the name of the field.
func TestMisuseIsRefused(t *testing.T) {
	handle := func(context.Context, order) error { return nil }
	var none hopback.Queue[order]
	var missing *hopback.Queue[order]
	for _, err := range []error{
		missing.Declare(t.Context()),
		missing.Publish(t.Context(), order{}),
		missing.Consume(t.Context(), handle, hopback.ConsumerConfig{}),
		none.Declare(t.Context()),
		none.Publish(t.Context(), order{}),
		none.Consume(t.Context(), handle, hopback.ConsumerConfig{}),
	} {
		assert.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, "hopback.Connect")
	}
	synctest.Test(t, func(t *testing.T) {
		_, conn := connect(t)
		for name, q := range map[string]*hopback.Queue[order]{
			"name":   {Conn: conn},
			"differ": {Conn: conn, Name: "orders", Settings: declare.QuorumQueue{Name: "other"}},
			"policy": {Conn: conn, Name: "orders", Retry: hopback.Policy{MaxRetries: 5000}},
		} {
			assert.ErrorAs(t, q.Declare(t.Context()), new(*argument.Error), name)
			assert.ErrorAs(t, q.Publish(t.Context(), order{}), new(*argument.Error), name)
			assert.ErrorAs(t, q.Consume(t.Context(), handle, hopback.ConsumerConfig{}), new(*argument.Error), name)
		}
		q := hopback.Queue[order]{Conn: conn, Name: "orders"}
		assert.ErrorAs(t, q.Consume(t.Context(), nil, hopback.ConsumerConfig{}), new(*argument.Error))
		assert.ErrorIs(t, q.Publish(t.Context(), order{}), client.ErrNotFound, "nobody has declared the queue")
		assert.ErrorIs(t, q.Consume(t.Context(), handle, hopback.ConsumerConfig{}), client.ErrNotFound)
	})
}

// Callers that publish first share one publisher, and a caller whose ctx has ended doesn't wait.
func TestConcurrentPublishersShareOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := connect(t)
		q := hopback.Queue[order]{Conn: conn, Name: "orders"}
		require.NoError(t, q.Declare(t.Context()))
		all := make(chan *client.Publisher[order], 10)
		for range cap(all) {
			go func() {
				p, err := q.Publisher(t.Context())
				assert.NoError(t, err)
				all <- p
			}()
		}
		first := <-all
		require.NotNil(t, first)
		for range cap(all) - 1 {
			assert.Same(t, first, <-all)
		}
	})
}

// Middleware of a queue sees the handler's errors, the first one outermost; and the outcomes of the short way in are
// those of package retry.
func TestMiddlewareInsideTheRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := connect(t)
		var log []string
		note := func(name string) client.Middleware {
			return func(next client.Handler) client.Handler {
				return client.Wrap(next, func(ctx context.Context, d *client.Delivery) error {
					err := next.Handle(ctx, d)
					log = append(log, fmt.Sprintf("%s: %v", name, err))
					return err
				})
			}
		}
		orders := hopback.Queue[order]{
			Conn: conn, Name: "orders", Middleware: []client.Middleware{note("outer"), note("inner")},
			Retry: hopback.Policy{MaxRetries: 1, Backoff: hopback.Exponential(time.Second, 2)},
		}
		require.NoError(t, orders.Declare(t.Context()))
		require.NoError(t, orders.Publish(t.Context(), order{ID: "o-1"}))
		ctx, stop := context.WithCancel(t.Context())
		calls := 0
		require.NoError(t, orders.Consume(ctx, func(ctx context.Context, _ order) error {
			calls++
			switch calls {
			case 1, 2: // more often than MaxRetries
				return hopback.Snooze(time.Second)
			case 3:
				return errors.New("the bank timed out")
			}
			stop()
			assert.Equal(t, 2, hopback.Attempt(ctx), "a snoozed attempt isn't counted")
			return hopback.Discard(errors.New("a test order"))
		}, hopback.ConsumerConfig{}))
		require.Len(t, log, 8)
		assert.Equal(t, []string{"inner: the bank timed out", "outer: the bank timed out"}, log[4:6])
		left, err := declare.Inspect(t.Context(), conn.Management(), "orders.dead")
		require.NoError(t, err)
		assert.Zero(t, left.Messages, "a discarded message is no dead letter")
	})
}

// A queue without retries dead-letters at the first failure.
func TestNoRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := connect(t)
		orders := hopback.Queue[order]{Conn: conn, Name: "orders", Retry: hopback.Policy{MaxRetries: hopback.NoRetries}}
		require.NoError(t, orders.Declare(t.Context()))
		require.NoError(t, orders.Publish(t.Context(), order{ID: "o-1"}))
		ctx, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		calls := 0
		require.NoError(t, orders.Consume(ctx, func(context.Context, order) error {
			calls++
			return errors.New("the bank timed out")
		}, hopback.ConsumerConfig{}))
		assert.Equal(t, 1, calls)
		left, err := declare.Inspect(t.Context(), conn.Management(), "orders.dead")
		require.NoError(t, err)
		assert.EqualValues(t, 1, left.Messages)
	})
}

// An invalid queue is named as the caller wrote it.
func TestQueuesAreNamedAsTheCallerWroteThem(t *testing.T) {
	t.Parallel()
	_, err := (&hopback.Queue[string]{}).Topology()
	require.ErrorContains(t, err, "hopback: Queue.Name is empty")
	_, err = (&hopback.Queue[string]{Name: "#"}).Topology()
	require.ErrorContains(t, err, `Queue.Name = "#"`)
	_, err = (&hopback.Queue[string]{Name: "q", Retry: hopback.Policy{Strategy: retry.StrategyNative}, Settings: declare.QuorumQueue{MessageTTL: time.Second}}).Topology()
	require.ErrorContains(t, err, "Queue.Settings.MessageTTL")
}
