package officialclient_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/adapter/officialclient"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

var errBroken = errors.New("broken")

// handlerResults are those that integration's TestHandlersResultsMeanTheSame has, too.
var handlerResults = []func() error{
	func() error { return nil },
	func() error { return errBroken },
	func() error { panic("ouch") },
	func() error { runtime.Goexit(); return nil },
	func() error { return client.Requeue{} },
	func() error { return client.Requeue{Failed: true} },
	func() error { return client.Modify{} },
	func() error { return client.Modify{DeadLetter: true, Annotations: map[string]any{"x-opt-mine": "1"}} },
	func() error { return client.DeadLetter{} },
	func() error {
		return client.DeadLetter{Reason: "ugly", Err: errBroken, Annotations: map[string]any{"x-opt-mine": "1"}}
	},
	func() error {
		return client.DeadLetter{Reason: "ugly", Annotations: map[string]any{"x-opt-mine": nil}}
	},
	func() error { return fmt.Errorf("so: %w", client.DeadLetter{Reason: "ugly"}) },
	func() error { return errors.Join(errBroken, client.DeadLetter{Reason: "ugly"}) },
	func() error { return errors.Join(client.DeadLetter{Reason: "first"}, client.Requeue{}) },
	func() error { return &client.DeadLetter{Reason: "ugly"} },
	func() error { return (*client.DeadLetter)(nil) },
	func() error {
		return client.Forward{To: address.Queue("copies"), Message: client.NewMessage([]byte("0"))}
	},
	func() error { return client.Forward{} },
	func() error { return client.Forward{Else: client.DeadLetter{Reason: "else"}} },
	func() error { return retry.Permanent(errBroken) },
	func() error { return retry.Discard(errBroken) },
	func() error { return retry.Snooze(10 * time.Millisecond) },
	func() error { return retry.After(10*time.Millisecond, errBroken) },
}

// Each result of a handler means the same to Serve and to the consumer of package client,
// with and without retry.With.
func TestServeTreatsResultsAsConsumeDoes(t *testing.T) {
	t.Parallel()
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(10 * time.Millisecond)}
	for name, with := range map[string]client.Middleware{
		"bare":       func(h client.Handler) client.Handler { return h },
		"retry.With": retry.With(policy),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, conn := memory(t, "4.3.6")
			topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "consumed", DeliveryLimit: 20}, declare.QuorumQueue{Name: "served", DeliveryLimit: 20})
			require.NoError(t, err)
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "copies", DeadLetter: declare.Drop()})
			own, err := client.Connect(t.Context(), b.URL(), client.Config{})
			require.NoError(t, err)
			defer func() { _ = own.Close(context.Background()) }()
			_, err = declare.Apply(t.Context(), own.Management(), topology)
			require.NoError(t, err)

			consumed := became(t, b, own, "consumed", with, func(ctx context.Context, h client.Handler) error {
				return own.Consume(ctx, "consumed", h, client.ConsumerConfig{Concurrency: 1, NoIsolation: true})
			})
			consumer, err := conn.NewConsumer(t.Context(), "served", nil)
			require.NoError(t, err)
			served := became(t, b, own, "served", with, func(ctx context.Context, h client.Handler) error {
				return officialclient.Serve(ctx, own, consumer, "served", h, officialclient.Config{Concurrency: 1})
			})
			assert.Equal(t, consumed, served)
			assert.Equal(t, 2, b.Queue("copies").Counts().Ready)
		})
	}
}

// became returns what becomes of messages: how often each was handled, and as which dead
// letter it ended.
func became(t *testing.T, b *hopbacktest.Broker, conn *client.Conn, queue string, with client.Middleware, run func(context.Context, client.Handler) error) []string {
	t.Helper()
	p, err := client.NewPublisher[int](t.Context(), conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	for i := range handlerResults {
		require.NoError(t, p.Publish(t.Context(), i))
	}
	require.NoError(t, p.Close(t.Context()))
	var mu sync.Mutex
	calls := make([]int, len(handlerResults))
	h := with(client.JSON(func(_ context.Context, n int) error {
		mu.Lock()
		calls[n]++
		first := calls[n] == 1
		mu.Unlock()
		if first {
			return handlerResults[n]()
		}
		return nil
	}))
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- run(ctx, h) }()
	for _, waits := range []string{queue, "delay_10ms", queue} {
		if b.Queue(waits).Exists() {
			require.NoError(t, b.Queue(waits).Await(ctx, func(c hopbacktest.Counts) bool { return c.Messages == 0 }))
		}
	}
	stop()
	require.NoError(t, <-done)
	all := make([]string, len(handlerResults))
	for i, n := range calls {
		all[i] = fmt.Sprint(n, " calls")
	}
	for _, m := range b.Queue(queue + ".dead").Messages() {
		var n int
		require.NoError(t, client.JSONCodec{}.Decode(m.Message, &n))
		a := m.Message.Annotations
		all[n] += fmt.Sprint(", dead: ", a[client.AnnotationReason], a[client.AnnotationError], a["x-opt-mine"], len(retry.AttemptsOf(m.Message)))
	}
	return all
}

// Serve can't park a message, so it is dead-lettered, and not delivered again at once, without end.
func TestServeDeadLettersWhatAHandlerParks(t *testing.T) {
	t.Parallel()
	b, conn := memory(t, "4.4.0")
	own, err := client.Connect(t.Context(), b.URL(), client.Config{})
	require.NoError(t, err)
	defer func() { _ = own.Close(context.Background()) }()
	_, err = declare.Apply(t.Context(), own.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeadLetter: declare.ToQueue("dead")}, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
	consumer, err := conn.NewConsumer(t.Context(), "orders", nil)
	require.NoError(t, err)
	p, err := client.NewPublisher[int](t.Context(), own, address.Queue("orders"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), 1))
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	done := make(chan error, 1)
	go func() {
		done <- officialclient.Serve(ctx, own, consumer, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			return client.Park{Token: "payment", Until: time.Now().Add(time.Hour), Err: errBroken, Annotations: map[string]any{"x-opt-mine": "1"}}
		}), officialclient.Config{Concurrency: 1})
	}()
	require.NoError(t, b.Queue("dead").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready == 1 }))
	stop()
	require.NoError(t, <-done)
	assert.Zero(t, b.Queue("orders").Counts().Messages)
	a := b.Queue("dead").Messages()[0].Message.Annotations
	assert.Equal(t, string(client.ReasonUnparkable), a[client.AnnotationReason])
	assert.Contains(t, a[client.AnnotationError], "client.Park works only in")
	assert.Contains(t, a[client.AnnotationError], "broken")
	assert.Equal(t, "1", a["x-opt-mine"])
}
