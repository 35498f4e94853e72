// Command p7-delayed-message is for teams that delay retries with the delayed-message
// exchange plugin:
//
//	amqpChannel.assertExchange('wait-exchange', 'x-delayed-message')
//
//	email-queue ──▶ error-exchange ──▶ error-queue ──▶ wait-exchange ──▶ requeue-queue ──▶ email-queue
//
// The plugin is no longer developed. The example shows that a broker without it refuses that
// topology. With hopback and RabbitMQ 4.3, the work queue itself holds each message for any
// delay, without a plugin, a copy, or another queue. RabbitMQ 4.0 to 4.2 would deliver the
// message again immediately, so the same program uses another strategy there:
// retry.StrategyAuto chooses when the consumer starts.
//
// The delays are 0.5 s, 1 s, and 2.5 s instead of 0.5 s, 30 s, 1 min, and 5 min. (The old
// code's 1 * 3600 milliseconds isn't a minute; time.Minute is.)
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p7-delayed-message
package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const emailDead = "p7.email-queue.dead"

var email = declare.QuorumQueue{Name: "p7.email-queue"}

var policy = retry.Policy{
	Strategy:   retry.StrategyAuto,
	MaxRetries: 3,
	Backoff:    retry.Delays(500*time.Millisecond, time.Second, 2500*time.Millisecond),
	Names:      retry.Names{Prefix: "p7."},
}

// rateLimits are the values of Retry-After with which the email service answers, one for each
// message. The longest comes first: in a single queue with a TTL, each message would wait for
// those before it.
var rateLimits = []time.Duration{2137 * time.Millisecond, 1611 * time.Millisecond, 1083 * time.Millisecond, 557 * time.Millisecond, 229 * time.Millisecond}

func main() { show.Main(example) }

func example(s *show.Stage) {
	native := s.Conn.Broker().AtLeast(4, 3)

	s.Act("The old way: the delayed-message exchange")
	_, err := declare.Apply(s.Ctx, s.Conn.Management(), declare.Topology{Exchanges: []declare.Exchange{
		{Name: "p7.wait-exchange", Type: "x-delayed-message", Arguments: map[string]any{"x-delayed-type": "fanout"}},
	}})
	if err == nil {
		s.Check(declare.DeleteExchange(s.Ctx, s.Conn.Management(), "p7.wait-exchange"))
		s.Say("this broker has the plugin, which keeps delayed messages on one node only")
	} else {
		s.Want(errors.Is(err, declare.ErrInvalid), "the broker doesn't know the type: %v", err)
		s.Say("%v", err)
	}

	s.Act("hopback: retry.StrategyAuto")
	s.Declare(show.Must(retry.Topology(policy, email)))
	inWords := policy
	inWords.Strategy = retry.StrategyNative
	if native {
		t := show.Must(retry.Topology(inWords, email))
		s.Say("the queue itself can delay: retry.StrategyNative needs %d queues, %s and two for messages that aren't retried any more", len(t.Queues), email.Name)
	} else {
		err := s.Conn.Consume(s.Ctx, email.Name, retry.With(inWords)(client.HandlerFunc(nil)), client.ConsumerConfig{})
		var guard *retry.GuardError
		s.Want(errors.As(err, &guard) && guard.Guard == retry.GuardStrategy, "retry.StrategyNative is refused: %v", err)
		s.Say("retry.StrategyNative is refused: %s; %s", guard.Problem, guard.Remedy)
	}
	order, through := delayed(s)
	longest, shortest := rateLimits[0], rateLimits[len(rateLimits)-1]
	if native {
		s.Want(len(through) == 0, "the queue itself holds the messages, not %v", through)
		s.Want(slices.Index(order, shortest) < slices.Index(order, longest), "no delay blocks the messages behind it: %v", order)
		s.Proven("on %s, with StrategyNative, delays of %v down to %v ended in the order %v, and 3 retries ended in a dead letter; "+
			"0 early, 0 other queues, 0 copies, 0 plugins", s.Conn.Broker().Version, longest, shortest, order)
		return
	}
	for _, delay := range show.Must(policy.QueueDelays()) {
		s.Want(slices.Contains(through, policy.Names.HoldQueue(delay)), "a queue holds messages for %v: %v", delay, through)
	}
	s.Want(len(through) == 3, "no other queue holds messages: %v", through)
	s.Proven("on %s, where StrategyNative is refused, the same handler had delays of %v down to %v, combined from 3 delay queues, "+
		"and 3 retries ended in a dead letter; 0 early, 0 copies, 0 plugins", s.Conn.Broker().Version, longest, shortest)
}

// delayed fails one message for each of rateLimits once, and another one until it is
// dead-lettered. It returns the order in which the delays ended, and the queues in which
// messages waited.
func delayed(s *show.Stage) (order []time.Duration, through []string) {
	failed := map[string]time.Time{}
	early := 0
	handled := make(chan struct{}, len(rateLimits))
	stop := s.Consume(email.Name, retry.With(policy)(client.Typed(client.RawCodec{}, func(ctx context.Context, body string) error {
		attempt := retry.Attempt(ctx)
		limit, err := time.ParseDuration(body) // each body is a Retry-After, except one
		if attempt > 1 {
			asked, had := limit, time.Since(failed[body])
			if err != nil {
				asked, _ = policy.Delay(attempt - 1)
			}
			held := email.Name
			if d, _ := client.DeliveryFrom(ctx); d.Annotation("x-last-death-queue") != nil {
				held = d.Annotation("x-last-death-queue").(string)
				if !slices.Contains(through, held) {
					through = append(through, held)
				}
			}
			if had < asked-time.Millisecond { // the broker counts whole milliseconds
				early++
			}
			s.Say("%-7s delay %6v, came after %4d ms, last held by %s", body, asked, had.Milliseconds(), held)
		}
		failed[body] = time.Now()
		switch {
		case err != nil:
			return errors.New("always down")
		case attempt == 1:
			return retry.After(limit, errors.New("429 Too Many Requests"))
		}
		order = append(order, limit)
		handled <- struct{}{}
		return nil
	})), client.ConsumerConfig{})

	messages := []*client.Message{client.NewMessage([]byte("down"))}
	for _, limit := range rateLimits {
		messages = append(messages, client.NewMessage([]byte(limit.String())))
	}
	s.Send(email.Address(), messages...)
	for range rateLimits {
		show.Next(s, handled, "the delayed messages")
	}
	var death retry.DeadLetter
	s.Take(emailDead, 1, func(m *client.Message) {
		death = retry.DeadLetterOf(m)
		s.Say("%s has %s: %s after %d retries", emailDead, m.GetData(), death.Reason, death.Retries)
	})
	stop()
	s.Want(early == 0, "no message comes back early: %d did", early)
	s.Want(death.Reason == retry.ReasonExhausted && death.Retries == policy.MaxRetries, "the retries end in the dead-letter queue: %+v", death)
	return order, through
}
