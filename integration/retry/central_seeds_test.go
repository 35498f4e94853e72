package retry_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
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

// failedProcess are the definitions of pattern P5: a queue dead-letters with its own name as
// routing key; a "failed" process counts up the header count and publishes to a headers
// exchange, which chooses the retry queue by it, and the dead-letter queue at -1.
const failedProcess = `{
  "exchanges": [
    { "name": "messages", "vhost": "/", "type": "topic", "durable": true, "auto_delete": false, "arguments": {} },
    { "name": "failed", "vhost": "/", "type": "fanout", "durable": true, "auto_delete": false, "arguments": {} },
    { "name": "deadletter", "vhost": "/", "type": "headers", "durable": true, "auto_delete": false, "arguments": {} },
    { "name": "reply", "vhost": "/", "type": "direct", "durable": true, "auto_delete": false, "arguments": {} }
  ],
  "queues": [
    { "name": "topic-queue", "vhost": "/", "durable": true, "auto_delete": false, "arguments": { "x-dead-letter-exchange": "failed", "x-dead-letter-routing-key": "topic-queue" } },
    { "name": "failed", "vhost": "/", "durable": true, "auto_delete": false, "arguments": {} },
    { "name": "retry-1", "vhost": "/", "durable": true, "auto_delete": false, "arguments": { "x-message-ttl": 100, "x-dead-letter-exchange": "reply" } },
    { "name": "retry-2", "vhost": "/", "durable": true, "auto_delete": false, "arguments": { "x-message-ttl": 300, "x-dead-letter-exchange": "reply" } },
    { "name": "deadletter", "vhost": "/", "durable": true, "auto_delete": false, "arguments": {} }
  ],
  "bindings": [
    { "source": "messages", "vhost": "/", "destination": "topic-queue", "destination_type": "queue", "routing_key": "order.#", "arguments": {} },
    { "source": "reply", "vhost": "/", "destination": "topic-queue", "destination_type": "queue", "routing_key": "topic-queue", "arguments": {} },
    { "source": "failed", "vhost": "/", "destination": "failed", "destination_type": "queue", "routing_key": "", "arguments": {} },
    { "source": "deadletter", "vhost": "/", "destination": "retry-1", "destination_type": "queue", "routing_key": "", "arguments": { "x-match": "all", "count": 1 } },
    { "source": "deadletter", "vhost": "/", "destination": "retry-2", "destination_type": "queue", "routing_key": "", "arguments": { "x-match": "all", "count": 2 } },
    { "source": "deadletter", "vhost": "/", "destination": "deadletter", "destination_type": "queue", "routing_key": "", "arguments": { "x-match": "all", "count": -1 } }
  ]
}`

// requeueQueue are the definitions of pattern P6: work queues dead-letter to a fanout
// exchange, without a key of their own, and a consumer of requeue-queue sends back by the
// death headers.
const requeueQueue = `{
  "exchanges": [
    { "name": "notification-exchange", "vhost": "/", "type": "fanout", "durable": true, "auto_delete": false, "arguments": {} },
    { "name": "error-exchange", "vhost": "/", "type": "fanout", "durable": true, "auto_delete": false, "arguments": {} }
  ],
  "queues": [
    { "name": "email-queue", "vhost": "/", "durable": true, "auto_delete": false, "arguments": { "x-dead-letter-exchange": "error-exchange" } },
    { "name": "webhook-queue", "vhost": "/", "durable": true, "auto_delete": false, "arguments": { "x-dead-letter-exchange": "error-exchange" } },
    { "name": "requeue-queue", "vhost": "/", "durable": true, "auto_delete": false, "arguments": {} }
  ],
  "bindings": [
    { "source": "notification-exchange", "vhost": "/", "destination": "email-queue", "destination_type": "queue", "routing_key": "", "arguments": {} },
    { "source": "notification-exchange", "vhost": "/", "destination": "webhook-queue", "destination_type": "queue", "routing_key": "", "arguments": {} },
    { "source": "error-exchange", "vhost": "/", "destination": "requeue-queue", "destination_type": "queue", "routing_key": "", "arguments": {} }
  ]
}`

