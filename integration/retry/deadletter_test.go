package retry_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// However a handler dead-letters a message, the message is in the dead-letter
// queue afterwards as its sender made it, and records why it is there, how often it
// was retried and where it came from.
func TestExhaustedMessageEndsInTheDeadLetterQueueWithItsHistory(t *testing.T) {
	errBad := errors.New("bad order")
	cases := []struct {
		queue   string
		body    string // default: a JSON order
		handle  func(ctx context.Context, o suite.Order) error
		reason  client.Reason
		text    string // within the error text
		retries int64
		// runtime.Goexit passes the decorator by: what it would add is missing, and
		// the broker's account and the counter have to do.
		bare bool
	}{
		{
			queue:  "exhausted",
			handle: func(context.Context, suite.Order) error { return errors.New("still down") },
			reason: retry.ReasonExhausted, text: "still down", retries: 2,
		},
		{
			queue:  "permanent",
			handle: func(context.Context, suite.Order) error { return retry.Permanent(errors.New("declined")) },
			reason: retry.ReasonPermanent, text: "declined",
		},
		{
			queue:  "not-retryable",
			handle: func(context.Context, suite.Order) error { return fmt.Errorf("charge: %w", errBad) },
			reason: retry.ReasonPermanent, text: "charge: bad order",
		},
		{
			queue:  "permanent-on-second-attempt",
			handle: permanentAfter(1),
			reason: retry.ReasonPermanent, text: "declined", retries: 1,
		},
		{
			queue: "undecodable", body: `{"id": `,
			handle: func(context.Context, suite.Order) error { return nil },
			reason: client.ReasonUndecodable, text: "unexpected end of JSON input",
		},
		{
			queue:  "panicking",
			handle: func(context.Context, suite.Order) error { panic("index out of order") },
			reason: client.ReasonPanicked, text: "index out of order",
		},
		{
			queue:  "goexit",
			handle: func(context.Context, suite.Order) error { runtime.Goexit(); return nil },
			reason: client.ReasonPanicked, text: "handler ended its goroutine", bare: true,
		},
		{
			queue: "panicking-on-second-attempt",
			handle: func(ctx context.Context, o suite.Order) error {
				if err := permanentAfter(1)(ctx, o); err.Error() == "declined" {
					panic("declined")
				}
				return errors.New("not yet")
			},
			reason: client.ReasonPanicked, text: "declined", retries: 1,
		},
		{
			queue: "own-outcome",
			handle: func(context.Context, suite.Order) error {
				return client.DeadLetter{Reason: "duplicate", Err: errors.New("seen before"), Annotations: map[string]any{"x-opt-seen": int64(7)}}
			},
			reason: "duplicate", text: "seen before",
		},
		{
			queue:  "hostile-error",
			handle: func(context.Context, suite.Order) error { return retry.Permanent(suite.HostileError{}) },
			reason: retry.ReasonPermanent, text: "ÿ",
		},
	}
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{
			MaxRetries: 2, Backoff: retry.Delays(50 * time.Millisecond),
			RetryIf: func(err error) bool { return !errors.Is(err, errBad) },
		}
		conn, _ := s.Connect(t)
		peer := s.Peer(t)
		var queues []declare.QuorumQueue
		for _, c := range cases {
			queues = append(queues, declare.QuorumQueue{Name: c.queue, DeliveryLimit: 5})
		}
		topology, err := retry.Topology(policy, queues...)
		require.NoError(t, err)
		topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "shop", Type: declare.ExchangeTopic})
		for _, c := range cases {
			topology.Bindings = append(topology.Bindings, declare.Binding{Source: "shop", Queue: c.queue, Key: "order." + c.queue})
		}
		suite.Apply(t, conn, topology)

		for _, c := range cases {
			suite.Consume(t, conn, c.queue, retry.With(policy)(client.JSON(c.handle)), client.ConsumerConfig{})
			body := c.body
			if body == "" {
				body = `{"id": 7}`
			}
			peer.SendPlain(address.Exchange("shop", "order."+c.queue), body)
		}
		for _, c := range cases {
			m := peer.Take(c.queue+".dead", 1)[0]
			body := c.body
			if body == "" {
				body = `{"id": 7}`
			}
			assert.Equal(t, body, string(m.GetData()), c.queue)
			assertPlainProperties(t, m, c.queue)

			assert.Equal(t, string(c.reason), m.Annotations[client.AnnotationReason], c.queue)
			text, _ := m.Annotations[client.AnnotationError].(string)
			assert.Contains(t, text, c.text, c.queue)
			assert.LessOrEqual(t, len(text), client.ErrorTextLimit)
			if !c.bare {
				assert.Equal(t, c.retries, m.Annotations[annotation.Retries], "%s: retries", c.queue)
				assert.Equal(t, c.queue, m.Annotations[annotation.Queue], "%s: origin queue", c.queue)
				assert.Equal(t, "shop", retry.DeadLetterOf(m).Exchange, "%s: origin exchange", c.queue)
				assert.Equal(t, "order."+c.queue, retry.DeadLetterOf(m).RoutingKey, "%s: origin routing key", c.queue)
			}
			assert.Equal(t, int(c.retries), retry.Count(m), "%s: counter", c.queue)
			// The broker's own account agrees.
			assert.Equal(t, "rejected", m.Annotations["x-last-death-reason"], c.queue)
			assert.Equal(t, c.queue, m.Annotations["x-last-death-queue"], c.queue)
			if c.queue == "own-outcome" {
				assert.Equal(t, int64(7), m.Annotations["x-opt-seen"])
			}
		}
		for _, c := range cases {
			assert.Zero(t, suite.Ready(t, conn, c.queue), c.queue)
			assert.Zero(t, suite.Ready(t, conn, c.queue+".dead"), c.queue)
		}
		assert.Zero(t, suite.Ready(t, conn, "parking_queue"))
	})
}

