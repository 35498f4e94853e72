package retry

import (
	"fmt"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

// Topology returns what p needs to retry messages of the work queues: declare it
// with declare.Apply. Several teams may apply it with different policies and work
// queues; what they share is the same.
//
//	retry_exchange        topic    takes delay.<ms>.<queue>
//	delay_<n>s            queue    bound delay.<ms>.#; holds, then dead-letters to
//	requeue_exchange      topic    brings back by *.*.<queue>; what finds no queue goes to
//	parking_exchange      fanout   which keeps it in parking_queue
//	dead_letter_exchange  direct   takes the dead of work queues, by the queue's name, to
//	<queue>.dead          queue    without a delivery limit
//	<queue>               queue    as given
//
// Every dead-lettering on the way is at-least-once, with overflow reject-publish,
// so that no message is lost when the next exchange, binding or queue is missing.
//
// A work queue without a DeadLetter gets the dead-letter queue above. One that has
// its own, or says declare.Drop, keeps it.
func Topology(p Policy, work ...declare.QuorumQueue) (declare.Topology, error) {
	pl, err := p.plan()
	if err != nil {
		return declare.Topology{}, err
	}
	n := pl.names
	parking := n.ParkingQueue()
	t := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: n.RetryExchange, Type: declare.Topic},
			{Name: n.RequeueExchange, Type: declare.Topic, AlternateExchange: n.parkingExchange()},
			{Name: n.DeadLetterExchange, Type: declare.Direct, AlternateExchange: n.parkingExchange()},
			{Name: n.parkingExchange(), Type: declare.Fanout},
		},
		Queues: []declare.Queue{
			// The end of the line: whoever rejects a message there means it.
			declare.QuorumQueue{Name: parking, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{{Source: n.parkingExchange(), Queue: parking}},
	}
	for _, d := range pl.rungs {
		name := n.DelayQueue(d)
		t.Queues = append(t.Queues, declare.QuorumQueue{
			Name: name, MessageTTL: d,
			DeadLetter: declare.DeadLetter{Exchange: n.RequeueExchange, Strategy: declare.AtLeastOnce},
		})
		t.Bindings = append(t.Bindings, declare.Binding{
			Source: n.RetryExchange, Queue: name, Key: fmt.Sprintf("delay.%d.#", d.Milliseconds()),
		})
	}
	for i, q := range work {
		label := fmt.Sprintf("work[%d].Name", i)
		if err := checkQueue(q.Name); err != nil {
			return declare.Topology{}, argument.Wrap(err, label, q.Name, "can't be a work queue", "")
		}
		for _, d := range pl.rungs {
			if _, err := RoutingKey(d, q.Name); err != nil {
				return declare.Topology{}, argument.Wrap(err, label, q.Name, "can't be retried", "")
			}
		}
		if q.DeadLetter.IsZero() {
			dead := n.DeadLetterQueue(q.Name)
			q.DeadLetter = declare.DeadLetter{Exchange: n.DeadLetterExchange, RoutingKey: q.Name, Strategy: declare.AtLeastOnce}
			t.Queues = append(t.Queues, declare.QuorumQueue{
				// A dead letter brings its delivery count along: a limit here would
				// drop it at once.
				Name: dead, DeliveryLimit: declare.Unlimited,
				// What is rejected even here is kept in the parking queue.
				DeadLetter: declare.DeadLetter{Exchange: n.parkingExchange(), Strategy: declare.AtLeastOnce},
			})
			t.Bindings = append(t.Bindings, declare.Binding{Source: n.DeadLetterExchange, Queue: dead, Key: q.Name})
		}
		t.Queues = append(t.Queues, q)
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.RequeueExchange, Queue: q.Name, Key: "*.*." + q.Name})
	}
	return t, t.Validate()
}
