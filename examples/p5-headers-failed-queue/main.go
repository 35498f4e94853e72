// Command p5-headers-failed-queue is for teams whose queues dead-letter into a "failed" queue.
// A separate process consumes it, increases the header count, publishes the message to a
// headers exchange, and acknowledges it:
//
//	args.BasicProperties.Headers["count"] = newCount; // -1 when the retries are used up
//	_channel.BasicPublish(_busConfiguration.DeadLetterExchangeName, args.RoutingKey, args.BasicProperties, args.Body);
//	_channel.BasicAck(args.DeliveryTag, true);
//
// It shows what happens if that process crashes between the publish and the ack: from then
// on, the message exists twice. retry.StrategyDeadLetter also uses a headers exchange and
// queues with a time to live. But the worker itself sets the delay when it rejects the
// message. There is no extra process and no copy, and the history of a dead letter is
// complete.
//
// The delays are 100, 200, and 400 ms.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p5-headers-failed-queue
package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const queue = "p5.topic-queue"

var (
	delays = []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond}

	errDown = errors.New("the database is down")
)

var policy = retry.Policy{
	Strategy:   retry.StrategyDeadLetter,
	MaxRetries: len(delays),
	Backoff:    retry.Delays(delays...),
	Names:      retry.Names{Prefix: "p5."},
}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("The old way: a process that counts, publishes, and acknowledges")
	s.Declare(oldTopology())
	oldAttempts, oldDead := failedProcess(s)

	s.Act("hopback: the worker rejects, and the broker does the rest")
	s.Declare(show.Must(retry.Topology(policy, declare.QuorumQueue{Name: queue})))
	attempts, dead := oneDisposition(s)

	s.Act("hopback: the publisher sends a duplicate, and a filter drops it")
	charged, copies := duplicateFilter(s)

	s.Proven("the process crashed once, and 1 message became %d attempts and %d dead letters; with hopback %d and %d, "+
		"with a complete history; %d copies with the same message-id were handled %d time", oldAttempts, oldDead, attempts, dead, copies, charged)
}

// oldTopology: topic-queue ─rejected▶ failed ─count▶ deadletter ─count=n▶ retry-n ─expired▶ reply ─▶ topic-queue.
func oldTopology() declare.Topology {
	t := declare.Topology{
		Exchanges: []declare.Exchange{{Name: "p5.deadletter", Type: declare.ExchangeHeaders}, {Name: "p5.reply", Type: declare.ExchangeDirect}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: queue, DeadLetter: declare.ToQueue("p5.failed")},
			declare.QuorumQueue{Name: "p5.failed", DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "p5.deadletter", DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "p5.reply", Queue: queue, Key: queue},
			{Source: "p5.deadletter", Queue: "p5.deadletter", Headers: map[string]any{"count": -1}},
		},
	}
	for i, delay := range delays {
		name := fmt.Sprintf("p5.retry-%d", i+1)
		t.Queues = append(t.Queues, declare.QuorumQueue{Name: name, MessageTTL: delay, DeadLetter: declare.DeadLetterTarget{Exchange: "p5.reply"}})
		t.Bindings = append(t.Bindings, declare.Binding{Source: "p5.deadletter", Queue: name, Headers: map[string]any{"count": i + 1}})
	}
	return t
}

// failedProcess runs the old worker, which always rejects, and the process for the failed
// queue, which crashes once. It returns the attempts and the dead letters of one message.
func failedProcess(s *show.Stage) (attempts, dead int) {
	stopWorker := s.Consume(queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		attempts++
		s.Say("%v: attempt %d, count %v", d.Message().Properties.MessageID, attempts, d.Property("count"))
		return client.Modify{DeadLetter: true} // reject
	}), client.ConsumerConfig{})

	publisher := show.Must(client.NewPublisher[*client.Message](s.Ctx, s.Conn, address.Exchange("p5.deadletter", queue), client.PublisherConfig{}))
	died := false
	stopProcess := s.Consume("p5.failed", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		count, _ := d.Property("count").(int64)
		m := client.Copy(d.Message())
		if count++; count > int64(len(delays)) {
			count = -1
		}
		m.ApplicationProperties = map[string]any{"count": count}
		if err := publisher.Publish(ctx, m); err != nil {
			return err
		}
		if !died {
			died = true
			s.Say("the process crashes: it has published %v, and not acknowledged it", m.Properties.MessageID)
			return client.Requeue{}
		}
		return nil
	}), client.ConsumerConfig{})

	s.Send(address.Queue(queue), message("m-1"))
	s.Take("p5.deadletter", 2, func(m *client.Message) {
		dead++
		s.Say("p5.deadletter has %v", m.Properties.MessageID)
	})
	stopWorker()
	stopProcess()
	s.Want(attempts == 1+2*len(delays), "from the first retry on there are two messages: %d attempts", attempts)
	return attempts, dead
}