func loadDefinitions(t *testing.T, s *suite.Site, definitions string) {
	t.Helper()
	s.HTTP(t, http.MethodPost, "/definitions", json.RawMessage(strings.ReplaceAll(definitions, `"/"`, strconv.Quote(s.VHost))), nil)
}

// rejectsAll is a worker that rejects each message as often as task says.
func rejectsAll(p *suite.Peer, queue string, a *attempts) {
	p.ByHand(queue, func(r *amqp.Receiver, m *amqp.Message) error {
		if a.task(string(m.GetData())) != nil {
			return r.RejectMessage(context.Background(), m, nil)
		}
		return r.AcceptMessage(context.Background(), m)
	})
}

// Central takes the failed process's place: with the other system's queues as they are, by
// its counter, which ends with -1.
func TestCentralTakesTheFailedProcesssPlace(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		loadDefinitions(t, s, failedProcess)
		file := suite.YAML(t, `
retry: {delays: [100ms, 300ms], max-retries: 2}
central:
  queues: [topic-queue]
  failed-queue: failed
  counter: count
  counter-end: -1
  counter-exchange: deadletter
`)
		conn, _ := s.Connect(t)
		hopback := s.Shell(t)
		hopback.Group = "retry"
		// These queues are classic, so they dead-letter at most once, and the failed queue has
		// no dead-letter exchange.
		out := hopback.Run(suite.ExitNo, "run", file)
		assert.Contains(t, out.Stderr, `topology check "failed-queue" failed at queue "failed"`)
		retrier(t, s, file, "--waive", "failed-queue")
		suite.AwaitConsumers(t, conn, "failed", 1)
		a := newAttempts()
		p := s.Peer(t)
		rejectsAll(p, "topic-queue", a)
		bodies := map[string]int{"ok:0": 1, "once:1": 2, "twice:2": 3, "always:9": 3}
		for b := range bodies {
			m := amqp.NewMessage([]byte(b))
			m.Header = &amqp.MessageHeader{Durable: true}
			m.Properties = &amqp.MessageProperties{MessageID: b}
			require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Exchange("messages", "order.placed"), m))
		}
		dead := p.Take("deadletter", 1)[0]
		assert.Equal(t, "always:9", dead.Properties.MessageID)
		assert.EqualValues(t, -1, dead.ApplicationProperties["count"])
		d := retry.DeadLetterOf(dead)
		assert.Equal(t, [4]string{"exhausted", "topic-queue", "messages", "order.placed"}, [4]string{string(d.Reason), d.Queue, d.Exchange, d.RoutingKey})
		var times []string
		for b, want := range bodies {
			suite.Poll(t, b, func() bool { return len(a.of(b)) >= want })
			at := a.of(b)
			assert.Len(t, at, want, b)
			for i := 1; i < len(at); i++ {
				assert.GreaterOrEqual(t, at[i].Sub(at[i-1]), []time.Duration{98, 298}[i-1]*time.Millisecond, b)
			}
			times = append(times, fmt.Sprintf("%s %d", b, len(at)))
		}
		for _, q := range []string{"topic-queue", "failed", "deadletter"} {
			suite.Poll(t, q+" is empty", func() bool { return suite.Ready(t, conn, q) == 0 })
		}
		suite.Report(t, s, "attempts over their own queues: %s", strings.Join(times, ", "))
	})
}

