package retry_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// What a copy can't be made of has its retries all the same, where the queue itself can
// hold it; and a copy that is too large only by its history goes without.
func TestWhatCanNotBeCopiedIsRetriedAllTheSame(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		var deep any = "deep"
		for range 100 {
			deep = []any{deep}
		}
		const most = 16 << 20 // the broker's max-message-size
		messages := map[string]*amqp.Message{
			"near the largest":     {Data: [][]byte{[]byte(strings.Repeat("x", most-700))}},
			"nested deep":          {Value: deep},
			"a list as a property": {Data: [][]byte{[]byte("m")}, ApplicationProperties: map[string]any{"list": []any{"a"}}},
		}
		for name, m := range messages {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				conn, _ := s.Connect(t)
				policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(500 * time.Millisecond)}
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 1})
				var calls atomic.Int64
				suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
					calls.Add(1)
					return errors.New(strings.Repeat("never ", 200))
				})), client.ConsumerConfig{})
				p := s.Peer(t)
				began := time.Now()
				p.Put("orders", m)
				death := retry.DeadLetterOf(p.Take("orders.dead", 1)[0])
				if !s.Newer() && name != "near the largest" {
					assert.Equal(t, client.ReasonUnforwardable, death.Reason)
					assert.Equal(t, int64(1), calls.Load())
					return
				}
				assert.Equal(t, retry.ReasonExhausted, death.Reason)
				assert.Equal(t, 2, death.Retries)
				assert.Equal(t, int64(3), calls.Load())
				assert.GreaterOrEqual(t, time.Since(began), time.Second)
				assert.Contains(t, death.Error, "never")
			})
		}
	})
}

// A header of an AMQP 0-9-1 client that holds a table or an array is delivered over
// AMQP 1.0 only if it begins with "x-": so a copy can't keep it. What is dead-lettered
// without a copy does. The HTTP API publishes and reads as such a client does.
func TestHeadersOfAMQP091ThatACopyCanNotKeep(t *testing.T) {
	t.Parallel()
	for _, b := range suite.Brokers { // the one in memory has no AMQP 0-9-1
		for strategy, kept := range map[retry.Strategy]bool{retry.StrategyRepublish: false, retry.StrategyDeadLetter: true} {
			t.Run(b.Version+" "+string(strategy), func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, b)
				conn, _ := s.Connect(t)
				policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond), Strategy: strategy}
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
				suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					assert.NotContains(t, d.Message().ApplicationProperties, "nested")
					assert.Equal(t, "plain", d.Property("text"))
					assert.NotNil(t, d.Annotation("x-nested"))
					return errors.New("never")
				})), client.ConsumerConfig{})
				s.HTTP(t, "POST", "/exchanges/"+s.VHost+"/amq.default/publish", map[string]any{
					"routing_key": "orders", "payload": "m", "payload_encoding": "string",
					"properties": map[string]any{"delivery_mode": 1, "headers": map[string]any{
						"nested": map[string]any{"a": "b"}, "list": []any{"a"}, "x-nested": map[string]any{"a": "b"}, "text": "plain",
					}},
				}, nil)
				suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, conn, "orders.dead") == 1 })
				var got []struct {
					Properties struct {
						DeliveryMode int `json:"delivery_mode"`
						Headers      map[string]any
					}
				}
				s.HTTP(t, "POST", "/queues/"+s.VHost+"/orders.dead/get", map[string]any{"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}, &got)
				headers := got[0].Properties.Headers
				assert.Equal(t, "plain", headers["text"])
				assert.Equal(t, map[string]any{"a": "b"}, headers["x-nested"])
				_, nested := headers["nested"]
				_, list := headers["list"]
				assert.Equal(t, kept, nested && list, "%v", headers)
				assert.Equal(t, map[bool]int{true: 1, false: 2}[kept], got[0].Properties.DeliveryMode, "a copy is durable")
			})
		}
	}
}
