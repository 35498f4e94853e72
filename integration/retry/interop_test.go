package retry_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// cookbook is the definitions file of pattern P4, "RabbitMQ retries with
// exponential backoff" of Repid's cookbook, as printed there.
const cookbook = `{
  "vhosts": [{ "name": "/" }],
  "exchanges": [
    { "name": "retry_exchange", "vhost": "/", "type": "topic", "durable": true, "auto_delete": false },
    { "name": "requeue_exchange", "vhost": "/", "type": "topic", "durable": true, "auto_delete": false }
  ],
  "queues": [
    {
      "name": "delay_10s", "vhost": "/", "durable": true, "auto_delete": false,
      "arguments": { "x-queue-type": "quorum", "x-message-ttl": 10000, "x-dead-letter-exchange": "requeue_exchange" }
    },
    {
      "name": "delay_60s", "vhost": "/", "durable": true, "auto_delete": false,
      "arguments": { "x-queue-type": "quorum", "x-message-ttl": 60000, "x-dead-letter-exchange": "requeue_exchange" }
    },
    {
      "name": "my_work_queue", "vhost": "/", "durable": true, "auto_delete": false,
      "arguments": { "x-queue-type": "quorum", "x-delivery-limit": 5 }
    }
  ],
  "bindings": [
    { "source": "retry_exchange", "vhost": "/", "destination": "delay_10s", "destination_type": "queue", "routing_key": "delay.10000.#" },
    { "source": "retry_exchange", "vhost": "/", "destination": "delay_60s", "destination_type": "queue", "routing_key": "delay.60000.#" },
    { "source": "requeue_exchange", "vhost": "/", "destination": "my_work_queue", "destination_type": "queue", "routing_key": "*.*.my_work_queue" }
  ]
}`

// cookbookQueue is its work queue.
const cookbookQueue = "my_work_queue"

// loadCookbook uploads the definitions as the document says, into the test's
// virtual host, and further delay queues of the same form for tests in a hurry.
func loadCookbook(t *testing.T, s *suite.Site, delays ...time.Duration) {
	t.Helper()
	load := func(definitions string) {
		s.HTTP(t, "POST", "/definitions", json.RawMessage(strings.ReplaceAll(definitions, `"/"`, strconv.Quote(s.VHost))), nil)
	}
	load(cookbook)
	for _, d := range delays {
		name := retry.Names{}.DelayQueue(d)
		load(fmt.Sprintf(`{
			"queues": [{ "name": %q, "vhost": "/", "durable": true, "auto_delete": false,
				"arguments": { "x-queue-type": "quorum", "x-message-ttl": %d, "x-dead-letter-exchange": "requeue_exchange" } }],
			"bindings": [{ "source": "retry_exchange", "vhost": "/", "destination": %[1]q, "destination_type": "queue", "routing_key": "delay.%[2]d.#" }]
		}`, name, d.Milliseconds()))
	}
}

// cookbookGuards are those that its topology needs waived, by name: it drops what
// is given up, and dead-letters at most once.
var cookbookGuards = []retry.Guard{retry.GuardDeadLetter, retry.GuardAtMostOnce}

