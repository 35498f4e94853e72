package retry

import (
	"fmt"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
)

// Topology returns the queues, exchanges, and bindings that p needs to retry messages of the work
// queues. Declare them with [declare.Apply]. Several teams can do so with different policies and
// work queues: the parts they share are identical.
//
// Each strategy needs these, so that a queue can change from one to another:
//
//	<queue>               queue    as given; dead-letters, under its name, to
//	dead_letter_exchange  headers  routes by the work queue's name to
//	dead_letter_exchange.sort
//	                      headers  routes messages that aren't retried to
//	given_up_exchange     direct   routes by the work queue's name to
//	<queue>.dead          queue    without a delivery limit
//	parking_exchange      fanout   routes messages that can't return to
//	parking_queue         queue
//
// StrategyRepublish and StrategyAuto add:
//
//	retry_exchange        topic    receives delay.<ms>.<queue>
//	delay_<n>s            queue    bound by delay.<ms>.#; delays, then dead-letters to
//	requeue_exchange      topic    returns by *.*.<queue>
//
// or, with [Policy.AnyDelay], an exchange and a queue for each level of the ladder.
//
// StrategyDeadLetter and StrategyAuto add:
//
//	hold_<n>s             queue    bound to dead_letter_exchange.sort by the delay that
//	                               the message's annotation names; dead-letters to
//	return_exchange       direct   returns by the work queue's name
//
// [Policy.ReplayByMove], which package desk uses, adds:
//
//	replay_exchange       headers  returns messages from the dead-letter queues, which
//	                               dead-letter to it, to their work queues
//
// The error is an *argument.Error if the policy or a queue is invalid.
//
//   - All of these queues dead-letter at least once, with overflow reject-publish. So no message
//     is lost if the next exchange, binding, or queue is missing.
//   - Every exchange after a delay queue has the parking exchange as its alternate exchange. So a
//     message that can't return doesn't block those behind it.
//   - A queue that somebody else binds to dead_letter_exchange gets copies. Don't bind one to
//     dead_letter_exchange.sort: it would take the messages that it matches.
//   - A work queue without a DeadLetter gets the dead-letter queue above. A queue with its own,
//     or with [declare.Drop], keeps that, and can't use StrategyDeadLetter. If it names
//     dead_letter_exchange, with another work queue's name as the routing key, they share that
//     one's dead-letter queue.
func Topology(p Policy, work ...declare.QuorumQueue) (declare.Topology, error) {
	pl, err := p.plan()
	if err != nil {
		return declare.Topology{}, err
	}
	t := join(pl.ends(), pl.waiting(pl.strategy))
	for i, q := range work {
		w, err := pl.workQueue(argument.Root("work").Index(i), pl.strategy, q)
		if err != nil {
			return declare.Topology{}, err
		}
		t = join(t, w)
	}
	return t, t.Validate()
}

// ends is where messages go that aren't retried any more. It is the same for every strategy.
func (pl *plan) ends() declare.Topology {
	n := pl.names
	parking := n.ParkingQueue()
	t := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: n.parkingExchange(), Type: declare.ExchangeFanout},
			{Name: n.GivenUpExchange, Type: declare.ExchangeDirect, AlternateExchange: n.parkingExchange()},
			{Name: n.DeadLetterExchange, Type: declare.ExchangeHeaders, AlternateExchange: n.GivenUpExchange},
			{Name: n.sortExchange(), Type: declare.ExchangeHeaders, AlternateExchange: n.GivenUpExchange},
		},
		Queues: []declare.Queue{
			// This is the last stop: a message that is rejected here is dropped on purpose.
			declare.QuorumQueue{Name: parking, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{{Source: n.parkingExchange(), Queue: parking}},
	}
	if pl.replayByMove {
		// What is rejected in a dead-letter queue without being replayed is kept in the parking
		// queue.
		t.Exchanges = append(t.Exchanges, declare.Exchange{Name: n.ReplayExchange, Type: declare.ExchangeHeaders, AlternateExchange: n.parkingExchange()})
	}
	return t
}

// replayBinding matches what package desk moves back to the work queue. A worker that fails
// overwrites the reason.
func (pl *plan) replayBinding(queue string) declare.Binding {
	return declare.Binding{
		Source: pl.names.ReplayExchange, Queue: queue, Match: declare.MatchAllWithX,
		Headers: map[string]any{
			client.AnnotationReason: string(ReasonReplayed),
			annotation.Queue:        queue,
			"x-last-death-reason":   "rejected",
		},
	}
}

// waiting is where messages wait, by strategy.
func (pl *plan) waiting(s Strategy) declare.Topology {
	var t declare.Topology
	if pl.ladder != nil {
		t = pl.ladder.topology(pl.names)
	} else if s == StrategyRepublish || s == StrategyAuto {
		t = pl.republishing()
	}
	if s == StrategyDeadLetter || s == StrategyAuto {
		t = join(t, pl.deadLettering())
	}
	return t
}

func join(a, b declare.Topology) declare.Topology {
	return declare.Topology{
		Exchanges: append(a.Exchanges, b.Exchanges...),
		Queues:    append(a.Queues, b.Queues...),
		Bindings:  append(a.Bindings, b.Bindings...),
	}
}

// republishing is what StrategyRepublish adds.
func (pl *plan) republishing() declare.Topology {
	n := pl.names
	t := declare.Topology{Exchanges: []declare.Exchange{
		{Name: n.RetryExchange, Type: declare.ExchangeTopic},
		{Name: n.RequeueExchange, Type: declare.ExchangeTopic, AlternateExchange: n.parkingExchange()},
	}}
	for _, d := range pl.levels {
		name := n.DelayQueue(d)
		t.Queues = append(t.Queues, holding(name, d, n.RequeueExchange))
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.RetryExchange, Queue: name, Key: delayKey(d)})
	}
	return t
}