// oneDisposition lets a message fail until it is dead-lettered, and reads the history that the
// broker has written into it: a copy would have started a new history.
func oneDisposition(s *show.Stage) (attempts, dead int) {
	stop := s.Consume(queue, retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		attempts++
		s.Say("%v: attempt %d", d.Message().Properties.MessageID, attempts)
		return errDown
	})), client.ConsumerConfig{})
	s.Send(address.Queue(queue), message("m-1"))
	var history []string
	var id any
	var death retry.DeadLetter
	s.Take("p5.topic-queue.dead", 1, func(m *client.Message) {
		id, death, history = m.Properties.MessageID, retry.DeadLetterOf(m), deaths(m)
		s.Say("p5.topic-queue.dead has %v, %q: %s after %d retries, %q, from %s",
			id, m.GetData(), death.Reason, death.Retries, death.Error, death.Queue)
		s.Say("its history: %s", strings.Join(history, ", "))
	})
	stop()
	s.Holds("p5.topic-queue.dead", 0) // there was only one
	s.Want(attempts == 1+len(delays), "there are %d attempts: there were %d", 1+len(delays), attempts)
	s.Want(id == "m-1" && death.Error == errDown.Error() && death.Retries == len(delays), "the dead letter has its message-id and the error")
	slices.Sort(history)
	s.Want(slices.Equal(history, []string{
		"expired in p5.hold_100ms x1", "expired in p5.hold_200ms x1", "expired in p5.hold_400ms x1", "rejected in p5.topic-queue x4",
	}), "its history is complete: %v", history)
	return attempts, 1
}

// deaths reads the broker's history of a message, its annotation x-opt-deaths.
func deaths(m *client.Message) (lines []string) {
	all, _ := m.Annotations["x-opt-deaths"].([]map[any]any)
	for _, d := range all {
		lines = append(lines, fmt.Sprintf("%v in %v x%v", d["reason"], d["queue"], d["count"]))
	}
	return lines
}

// duplicateFilter publishes a message twice, like a publisher that got no answer the first
// time. It returns how often the message was handled, and how often published.
func duplicateFilter(s *show.Stage) (handled, published int) {
	accepted := make(chan struct{}, 2)
	work := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		if retry.Attempt(ctx) == 1 {
			return errDown
		}
		handled++
		s.Say("%v: handled, attempt %d", d.Message().Properties.MessageID, retry.Attempt(ctx))
		return nil
	})
	stop := s.Consume(queue, client.Chain(notify(accepted), retry.With(policy), once)(work), client.ConsumerConfig{})
	s.Send(address.Queue(queue), message("m-2"), message("m-2"))
	show.Next(s, accepted, "the first copy")
	show.Next(s, accepted, "the second copy")
	stop()
	s.Want(handled == 1, "one of the copies is handled: %d were", handled)
	return handled, 2
}

// once is a filter for duplicates: it acknowledges messages whose message-id was already
// handled. A real filter remembers the IDs in a database, for a time: see package dedupe.
func once(h client.Handler) client.Handler {
	var seen sync.Map
	return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
		id := d.Message().Properties.MessageID
		if _, ok := seen.Load(id); ok {
			return nil
		}
		err := h.Handle(ctx, d)
		if err == nil {
			seen.Store(id, true)
		}
		return err
	})
}

// notify is a middleware that reports every acknowledged delivery.
func notify(accepted chan<- struct{}) client.Middleware {
	return func(h client.Handler) client.Handler {
		return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
			err := h.Handle(ctx, d)
			if err == nil {
				accepted <- struct{}{}
			}
			return err
		})
	}
}

func message(id string) *client.Message {
	m := client.NewMessage([]byte("do something"))
	m.Properties.MessageID = id
	return m
}
