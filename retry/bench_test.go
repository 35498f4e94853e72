package retry

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/outcome"
)

func BenchmarkDecide(b *testing.B) {
	plain := fmt.Errorf("charging: %w", errA)
	policy := Policy{Rules: []ErrorRule{{If: On(errB), Do: ActionDeadLetter}}, RetryIf: On(errA)}
	pl, err := policy.plan()
	if err != nil {
		b.Fatal(err)
	}
	for name, err := range map[string]error{"plain": plain, "permanent": Permanent(plain), "after": After(time.Second, plain), "by a rule": errors.Join(plain, errB)} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			f := failure{err: err, says: outcome.Read[client.Outcome](err), count: 1, now: time.Now()}
			for b.Loop() {
				pl.decide(f)
			}
		})
	}
}

// BenchmarkStrategy is all that a failure costs before the consumer carries it out:
// the decision, the history, and the copy where there is one.
func BenchmarkStrategy(b *testing.B) {
	for _, s := range []Strategy{StrategyRepublish, StrategyDeadLetter, StrategyNative} {
		b.Run(string(s), func(b *testing.B) {
			b.ReportAllocs()
			d := With(Policy{Strategy: s, Worker: "w"})(returns(errA)).(*decorator)
			d.states.put(d.plan.stateFor("orders", s))
			m := client.NewMessage([]byte("body"))
			m.Annotations = map[any]any{"x-exchange": "shop", "x-routing-key": "order.placed"}
			del := client.NewDelivery("orders", m)
			for b.Loop() {
				_ = d.Handle(b.Context(), del)
			}
		})
	}
}

func BenchmarkAutopsy(b *testing.B) {
	pl, err := Policy{Worker: "w"}.plan()
	if err != nil {
		b.Fatal(err)
	}
	m := client.NewMessage([]byte("body"))
	m.Annotations = map[any]any{"x-last-death-reason": "rejected", "x-last-death-queue": "orders", client.AnnotationReason: string(ReasonExhausted)}
	for k, v := range pl.history(client.NewDelivery("orders", m), errA, past{count: 5}, time.Now()) {
		m.Annotations[k] = v
	}
	b.ReportAllocs()
	for b.Loop() {
		if DeadLetterOf(m).Reason != ReasonExhausted {
			b.Fatal("another reason")
		}
	}
}

func BenchmarkCentral(b *testing.B) {
	h := Central(Policy{}, CentralConfig{Queues: []string{"orders"}})
	m := failed("orders", "orders", "rejected")
	m.ApplicationProperties = map[string]any{"tenant": "acme"}
	d := client.NewDelivery("failed_queue", m)
	b.ReportAllocs()
	for b.Loop() {
		_ = h.Handle(b.Context(), d)
	}
}
