package client

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// What is sent doesn't arrive any more, and heartbeats go on coming: the connection is
// lost within about IdleTimeout, and the next endpoint comes first. Every call ends with
// its ctx during that time.
func TestAOneWayBlackHoleIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dial, deafen := deafServers(t)
		log := &lines{}
		c, events := connectTo(t, Config{IdleTimeout: minIdleTimeout, Logger: log.logger(), Dial: dial}, "first:5672", "other:5672")
		assert.Equal(t, EventUp, (<-events).Kind)
		deafen("first:5672")
		began := time.Now()
		lost := <-events
		assert.Equal(t, EventLost, lost.Kind)
		assert.Contains(t, lost.Target, "first")
		require.ErrorIs(t, lost.Err, failure.ErrConnectionLost)
		require.ErrorIs(t, lost.Err, engine.ErrSilent)
		assert.Less(t, time.Since(began), 2*minIdleTimeout)
		up := <-events
		assert.Equal(t, EventUp, up.Kind)
		assert.Contains(t, up.Target, "other", "not the one that doesn't answer")
		assert.Contains(t, log.String(), "answers no requests")
		p, err := NewPublisher[string](within(t, time.Minute), c, address.Queue("q"), PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(within(t, time.Minute), "m"))
	})
}

func TestAOneWayBlackHoleBlocksNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dial, deafen := deafServers(t)
		c, _ := connectTo(t, Config{Logger: quiet, Dial: dial}, "one:5672")
		p, err := NewPublisher[string](within(t, time.Minute), c, address.Queue("q"), PublisherConfig{})
		require.NoError(t, err)
		closing, err := NewPublisher[string](within(t, time.Minute), c, address.Queue("q"), PublisherConfig{})
		require.NoError(t, err)
		handling := make(chan struct{}, 100)
		ctx, stop := context.WithCancel(t.Context())
		consumed := async(func() error {
			return c.Consume(ctx, "q", HandlerFunc(func(context.Context, *Delivery) error {
				handling <- struct{}{}
				time.Sleep(200 * time.Millisecond)
				return nil
			}), ConsumerConfig{})
		})
		<-handling
		deafen("one:5672")
		const slack = 900 * time.Millisecond // Publisher.Close took a second more
		timed := func(call string, limit time.Duration, f func()) {
			t.Helper()
			began := time.Now()
			f()
			assert.Less(t, time.Since(began), limit+slack, call)
		}
		stop()
		timed("Publish", time.Second, func() {
			require.ErrorIs(t, p.Publish(within(t, time.Second), "m"), failure.ErrOutcomeUnknown)
		})
		timed("Publisher.Close", time.Second, func() {
			go func() { _ = closing.Publish(t.Context(), "m") }()
			_ = closing.Close(within(t, time.Second))
		})
		timed("NewPublisher", time.Second, func() {
			_, err := NewPublisher[string](within(t, time.Second), c, address.Queue("q"), PublisherConfig{})
			require.Error(t, err)
		})
		timed("Consume", silentAfter+silentLimit, func() { require.NoError(t, <-consumed) })
		timed("Close", time.Second, func() { _ = c.Close(within(t, time.Second)) })
	})
}

// A consumer that has no credit left to wait for waits for the broker once, and not for link and
// session in turn.
func TestAConsumerWithoutCreditWaitsOnceForASilentBroker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dial, deafen := deafServers(t)
		c, _ := connectTo(t, Config{Logger: quiet, Dial: dial}, "one:5672")
		handling := make(chan struct{}, 100)
		ctx, stop := context.WithCancel(t.Context())
		end := make(chan struct{})
		consumed := async(func() error {
			return c.Consume(ctx, "q", HandlerFunc(func(context.Context, *Delivery) error {
				handling <- struct{}{}
				<-end
				return nil
			}), ConsumerConfig{Prefetch: 1})
		})
		<-handling
		deafen("one:5672")
		stop()
		close(end)
		began := time.Now()
		require.NoError(t, <-consumed)
		assert.Less(t, time.Since(began), link.CloseTimeout+900*time.Millisecond)
	})
}

// A connection on which nothing happens is asked now and then, and kept.
func TestAQuietConnectionIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dial, deafen := deafServers(t)
		c, events := connectTo(t, Config{IdleTimeout: minIdleTimeout, Logger: quiet, Dial: dial}, "one:5672")
		assert.Equal(t, EventUp, (<-events).Kind)
		w, err := c.pool.Wire(t.Context())
		require.NoError(t, err)
		before := w.AMQP.Answers()
		select {
		case e := <-events:
			t.Errorf("%v", e)
		case <-time.After(2 * minIdleTimeout):
		}
		synctest.Wait() // it may be asking at this very moment
		asked := w.AMQP.Answers() - before
		assert.GreaterOrEqual(t, asked, uint64(2), "a begin and an end")
		assert.LessOrEqual(t, asked, uint64(8))
		assert.Empty(t, w.Spare)

		// With no room for a session nothing can be asked, and nothing is concluded.
		for range cap(w.Spare) {
			w.Spare <- struct{}{}
		}
		deafen("one:5672")
		select {
		case e := <-events:
			t.Errorf("%v", e)
		case <-time.After(2 * minIdleTimeout):
		}
		<-w.Spare
		assert.Equal(t, EventLost, (<-events).Kind)
	})
}

// The drain waits for handlers, and not for copies that a silent broker doesn't confirm.
func TestADrainDoesNotWaitForASilentBroker(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Version = version
			b.Verdict = func(string, *Message) amqp.DeliveryState { return nil }
			b.Publish("copied", "slow")
			began := make(chan string, 2)
			ended := make(chan error, 1)
			h := HandlerFunc(func(ctx context.Context, d *Delivery) error {
				began <- linktest.IDOf(d.Message())
				if linktest.IDOf(d.Message()) == "copied" {
					return Forward{To: address.Queue("other"), Message: linktest.WithID("copy")}
				}
				time.Sleep(10 * time.Second)
				ended <- ctx.Err()
				return nil
			})
			c := startConsumer(b, ConsumerConfig{Concurrency: 2}, h)
			<-began
			<-began
			synctest.Wait()
			b.Mu.Lock()
			b.Silent = true
			b.Mu.Unlock()
			start := time.Now()
			require.NoError(t, c.end())
			require.NoError(t, <-ended, "the handler had its time")
			assert.LessOrEqual(t, time.Since(start), 11*time.Second)
			time.Sleep(5 * time.Minute) // what is closed in the background
		})
	}
}
