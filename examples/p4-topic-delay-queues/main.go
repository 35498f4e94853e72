// Command p4-topic-delay-queues is for teams that share topic delay queues among work
// queues, with a decorator around their handlers:
//
//	@with_rabbitmq_retries(max_retries=5, retry_exceptions=(ConnectionError, TimeoutError))
//
//	my_work_queue ──▶ retry_exchange ──delay.10000.#──▶ delay_10s ──▶ requeue_exchange ──*.*.my_work_queue──▶ my_work_queue
//
// hopback's default strategy uses the same names. First, an old worker and a hopback worker
// share the old definitions, unchanged. Each continues the other's count in x-retry-count,
// although one writes a string and the other a number. The old definitions have no
// dead-letter queue, so messages disappear if they are exhausted, not retryable, or poison.
// Then both workers use hopback's topology, which keeps all of these messages, with the
// reason.
//
// The delays are a thousandth of the old ones: 10 ms, 60 ms, 300 ms, 600 ms, and 1.8 s instead
// of 10 s, 1 min, 5 min, 10 min, and 30 min. All names start with "p4.".
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/p4-topic-delay-queues
package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	queue         = "p4.my_work_queue"
	maxRetries    = 5
	deliveryLimit = 5
	flaky         = 8 // messages that succeed at their last attempt
)

var (
	delays = []time.Duration{10 * time.Millisecond, 60 * time.Millisecond, 300 * time.Millisecond, 600 * time.Millisecond, 1800 * time.Millisecond}

	errConnection = errors.New("ConnectionError: temporary API failure")
	errTimeout    = errors.New("TimeoutError")
	errValue      = errors.New("ValueError: invalid data format")
)

// policy is the old decorator's policy in hopback's terms.
var policy = retry.Policy{
	MaxRetries: maxRetries,
	Backoff:    retry.Delays(delays...),
	RetryIf:    retry.On(errConnection, errTimeout),
	Names:      retry.Names{Prefix: "p4."},
}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("The old definitions, with an old worker and a hopback worker side by side")
	s.Declare(definitions())
	// hopback reports what is wrong with them, and starts only if these checks are disabled.
	err := s.Conn.Consume(s.Ctx, queue, retry.With(policy)(client.HandlerFunc(nil)), client.ConsumerConfig{})
	s.Want(errors.As(err, new(*retry.GuardError)), "a check fails: %v", err)
	s.Say("hopback refuses to start, and names %d problems, such as:", strings.Count(err.Error(), "\n")+1)
	s.Say("%s", strings.SplitN(err.Error(), "\n", 2)[0])
	waived := policy
	waived.Waive = retry.AllGuards()
	work(s, waived)
	s.Holds(queue, 0)
	for _, delay := range delays {
		s.Holds(policy.Names.DelayQueue(delay), 0)
	}
	s.Say("exhausted, not retryable, and poison: in no queue, 3 of 3 are lost")

	s.Act("hopback's topology, with the same names and the same two workers")
	s.Declare(show.Must(retry.Topology(policy, declare.QuorumQueue{Name: queue, DeliveryLimit: deliveryLimit})))
	old, new := work(s, policy)
	var kept []string
	s.Take("p4.my_work_queue.dead", 3, func(m *client.Message) {
		death := retry.DeadLetterOf(m)
		s.Say("p4.my_work_queue.dead has %s: %s, %d retries", m.GetData(), death.Reason, death.Retries)
		kept = append(kept, string(m.GetData()))
	})
	slices.Sort(kept)
	s.Want(slices.Equal(kept, []string{"exhausted", "not retryable", "poison"}), "each of them is kept once: %v", kept)

	s.Proven("%d messages of %d succeeded at attempt %d, with an old worker (%d deliveries) and a hopback worker (%d) sharing one counter; "+
		"of 3 that failed, the old definitions lost 3, hopback's topology 0", flaky, flaky, maxRetries+1, old, new)
}

// definitions is the old definitions.json. It adds what the old file leaves implicit: the work
// queue drops its dead letters, and a delay queue forwards messages at most once.
func definitions() declare.Topology {
	t := declare.Topology{
		Exchanges: []declare.Exchange{{Name: "p4.retry_exchange", Type: declare.ExchangeTopic}, {Name: "p4.requeue_exchange", Type: declare.ExchangeTopic}},
		Queues:    []declare.Queue{declare.QuorumQueue{Name: queue, DeliveryLimit: deliveryLimit, DeadLetter: declare.Drop()}},
		Bindings:  []declare.Binding{{Source: "p4.requeue_exchange", Queue: queue, Key: "*.*." + queue}},
	}
	for _, delay := range delays {
		name := policy.Names.DelayQueue(delay) // "p4.delay_10ms"
		t.Queues = append(t.Queues, declare.QuorumQueue{
			Name: name, MessageTTL: delay, DeadLetter: declare.DeadLetterTarget{Exchange: "p4.requeue_exchange", AtMostOnce: true},
		})
		t.Bindings = append(t.Bindings, declare.Binding{Source: "p4.retry_exchange", Queue: name, Key: fmt.Sprintf("delay.%d.#", delay.Milliseconds())})
	}
	return t
}