func delayKey(d time.Duration) string { return fmt.Sprintf("delay.%d.#", d.Milliseconds()) }

// deadLettering is what StrategyDeadLetter adds.
func (pl *plan) deadLettering() declare.Topology {
	n := pl.names
	t := declare.Topology{Exchanges: []declare.Exchange{
		{Name: n.ReturnExchange, Type: declare.ExchangeDirect, AlternateExchange: n.parkingExchange()},
	}}
	for _, d := range pl.levels {
		name := n.HoldQueue(d)
		t.Queues = append(t.Queues, holding(name, d, n.ReturnExchange))
		t.Bindings = append(t.Bindings, pl.holdBinding(n.DeadLetterExchange, d), pl.holdBinding(n.sortExchange(), d))
	}
	return t
}

// sortBinding leads the dead letters of a work queue to the exchange that sorts them, regardless of
// what else is bound to the dead-letter exchange. It is for one queue, because other teams may have a topology
// without it: their delay queues are bound to the dead-letter exchange alone.
func (pl *plan) sortBinding(queue string) declare.Binding {
	return declare.Binding{
		Source: pl.names.DeadLetterExchange, Exchange: pl.names.sortExchange(), Key: queue, Match: declare.MatchAllWithX,
		Headers: map[string]any{"x-last-death-queue": queue},
	}
}

// holdBinding matches the mark of a retry and its delay, and only messages that a worker
// rejected: one that reaches the delivery limit or its time to live may still carry an old mark.
func (pl *plan) holdBinding(source string, d time.Duration) declare.Binding {
	return declare.Binding{
		Source: source, Queue: pl.names.HoldQueue(d), Match: declare.MatchAllWithX,
		Headers: map[string]any{
			client.AnnotationReason: string(reasonRetry),
			annotation.Delay:        d.Milliseconds(),
			"x-last-death-reason":   "rejected",
		},
	}
}

func holding(name string, d time.Duration, to string) declare.QuorumQueue {
	return declare.QuorumQueue{Name: name, MessageTTL: d, DeadLetter: declare.DeadLetterTarget{Exchange: to}}
}

// workQueue is what the work queue q, which at leads to, needs.
func (pl *plan) workQueue(at argument.Path, s Strategy, q declare.QuorumQueue) (declare.Topology, error) {
	n := pl.names
	if err := checkQueue(at.Field("Name"), q.Name); err != nil {
		return declare.Topology{}, err
	}
	if s == StrategyNative && q.MessageTTL > 0 && q.MessageTTL <= pl.together() && !pl.waived[GuardDelayQueue] {
		return declare.Topology{}, argument.At(at.Field("MessageTTL"), argument.CodeConflict, q.MessageTTL, fmt.Sprintf("isn't longer than all delays of the policy together, %v: with the strategy %s it keeps running while a message waits, so waiting messages expire", pl.together(), s),
			"use a longer one or none, or another strategy")
	}
	var t declare.Topology
	if pl.ladder != nil {
		if _, err := pl.ladder.address(at.Field("Name"), n, maxDelay, q.Name); err != nil {
			return t, err
		}
		t.Bindings = append(t.Bindings, pl.ladder.home(n, q.Name))
	} else if s == StrategyRepublish || s == StrategyAuto {
		for _, d := range pl.levels {
			if _, err := routingKey(at.Field("Name"), d, q.Name); err != nil {
				return t, err
			}
		}
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.RequeueExchange, Queue: q.Name, Key: "*.*." + q.Name})
	}
	if s == StrategyDeadLetter || s == StrategyAuto {
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.ReturnExchange, Queue: q.Name, Key: q.Name})
	}
	switch {
	case q.DeadLetter.IsZero():
		dead := n.DeadLetterQueue(q.Name)
		q.DeadLetter = declare.DeadLetterTarget{Exchange: n.DeadLetterExchange, RoutingKey: q.Name}
		if pl.replayByMove {
			t.Bindings = append(t.Bindings, pl.replayBinding(q.Name))
		}
		t.Queues = append(t.Queues, pl.deadLetterQueue(q.Name))
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.GivenUpExchange, Queue: dead, Key: q.Name}, pl.sortBinding(q.Name))
	case q.DeadLetter.Exchange == n.DeadLetterExchange && q.DeadLetter.RoutingKey != "" && s != StrategyDeadLetter:
		// It shares the dead-letter queue of another work queue, as the lanes of package fair do.
		if pl.replayByMove {
			t.Bindings = append(t.Bindings, pl.replayBinding(q.Name))
		}
		t.Bindings = append(t.Bindings, pl.sortBinding(q.Name))
	case s == StrategyDeadLetter:
		return t, argument.At(at.Field("DeadLetter"), argument.CodeConflict, nil, fmt.Sprintf("is set, but the strategy %s retries by the work queue's own dead-lettering", s), "leave it out, or use another strategy")
	}
	t.Queues = append(t.Queues, q)
	return t, nil
}

// deadLetterQueue is that of a work queue.
func (pl *plan) deadLetterQueue(work string) declare.QuorumQueue {
	behind := pl.names.parkingExchange()
	if pl.replayByMove {
		behind = pl.names.ReplayExchange
	}
	return declare.QuorumQueue{
		// A dead letter keeps its delivery count: a limit here would drop it at once.
		Name: pl.names.DeadLetterQueue(work), DeliveryLimit: declare.Unlimited,
		// What is rejected even here is kept in the parking queue.
		DeadLetter: declare.DeadLetterTarget{Exchange: behind},
	}
}
