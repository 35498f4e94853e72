// Command p3-ttl-head-of-line is for teams that wait with a time to live on each message,
// in one queue that dead-letters back:
//
//	retry_queue = channel.queue("retry_queue", arguments: { "x-dead-letter-exchange": "work_exchange" })
//	retry_queue.publish(payload, expiration: (expiration * 1.5).to_i, headers: { "x-retry-count": retry_count + 1 })
//
// It shows head-of-line blocking: a queue expires messages only at its head, so a message
// with a delay of 2 s blocks one behind it with a delay of 200 ms. hopback declares one queue
// for each delay of the policy, and all messages in a queue have the same delay.
//
// The backoff has five retries with a factor of 1.5, like the old one, but starts at 200 ms
// instead of 1 s.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p3-ttl-head-of-line
package main

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	long  = 2 * time.Second
	short = 200 * time.Millisecond
)

var (
	errMaintenance = errors.New("down for maintenance")
	errBlip        = errors.New("a blip")
)

var work = declare.QuorumQueue{Name: "p3.work_queue"}

var policy = retry.Policy{
	MaxRetries: 5,
	Backoff:    retry.Exponential(200*time.Millisecond, 1.5),
	Rules:      []retry.ErrorRule{{If: retry.On(errMaintenance), Backoff: retry.Delays(long)}},
	Names:      retry.Names{Prefix: "p3."},
}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("The old way: one retry queue, a TTL on each message")
	before := oneQueue(s)
	s.Want(before["short"] >= before["long"] && before["long"] >= long, "the short delay waits until the long one ends")

	s.Act("hopback: one queue for each delay")
	after := queuePerDelay(s)
	s.Want(after["long"] >= long && after["short"] >= short, "no message comes back too early")
	s.Want(after["short"] < after["long"], "the short delay ends before the long one")

	s.Proven("delays of 2 s and then 200 ms took %d ms and %d ms through one retry queue, %d ms and %d ms with hopback; "+
		"5 retries from 200 ms with a factor of 1.5 each came after their delay, none early",
		before["long"].Milliseconds(), before["short"].Milliseconds(), after["long"].Milliseconds(), after["short"].Milliseconds())
}

// oneQueue sends both messages through the old retry_queue, and returns how long each of them
// took.
func oneQueue(s *show.Stage) map[string]time.Duration {
	s.Declare(declare.Topology{
		Exchanges: []declare.Exchange{{Name: "p3.work_exchange", Type: declare.ExchangeFanout}, {Name: "p3.retry_exchange", Type: declare.ExchangeFanout}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: work.Name, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "p3.retry_queue", DeadLetter: declare.DeadLetterTarget{Exchange: "p3.work_exchange", AtMostOnce: true}},
		},
		Bindings: []declare.Binding{{Source: "p3.work_exchange", Queue: work.Name}, {Source: "p3.retry_exchange", Queue: "p3.retry_queue"}},
	})
	expiring := func(body string, ttl time.Duration) *client.Message {
		m := client.NewMessage([]byte(body))
		m.Header.TTL = ttl
		return m
	}
	took := map[string]time.Duration{}
	began := time.Now()
	s.Send(address.Exchange("p3.retry_exchange", ""), expiring("long", long), expiring("short", short))
	s.Say("published to retry_queue: long, with expiration 2000, then short, with expiration 200")
	s.Take(work.Name, 2, func(m *client.Message) {
		took[string(m.GetData())] = time.Since(began)
		s.Say("%s is back after %v", m.GetData(), time.Since(began).Round(time.Millisecond))
	})
	return took
}

// queuePerDelay fails the same messages once with hopback's policy, and returns how long each
// of them took. A third one, "growing", fails until its last attempt.
func queuePerDelay(s *show.Stage) map[string]time.Duration {
	topology := show.Must(retry.Topology(policy, work))
	s.Declare(topology)
	for _, delay := range show.Must(policy.QueueDelays()) {
		s.Say("%s is for messages that wait %v", policy.Names.DelayQueue(delay), delay)
	}

	took, failed := map[string]time.Duration{}, map[string]time.Time{}
	early := 0
	back := make(chan string, 3)
	began := time.Now()
	s.Consume(work.Name, retry.With(policy)(client.Typed(client.RawCodec{}, func(ctx context.Context, body string) error {
		attempt := retry.Attempt(ctx)
		if attempt > 1 {
			asked, had := long, time.Since(failed[body])
			if body != "long" {
				asked, _ = policy.Delay(attempt - 1)
			}
			if had < asked-time.Millisecond { // the broker counts whole milliseconds
				early++
			}
			s.Say("%s, retry %d: delay %v, came after %v", body, attempt-1, asked, had.Round(time.Millisecond))
		}
		failed[body] = time.Now()
		switch {
		case body == "growing" && attempt <= policy.MaxRetries, body == "short" && attempt == 1:
			return errBlip
		case body == "long" && attempt == 1:
			return errMaintenance
		}
		took[body] = time.Since(began)
		back <- body
		return nil
	})), client.ConsumerConfig{})
	s.Send(work.Address(), client.NewMessage([]byte("long")), client.NewMessage([]byte("short")), client.NewMessage([]byte("growing")))
	for range 3 {
		show.Next(s, back, "the messages")
	}
	s.Want(early == 0, "every retry comes after its delay, none early")
	return took
}
