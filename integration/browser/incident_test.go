package browser

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// trouble is a kind of error that made messages of a queue fail.
type trouble struct {
	queue, kind, reason string
	text                func(n int) string
	count               int
	// at is how long ago the nth message was dead-lettered.
	at func(random *rand.Rand) time.Duration
	// delays are those after each attempt but the last; nil if there was one attempt.
	delays []time.Duration
	before string // the error of earlier attempts; "" for the same one
}

// failing is a message that is to be dead-lettered at a time.
type failing struct {
	trouble
	n  int
	at time.Time
}

// steady is a trickle over a day, outage is most of it in a while, and both are ages.
func steady(random *rand.Rand) time.Duration {
	return time.Duration(random.IntN(26*60)) * time.Minute
}

func outage(ago, width time.Duration) func(*rand.Rand) time.Duration {
	return func(random *rand.Rand) time.Duration {
		if random.IntN(9) == 0 {
			return steady(random)
		}
		return max(ago+time.Duration(random.NormFloat64()*float64(width)), 3*time.Minute)
	}
}

var troubles = []trouble{
	{"orders", "*url.Error", "exhausted", func(int) string {
		return "charge card: Post \"https://pay.example.com/charges\": context deadline exceeded"
	}, 148, outage(4*time.Hour, 75*time.Minute), []time.Duration{5 * time.Second, 30 * time.Second, 3 * time.Minute, 15 * time.Minute}, "charge card: HTTP 503 Service Unavailable"},
	{"orders", "*stock.UnknownSKUError", "permanent", func(n int) string { return fmt.Sprintf("reserve stock: SKU %d doesn't exist", 71000+n*7) }, 37, steady, nil, ""},
	{"orders", "*json.UnmarshalTypeError", "undecodable", func(int) string {
		return "json: cannot unmarshal string into Go struct field Order.total of type float64"
	}, 21, outage(19*time.Hour, 40*time.Minute), nil, ""},
	{"orders", "*fraud.Rejection", "fraud", func(n int) string { return fmt.Sprintf("fraud score 0.%d is above 0.9", 91+n%8) }, 9, steady, nil, ""},
	{"invoices", "*tax.StatusError", "exhausted", func(int) string { return "tax rates: HTTP 502 Bad Gateway" }, 64, outage(11*time.Hour, 100*time.Minute), []time.Duration{10 * time.Second, 2 * time.Minute, 20 * time.Minute}, ""},
	{"invoices", "*pgconn.PgError", "permanent", func(int) string {
		return `ERROR: duplicate key value violates unique constraint "invoices_number_key" (SQLSTATE 23505)`
	}, 12, steady, nil, ""},
	{"emails", "*textproto.Error", "permanent", func(n int) string {
		return fmt.Sprintf("smtp: mailbox customer%d@example.org is unavailable", 300+n)
	}, 53, steady, nil, ""},
	{"emails", "runtime.boundsError", "panicked", func(int) string { return "handler panicked: runtime error: index out of range [3] with length 3" }, 8, outage(40*time.Minute, 8*time.Minute), nil, ""},
}

var (
	shops   = []string{"berlin", "vienna", "zurich", "paris"}
	tenants = []string{"acme", "globex", "initech"}
)

