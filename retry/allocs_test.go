package retry

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
)

// The bounds are what it takes: one more fails. What the consumer does with the outcome
// comes on top, see client's tests.
func TestAllocationsOfEachStrategy(t *testing.T) {
	notUnderRace(t)
	failed := errors.New("failed")
	for _, c := range []struct {
		strategy                Strategy
		success, retried, ended int
	}{{StrategyRepublish, 0, 10, 8}, {StrategyDeadLetter, 0, 9, 8}, {StrategyNative, 0, 10, 8}} {
		p := Policy{Strategy: c.strategy, Backoff: Delays(time.Minute), MaxRetries: 1, Worker: "w"}
		m := client.NewMessage([]byte("body"))
		m.Annotations = map[any]any{"x-exchange": "shop", "x-routing-key": "order.placed"}
		del := client.NewDelivery("orders", m)
		count := func(err error) int {
			d := With(p)(returns(err)).(*decorator)
			d.states.put(d.plan.stateFor("orders", c.strategy))
			return int(testing.AllocsPerRun(1000, func() { _ = d.Handle(t.Context(), del) }))
		}
		assert.LessOrEqual(t, count(nil), c.success, "%v, handled", c.strategy)
		assert.LessOrEqual(t, count(failed), c.retried, "%v, to be retried", c.strategy)
		assert.LessOrEqual(t, count(Permanent(failed)), c.ended, "%v, dead", c.strategy)
	}
}

// What Central does to a message that a worker has rejected is one allocation more than a
// decorator's failure: the error, which a handler brings along.
func TestAllocationsOfCentral(t *testing.T) {
	notUnderRace(t)
	count := func(m *client.Message, p Policy) int {
		h := Central(p, CentralConfig{Queues: []string{"orders"}})
		d := client.NewDelivery("failed_queue", m)
		return int(testing.AllocsPerRun(1000, func() { _ = h.Handle(t.Context(), d) }))
	}
	once := Policy{Backoff: Delays(time.Minute), MaxRetries: 1, Worker: "w"}
	rejected := failed("orders", "orders", "rejected")
	assert.LessOrEqual(t, count(rejected, once), 11, "to be retried")
	rejected.ApplicationProperties = map[string]any{CountProperty: int64(1)}
	assert.LessOrEqual(t, count(rejected, once), 20, "dead")
}