func TestGuardsNameWhatTheCookbooksTopologyLacks(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		loadCookbook(t, s)
		conn, _ := s.Connect(t)
		found := func(p retry.Policy) []string {
			err := client.Prepare(t.Context(), retry.With(p)(suite.Nop), client.Start{Queue: cookbookQueue, Broker: conn.Broker(), Management: conn.Management()})
			if err == nil {
				return nil
			}
			joined, ok := err.(interface{ Unwrap() []error })
			require.True(t, ok, "%v", err)
			var guards []string
			for _, e := range joined.Unwrap() {
				var g *retry.GuardError
				require.ErrorAs(t, e, &g)
				guards = append(guards, string(g.Guard)+" at "+g.Queue+": "+g.Problem)
			}
			slices.Sort(guards)
			return guards
		}
		const atMostOnce = "it dead-letters at most once, so a dead letter is lost if its target is missing or full"
		lacks := []string{
			"at-most-once at delay_10s: " + atMostOnce,
			"at-most-once at delay_60s: " + atMostOnce,
			"dead-letter at my_work_queue: it has no dead-letter exchange, so the broker drops messages that are dead-lettered or exceed the delivery limit",
		}
		policy := retry.Policy{Backoff: retry.Delays(10*time.Second, time.Minute)}
		assert.Equal(t, lacks, found(policy))
		policy.Waive = cookbookGuards
		assert.Empty(t, found(policy))

		// The document's decorator continues with delays of 5, 10 and 30 minutes, for
		// which it declares no queues: what it publishes there is lost.
		assert.Equal(t, []string{
			`delay-queue at delay_1800s: it doesn't exist`,
			`delay-queue at delay_300s: it doesn't exist`,
			`delay-queue at delay_600s: it doesn't exist`,
			`delay-queue at my_work_queue: binding "retry_exchange" to queue "delay_1800s", key "delay.1800000.#" is missing`,
			`delay-queue at my_work_queue: binding "retry_exchange" to queue "delay_300s", key "delay.300000.#" is missing`,
			`delay-queue at my_work_queue: binding "retry_exchange" to queue "delay_600s", key "delay.600000.#" is missing`,
		}, found(retry.Policy{Waive: cookbookGuards}))
	})
}

func TestRetryHopsThroughTheCookbooksTenSecondQueue(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		loadCookbook(t, s)
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(10*time.Second, time.Minute), Waive: cookbookGuards}
		began := make(chan time.Time, 10)
		suite.Consume(t, conn, cookbookQueue, retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			began <- time.Now()
			if retry.Count(d.Message()) == 0 {
				return errors.New("temporary API failure")
			}
			return nil
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue(cookbookQueue)), "task")
		first := suite.Await(t, began, "the first attempt")
		had := suite.Await(t, began, "the second attempt").Sub(first)
		assert.GreaterOrEqual(t, had, 10*time.Second-2*time.Millisecond)
		assert.Less(t, had, 10*time.Second+suite.LateLimit)
		suite.Report(t, s, "asked 10s, late by %v", (had - 10*time.Second).Round(100*time.Microsecond))
	})
}

// Workers of both kinds take from one queue. After a failure in either, the next one
// continues from its count, and the limit holds across both.
func TestHopbackWorksSideBySideWithTheCookbooksDecorator(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, maxRetries = 120, 4
		delays := []time.Duration{100 * time.Millisecond, 300 * time.Millisecond}
		loadCookbook(t, s, delays...)
		conn, _ := s.Connect(t)

		// Message i fails i%6 times: 5 is once too often.
		fails := func(id, count int) bool { return count < id%(maxRetries+2) }
		type attempt struct {
			id, count int
			counter   any
			theirs    bool
			tenant    any
		}
		attempts := make(chan attempt, messages*(maxRetries+2))

		policy := retry.Policy{MaxRetries: maxRetries, Backoff: retry.Delays(delays...), Waive: cookbookGuards}
		suite.Consume(t, conn, cookbookQueue, retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			d, _ := client.DeliveryFrom(ctx)
			a := attempt{id: o.ID, count: retry.Count(d.Message()), counter: d.Property(retry.CountProperty), tenant: d.Property("tenant")}
			attempts <- a
			if fails(a.id, a.count) {
				return errors.New("temporary API failure")
			}
			return nil
		})), client.ConsumerConfig{Concurrency: 2, Prefetch: 4})

		theirs := decorator(t, s, maxRetries, delays, func(m *amqp.Message, count int) bool {
			var o suite.Order
			assert.NoError(t, json.Unmarshal(m.GetData(), &o))
			attempts <- attempt{o.ID, count, m.ApplicationProperties[retry.CountProperty], true, m.ApplicationProperties["tenant"]}
			return fails(o.ID, count)
		})

		p := suite.Publisher[suite.Order](t, conn, address.Queue(cookbookQueue))
		want := 0
		for id := range messages {
			want += min(id%(maxRetries+2), maxRetries) + 1
			suite.Publish(t, p, suite.Order{ID: id}, func(m *client.Message) { m.ApplicationProperties = map[string]any{"tenant": "acme"} })
		}
		seen := map[int][]attempt{}
		for range want {
			a := suite.Await(t, attempts, "an attempt")
			seen[a.id] = append(seen[a.id], a)
		}
		both, byThem, texts := 0, 0, 0
		for id, as := range seen {
			kinds := map[bool]bool{}
			text := false
			for i, a := range as {
				assert.Equal(t, i, a.count, "message %d: %+v", id, as)
				assert.Equal(t, "acme", a.tenant)
				if a.counter != nil {
					_, isText := a.counter.(string)
					assert.Equal(t, text, isText, "the counter's type: message %d, %+v", id, as)
				}
				// Theirs is a string, and ours stays what it was.
				text = text || a.theirs
				if kinds[a.theirs] = true; a.theirs {
					byThem++
				}
				if text {
					texts++
				}
			}
			assert.Len(t, as, min(id%(maxRetries+2), maxRetries)+1, "message %d", id)
			if len(kinds) == 2 {
				both++
			}
		}
		assert.Len(t, seen, messages)
		assert.Positive(t, both, "messages that workers of both kinds had")
		for _, q := range []string{cookbookQueue, "delay_100ms", "delay_300ms", "delay_10s", "delay_60s"} {
			assert.Zero(t, suite.Ready(t, conn, q), "messages in %s", q)
		}
		theirs()
		assert.Empty(t, attempts, "attempts beyond the limit")
		suite.Report(t, s, "%d messages, %d attempts, %d of them by the decorator; %d messages went through both", messages, want, byThem, both)
	})
}

