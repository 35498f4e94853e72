package retry

import (
	"fmt"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// Topology returns what p needs to retry messages of the work queues: declare it
// with declare.Apply. Several teams may apply it with different policies and work
// queues; what they share is the same.
//
// For every strategy, so that a queue can move from one to another:
//
//	<queue>               queue    as given; its dead go, under its name, to
//	dead_letter_exchange  headers  which sends on what isn't to be retried to
//	given_up_exchange     direct   which takes it, by the queue's name, to
//	<queue>.dead          queue    without a delivery limit
//	parking_exchange      fanout   takes what finds no queue any more, to
//	parking_queue         queue
//
// For Republish (and Auto, which may take any):
//
//	retry_exchange        topic    takes delay.<ms>.<queue>
//	delay_<n>s            queue    bound delay.<ms>.#; holds, then dead-letters to
//	requeue_exchange      topic    which brings back by *.*.<queue>
//
// or, with Policy.AnyDelay, an exchange and a queue for each level of the ladder.
// For DeadLetter (and Auto):
//
//	hold_<n>s             queue    bound to dead_letter_exchange by the delay that
//	                               the message's annotation names; dead-letters to
//	return_exchange       direct   which brings back by the queue's name
//
// Every dead-lettering on the way is at-least-once, with overflow reject-publish,
// so that no message is lost when the next exchange, binding or queue is missing;
// and every exchange behind a delay queue has the parking exchange as alternate,
// so that messages which can't be brought back don't block those behind them.
//
// A work queue without a DeadLetter gets the dead-letter queue above. One that has
// its own, or says declare.Drop, keeps it, and can't use the DeadLetter strategy.
func Topology(p Policy, work ...declare.QuorumQueue) (declare.Topology, error) {
	pl, err := p.plan()
	if err != nil {
		return declare.Topology{}, err
	}
	n := pl.names
	parking := n.ParkingQueue()
	t := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: n.parkingExchange(), Type: declare.Fanout},
			{Name: n.GivenUpExchange, Type: declare.Direct, AlternateExchange: n.parkingExchange()},
			{Name: n.DeadLetterExchange, Type: declare.Headers, AlternateExchange: n.GivenUpExchange},
		},
		Queues: []declare.Queue{
			// The end of the line: whoever rejects a message there means it.
			declare.QuorumQueue{Name: parking, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{{Source: n.parkingExchange(), Queue: parking}},
	}
	if pl.ladder != nil {
		t = join(t, pl.ladder.topology(n))
	} else if pl.strategy == Republish || pl.strategy == Auto {
		t = join(t, pl.delayQueues())
	}
	if pl.strategy == DeadLetter || pl.strategy == Auto {
		t = join(t, pl.holdQueues())
	}
	for i, q := range work {
		w, err := pl.workQueue(q)
		if err != nil {
			return declare.Topology{}, argument.Wrap(err, fmt.Sprintf("work[%d]", i), q.Name, "can't be retried", "")
		}
		t = join(t, w)
	}
	return t, t.Validate()
}

func join(a, b declare.Topology) declare.Topology {
	return declare.Topology{
		Exchanges: append(a.Exchanges, b.Exchanges...),
		Queues:    append(a.Queues, b.Queues...),
		Bindings:  append(a.Bindings, b.Bindings...),
	}
}

// delayQueues are those of Republish.
func (pl *plan) delayQueues() declare.Topology {
	n := pl.names
	t := declare.Topology{Exchanges: []declare.Exchange{
		{Name: n.RetryExchange, Type: declare.Topic},
		{Name: n.RequeueExchange, Type: declare.Topic, AlternateExchange: n.parkingExchange()},
	}}
	for _, d := range pl.rungs {
		name := n.DelayQueue(d)
		t.Queues = append(t.Queues, holding(name, d, n.RequeueExchange))
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.RetryExchange, Queue: name, Key: delayKey(d)})
	}
	return t
}

func delayKey(d time.Duration) string { return fmt.Sprintf("delay.%d.#", d.Milliseconds()) }

// holdQueues are those of DeadLetter.
func (pl *plan) holdQueues() declare.Topology {
	n := pl.names
	t := declare.Topology{Exchanges: []declare.Exchange{
		{Name: n.ReturnExchange, Type: declare.Direct, AlternateExchange: n.parkingExchange()},
	}}
	for _, d := range pl.rungs {
		name := n.HoldQueue(d)
		t.Queues = append(t.Queues, holding(name, d, n.ReturnExchange))
		t.Bindings = append(t.Bindings, pl.holdBinding(d))
	}
	return t
}

// holdBinding matches the mark of a retry and its delay, and that a worker sent the
// message here: one that dies of the delivery limit, or of its own time to live,
// may still bear an old mark.
func (pl *plan) holdBinding(d time.Duration) declare.Binding {
	return declare.Binding{
		Source: pl.names.DeadLetterExchange, Queue: pl.names.HoldQueue(d), Match: declare.AllWithX,
		Headers: map[string]any{
			client.AnnotationReason: string(reasonRetry),
			AnnotationDelay:         d.Milliseconds(),
			"x-last-death-reason":   "rejected",
		},
	}
}

func holding(name string, d time.Duration, to string) declare.QuorumQueue {
	return declare.QuorumQueue{Name: name, MessageTTL: d, DeadLetter: declare.DeadLetter{Exchange: to, Strategy: declare.AtLeastOnce}}
}

func (pl *plan) workQueue(q declare.QuorumQueue) (declare.Topology, error) {
	n := pl.names
	if err := checkQueue(q.Name); err != nil {
		return declare.Topology{}, err
	}
	var t declare.Topology
	if pl.ladder != nil {
		if _, err := pl.ladder.address(n, maxDelay, q.Name); err != nil {
			return t, err
		}
		t.Bindings = append(t.Bindings, pl.ladder.home(n, q.Name))
	} else if pl.strategy == Republish || pl.strategy == Auto {
		for _, d := range pl.rungs {
			if _, err := RoutingKey(d, q.Name); err != nil {
				return t, err
			}
		}
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.RequeueExchange, Queue: q.Name, Key: "*.*." + q.Name})
	}
	if pl.strategy == DeadLetter || pl.strategy == Auto {
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.ReturnExchange, Queue: q.Name, Key: q.Name})
	}
	switch {
	case q.DeadLetter.IsZero():
		dead := n.DeadLetterQueue(q.Name)
		q.DeadLetter = declare.DeadLetter{Exchange: n.DeadLetterExchange, RoutingKey: q.Name, Strategy: declare.AtLeastOnce}
		t.Queues = append(t.Queues, declare.QuorumQueue{
			// A dead letter brings its delivery count along: a limit here would end
			// it at once.
			Name: dead, DeliveryLimit: declare.Unlimited,
			// What is rejected even here is kept in the parking queue.
			DeadLetter: declare.DeadLetter{Exchange: n.parkingExchange(), Strategy: declare.AtLeastOnce},
		})
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.GivenUpExchange, Queue: dead, Key: q.Name})
	case pl.strategy == DeadLetter:
		return t, argument.New("DeadLetter", nil, "is given, but the DeadLetter strategy retries by the work queue's dead-lettering", "leave it out, or use another strategy")
	}
	t.Queues = append(t.Queues, q)
	return t, nil
}
