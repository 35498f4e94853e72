package retry

import (
	"context"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/internal/startcheck"
)

// During a memory or disk alarm RabbitMQ answers no management requests, so the topology can't be
// checked. But a backlog may be the cause of the alarm, and only consumers can shrink it. So a
// consumer starts, and runs the check when the broker answers. Until then it acknowledges what its
// handler handles, and holds every message that is to be retried or dead-lettered: it doesn't know
// by which strategy a message can wait, or whether the queue would drop a dead letter.

// newState returns what a consumer knows about its queue without asking the broker.
func (d *decorator) newState(ctx context.Context, s client.Start) *queueState {
	q := d.plan.stateFor(s.Queue, StrategyRepublish)
	q.consumer, q.log, q.clock.own = refusal.Of(ctx), logOf(s), brokerclock.OwnClock(ctx)
	q.holdsMessages = !oldbroker.Of(s.Broker.AtLeast).IgnoresDeliveryTime
	q.prepared = true
	return q
}

// check chooses the strategy, runs the checks, and reads the broker's clock.
func (d *decorator) check(ctx context.Context, s client.Start) (*queueState, error) {
	q := d.newState(ctx, s)
	var err error
	if q.strategy, q.watch, q.canHold, err = d.plan.prepare(ctx, s); err != nil {
		return nil, err
	}
	if q.strategy == StrategyRepublish && q.noKey != nil {
		return nil, q.noKey
	}
	if d.plan.jitter != JitterNone && q.strategy != StrategyNative && d.plan.ladder == nil {
		q.log.Warn("hopback: Policy.Jitter has no effect, because StrategyAuto uses delay queues here; use StrategyNative or Policy.AnyDelay, or remove the jitter", "queue", s.Queue, "strategy", string(q.strategy))
	}
	if q.tokens = !oldbroker.Of(s.Broker.AtLeast).LacksTokens && q.strategy == StrategyNative; d.plan.claimable && !q.tokens {
		q.log.Warn("hopback: Policy.Claimable has no effect, because StrategyAuto uses delay queues here, or the broker is older than RabbitMQ 4.4", "queue", s.Queue, "strategy", string(q.strategy), "broker", s.Broker.Version)
	}
	if q.strategy == StrategyNative || q.canHold || d.plan.giveUp > 0 {
		q.clock.asks(q, s)
	}
	if q.strategy == StrategyNative || d.plan.giveUp > 0 {
		q.clock.learn(ctx)
	}
	return q, nil
}

// startChecked returns the result of check, or q if an alarm keeps the broker from answering. q then
// waits for the check, which stops the consumer if it fails.
func (d *decorator) startChecked(ctx context.Context, s client.Start, q *queueState, check func(context.Context) (*queueState, error)) (*queueState, error) {
	found, pending, err := startcheck.Check[*queueState]{
		Run: check, Alarms: inside.AlarmsOf(ctx),
		Stop: func(err error) { refusal.Stop(ctx, err) }, Log: q.log.With("queue", s.Queue),
	}.Start(ctx, d.states.put)
	if pending == nil {
		return found, err
	}
	q.pending = pending
	q.log.Warn("hopback: topology check: the broker answers no requests during its memory or disk alarm. The consumer starts without the check and runs it after the alarm; until then it holds messages that must be retried or dead-lettered", "queue", s.Queue)
	return q, nil
}

// start checks the topology of the queue.
func (d *decorator) start(ctx context.Context, s client.Start) (*queueState, error) {
	q, err := d.startChecked(ctx, s, d.newState(ctx, s), func(ctx context.Context) (*queueState, error) { return d.check(ctx, s) })
	if err == nil && q.pending != nil && d.plan.strategy == StrategyRepublish && q.noKey != nil {
		q.pending.Cancel()
		return nil, q.noKey
	}
	return q, err
}

// waits reports whether the check of the queue waits for the end of an alarm.
func (q *queueState) waits() bool {
	if q.pending == nil {
		return false
	}
	select {
	case <-q.pending.Done():
		return false
	default:
		return true
	}
}

// onceChecked decides about a delivery whose handler has returned err: now, or when the check that
// waits for the end of an alarm is done.
func (d *decorator) onceChecked(ctx context.Context, del *client.Delivery, q *queueState, was past, err error, decide func(*queueState) error) error {
	p := q.pending
	switch {
	case p == nil:
		return decide(q)
	case !q.waits():
		return decide(p.Result())
	}
	ctx = context.WithoutCancel(ctx) // the handler's ctx has ended by then
	return &inside.Later{Ready: p.Done(), Err: err, Then: func() (err error) {
		returned := false
		defer outcome.Catch(&returned, func(value any, stack []byte) { err = d.panicked(ctx, del, p.Result(), was, value, stack) })
		err = decide(p.Result())
		returned = true
		return err
	}}
}
