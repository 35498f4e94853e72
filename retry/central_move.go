package retry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/annotation"
)

// Central moves messages where the topology allows it: it settles a message of the failed
// queue as modified and undeliverable-here, and the broker dead-letters it by the annotations
// of that settlement. Nothing is published. The message stays what its sender published,
// including what AMQP 1.0 can't show, such as nested headers of AMQP 0-9-1.
//
// The failed queue's own arguments are those that it always had. It dead-letters to
// given_up_exchange with its own name as the routing key, and so do the delay queues to
// return_exchange. From both a binding leads to the failed exchange, which routes by headers.

// Values of annotation.Delay in messages that Central dead-letters.
const (
	delayDead    int64 = 0  // to the dead-letter queue of annotation.Queue
	delayUnknown int64 = -1 // to the dead-letter queue of the failed queue
)

// centralPlan is the plan of a Central: what leads its work queues' dead letters to the failed queue, and
// what leads from there back to the work queues, or to dead-letter queues. It doesn't change.
type centralPlan struct {
	*plan
	cfg CentralConfig
}

// canMove reports whether CentralTopology declares what moving needs.
func (c centralPlan) canMove() bool {
	return c.ladder == nil && c.cfg.Counter == "" && c.cfg.FailedQueue == c.names.FailedQueue
}

// failedExits are the bindings by which messages leave the failed queue, and those by which
// they return after a delay.
func (c centralPlan) failedExits() declare.Topology {
	n := c.names
	t := declare.Topology{Bindings: []declare.Binding{
		{Source: n.GivenUpExchange, Exchange: n.FailedExchange, Key: n.FailedQueue},
		c.failedHeaders(n.DeadLetterQueue(n.FailedQueue), "rejected", map[string]any{annotation.Delay: delayUnknown}),
	}}
	if len(c.levels) > 0 {
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.ReturnExchange, Exchange: n.FailedExchange, Key: n.FailedQueue})
	}
	for _, d := range c.levels {
		t.Queues = append(t.Queues, holding(n.HoldQueue(d), d, n.ReturnExchange))
		// The mark isn't that of StrategyDeadLetter: what a worker rejects later must come to
		// Central, and not to a delay queue.
		t.Bindings = append(t.Bindings, c.failedHeaders(n.HoldQueue(d), "rejected", map[string]any{
			client.AnnotationReason: reasonWaits, annotation.Delay: d.Milliseconds(),
		}))
	}
	return t
}

// failedReturns are the bindings to a work queue and to its dead-letter queue.
func (c centralPlan) failedReturns(queue string) declare.Topology {
	var t declare.Topology
	if len(c.levels) > 0 {
		t.Bindings = append(t.Bindings, c.failedHeaders(queue, "expired", map[string]any{client.AnnotationReason: reasonWaits, annotation.Queue: queue}))
	}
	t.Bindings = append(t.Bindings, c.failedHeaders(c.names.DeadLetterQueue(queue), "rejected", map[string]any{annotation.Delay: delayDead, annotation.Queue: queue}))
	return t
}

// failedHeaders is a binding of the failed exchange, for messages with these annotations that
// were last dead-lettered for that reason.
func (c centralPlan) failedHeaders(queue, reason string, headers map[string]any) declare.Binding {
	headers["x-last-death-reason"] = reason
	return declare.Binding{Source: c.names.FailedExchange, Queue: queue, Match: declare.MatchAllWithX, Headers: headers}
}

// failedExchanges are those that moving needs.
func (c centralPlan) failedExchanges() (all []declare.Exchange) {
	n := c.names
	all = append(all, declare.Exchange{Name: n.FailedExchange, Type: declare.ExchangeHeaders, AlternateExchange: n.parkingExchange()})
	if len(c.levels) > 0 {
		all = append(all, declare.Exchange{Name: n.ReturnExchange, Type: declare.ExchangeDirect, AlternateExchange: n.parkingExchange()})
	}
	return all
}

// copiedExit leads what the failed queue dead-letters to its dead-letter queue, where Central
// doesn't move. With it and the exits above each message would be in two places.
func (c centralPlan) copiedExit() declare.Binding {
	return declare.Binding{Source: c.names.GivenUpExchange, Queue: c.names.DeadLetterQueue(c.cfg.FailedQueue), Key: c.cfg.FailedQueue}
}

var errUnchecked = errors.New("the work queue can't be inspected")