// oldDecorator is with_rabbitmq_retries.
func oldDecorator(p *client.Publisher[*client.Message]) client.Middleware {
	return func(h client.Handler) client.Handler {
		return client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			err := h.Handle(ctx, d)
			if err == nil || errors.As(err, new(client.Outcome)) {
				return err
			}
			retries := 0
			if header := d.Property("x-retry-count"); header != nil {
				retries, _ = strconv.Atoi(fmt.Sprint(header)) // int(headers.get("x-retry-count", 0))
			}
			if !errors.Is(err, errConnection) && !errors.Is(err, errTimeout) || retries >= maxRetries {
				return client.Modify{DeadLetter: true} // raise: the message is rejected
			}
			m := client.Copy(d.Message())
			if m.ApplicationProperties == nil {
				m.ApplicationProperties = map[string]any{}
			}
			m.ApplicationProperties["x-retry-count"] = strconv.Itoa(retries + 1)
			delay := delays[min(retries, len(delays)-1)]
			key := fmt.Sprintf("delay.%d.%s", delay.Milliseconds(), d.Queue())
			return p.Publish(ctx, m, client.PublishTo(address.Exchange("p4.retry_exchange", key)))
		})
	}
}

// work publishes messages and handles them with both workers until no message can be handled
// again. It returns how many deliveries each worker had.
func work(s *show.Stage, p retry.Policy) (byOld, byHopback int) {
	var (
		mu       sync.Mutex
		counters = map[string][]string{} // x-retry-count at each delivery, by message
		workers  = map[string]int{}
		wrong    = 0 // counters that differ from the number of the retry
		left     = flaky*(maxRetries+1) + (maxRetries + 1) + 1 + (deliveryLimit + 1)
		done     = make(chan struct{})
	)
	handler := func(worker string) client.Handler {
		return client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			body := string(d.Message().GetData())
			if body != "poison" && retry.Count(d.Message()) != len(counters[body]) {
				wrong++
			}
			counters[body] = append(counters[body], fmt.Sprintf("%#v", d.Property("x-retry-count")))
			workers[worker]++
			if left--; left == 0 {
				close(done)
			}
			switch {
			case body == "not retryable":
				return errValue
			case body == "poison": // instead of killing the worker: the broker counts both the same
				return client.Requeue{Failed: true}
			case body == "exhausted" || len(counters[body]) <= maxRetries:
				return errConnection
			}
			return nil
		})
	}
	publisher := show.Must(client.NewPublisher[*client.Message](s.Ctx, s.Conn, address.Address{}, client.PublisherConfig{}))
	stopOld := s.Consume(queue, oldDecorator(publisher)(handler("old")), client.ConsumerConfig{Prefetch: 1})
	stopHopback := s.Consume(queue, retry.With(p)(handler("hopback")), client.ConsumerConfig{Prefetch: 1})

	messages := []*client.Message{client.NewMessage([]byte("exhausted")), client.NewMessage([]byte("not retryable")), client.NewMessage([]byte("poison"))}
	for i := range flaky {
		messages = append(messages, client.NewMessage(fmt.Appendf(nil, "flaky %d", i+1)))
	}
	s.Send(address.Queue(queue), messages...)
	show.Next(s, done, "the last delivery")
	stopOld()
	stopHopback()

	s.Say("x-retry-count of %q: %s", "flaky 1", strings.Join(counters["flaky 1"], ", "))
	s.Say("deliveries: %d to the old worker, %d to the hopback worker", workers["old"], workers["hopback"])
	s.Want(wrong == 0, "both workers increase the counter by one: %v", counters)
	s.Want(left == 0, "no message is delivered more often than the limits allow: extra deliveries: %d", -left)
	s.Want(workers["old"] > 0 && workers["hopback"] > 0, "both workers get messages")
	for body, want := range map[string]int{"flaky 1": maxRetries + 1, "exhausted": maxRetries + 1, "not retryable": 1, "poison": deliveryLimit + 1} {
		s.Want(len(counters[body]) == want, "%s is delivered %d times: %v", body, want, counters[body])
	}
	return workers["old"], workers["hopback"]
}