// Central takes the place of the consumer of requeue-queue: it finds the queue by the
// broker's history, and waits in delay queues next to the other system's.
func TestCentralTakesTheRequeueConsumersPlace(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		loadDefinitions(t, s, requeueQueue)
		file := suite.YAML(t, `
retry: {delays: [100ms, 300ms], max-retries: 2}
central:
  queues: [email-queue, webhook-queue]
  failed-queue: requeue-queue
`)
		conn, _ := s.Connect(t)
		s.Shell(t).Run(suite.ExitDone, "apply", file)
		retrier(t, s, file, "--waive", "failed-queue", "--waive", "at-most-once")
		suite.AwaitConsumers(t, conn, "requeue-queue", 1)
		emails, webhooks := newAttempts(), newAttempts()
		p := s.Peer(t)
		rejectsAll(p, "email-queue", emails)
		p.ByHand("webhook-queue", func(r *amqp.Receiver, m *amqp.Message) error {
			webhooks.next(string(m.GetData()))
			return r.AcceptMessage(context.Background(), m)
		})
		for _, b := range []string{"once:1", "always:9"} {
			require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Exchange("notification-exchange", ""), amqp.NewMessage([]byte(b))))
		}
		d := retry.DeadLetterOf(p.Take("email-queue.dead", 1)[0])
		assert.Equal(t, [3]string{"exhausted", "email-queue", "notification-exchange"}, [3]string{string(d.Reason), d.Queue, d.Exchange})
		assert.Len(t, emails.of("always:9"), 3)
		suite.Poll(t, "it comes again", func() bool { return len(emails.of("once:1")) == 2 })
		assert.Len(t, webhooks.of("once:1"), 1, "its own queue alone")
		assert.Len(t, webhooks.of("always:9"), 1)
		at := emails.of("always:9")
		assert.GreaterOrEqual(t, at[1].Sub(at[0]), 98*time.Millisecond, "not at once, as before")
	})
}

