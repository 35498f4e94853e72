// Command p1-naive-requeue is for teams that reject a failed message with requeue=true:
//
//	channel.reject(delivery_info.delivery_tag, true)   // bunny
//	amqpChannel.nack(msg, false, true)                 // amqplib
//
// It shows the effect: the message returns to the head of the queue immediately, again and
// again, and no message behind it is handled. hopback has the same as an explicit outcome,
// client.Requeue. There, the queue's delivery limit stops the loop, and the message goes to a
// dead-letter queue.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p1-naive-requeue
package main

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	queue      = "p1.some.queue"
	deadLetter = "p1.some.queue.dead"

	enough = 300 // attempts until this example stops the loop, which nothing else stops
	limit  = 5   // x-delivery-limit: 5 returns, so 6 deliveries
)

var errSome = errors.New("some error when handling the message")

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("The old way: reject with requeue=true")
	s.Declare(declare.Topology{Queues: []declare.Queue{
		// No delivery limit, as in a classic queue, and explicitly no dead-letter queue.
		declare.QuorumQueue{Name: queue, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}})
	blocked := work(s)
	s.Say("and so on, until this example acknowledges it: the queue itself would never stop")
	s.Say("the message behind it waited for %d attempts", blocked)
	s.Want(blocked == enough, "a message that always fails blocks the one behind it")

	s.Act("hopback: client.Requeue, with a delivery limit and a dead-letter queue")
	s.Declare(declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: queue, DeliveryLimit: limit, DeadLetter: declare.ToQueue(deadLetter)},
		// No limit in the last queue, since a dead letter keeps its delivery count.
		declare.QuorumQueue{Name: deadLetter, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}})
	attempts := work(s)
	s.Say("the message behind it waited for %d attempts", attempts)
	s.Want(attempts == limit+1, "the message is delivered %d times: it was delivered %d times", limit+1, attempts)
	s.Holds(queue, 0)
	s.Take(deadLetter, 1, func(m *client.Message) {
		death := retry.DeadLetterOf(m)
		s.Say("%s has %q: reason %q, from %s", deadLetter, m.GetData(), death.Reason, death.Queue)
		s.Want(string(m.GetData()) == "some message" && death.Reason == retry.ReasonDeliveryLimit, "the message is kept, with the reason")
	})
	s.Proven("requeued without a limit, a failing message was handled %d times in a row, and the one behind it never; "+
		"with a delivery limit of %d it was handled %d times, then dead-lettered, 0 lost", blocked, limit, attempts)
}

// work publishes two messages and handles them until it gets the second one. The first one
// always fails. work returns how often it was handled.
func work(s *show.Stage) (attempts int) {
	s.Send(declare.QuorumQueue{Name: queue}.Address(),
		client.NewMessage([]byte("some message")), client.NewMessage([]byte("next message")))
	next := make(chan struct{})
	began := time.Now()
	stop := s.Consume(queue, client.Typed(client.RawCodec{}, func(_ context.Context, body string) error {
		if body == "next message" {
			close(next)
			return nil
		}
		attempts++
		switch attempts {
		case 1, 2, 3, 10, 100:
			s.Say("handling %q, attempt %d after %v: rejected", body, attempts, time.Since(began).Round(time.Millisecond))
		case enough:
			return nil
		}
		return client.Requeue{Failed: true, Err: errSome}
	}), client.ConsumerConfig{Prefetch: 1})
	show.Next(s, next, "the next message")
	stop()
	return attempts
}
