// Command central-retrier is for teams whose workers can't use hopback: they are written in
// another language, or nobody can change them. If a message fails, such a worker only rejects
// it.
//
// The worker in this example uses go-amqp, without hopback, and has no retries, delays, or
// counter. retry.Central runs next to it, usually in a separate process, and retries rejected
// messages after a delay. A worker in Python or Node works the same way; it calls nack with
// requeue=false.
//
// To do the same on the command line, use "hopback retry run": see docs/central-retrier.md.
// The delays are 100 ms, 200 ms, and 400 ms.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/central-retrier
package main

import (
	"context"
	"errors"
	"net/url"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	queue  = "central.payments"
	failed = "central.failed_queue" // the queue's dead letters go here
	dead   = "central.payments.dead"
)

var delays = []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond}

// policy is for the central retrier. The worker doesn't know it.
var policy = retry.Policy{
	MaxRetries: len(delays),
	Backoff:    retry.Delays(delays...),
	Rules:      []retry.ErrorRule{{If: retry.OnReason("declined"), Do: retry.ActionDeadLetter}},
	Names:      retry.Names{Prefix: "central."},
}

var central = retry.CentralConfig{Queues: []string{queue}}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("A worker that rejects, and the central retrier next to it")
	s.Declare(show.Must(retry.CentralTopology(policy, central, declare.QuorumQueue{Name: queue})))
	s.Consume(failed, retry.Central(policy, central), client.ConsumerConfig{Prefetch: 1000, NoIsolation: true})
	w := startWorker(s)
	s.Send(address.Queue(queue), payment("paid"), payment("bank down"), payment("always down"), payment("declined"))
	show.Next(s, w.paid, "the first payment")
	show.Next(s, w.paid, "the second payment")
	s.Holds(dead, 2)
	w.stop()

	s.Act("The result")
	early, total := 0, 0
	for _, p := range []struct {
		name     string
		attempts int
	}{{"paid", 1}, {"bank down", 3}, {"always down", 4}, {"declined", 1}} {
		name, at := p.name, w.attempts[p.name]
		total += len(at)
		s.Want(len(at) == p.attempts, "the worker gets %q %d times: it got it %d times", name, p.attempts, len(at))
		for i := 1; i < len(at); i++ {
			had := at[i].Sub(at[i-1])
			s.Say("%-11s  attempt %d: delay %v, came after %v", name, i+1, delays[i-1], had.Round(time.Millisecond))
			if had < delays[i-1]-time.Millisecond { // the broker counts whole milliseconds
				early++
			}
		}
	}
	s.Want(early == 0, "every retry comes after its delay: %d came early", early)
	deaths := map[string]retry.DeadLetter{}
	s.Take(dead, 2, func(m *client.Message) {
		d := retry.DeadLetterOf(m)
		s.Say("%-11s  dead-lettered: %s after %d retries; %q", m.GetData(), d.Reason, d.Retries, d.Error)
		deaths[string(m.GetData())] = d
	})
	exhausted, declined := deaths["always down"], deaths["declined"]
	s.Want(exhausted.Reason == retry.ReasonExhausted && exhausted.Retries == len(delays), "one payment has used up its retries: %+v", exhausted)
	s.Want(declined.Reason == retry.ReasonPermanent && declined.Error == errDeclined.Error(), "one payment was declined, and isn't retried: %+v", declined)

	s.Proven("a worker that only rejects got 4 messages %d times, no retry early; 2 succeeded, and 2 were dead-lettered, one after %d retries and one immediately, with the worker's error",
		total, exhausted.Retries)
}

func payment(name string) *client.Message { return client.NewMessage([]byte(name)) }

// worker stands for a worker in any language.
type worker struct {
	stop func()
	paid chan string

	attempts map[string][]time.Time
}

var errDown, errDeclined = errors.New("the bank is down"), errors.New("the bank declines")

// pay fails the first two times, always, or for good.
func (w *worker) pay(name string) error {
	w.attempts[name] = append(w.attempts[name], time.Now())
	switch {
	case name == "declined":
		return errDeclined
	case name == "always down", name == "bank down" && len(w.attempts[name]) <= 2:
		return errDown
	}
	return nil
}

func startWorker(s *show.Stage) *worker {
	w := &worker{paid: make(chan string, 10), attempts: map[string][]time.Time{}}
	u := show.Must(url.Parse(s.URL))
	password, _ := u.User.Password()
	opts := &amqp.ConnOptions{SASLType: amqp.SASLTypePlain(u.User.Username(), password)}
	if len(u.Path) > 1 {
		opts.HostName = "vhost:" + u.Path[1:]
	}
	conn := show.Must(amqp.Dial(s.Ctx, u.Scheme+"://"+u.Host, opts))
	session := show.Must(conn.NewSession(s.Ctx, nil))
	r := show.Must(session.NewReceiver(s.Ctx, "/queues/"+queue, &amqp.ReceiverOptions{Credit: 10}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.work(s.Ctx, r)
	}()
	w.stop = func() {
		_ = conn.Close()
		<-done
	}
	return w
}

// work is the whole worker.
func (w *worker) work(ctx context.Context, r *amqp.Receiver) {
	for {
		m, err := r.Receive(ctx, nil)
		if err != nil {
			return
		}
		name := string(m.GetData())
		switch failure := w.pay(name); failure {
		case nil:
			if err = r.AcceptMessage(ctx, m); err == nil {
				w.paid <- name
			}
		case errDeclined: // a worker over AMQP 1.0 can say why
			err = r.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{
				UndeliverableHere: true, Annotations: amqp.Annotations{"x-reason": "declined", "x-error": failure.Error()},
			})
		default:
			err = r.RejectMessage(ctx, m, nil)
		}
		if err != nil {
			return
		}
	}
}