// A consumer outlives handlers that panic or end their goroutine, with as many
// workers as before.
func TestConsumerKeepsItsWorkersThroughPanics(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const bad, concurrency = 20, 2
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: retry.NoRetries}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		good := make(chan struct{}, concurrency)
		both := make(chan struct{})
		suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error {
			switch {
			case o.ID >= bad:
				good <- struct{}{}
				<-both // so that one worker alone can't take the two
				return nil
			case o.ID%2 == 0:
				runtime.Goexit()
			}
			panic(o.ID)
		}), client.ConsumerConfig{Concurrency: concurrency})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range bad + concurrency {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		for range concurrency {
			suite.Await(t, good, "a good message, handled next to another")
		}
		close(both)
		s.Peer(t).Take("orders.dead", bad)
	})
}

// permanentAfter fails until the message was retried n times, and then for good.
func permanentAfter(n int) func(context.Context, suite.Order) error {
	return func(ctx context.Context, _ suite.Order) error {
		if d, ok := client.DeliveryFrom(ctx); ok && retry.Count(d.Message()) >= n {
			return retry.Permanent(errors.New("declined"))
		}
		return errors.New("not yet")
	}
}

func assertPlainProperties(t *testing.T, m *amqp.Message, what string) {
	t.Helper()
	assert.Equal(t, &amqp.MessageProperties{
		MessageID: "m-1", CorrelationID: uint64(42), Subject: new("order placed"), To: new("billing"), ReplyTo: new("answers"),
		ContentType: new("application/json"), ContentEncoding: new("identity"), UserID: []byte("guest"),
	}, m.Properties, what)
	assert.Equal(t, "acme", m.ApplicationProperties["tenant"], what)
	assert.Equal(t, 2.5, m.ApplicationProperties["weight"], what)
	assert.Equal(t, "acme", m.Annotations["x-opt-tenant"], what)
	assert.Equal(t, uint8(5), m.Header.Priority, what)
	assert.True(t, m.Header.Durable, what)
}
