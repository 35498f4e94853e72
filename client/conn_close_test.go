package client_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// withOrders connects to a broker in memory with the queue "orders".
func withOrders(t *testing.T) (*hopbacktest.Broker, *client.Conn) {
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
	return broker, conn
}

// A Close that waits for another one, which drains, waits within its own ctx. The other continues.
func TestCloseBehindAnotherEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := withOrders(t)
		ended := make(chan error, 1)
		go func() {
			ended <- conn.Consume(context.Background(), "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
				time.Sleep(20 * time.Second)
				return nil
			}), client.ConsumerConfig{})
		}()
		p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), "m"))
		synctest.Wait()
		start := time.Now()
		first := make(chan error, 1)
		go func() { first <- conn.Close(context.Background()) }()
		synctest.Wait()

		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		require.ErrorIs(t, conn.Close(ctx), context.DeadlineExceeded)
		assert.Equal(t, time.Second, time.Since(start))
		assert.Empty(t, first)
		require.NoError(t, conn.Close(context.Background()))
		assert.Equal(t, 20*time.Second, time.Since(start).Round(time.Second))
		require.NoError(t, <-first)
		require.ErrorIs(t, <-ended, client.ErrClosed)
		require.NoError(t, conn.Close(ctx), "the result counts for more than the ctx")
	})
}

// Consume returns nil if its ctx ends while a check waits for the broker, as it does later. A
// bad argument is an error all the same.
func TestConsumeWhoseContextEndsInAPreparer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker, conn := withOrders(t)
		defer func() { require.NoError(t, conn.Close(context.Background())) }()
		broker.SetMemoryAlarm(true) // management requests aren't answered
		defer broker.SetMemoryAlarm(false)
		h := retry.With(retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second)})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
		for _, cause := range []error{nil, errors.New("the process stops")} {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(cause) })
			start := time.Now()
			require.NoError(t, conn.Consume(ctx, "orders", h, client.ConsumerConfig{}), "%v", cause)
			assert.Equal(t, time.Second, time.Since(start))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		bad := retry.With(retry.Policy{MaxRetries: -2})(h)
		require.ErrorAs(t, conn.Consume(ctx, "orders", bad, client.ConsumerConfig{}), new(*argument.Error))
	})
}

// A message without an answer makes Close fail also if its caller has left, no matter how soon the
// connection is gone when Close's ctx has ended.
func TestCloseReportsAMessageWithoutAnAnswerWhoseCallerHasLeft(t *testing.T) {
	for name, limit := range map[string]time.Duration{"a ctx that ends later": time.Second, "a ctx that has ended": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 100 {
				synctest.Test(t, func(t *testing.T) {
					broker, conn := withOrders(t)
					p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
					require.NoError(t, err)
					release := broker.HoldAnswers()
					defer release()
					left, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					require.ErrorIs(t, p.Publish(left, "m"), client.ErrOutcomeUnknown)
					ctx, cancel := context.WithTimeout(context.Background(), limit)
					defer cancel()
					require.ErrorIs(t, conn.Close(ctx), client.ErrOutcomeUnknown)
					synctest.Wait() // the broker has noticed
				})
			}
		})
	}
}
