package retry

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/refusal"
)

// brokerOf stands in for a broker with one quorum queue, which dead-letters as Topology
// declares it. Nothing else exists there.
type brokerOf struct{ queue string }

func (b brokerOf) Request(_ context.Context, method, path string, _ any) (int, any, error) {
	if method == "GET" && path == "/queues/"+b.queue {
		return 200, map[string]any{"name": b.queue, "type": "quorum", "durable": true, "exclusive": false, "auto_delete": false, "leader": "n", "replicas": []any{"n"}, "message_count": uint64(0), "consumer_count": uint32(0), "arguments": map[string]any{
			"x-queue-type": "quorum", "x-dead-letter-exchange": "dead_letter_exchange", "x-dead-letter-routing-key": b.queue,
			"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
		}}, nil
	}
	if strings.HasPrefix(path, "/bindings") {
		return 200, []any{}, nil
	}
	return 404, nil, nil
}

// Several consumers share a decorator, and their queues have one name. Each consumer retries
// as its own broker needs it, whichever prepared last.
func TestEachConsumerOfADecoratorHasItsOwnState(t *testing.T) {
	t.Parallel()
	h := With(Policy{Strategy: StrategyAuto, Backoff: Delays(time.Minute), Waive: AllGuards()})(returns(errA))
	newer, endNewer := refusal.Context(t.Context())
	older, endOlder := refusal.Context(t.Context())
	prepare := func(ctx context.Context, version string) {
		require.NoError(t, client.Prepare(ctx, h, client.Start{Queue: "orders", Broker: client.Broker{Version: version}, Management: brokerOf{"orders"}}))
	}
	check := func() {
		for range 3 {
			for ctx, dead := range map[context.Context]bool{newer: false, older: true} {
				o, ok := h.Handle(ctx, client.NewDelivery("orders", client.NewMessage(nil))).(client.Modify)
				require.True(t, ok)
				assert.Equal(t, dead, o.DeadLetter)
			}
		}
	}
	prepare(newer, "4.3.6")
	prepare(older, "4.0.5")
	check()
	prepare(newer, "4.3.6") // it has lost its connection while it started
	check()

	// A ctx of no consumer can't tell the two apart.
	requeue, ok := h.Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil))).(client.Requeue)
	require.True(t, ok)
	assert.True(t, requeue.Failed)
	assert.ErrorIs(t, requeue.Err, errOtherCtx)
	// With one of them gone, there is no doubt.
	require.NoError(t, endOlder(nil))
	o, ok := h.Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil))).(client.Modify)
	require.True(t, ok)
	assert.False(t, o.DeadLetter)
	require.NoError(t, endNewer(nil))
}

// A program may start and stop consumers for as long as it likes.
func TestStatesOfEndedConsumersAreForgotten(t *testing.T) {
	t.Parallel()
	d := With(Policy{})(returns(errA)).(*decorator)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 50 {
				ctx, end := refusal.Context(t.Context())
				queue := fmt.Sprint("orders", i)
				assert.NoError(t, client.Prepare(ctx, d, client.Start{Queue: queue}))
				assert.IsType(t, client.Forward{}, d.Handle(ctx, client.NewDelivery(queue, client.NewMessage(nil))))
				assert.NoError(t, end(nil))
			}
		})
	}
	wg.Wait()
	ctx, end := refusal.Context(t.Context())
	require.NoError(t, client.Prepare(ctx, d, client.Start{Queue: "orders"}))
	assert.Len(t, *d.states.all.Load(), 1)
	require.NoError(t, end(nil))
}

// Two consumers of the failed queue have clocks of their own, too.
func TestEachConsumerOfCentralHasItsOwnClock(t *testing.T) {
	t.Parallel()
	h := Central(Policy{Backoff: Delays(time.Minute), GiveUpAfter: time.Hour}, CentralConfig{Queues: []string{"orders"}})
	for _, ahead := range []time.Duration{0, -48 * time.Hour, 48 * time.Hour} {
		ctx, end := refusal.Context(t.Context())
		defer func() { assert.NoError(t, end(nil)) }()
		require.NoError(t, client.Prepare(ctx, h, client.Start{
			Queue: "failed_queue", BrokerTime: func(context.Context) (time.Time, error) { return time.Now().Add(ahead), nil },
		}))
		defer func() {
			f, ok := h.Handle(ctx, client.NewDelivery("failed_queue", failed("orders", "orders", "rejected"))).(client.Forward)
			require.True(t, ok)
			assert.WithinDuration(t, time.Now().Add(ahead), DeadLetterOf(f.Message).FirstFailure, time.Minute)
		}()
	}
}
