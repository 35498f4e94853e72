package integration

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
	"github.com/hopback/hopback/retry"
)

// What is sent to the broker is lost on its way, and its heartbeats go on coming. The
// connection is lost within about IdleTimeout, whether anything happens on it or not, and
// work goes on over the next endpoint.
func TestABlackHoleInOneDirectionIsNoticed(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const idle, slack = 4 * time.Second, 3 * time.Second
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		direct, _ := s.connect(t)
		applyRetry(t, direct, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 10})
		wire, through := s.through(t)
		connect := func() (*client.Conn, *events) {
			seen := &events{}
			conn, _ := connectTo(t, through, soon, func(c *client.Config) {
				c.Endpoints, c.IdleTimeout, c.Observe = []string{s.url()}, idle, seen.observe
			})
			return conn, seen
		}
		quiet, quietEvents := connect()
		busy, busyEvents := connect()
		handled := make(chan int, 1000)
		consume(t, busy, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o order) error {
			if retry.Attempt(ctx) == 1 {
				return errors.New("not yet")
			}
			handled <- o.ID
			return nil
		})), client.ConsumerConfig{Concurrency: 4})
		p := publisher[order](t, busy, address.Queue("orders"))
		publish(t, p, order{ID: -1})
		await(t, handled, "a message before")
		time.Sleep(2 * idle) // asked now and then, and kept
		assert.Empty(t, quietEvents.of("connection", client.EventLost))
		assert.Empty(t, busyEvents.of("connection", client.EventLost))

		began := time.Now()
		wire.Deafen()
		const messages = 50
		for i := range messages {
			publish(t, p, order{ID: i})
		}
		went := time.Since(began)
		missing := map[int]bool{}
		for i := range messages {
			missing[i] = true
		}
		for len(missing) > 0 {
			delete(missing, await(t, handled, "a message after"))
		}
		for name, seen := range map[string]*events{"quiet": quietEvents, "busy": busyEvents} {
			poll(t, name+" is up again", func() bool { return len(seen.of("connection", client.EventUp)) >= 2 })
			lost := seen.of("connection", client.EventLost)[0]
			require.ErrorIs(t, lost.Err, client.ErrConnectionLost)
			assert.ErrorContains(t, lost.Err, "answers nothing")
			took := lost.Time.Sub(began)
			assert.Less(t, took, idle+slack, name)
			report(t, s, "a black hole in one direction under a %s connection was noticed after %v of an IdleTimeout of %v", name, took.Round(10*time.Millisecond), idle)
		}
		assert.True(t, quiet.State().Connected)
		report(t, s, "%d messages were published over the next endpoint %v after it began", messages, went.Round(10*time.Millisecond))
	})
}

// With the default IdleTimeout it takes longer until that is noticed, and no call waits so
// long.
func TestABlackHoleInOneDirectionHoldsUpNobody(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		direct, _ := s.connect(t)
		applyRetry(t, direct, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 10})
		wire, through := s.through(t)
		conn, _ := connectTo(t, through, soon)
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
		p := publisher[order](t, conn, address.Queue("orders"))
		for i := range 20 {
			publish(t, p, order{ID: i})
		}
		await(t, begun, "a handler")
		wire.Deafen()
		began := time.Now()
		stop()
		require.NoError(t, await(t, consumed, "Consume returns"))
		drained := time.Since(began)
		assert.Less(t, drained, 10*time.Second)

		within := func(what string, f func(ctx context.Context)) time.Duration {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			f(ctx)
			took := time.Since(began)
			assert.Less(t, took, 1500*time.Millisecond, what)
			return took
		}
		go func() { _ = p.Publish(t.Context(), order{}) }()
		closed := within("Publisher.Close", func(ctx context.Context) { _ = p.Close(ctx) })
		all := within("Conn.Close", func(ctx context.Context) { _ = conn.Close(ctx) })
		report(t, s, "in a black hole in one direction Consume ends in %v, Publisher.Close in %v and Conn.Close in %v, each of 1 s",
			drained.Round(10*time.Millisecond), closed.Round(10*time.Millisecond), all.Round(10*time.Millisecond))
	})
}
