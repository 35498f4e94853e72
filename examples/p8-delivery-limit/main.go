// Command p8-delivery-limit is for teams that rely on the delivery limit of their quorum
// queues:
//
//	"my_work_queue": { "x-queue-type": "quorum", "x-delivery-limit": 5 }
//
// It shows that such a queue silently drops a message after six deliveries: a limit of N means
// N+1 deliveries. The default limit is 20, so 21 deliveries. hopback declares a queue, or
// consumes from it with retries, only if the queue has a dead-letter target or your code says
// explicitly that dead letters are dropped.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p8-delivery-limit
package main

import (
	"context"
	"errors"
	"slices"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	queue = "p8.my_work_queue"
)

var policy = retry.Policy{Names: retry.Names{Prefix: "p8."}}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("The old way: a delivery limit, and nothing else")
	// hopback doesn't even send the old definition to the broker.
	_, err := declare.Apply(s.Ctx, s.Conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: queue, DeliveryLimit: 5},
	}})
	s.Want(errors.As(err, new(*argument.Error)), "a queue without a dead-letter target is refused: %v", err)
	s.Say("%v", err)
	s.Say("so explicitly: DeadLetter: declare.Drop()")
	s.Declare(declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: queue, DeliveryLimit: 5, DeadLetter: declare.Drop()},
	}})
	old := poison(s, queue)
	s.Holds(queue, 0)
	s.Say("delivered %d times, and in no queue afterwards", old)
	s.Want(old == 6, "a limit of 5 makes 6 deliveries")

	err = s.Conn.Consume(s.Ctx, queue, retry.With(policy)(client.HandlerFunc(nil)), client.ConsumerConfig{})
	var guard *retry.GuardError
	s.Want(errors.As(err, &guard), "a consumer with retries is refused on such a queue: %v", err)
	s.Say("retry.With refuses it as well: %s", guard.Problem)

	s.Act("hopback: the same limit, with a dead-letter queue")
	queues := []declare.QuorumQueue{
		{Name: "p8.limit_0", DeliveryLimit: declare.NoRedelivery},
		{Name: "p8.limit_1", DeliveryLimit: 1},
		{Name: queue, DeliveryLimit: 5},
		{Name: "p8.limit_by_default"}, // the broker's default, 20
	}
	s.Declare(show.Must(retry.Topology(policy, queues...)))
	var figures []int
	for _, q := range queues {
		deliveries := poison(s, q.Name)
		var death retry.DeadLetter
		s.Take(q.Name+".dead", 1, func(m *client.Message) { death = retry.DeadLetterOf(m) })
		s.Say("%-19s delivered %2d times, then kept in %s.dead, reason %q", q.Name, deliveries, q.Name, death.Reason)
		s.Want(death.Reason == retry.ReasonDeliveryLimit && death.Queue == q.Name, "the dead letter has the reason: %+v", death)
		figures = append(figures, deliveries)
	}
	s.Want(slices.Equal(figures, []int{1, 2, 6, 21}), "a limit of N makes N+1 deliveries: %v", figures)
	s.Proven("without a dead-letter queue 1 message of 1 was dropped after %d deliveries, and hopback refuses to declare or consume such a queue "+
		"unless the code says so explicitly; limits of 0, 1, 5, and the default made %v deliveries, and 4 of 4 messages were kept", old, figures)
}

// poison publishes a message that would crash every worker. It requeues the message as a
// failed delivery, as the broker does after a crash. It returns how often the message was
// delivered until the queue dropped or dead-lettered it, and delivered the next one.
func poison(s *show.Stage, name string) (deliveries int) {
	behind := make(chan struct{})
	stop := s.Consume(name, client.Typed(client.RawCodec{}, func(_ context.Context, body string) error {
		if body != "poison" {
			close(behind)
			return nil
		}
		deliveries++
		return client.Requeue{Failed: true}
	}), client.ConsumerConfig{Prefetch: 1})
	s.Send(address.Queue(name), client.NewMessage([]byte("poison")), client.NewMessage([]byte("behind")))
	show.Next(s, behind, "the message behind")
	stop()
	return deliveries
}