// notMoving is why Central copies the messages of a work queue, or nil. It assumes the
// exchanges as CentralTopology declares them, since AMQP doesn't show them.
func (c *central) notMoving(ctx context.Context, start client.Start, queue string) error {
	pl := c.plan()
	switch {
	case pl.ladder != nil:
		return errors.New("the policy has AnyDelay")
	case c.cfg.Counter != "":
		return errors.New("CentralConfig.Counter is an application property, which only a copy can change")
	}
	exits := pl.failedExits()
	t := join(exits, pl.failedReturns(queue))
	old := pl.copiedExit()
	s, whole := c.virtualHost(ctx, logOf(start))
	if !whole {
		var err error
		of := t
		of.Queues = append(slices.Clone(t.Queues), declare.QuorumQueue{Name: c.cfg.FailedQueue, DeadLetter: declare.Drop()})
		of.Bindings = append(slices.Clone(t.Bindings), old)
		if s, err = check.Read(ctx, check.Sources{AMQP: start.Management}, of); err != nil {
			return err
		}
	}
	if i := slices.IndexFunc(s.Queues, func(q declare.QueueInfo) bool { return q.Name == c.cfg.FailedQueue }); i < 0 {
		return errors.New("the failed queue can't be inspected")
	} else if err := c.leadsOut(s, s.Queues[i]); err != nil {
		return err
	}
	if slices.ContainsFunc(s.Bindings, func(b declare.Binding) bool {
		return b.Source == old.Source && b.Queue == old.Queue && b.Key == old.Key
	}) {
		return fmt.Errorf("exchange %q still has the binding to %q that copying needs; call retry.TakeOver, or run hopback retry take-over", old.Source, old.Queue)
	}
	// Other queues of the virtual host, such as an application's transient ones, don't matter.
	for _, f := range check.VerifyOwn(s.Assume(t), t).Findings {
		if f.Resource.Kind == "binding" || f.Resource.Kind == "queue" {
			return fmt.Errorf("%s: %s; apply retry.CentralTopology", f.Resource, f.Problem)
		}
	}
	return nil
}

// leadsOut checks that the failed queue dead-letters at least once, to given_up_exchange.
func (c *central) leadsOut(s check.Snapshot, failed declare.QueueInfo) error {
	args := s.Effective(failed)
	if failed.Type != "quorum" {
		return fmt.Errorf("the failed queue is a %s queue, which keeps no annotations", failed.Type)
	}
	for key, want := range map[string]string{
		"x-dead-letter-exchange": c.retries.plan.names.GivenUpExchange, "x-dead-letter-routing-key": c.cfg.FailedQueue,
		"x-dead-letter-strategy": "at-least-once", "x-overflow": string(declare.OverflowRejectPublish),
	} {
		if args[key] != want {
			return fmt.Errorf("the failed queue's %s is %.100q, and should be %.100q", key, fmt.Sprint(args[key]), want)
		}
	}
	return nil
}

// moves reports whether messages of the queue are moved, according to the last check.
func (q *queueState) moves() bool { return q.watch != nil && q.watch.moves.Load() }

// movable reports whether a message can be retried without a copy. A moved message keeps its
// delivery count, so one that has reached the delivery limit would be dead-lettered again at
// once. And an annotation can't replace an application property.
func (c *central) movable(f arrival) bool {
	if f.dead == ReasonDeliveryLimit || len(c.retries.plan.levels) == 0 {
		return false
	}
	return !slices.ContainsFunc(c.retries.forgets, func(key string) bool { return f.message.ApplicationProperties[key] != nil })
}

// move has the broker hold a message for a retry.
func (c *central) move(ctx context.Context, d *client.Delivery, q *queueState, what decision, f arrival, now time.Time) client.Outcome {
	f.was.count = what.count
	a := c.retries.plan.account(d, f.err, f.was, now)
	// Nobody but Central could send it through a second delay queue, so it waits in one.
	levels := c.retries.plan.levels
	up, _ := slices.BinarySearch(levels, what.delay)
	delay := levels[min(up, len(levels)-1)]
	q.reportRetry(ctx, d, what, StrategyDeadLetter, delay, &a, f.err)
	q.watch.retrySent(delay)
	h := a.annotations(delay)
	h[client.AnnotationReason], h[annotation.Delay] = reasonWaits, delay.Milliseconds()
	c.counts(h, f, what.count)
	for _, key := range c.retries.forgets {
		if f.message.Annotations[key] != nil {
			h[key] = "" // a settlement can't take it away
		}
	}
	return client.Modify{DeadLetter: true, Annotations: h, Err: f.err}
}

// counts writes CountProperty if the message has it.
func (c *central) counts(h map[string]any, f arrival, n int) {
	if f.message.Annotations[CountProperty] != nil || f.message.ApplicationProperties[CountProperty] != nil {
		h[CountProperty] = int64(n)
	}
}

// movesDead reports whether a message can be moved to the dead-letter queue. The bindings for
// messages of unknown queues are those of every queue.
func (c *central) movesDead(f arrival) bool {
	queue := f.err.Queue
	if !f.known {
		queue = c.cfg.Queues[0]
	}
	q := c.retries.states.get(f.at.consumer, queue)
	return q != nil && q.moves()
}

// moveDead has the broker bring a message to a dead-letter queue.
func (c *central) moveDead(f arrival, h map[string]any) client.Outcome {
	h[annotation.Delay], h[annotation.Queue] = delayDead, f.err.Queue
	if !f.known {
		h[annotation.Delay] = delayUnknown
	}
	c.counts(h, f, f.was.count)
	return client.Modify{DeadLetter: true, Annotations: h}
}
