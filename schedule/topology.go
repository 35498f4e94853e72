package schedule

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/brokername"
)

// Topology returns the ladder, and the bindings through which each of queues gets its messages
// from the broker. Declare it with declare.Apply. Several services can do so, each with its own
// queues: the ladder is the same. The error is an *argument.Error if a name is invalid.
//
//	schedule_<n>            topic, queue   of level n; delays a message for 2ⁿ × 100 ms, and
//	                                       dead-letters to the level below
//	schedule_due            topic          where messages leave the ladder
//	schedule_dispatch       fanout, queue  for what no queue is bound for; see Dispatch
//	schedule_undeliverable  fanout, queue  for messages whose target is gone
//
// The queues themselves must exist, or you declare them together with this topology. All queues
// of the ladder dead-letter at least once, with overflow reject-publish, and every exchange has
// an alternate exchange. So if a queue or a binding is gone, no message is lost and no other
// message is blocked.
//
// Don't bind a queue with a maximum length. For each level, RabbitMQ keeps at most 32 messages
// that their queue refuses; then that level is blocked for all services. If you leave such a
// queue out, it gets its messages from [Dispatch], which waits for it without blocking others.
func Topology(n Names, queues ...string) (declare.Topology, error) {
	if err := n.check(argument.Root("Names")); err != nil {
		return declare.Topology{}, err
	}
	lost := n.UndeliverableQueue()
	t := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: lost, Type: declare.ExchangeFanout},
			{Name: n.DispatchQueue(), Type: declare.ExchangeFanout},
			{Name: n.due(), Type: declare.ExchangeTopic, AlternateExchange: n.DispatchQueue()},
		},
		Queues: []declare.Queue{
			// This is the last stop: a message that is rejected here is dropped on purpose.
			declare.QuorumQueue{Name: lost, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{
				// A redelivery here is never the message's fault.
				Name: n.DispatchQueue(), DeliveryLimit: declare.Unlimited,
				DeadLetter: declare.DeadLetterTarget{Exchange: lost},
			},
		},
		Bindings: []declare.Binding{
			{Source: lost, Queue: lost},
			{Source: n.DispatchQueue(), Queue: n.DispatchQueue()},
		},
	}
	n.ladder().Add(&t, lost, declare.QuorumQueue{DeliveryLimit: declare.Unlimited})
	for i, queue := range queues {
		at := argument.Root("queues").Index(i)
		if err := brokername.Check(at, queue); err != nil {
			return declare.Topology{}, err
		}
		if !bindable(queue) {
			return declare.Topology{}, argument.At(at, argument.CodeReserved, queue, "can't be bound to the ladder: it is over 194 bytes, or has a word that is a wildcard in a binding", "leave it out; schedule.Dispatch delivers its messages")
		}
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.due(), Queue: queue, Key: n.ladder().Leaves(toWord + queue)})
	}
	return t, t.Validate()
}

// ClaimableTopology returns the queue that messages of [PublisherConfig].Claimable wait in, and the
// one for messages that can't be delivered. It needs RabbitMQ 4.4. The error is an *argument.Error
// if a name is invalid.
//
//	schedule_claimable      queue          holds waiting messages; see Dispatch
//	schedule_undeliverable  fanout, queue  for messages whose target is gone
func ClaimableTopology(n Names) (declare.Topology, error) {
	if err := n.check(argument.Root("Names")); err != nil {
		return declare.Topology{}, err
	}
	lost := n.UndeliverableQueue()
	t := declare.Topology{
		Exchanges: []declare.Exchange{{Name: lost, Type: declare.ExchangeFanout}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: lost, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: n.ClaimableQueue(), DeliveryLimit: declare.Unlimited, DeadLetter: declare.DeadLetterTarget{Exchange: lost}},
		},
		Bindings: []declare.Binding{{Source: lost, Queue: lost}},
	}
	return t, t.Validate()
}
