package client_test

import (
	"context"
	"errors"
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

// What is sent to the broker is lost on its way, and its heartbeats go on coming. The
// connection is lost within about IdleTimeout, whether anything happens on it or not, and
// work continues over the next endpoint.
func TestABlackHoleInOneDirectionIsNoticed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const idle, slack = 4 * time.Second, suite.LateLimit
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		direct, _ := s.Connect(t)
		suite.ApplyRetry(t, direct, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 10})
		wire, through := s.Through(t)
		connect := func() (*client.Conn, *suite.Events) {
			seen := &suite.Events{}
			conn, _ := suite.ConnectTo(t, through, suite.Soon, func(c *client.Config) {
				c.Endpoints, c.IdleTimeout, c.OnEvent = []string{s.AMQPURL()}, idle, seen.Observe
			})
			return conn, seen
		}
		quiet, quietEvents := connect()
		busy, busyEvents := connect()
		handled := make(chan int, 1000)
		suite.Consume(t, busy, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			if retry.Attempt(ctx) == 1 {
				return errors.New("not yet")
			}
			handled <- o.ID
			return nil
		})), client.ConsumerConfig{Concurrency: 4})
		p := suite.Publisher[suite.Order](t, busy, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: -1})
		suite.Await(t, handled, "a message before")
		time.Sleep(2 * idle) // asked now and then, and kept
		assert.Empty(t, quietEvents.Of("connection", client.EventLost))
		assert.Empty(t, busyEvents.Of("connection", client.EventLost))

		began := time.Now()
		wire.Deafen()
		const messages = 50
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		went := time.Since(began)
		missing := map[int]bool{}
		for i := range messages {
			missing[i] = true
		}
		for len(missing) > 0 {
			delete(missing, suite.Await(t, handled, "a message after"))
		}
		for name, seen := range map[string]*suite.Events{"quiet": quietEvents, "busy": busyEvents} {
			suite.Poll(t, name+" is up again", func() bool { return len(seen.Of("connection", client.EventUp)) >= 2 })
			lost := seen.Of("connection", client.EventLost)[0]
			require.ErrorIs(t, lost.Err, client.ErrConnectionLost)
			assert.ErrorContains(t, lost.Err, "answers no requests")
			took := lost.Time.Sub(began)
			assert.Less(t, took, idle+slack, name)
			suite.Report(t, s, "a black hole in one direction under a %s connection was noticed after %v of an IdleTimeout of %v", name, took.Round(10*time.Millisecond), idle)
		}
		assert.True(t, quiet.State().Connected)
		suite.Report(t, s, "%d messages were published over the next endpoint %v after it began", messages, went.Round(10*time.Millisecond))
	})
}

// With the default IdleTimeout it takes longer until that is noticed, and no call waits so
// long.
func TestABlackHoleInOneDirectionBlocksNobody(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		direct, _ := s.Connect(t)
		suite.ApplyRetry(t, direct, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 10})
		wire, through := s.Through(t)
		conn, _ := suite.ConnectTo(t, through, suite.Soon)
		begun := make(chan struct{}, 1000)
		ctx, stop := context.WithCancel(t.Context())
		consumed := make(chan error, 1)
		go func() {
			consumed <- conn.Consume(ctx, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
				begun <- struct{}{}
				time.Sleep(200 * time.Millisecond)
				return errors.New("each is copied")
			})), client.ConsumerConfig{Concurrency: 4})
		}()
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range 20 {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		suite.Await(t, begun, "a handler")
		wire.Deafen()
		began := time.Now()
		stop()
		require.NoError(t, suite.Await(t, consumed, "Consume returns"))
		drained := time.Since(began)
		assert.Less(t, drained, suite.LateLimit)

		within := func(what string, f func(ctx context.Context)) time.Duration {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			f(ctx)
			took := time.Since(began)
			assert.Less(t, took, suite.LateLimit, what)
			return took
		}
		go func() { _ = p.Publish(t.Context(), suite.Order{}) }()
		closed := within("Publisher.Close", func(ctx context.Context) { _ = p.Close(ctx) })
		all := within("Conn.Close", func(ctx context.Context) { _ = conn.Close(ctx) })
		suite.Report(t, s, "in a black hole in one direction Consume ends in %v, Publisher.Close in %v and Conn.Close in %v, each of 1 s",
			drained.Round(10*time.Millisecond), closed.Round(10*time.Millisecond), all.Round(10*time.Millisecond))
	})
}