// What RabbitMQ records about a dead letter, and what a publisher can forge: Central relies
// on x-opt-deaths.
func TestWhatTheBrokerTellsOfADeath(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		ctx := context.Background()
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "errors", Type: declare.ExchangeFanout}, {Name: "shop", Type: declare.ExchangeTopic}, {Name: "back", Type: declare.ExchangeTopic}},
			Queues: []declare.Queue{
				declare.QuorumQueue{Name: "orders", DeliveryLimit: 1, DeadLetter: declare.DeadLetterTarget{Exchange: "errors"}},
				declare.QuorumQueue{Name: "delay", MessageTTL: 50 * time.Millisecond, DeadLetter: declare.DeadLetterTarget{Exchange: "back"}},
				declare.QuorumQueue{Name: "failed", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			},
			Bindings: []declare.Binding{{Source: "errors", Queue: "failed"}, {Source: "shop", Queue: "orders", Key: "#"}, {Source: "back", Queue: "orders", Key: "#"}},
		})
		p := s.Peer(t)
		r := p.Receiver("orders", 10)
		last := func(m *amqp.Message) (queue, reason, exchange string, key any) {
			deaths, ok := m.Annotations["x-opt-deaths"].([]map[any]any)
			require.True(t, ok, "%T", m.Annotations["x-opt-deaths"])
			d := deaths[0]
			return d["queue"].(string), d["reason"].(string), d["exchange"].(string), d["routing-keys"]
		}

		// A publisher can forge the short annotations, but not the history.
		forged := amqp.NewMessage([]byte("a"))
		forged.Annotations = amqp.Annotations{"x-last-death-queue": "forged", "x-first-death-queue": "forged", "x-last-death-reason": "forged"}
		require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Exchange("shop", "order.placed"), forged))
		m := p.Next(r)
		assert.Equal(t, "forged", m.Annotations["x-last-death-queue"])
		assert.NotContains(t, m.Annotations, "x-opt-deaths")
		// A rejection's error isn't kept: only a modified outcome's annotations are.
		require.NoError(t, r.RejectMessage(ctx, m, &amqp.Error{Condition: "app:fatal", Description: "because", Info: map[string]any{"x-reason": "fatal"}}))
		m = p.Take("failed", 1)[0]
		queue, reason, exchange, keys := last(m)
		assert.Equal(t, [3]string{"orders", "rejected", "shop"}, [3]string{queue, reason, exchange})
		assert.Equal(t, []string{"order.placed"}, keys)
		assert.Equal(t, "orders", m.Annotations["x-last-death-queue"], "overwritten")
		assert.Equal(t, "order.placed", m.Annotations["x-routing-key"])
		assert.NotContains(t, fmt.Sprint(m.Annotations, m.ApplicationProperties), "fatal")
		assert.NotContains(t, fmt.Sprint(m.Annotations), "because")

		// A message that waited: the last death comes first.
		require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Queue("delay"), amqp.NewMessage([]byte("b"))))
		require.NoError(t, r.ModifyMessage(ctx, p.Next(r), &amqp.ModifyMessageOptions{UndeliverableHere: true, Annotations: amqp.Annotations{"x-reason": "fatal"}}))
		m = p.Take("failed", 1)[0]
		queue, reason, _, _ = last(m)
		assert.Equal(t, [2]string{"orders", "rejected"}, [2]string{queue, reason})
		assert.Len(t, m.Annotations["x-opt-deaths"], 2)
		assert.Equal(t, "fatal", m.Annotations["x-reason"])
		assert.Equal(t, "delay", m.Annotations["x-first-death-queue"], "not the work queue")

		// A copy starts over.
		require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Queue("orders"), client.Copy(m)))
		m = p.Next(r)
		assert.NotContains(t, m.Annotations, "x-opt-deaths")
		assert.NotContains(t, m.Annotations, "x-last-death-queue")
		for range 2 { // beyond the delivery limit
			require.NoError(t, r.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
			if m.Header.DeliveryCount == 0 {
				m = p.Next(r)
			}
		}
		m = p.Take("failed", 1)[0]
		queue, reason, _, _ = last(m)
		assert.Equal(t, [2]string{"orders", "delivery_limit"}, [2]string{queue, reason})
		assert.Greater(t, m.Header.DeliveryCount, uint32(1), "it is brought along")

		require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Queue("delay"), amqp.NewMessage([]byte("c"))))
		require.NoError(t, r.RejectMessage(ctx, p.Next(r), nil))
		got := make(chan *client.Delivery, 4)
		stop := suite.Consume(t, conn, "failed", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			got <- d
			return nil
		}), client.ConsumerConfig{})
		d := <-got
		require.NoError(t, stop())
		kept := annotation.DeadLetterings(nil, d.Message().Annotations)
		for i := range kept {
			assert.EqualValues(t, 1, kept[i].Count)
			assert.WithinDuration(t, time.Now(), kept[i].Last, time.Minute)
			kept[i].Count, kept[i].First, kept[i].Last = 0, time.Time{}, time.Time{}
		}
		assert.Equal(t, []annotation.DeadLettering{
			{Queue: "orders", Reason: "rejected", Exchange: "back", RoutingKey: "delay"},
			{Queue: "delay", Reason: "expired", RoutingKey: "delay"},
		}, kept)

		whole := d.Message().Annotations
		for key, v := range map[string]string{
			"x-exchange": "errors", "x-routing-key": "delay",
			"x-first-death-queue": "delay", "x-first-death-reason": "expired", "x-first-death-exchange": "",
			"x-last-death-queue": "orders", "x-last-death-reason": "rejected", "x-last-death-exchange": "back",
		} {
			assert.Equal(t, v, whole[key], key)
			assert.Equal(t, v, d.Annotation(key), key)
		}
		require.IsType(t, []map[any]any{}, whole["x-opt-deaths"])
		deaths := whole["x-opt-deaths"].([]map[any]any)
		require.Len(t, deaths, 2)
		assert.IsType(t, time.Time{}, deaths[0]["first-time"])
		assert.Equal(t, []string{"delay"}, deaths[0]["routing-keys"])
	})
}
