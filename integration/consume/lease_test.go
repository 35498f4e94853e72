package consume_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
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

// RabbitMQ 4.3 takes a delivery back that was held for longer than the queue's
// consumer timeout, and gives the link nothing more until it is settled. 4.0 has no
// such timeout for AMQP 1.0.
func TestConsumerTimeoutEndsTheHandlersContextAndBlocksTheLateSettlement(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const timeout = 2 * time.Second
		conn, log := s.Connect(t)
		// By a policy, which a consumer can't know of: else the handler's ctx would end sooner.
		if s.Newer() {
			s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/slow", map[string]any{"pattern": "^slow$", "apply-to": "queues", "definition": map[string]any{"consumer-timeout": timeout.Milliseconds()}}, nil)
		}
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "slow"}))
		type end struct {
			err, cause error
			after      time.Duration
		}
		ended := make(chan end, 1)
		again := make(chan string, 10)
		others := make(chan string, 10)
		first := true
		suite.Consume(t, conn, "slow", client.Typed(client.RawCodec{}, func(ctx context.Context, what string) error {
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
		p := suite.PublisherOf(t, conn, address.Queue("slow"))
		suite.Publish(t, p, "stuck")
		for range 3 {
			suite.Publish(t, p, "other")
		}
		e := suite.Await(t, ended, "the end of the slow handler")
		for range 3 {
			suite.Await(t, others, "a message behind the slow one")
		}
		if !s.Newer() {
			assert.NoError(t, e.err, "4.0 has no consumer timeout")
			return
		}
		require.ErrorIs(t, e.err, context.Canceled)
		assert.ErrorIs(t, e.cause, client.ErrConsumerTimeout)
		assert.GreaterOrEqual(t, e.after, timeout-100*time.Millisecond)
		suite.Await(t, again, "the delivery that was taken back")
		assert.NotEmpty(t, log.With("revoked a delivery"))
		assert.NotEmpty(t, log.With("handled after its consumer timeout"))
		suite.Poll(t, "the queue is empty", func() bool { return suite.Ready(t, conn, "slow") == 0 })
		suite.Report(t, s, "consumer timeout of %v: the handler's ctx ended after %v", timeout, e.after.Round(time.Millisecond))
	})
}

// RabbitMQ 4.3 gives a link nothing more, once it has taken a delivery back, until a flow has
// come behind the settlement of that: it isn't enough that the consumer has credit left.
func TestAConsumerGoesOnAfterADeliveryWasTakenBack(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, log := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "slow", ConsumerTimeout: time.Second})) // Drop: no failure is counted in time
		stuck, others := make(chan struct{}), make(chan string, 10)
		first := true
		stop := suite.Consume(t, conn, "slow", client.Typed(client.RawCodec{}, func(_ context.Context, what string) error {
			if what == "stuck" && first {
				first = false
				<-stuck
				return nil
			}
			others <- what
			return nil
		}), client.ConsumerConfig{Concurrency: 2, Prefetch: 64})
		p := suite.PublisherOf(t, conn, address.Queue("slow"))
		suite.Publish(t, p, "stuck")
		suite.Poll(t, "it is taken back", func() bool { return len(log.With("revoked a delivery")) > 0 })
		began := time.Now()
		suite.Publish(t, p, "other")
		assert.ElementsMatch(t, []string{"stuck", "other"}, []string{suite.Await(t, others, "a message"), suite.Await(t, others, "a message")})
		took := time.Since(began)
		assert.Less(t, took, 15*time.Second, "a consumer that gets nothing looks at its queue after 30 s")
		close(stuck)
		require.NoError(t, stop())
		suite.Report(t, s, "behind a delivery that was taken back the next came after %v", took.Round(time.Millisecond))
	})
}

// A message whose handler always runs for longer than the consumer timeout ends where others
// end that fail: by the policy, or, if its handler ignores its ctx, by the delivery limit.
// RabbitMQ counts no failure where it takes a delivery back.
func TestAMessageThatAlwaysOutlastsTheConsumerTimeoutEnds(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		const retries = 1
		policy := retry.Policy{MaxRetries: retries, Backoff: retry.Delays(time.Second)}
		for _, heeds := range []bool{true, false} {
			name := fmt.Sprintf("orders-%v", heeds)
			conn, _ := s.Connect(t)
			suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: name, DeliveryLimit: retries, ConsumerTimeout: 2 * time.Second})
			var attempts atomic.Int64
			over := make(chan struct{})
			end := sync.OnceFunc(func() { close(over) })
			stop := suite.Consume(t, conn, name, retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
				attempts.Add(1)
				if heeds {
					<-ctx.Done()
					return ctx.Err()
				}
				<-over
				return errors.New("too late")
			})), client.ConsumerConfig{Concurrency: 100}) // a handler for each time that the broker is first to take it back
			t.Cleanup(end) // before the consumer's, which waits for the handlers
			suite.Publish(t, suite.PublisherOf(t, conn, address.Queue(name)), "m")
			suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, conn, name+".dead") >= 1 })
			// A busy machine may settle too late, and the broker then delivers the message again.
			assert.GreaterOrEqual(t, attempts.Load(), int64(retries+1), "heeds: %v", heeds)
			end()
			require.NoError(t, stop())
			m := s.Peer(t).Take(name+".dead", 1)[0]
			if reason := m.Annotations[client.AnnotationReason]; heeds {
				assert.EqualValues(t, retry.ReasonExhausted, reason)
			} else {
				assert.Nil(t, reason, "the broker has dead-lettered it")
			}
		}
	})
}

// A Control pauses a consumer: what it has prefetched goes back (4.3) or is kept
// (4.0), and nothing is handled until it resumes.
func TestPausedConsumerTakesNothingAndGoesOn(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 200
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "work", DeliveryLimit: 2}))
		p := suite.PublisherOf(t, conn, address.Queue("work"))
		for range messages {
			suite.Publish(t, p, "m")
		}
		control := &client.Control{}
		handled := make(chan struct{}, 10*messages)
		running := make(chan struct{}, 10*messages)
		finish := make(chan struct{})
		suite.Consume(t, conn, "work", client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			running <- struct{}{}
			select {
			case <-finish:
			case <-ctx.Done():
			}
			if c, ok := client.ControlFrom(ctx); !ok || c != control {
				return errors.New("another Control")
			}
			handled <- struct{}{}
			return nil
		}), client.ConsumerConfig{Concurrency: 4, Prefetch: 50, Control: control})
		for range 4 {
			suite.Await(t, running, "a handler")
		}
		resume := control.Pause()
		assert.True(t, control.Paused())
		close(finish) // those four end, and no other begins
		for range 4 {
			suite.Await(t, handled, "a handler that was running")
		}
		if s.Newer() {
			suite.Poll(t, "what was prefetched is back in the queue", func() bool { return suite.Ready(t, conn, "work") == messages-4 })
		}
		select {
		case <-running:
			t.Error("a handler began while the consumer was paused")
		case <-time.After(300 * time.Millisecond): // a chance to be wrong, not a proof
		}
		resume()
		for range messages - 4 {
			suite.Await(t, handled, "the rest")
		}
		suite.Poll(t, "the queue is empty", func() bool { return suite.Ready(t, conn, "work") == 0 })
	})
}
