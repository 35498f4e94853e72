package schedule

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/brokername"
)

// Topology returns the ladder, and the bindings by which each of queues gets its messages
// from the broker. Declare it with declare.Apply. Several services may do so, each with
// its own queues: the ladder is the same.
//
//	schedule_<n>            topic, queue   of level n; holds a message for 2ⁿ × 100 ms, and
//	                                       dead-letters to the level below
//	schedule_due            topic          where messages leave the ladder
//	schedule_dispatch       fanout, queue  for what no queue is bound for; see Dispatch
//	schedule_undeliverable  fanout, queue  for messages whose target is gone
//
// All queues dead-letter at least once, with overflow reject-publish, and every exchange
// has an alternate exchange. So no message is lost or held up when a queue or a binding is
// gone.
//
// The queues themselves must exist, or be declared with it. A bound queue should have no
// max-length: RabbitMQ holds at most 32 messages of each level that their queue refuses,
// and then the level stands still for all services. Leave such a queue out; then it gets
// its messages from Dispatch, which waits for it without holding up others.
//
// Bad input is an *argument.Error.
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
			// The end of the line: whoever rejects a message there means it.
			declare.QuorumQueue{Name: lost, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{
				// What comes back here was never a message's own fault.
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
			return declare.Topology{}, argument.At(at, argument.CodeReserved, queue, "can't be bound to the ladder: it is over 194 bytes, or has a word that is a wildcard in a binding", "leave it out; it gets its messages from schedule.Dispatch")
		}
		t.Bindings = append(t.Bindings, declare.Binding{Source: n.due(), Queue: queue, Key: n.ladder().Leaves(toWord + queue)})
	}
	return t, t.Validate()
}
