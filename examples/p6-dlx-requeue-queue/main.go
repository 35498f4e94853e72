// Command p6-dlx-requeue-queue is for teams whose queues dead-letter to an error-exchange,
// where a consumer of requeue-queue reads the death headers and sends the message back:
//
//	const { 'x-first-death-reason': reason, 'x-first-death-queue': originalQueue } = msg.properties.headers
//	if (originalQueue == null || reason !== 'rejected') { ... }
//	const rejectsCount = xDeaths.find(d => d.reason === 'rejected')?.count ?? -1
//	const MAX_REQUEUES = 10
//
// It shows how that hammers a service that is down: each message returns within milliseconds.
// And it never stops: RabbitMQ 4 starts a new x-death history with every publish, so the count
// stays at 1. hopback waits between retries and counts them itself. Each message in its
// dead-letter queue has the reason, and can be replayed to its original queue only. A replayed
// message starts over: it is retried, even if its first failure is longer ago than the
// policy's GiveUpAfter.
//
// There are ten retries, from 20 ms with a factor of 1.5.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p6-dlx-requeue-queue
package main

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

const (
	notifications = "p6.notification-exchange"
	emailQueue    = "p6.email-queue"
	webhookQueue  = "p6.webhook-queue"
	emailDead     = "p6.email-queue.dead"

	maxRequeues = 10
	enough      = 50 // calls of the service that is down, until this example stops the loop
)

var errDown = errors.New("the email service is down")

var policy = retry.Policy{
	MaxRetries:  maxRequeues,
	Backoff:     retry.Exponential(20*time.Millisecond, 1.5),
	GiveUpAfter: 6 * time.Second,
	Names:       retry.Names{Prefix: "p6."},
}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("The old way: reject, and a consumer that sends back immediately")
	count, took := hammer(s)

	s.Act("hopback: backoff, and a reason for each dead letter")
	calls, span := fourDeaths(s)

	s.Act("hopback: replay of the failed message, now that the email service is up")
	replay(s)

	s.Proven("the old way called the broken service %d times in %d ms, while x-death counted %d of %d; "+
		"hopback called it %d times in %d ms, no retry early; 4 dead letters with 4 reasons, and 1 of them replayed to its queue only, where it was retried although its first failure was %v ago",
		enough, took.Milliseconds(), count, maxRequeues, calls, span.Milliseconds(), policy.GiveUpAfter)
}

// hammer runs the old email worker and the consumer of requeue-queue. It returns the
// highest count of rejections that it read, and how long the calls took.
func hammer(s *show.Stage) (highest int, took time.Duration) {
	dead := declare.DeadLetterTarget{Exchange: "p6.error-exchange"}
	s.Declare(declare.Topology{
		Exchanges: []declare.Exchange{{Name: notifications, Type: declare.ExchangeFanout}, {Name: "p6.error-exchange", Type: declare.ExchangeFanout}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: emailQueue, DeadLetter: dead},
			declare.QuorumQueue{Name: webhookQueue, DeadLetter: dead},
			declare.QuorumQueue{Name: "p6.requeue-queue", DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: notifications, Queue: emailQueue}, {Source: notifications, Queue: webhookQueue},
			{Source: "p6.error-exchange", Queue: "p6.requeue-queue"},
		},
	})
	calls := 0
	began := time.Now()
	done := make(chan struct{})
	stopWorker := s.Consume(emailQueue, client.HandlerFunc(func(context.Context, *client.Delivery) error {
		switch calls++; {
		case calls <= 3 || calls == maxRequeues+1:
			s.Say("call %d of the email service after %v: down", calls, time.Since(began).Round(time.Millisecond))
		case calls == enough:
			took = time.Since(began)
			close(done)
			return nil
		}
		return client.Modify{DeadLetter: true} // nack(msg, false, false)
	}), client.ConsumerConfig{})
	stopRequeue := s.Consume("p6.requeue-queue", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		origin, _ := d.Annotation("x-first-death-queue").(string)
		count := rejections(d)
		highest = max(highest, count)
		if d.Annotation("x-first-death-reason") != "rejected" || count >= maxRequeues {
			return nil // never reached
		}
		return client.Forward{To: address.Queue(origin), Message: client.Copy(d.Message())} // sendToQueue, ack
	}), client.ConsumerConfig{})
	s.Send(address.Exchange(notifications, ""), message("welcome"))
	show.Next(s, done, "the calls")
	stopWorker()
	stopRequeue()
	s.Say("call %d after %v; the highest count in x-death: %d of %d", enough, took.Round(time.Millisecond), highest, maxRequeues)
	s.Want(highest == 1, "the count stays at 1")
	return highest, took
}

