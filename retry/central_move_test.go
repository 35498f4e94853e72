package retry

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
)

// moving is Central on a topology by which it moves messages.
func moving(t *testing.T, p Policy, cfg CentralConfig) *central {
	t.Helper()
	cfg.Queues = []string{"orders", "emails"}
	c := Central(p, cfg).(*central)
	require.NoError(t, c.invalid)
	for _, name := range cfg.Queues {
		q := c.retries.plan.stateFor(name, StrategyRepublish)
		q.watch = newWatch(nil, name, time.Now, func(context.Context) (inspection, error) { return inspection{}, errors.New("not now") })
		q.watch.moves.Store(true)
		q.prepared = true
		c.retries.states.put(q)
	}
	return c
}

func (c *central) settles(m *client.Message) client.Outcome {
	return client.OutcomeOf(c.Handle(context.Background(), client.NewDelivery("failed_queue", m)))
}

func TestCentralMovesMessages(t *testing.T) {
	t.Parallel()
	c := moving(t, Policy{MaxRetries: 1}, CentralConfig{})
	var log bytes.Buffer
	for _, q := range *c.retries.states.all.Load() {
		q.log = slog.New(slog.NewTextHandler(&log, nil))
	}
	moved := func(m *client.Message) map[string]any {
		t.Helper()
		o, ok := c.settles(m).(client.Modify)
		require.True(t, ok)
		assert.True(t, o.DeadLetter)
		return o.Annotations
	}
	rejected := failed("orders", "orders", "rejected")
	rejected.Annotations[annotation.Queue], rejected.Annotations["x-reason"], rejected.Annotations["x-error"] = "payments", "timeout", "gone"
	h := moved(rejected)
	assert.Equal(t, 1, strings.Count(log.String(), "an attempt failed"), "%s", &log)
	assert.Equal(t, []any{"waiting", int64(10_000), "orders", int64(1), "gone", "", ""},
		[]any{h[client.AnnotationReason], h[annotation.Delay], h[annotation.Queue], h[annotation.Retries], h[client.AnnotationError], h["x-reason"], h["x-error"]})
	assert.NotContains(t, h, "x-error-type")
	assert.NotContains(t, h, CountProperty)

	// A dead letter, of a message that has a counter of another worker.
	spent := failed("orders", "orders", "rejected", "hold_10s", "expired", "failed_queue", "rejected")
	for k, v := range h {
		spent.Annotations[k] = v
	}
	spent.ApplicationProperties = map[string]any{CountProperty: "1"}
	h = moved(spent)
	assert.Equal(t, []any{"exhausted", int64(0), "orders", int64(1), int64(1)}, []any{h[client.AnnotationReason], h[annotation.Delay], h[annotation.Queue], h[annotation.Retries], h[CountProperty]})

	// That is what it says in its dead-letter queue.
	dead := failed("failed_queue", "failed_queue", "rejected", "orders", "rejected", "hold_10s", "expired")
	for k, v := range h {
		dead.Annotations[k] = v
	}
	d := DeadLetterOf(dead)
	assert.Equal(t, [4]string{"exhausted", "orders", "shop", "order.placed"}, [4]string{string(d.Reason), d.Queue, d.Exchange, d.RoutingKey})
	assert.True(t, evidenceOf(Names{}).Failed(dead, "anywhere", "orders"))

	h = moved(failed("others", "others", "rejected"))
	assert.Equal(t, []any{"unknown-queue", int64(-1), "others"}, []any{h[client.AnnotationReason], h[annotation.Delay], h[annotation.Queue]})
}

// What a settlement can't change is copied, as before.
func TestCentralCopiesWhatCannotBeMoved(t *testing.T) {
	t.Parallel()
	rule := Policy{MaxRetries: 3, Rules: []ErrorRule{{If: OnReason(ReasonDeliveryLimit), Do: ActionRetry}}}
	assert.IsType(t, client.Forward{}, moving(t, rule, CentralConfig{}).settles(failed("orders", "orders", "delivery_limit")), "its delivery count would go along")
	m := failed("orders")
	m.ApplicationProperties = map[string]any{"reason": "a"}
	assert.IsType(t, client.Forward{}, moving(t, Policy{}, CentralConfig{ReasonKey: "reason"}).settles(m), "a retry removes it")
	assert.IsType(t, client.Modify{}, moving(t, Policy{}, CentralConfig{}).settles(m))
}

func TestOneExitOfTheFailedQueue(t *testing.T) {
	t.Parallel()
	exits := func(p Policy, cfg CentralConfig) (queues, exchanges []string) {
		topology, err := CentralTopology(p, cfg, declare.QuorumQueue{Name: "orders"})
		require.NoError(t, err)
		for _, b := range topology.Bindings {
			if b.Source != "given_up_exchange" || b.Key != "failed_queue" {
				continue
			}
			if b.Queue != "" {
				queues = append(queues, b.Queue)
			} else {
				exchanges = append(exchanges, b.Exchange)
			}
		}
		return queues, exchanges
	}
	queues, exchanges := exits(Policy{}, CentralConfig{})
	assert.Empty(t, queues)
	assert.Equal(t, []string{"failed_exchange"}, exchanges)
	for _, c := range []struct {
		p   Policy
		cfg CentralConfig
	}{{Policy{AnyDelay: &Ladder{}}, CentralConfig{}}, {Policy{}, CentralConfig{Counter: "count"}}} {
		queues, exchanges = exits(c.p, c.cfg)
		assert.Equal(t, []string{"failed_queue.dead"}, queues)
		assert.Empty(t, exchanges)
	}
}