// busy is a shop with dead letters of the last day in several queues, as workers would have left
// them. The broker's clock goes back by a day, and forward to each message's time.
func (s *site) busy() {
	t := s.t
	t.Helper()
	require.NotNil(t, s.memory)
	names := []string{"orders", "invoices", "emails", "shipments"}
	var queues []declare.QuorumQueue
	for _, name := range names {
		queues = append(queues, declare.QuorumQueue{Name: name, DeliveryLimit: 20})
	}
	topology, err := retry.Topology(retry.Policy{Strategy: retry.StrategyRepublish, MaxRetries: 4, Backoff: retry.Exponential(5*time.Second, 6)}, queues...)
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)

	random, now := rand.New(rand.NewPCG(3, 4)), time.Now()
	var all []failing
	for _, x := range troubles {
		for n := range x.count {
			all = append(all, failing{x, n, now.Add(-x.at(random))})
		}
	}
	slices.SortFunc(all, func(a, b failing) int { return cmp.Compare(a.at.UnixNano(), b.at.UnixNano()) })
	dead, done := s.deadLetterer(names...)
	for i, f := range all {
		s.memory.StepClock(f.at.Sub(now))
		dead(f.queue, s.message(f, i))
		s.memory.StepClock(now.Sub(f.at))
	}
	done()
	for queue, n := range map[string]int{"emails": 31, "shipments": 4} {
		p, err := client.NewPublisher[order](t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.PublishAll(t.Context(), make([]order, n)))
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	for _, queue := range []string{"orders", "invoices"} {
		go func() {
			ended <- s.conn.Consume(ctx, queue, client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
		}()
	}
	t.Cleanup(func() {
		stop()
		assert.NoError(t, errors.Join(<-ended, <-ended))
	})
}

// message is one that has failed as often as its trouble says, as package retry records it.
func (s *site) message(f failing, i int) *client.Message {
	noun := map[string]string{"orders": "order", "invoices": "invoice", "emails": "email"}[f.queue]
	lines := []map[string]any{{"sku": fmt.Sprintf("SKU-%d", 71000+f.n*7), "quantity": 1 + i%3, "price": 12.5}, {"sku": "SKU-40021", "quantity": 1, "price": 4.9}}
	body, err := json.Marshal(map[string]any{noun: fmt.Sprintf("%s-%d", noun, 48200+i), "customer": 300 + i%90, "currency": "EUR", "total": 17.4 + float64(i%40), "lines": lines})
	require.NoError(s.t, err)
	m := client.NewMessage(body)
	kind, created := "application/json", f.at
	for _, d := range f.delays {
		created = created.Add(-d - 2*time.Second)
	}
	first := created.Add(900 * time.Millisecond)
	created = created.Add(-300 * time.Millisecond)
	m.Properties.MessageID, m.Properties.ContentType, m.Properties.CreationTime = fmt.Sprintf("%s-%d", noun, 48200+i), &kind, &created
	m.ApplicationProperties = map[string]any{"shop": shops[i%len(shops)], "tenant": tenants[i%7%len(tenants)], "schema": int64(2)}
	text := f.text(f.n)
	history := map[string]any{"queue": f.queue, "type": f.kind, "worker": fmt.Sprintf("%s-%c%d", f.queue, 'a'+rune(i%3), 1+i%2), "exchange": "shop", "key": noun + ".created", "first": first.UnixMilli(), "last": f.at.UnixMilli()}
	var attempts []any
	at := first
	for k, d := range f.delays {
		failed := cmp.Or(f.before, text)
		if k == len(f.delays)-1 {
			failed = text
		}
		attempts = append(attempts, []any{at.UnixMilli(), d.Milliseconds(), failed})
		at = at.Add(d + 2*time.Second)
	}
	if attempts != nil {
		history["attempts"] = attempts
	}
	record, err := json.Marshal(history)
	require.NoError(s.t, err)
	m.Annotations = map[any]any{annotation.History: string(record), annotation.Retries: int64(len(f.delays)), annotation.Reason: f.reason, annotation.Error: text}
	return m
}

// deadLetterer returns a function that has the broker dead-letter a message from a work queue, and
// one that stops the consumers that do it.
func (s *site) deadLetterer(queues ...string) (dead func(queue string, m *client.Message), done func()) {
	t := s.t
	t.Helper()
	publishers := map[string]*client.Publisher[*client.Message]{}
	counts := map[string]int{}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, len(queues))
	for _, queue := range queues {
		p, err := client.NewPublisher[*client.Message](t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
		require.NoError(t, err)
		publishers[queue] = p
	}
	handle := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		a := d.Message().Annotations
		reason, _ := a[annotation.Reason].(string)
		text, _ := a[annotation.Error].(string)
		return client.DeadLetter{Reason: client.Reason(reason), Err: errors.New(text)}
	})
	for _, queue := range queues {
		go func() { ended <- s.conn.Consume(ctx, queue, handle, client.ConsumerConfig{Prefetch: 1}) }()
	}
	dead = func(queue string, m *client.Message) {
		t.Helper()
		require.NoError(t, publishers[queue].Publish(t.Context(), m))
		counts[queue]++
		waiting, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		require.NoError(t, s.memory.Queue(queue+".dead").Await(waiting, func(c hopbacktest.Counts) bool { return c.Ready == counts[queue] }))
	}
	return dead, func() {
		stop()
		for range queues {
			assert.NoError(t, <-ended)
		}
	}
}
