package retry

import (
	"math/rand/v2"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
)

// InPlace is for packages stream and partition: see inside.InPlace.
func (d *decorator) InPlace() (inside.Policy, error) {
	p := d.policy
	p.Strategy = StrategyNative // which needs no delay queues
	limit := p.MaxRetries
	p.MaxRetries = min(limit, maxRetries)
	pl, err := p.plan()
	if err != nil {
		return nil, err
	}
	pl.max = max(pl.max, limit)
	for i, r := range p.Rules {
		if r.MaxRetries == 0 {
			pl.rules[i].max = max(pl.rules[i].max, limit)
		}
	}
	return inPlace{&pl}, nil
}

type inPlace struct{ plan *plan }

// Decide is the policy's decision.
func (p inPlace) Decide(a inside.Attempt) inside.Decision {
	what := p.plan.decide(failure{
		err: readable(a.Err, a.Says), says: a.Says, count: a.Retries, first: a.First, now: a.Now, strategy: StrategyNative, u: rand.Float64(),
	})
	switch what.do {
	case decidedDiscard:
		return inside.Decision{Discard: true}
	case decidedDead:
		return inside.Decision{Reason: string(what.reason), Err: what.err}
	}
	return inside.Decision{Delay: what.delay, Asked: what.asked, Counted: what.count > a.Retries}
}

// Past is what the message's history says.
func (p inPlace) Past(m *amqp.Message) inside.Past {
	was := pastOf(m, "").read()
	past := inside.Past{Retries: was.count, First: was.first}
	if t := was.parsed; t != nil && !millis(m.Annotations[annotation.ReplayedAt]).After(millis(t.Last)) {
		past.Last, past.Delay = millis(t.Last), time.Duration(min(max(t.Delay, 0), maxDelay.Milliseconds()))*time.Millisecond
	}
	return past
}

// History is the same as retry.With writes.
func (p inPlace) History(queue string, m *amqp.Message, retries int, first, now time.Time, delay time.Duration, err error) map[string]any {
	was := pastOf(m, "").read()
	was.count = retries
	if !first.IsZero() {
		was.first = first
	}
	a := p.plan.account(client.NewDelivery(queue, m), err, was, now)
	return a.annotations(delay)
}