// decorator runs a worker that does what the document's Python decorator does, on
// go-amqp itself, until the function that it returns is called. fails is called for
// each attempt.
func decorator(t *testing.T, s *suite.Site, maxRetries int, backoff []time.Duration, fails func(m *amqp.Message, count int) bool) (stop func()) {
	t.Helper()
	p := s.Peer(t)
	r := p.Receiver(cookbookQueue, 4)
	anywhere, err := p.Site.NewSender(t.Context(), "", nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for {
			m, err := r.Receive(ctx, nil)
			if err != nil {
				return
			}
			if err := decorated(r, anywhere, m, maxRetries, backoff, fails); err != nil {
				t.Errorf("the decorator: %v", err)
				return
			}
			if err := r.IssueCredit(1); err != nil {
				t.Errorf("the decorator: %v", err)
				return
			}
		}
	})
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(stop)
	return stop
}

// decorated follows the document's wrapper line by line.
func decorated(r *amqp.Receiver, anywhere *amqp.Sender, m *amqp.Message, maxRetries int, backoff []time.Duration, fails func(*amqp.Message, int) bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), suite.Patience)
	defer cancel()
	retryCount := 0 // int(headers.get("x-retry-count", 0))
	if v, ok := m.ApplicationProperties["x-retry-count"]; ok {
		var err error
		if retryCount, err = strconv.Atoi(fmt.Sprint(v)); err != nil {
			return err
		}
	}
	if !fails(m, retryCount) {
		return r.AcceptMessage(ctx, m)
	}
	if retryCount >= maxRetries {
		return r.RejectMessage(ctx, m, nil)
	}
	delay := backoff[min(retryCount, len(backoff)-1)]
	headers := maps.Clone(m.ApplicationProperties)
	if headers == nil {
		headers = map[string]any{}
	}
	headers["x-retry-count"] = strconv.Itoa(retryCount + 1)
	c := amqp.NewMessage(m.GetData())
	c.ApplicationProperties = headers
	c.Properties = &amqp.MessageProperties{
		To:          new(fmt.Sprintf("/exchanges/retry_exchange/delay.%d.%s", delay.Milliseconds(), cookbookQueue)),
		ContentType: m.Properties.ContentType,
	}
	if err := anywhere.Send(ctx, c, nil); err != nil {
		return err
	}
	return r.AcceptMessage(ctx, m)
}