// rejections is the count in the history's entry for rejections, as in
// xDeaths.find(d => d.reason === 'rejected')?.count.
func rejections(d *client.Delivery) int {
	deaths, _ := d.Annotation("x-opt-deaths").([]map[any]any)
	for _, death := range deaths {
		if death["reason"] == "rejected" {
			n, _ := death["count"].(uint64)
			return int(n)
		}
	}
	return -1
}

// fourDeaths lets four messages be dead-lettered for different reasons. It returns how often
// the email service was called for the one that failed, and how long that took.
func fourDeaths(s *show.Stage) (calls int, span time.Duration) {
	topology := show.Must(retry.Topology(policy,
		declare.QuorumQueue{Name: emailQueue, DeliveryLimit: 2}, declare.QuorumQueue{Name: webhookQueue, DeliveryLimit: 2}))
	topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: notifications, Type: declare.ExchangeFanout})
	topology.Bindings = append(topology.Bindings,
		declare.Binding{Source: notifications, Queue: emailQueue}, declare.Binding{Source: notifications, Queue: webhookQueue})
	s.Declare(topology)

	// This one expires before there is a worker.
	late := message("too late")
	late.Header.TTL = 50 * time.Millisecond
	s.Send(address.Queue(emailQueue), late)
	s.Holds(emailDead, 1)

	var last time.Time
	early := 0
	stop := s.Consume(emailQueue, retry.With(policy)(client.Typed(client.RawCodec{}, func(ctx context.Context, body string) error {
		switch body {
		case "refused":
			return client.DeadLetter{Err: errors.New("no such address")} // the handler decides
		case "poison":
			return client.Requeue{Failed: true} // instead of killing the worker: the broker counts both the same
		}
		calls++
		if calls > 1 {
			asked, _ := policy.Delay(calls - 1)
			had := time.Since(last)
			s.Say("call %d of the email service: delay %v, came after %v", calls, asked, had.Round(time.Millisecond))
			if had < asked-time.Millisecond { // the broker counts whole milliseconds
				early++
			}
			span += had
		}
		last = time.Now()
		return errDown
	})), client.ConsumerConfig{})
	s.Send(address.Exchange(notifications, ""), message("welcome"), message("refused"), message("poison"))
	s.Holds(emailDead, 4)
	stop()
	s.Want(early == 0, "every retry comes after its delay: %d came early", early)
	s.Want(calls == maxRequeues+1, "the service is called %d times: it was called %d times", maxRequeues+1, calls)
	return calls, span
}

// replay sends the failed email back to its original queue, long after policy.GiveUpAfter. The
// exchange would also send it to the webhooks. The message starts over: it fails once more,
// and is retried.
func replay(s *show.Stage) {
	d := show.Must(desk.New(s.Conn, desk.Config{Names: policy.Names}))
	list := show.Must(d.List(s.Ctx, desk.ListConfig{Queue: emailDead}))
	reasons := map[string]client.Reason{}
	var failed time.Time
	for _, m := range list.Messages {
		s.Say("%-8s  reason %-14s  retries %2d  error %q", m.MessageID, m.Reason, m.Retries, m.Error)
		reasons[m.MessageID] = m.Reason
		if m.Reason == retry.ReasonExhausted {
			failed = m.FirstFailure
		}
	}
	s.Want(maps.Equal(reasons, map[string]client.Reason{
		"welcome": retry.ReasonExhausted, "refused": retry.ReasonRejected, "too late": retry.ReasonExpired, "poison": retry.ReasonDeliveryLimit,
	}), "each dead letter has its reason: %v", reasons)
	time.Sleep(time.Until(failed.Add(policy.GiveUpAfter)))

	attempts := make(chan int, 10)
	s.Consume(emailQueue, retry.With(policy)(client.Typed(client.RawCodec{}, func(ctx context.Context, body string) error {
		attempt := retry.Attempt(ctx)
		s.Say("%s, attempt %d", body, attempt)
		attempts <- attempt
		if attempt == 1 {
			return errDown
		}
		return nil
	})), client.ConsumerConfig{})
	r := show.Must(d.Replay(s.Ctx, desk.ReplayConfig{Queue: emailDead, Filter: desk.Filter{Reasons: []client.Reason{retry.ReasonExhausted}}, By: "p6"}))
	s.Say("replayed %d of %d, %v after the first failure", r.Replayed, r.Seen, time.Since(failed).Round(time.Second))
	s.Want(r.Replayed == 1, "the failed message is replayed: %+v", r)
	first, second := show.Next(s, attempts, "the replay"), show.Next(s, attempts, "the retry")
	s.Want(first == 1 && second == 2, "the message starts over: attempts %d and %d", first, second)
	s.Holds(emailDead, 3)
	s.Holds(webhookQueue, 3) // it has no worker: welcome, refused, and poison, each once
}

func message(body string) *client.Message {
	m := client.NewMessage([]byte(body))
	m.Properties.MessageID = body
	return m
}
