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
)

// RabbitMQ 4.3 takes a delivery back that was held for longer than the queue's
// consumer timeout, and gives the link nothing more until it is settled. 4.0 has no
// such timeout for AMQP 1.0.
func TestConsumerTimeoutEndsTheHandlersContextAndBlocksTheLateSettlement(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const timeout = 2 * time.Second
		conn, log := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "slow", ConsumerTimeout: timeout}))
		type end struct {
			err, cause error
			after      time.Duration
		}
		ended := make(chan end, 1)
		again := make(chan string, 10)
		others := make(chan string, 10)
		first := true
		consume(t, conn, "slow", client.Typed(client.RawCodec{}, func(ctx context.Context, what string) error {
			switch {
			case what == "stuck" && first:
				first = false
				began := time.Now()
				select {
				case <-ctx.Done():
				case <-time.After(3 * timeout): // 4.0: nothing happens
				}
				ended <- end{ctx.Err(), context.Cause(ctx), time.Since(began)}
				return nil // too late
			case what == "stuck":
				again <- what
			default:
				others <- what
			}
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: 1})
		p := publisherOf(t, conn, address.Queue("slow"))
		publish(t, p, "stuck")
		for range 3 {
			publish(t, p, "other")
		}
		e := await(t, ended, "the end of the slow handler")
		for range 3 {
			await(t, others, "a message behind the slow one")
		}
		if !s.newer() {
			assert.NoError(t, e.err, "4.0 has no consumer timeout")
			return
		}
		require.ErrorIs(t, e.err, context.Canceled)
		assert.ErrorIs(t, e.cause, client.ErrConsumerTimeout)
		assert.GreaterOrEqual(t, e.after, timeout-100*time.Millisecond)
		await(t, again, "the delivery that was taken back")
		assert.NotEmpty(t, log.with("took a delivery back"))
		assert.NotEmpty(t, log.with("after the broker had taken it back"))
		poll(t, "the queue is empty", func() bool { return ready(t, conn, "slow") == 0 })
		report(t, s, "consumer timeout of %v: the handler's ctx ended after %v", timeout, e.after.Round(time.Millisecond))
	})
}

// A Control pauses a consumer: what it has prefetched goes back (4.3) or is kept
// (4.0), and nothing is handled until it goes on.
func TestPausedConsumerTakesNothingAndGoesOn(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const messages = 200
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "work", DeliveryLimit: 2}))
		p := publisherOf(t, conn, address.Queue("work"))
		for range messages {
			publish(t, p, "m")
		}
		control := &client.Control{}
		handled := make(chan struct{}, 10*messages)
		running := make(chan struct{}, 10*messages)
		goOn := make(chan struct{})
		consume(t, conn, "work", client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			running <- struct{}{}
			select {
			case <-goOn:
			case <-ctx.Done():
			}
			if c, ok := client.ControlFrom(ctx); !ok || c != control {
				return errors.New("another Control")
			}
			handled <- struct{}{}
			return nil
		}), client.ConsumerConfig{Concurrency: 4, Prefetch: 50, Control: control})
		for range 4 {
			await(t, running, "a handler")
		}
		resume := control.Pause()
		assert.True(t, control.Paused())
		close(goOn) // those four end, and no other begins
		for range 4 {
			await(t, handled, "a handler that was running")
		}
		if s.newer() {
			poll(t, "what was prefetched is back in the queue", func() bool { return ready(t, conn, "work") == messages-4 })
		}
		select {
		case <-running:
			t.Error("a handler began while the consumer was paused")
		case <-time.After(300 * time.Millisecond): // a chance to be wrong, not a proof
		}
		resume()
		for range messages - 4 {
			await(t, handled, "the rest")
		}
		poll(t, "the queue is empty", func() bool { return ready(t, conn, "work") == 0 })
	})
}
