// Command quickstart shows what hopback does with messages whose handler fails.
//
// It publishes eight orders that each fail differently, and handles them with a retry policy
// that has short delays. It prints a timeline, where each order ended up, and the dead-letter
// queue.
//
//	go run ./examples/quickstart -url amqp://guest:guest@localhost:5672/
//
// Without -url it uses the URL in HOPBACK_URL. Without either it runs on a RabbitMQ in memory,
// which needs only Go: see package hopbacktest. The names of all queues and exchanges that it
// declares start with "quickstart.", and it deletes them at the end. If an order is
// unaccounted for, the exit code is 1.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID      string `json:"id"`
	History string `json:"history"` // what the fake bank will do, see bank.go
}

var orders = []Order{
	{"o-1", paid},
	{"o-2", failsOnce},
	{"o-3", failsThreeTimes},
	{"o-4", failsAlways},
	{"o-5", declined},
	{"o-6", brokenBody},
	{"o-7", panics},
	{"o-8", busy},
}

// policy retries three times. Your program can leave out Names, and then shares its exchanges
// and delay queues with all other programs that leave it out.
var policy = retry.Policy{
	MaxRetries: 3,
	Backoff:    retry.Delays(300*time.Millisecond, time.Second, 2*time.Second),
	LogLevel:   slog.LevelDebug, // default: Info. The timeline already shows each attempt
	Names: retry.Names{
		RetryExchange:      "quickstart.retry",
		RequeueExchange:    "quickstart.requeue",
		DeadLetterExchange: "quickstart.dead_letter",
		GivenUpExchange:    "quickstart.given_up",
		Parking:            "quickstart.parking",
		DelayPrefix:        "quickstart.delay_",
	},
}

var work = declare.QuorumQueue{Name: "quickstart.orders", DeliveryLimit: 5}

// charge handles an order. Its result decides what happens to the message.
func charge(ctx context.Context, o Order) error {
	err := askBank(ctx, o)
	if wait, ok := errors.AsType[busyError](err); ok {
		return retry.After(wait.time, err) // the bank says when to retry
	}
	if errors.Is(err, errDeclined) {
		return retry.Permanent(err) // retrying can't help
	}
	return err // nil acknowledges; the policy retries every other error
}

func run(ctx context.Context, url string, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errPatience)
	defer cancel()
	show := newTimeline(out, orders)

	// Connect. If the connection is lost, the client reconnects, and consumers and publishers
	// continue.
	conn, err := client.Connect(ctx, url, client.Config{Name: "hopback-quickstart", Logger: show.logger()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, briefly(ctx, conn.Close)) }()

	// Declare the work queue and everything that retries need. First, delete what an
	// interrupted run may have left.
	topology, err := retry.Topology(policy, work)
	if err != nil {
		return err
	}
	tidy := func(ctx context.Context) error {
		_, err := declare.Delete(ctx, conn.Management(), topology)
		return err
	}
	if err := tidy(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, briefly(ctx, tidy)) }()
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return err
	}
	show.declared(conn.Broker(), policy, work.Name)

	// Publish. A nil error means that the broker has the message.
	publisher, err := client.NewPublisher[Order](ctx, conn, work.Address(), client.PublisherConfig{})
	if err != nil {
		return err
	}
	for _, o := range orders {
		err := publisher.Publish(ctx, o, func(m *client.Message) {
			m.Properties.MessageID = o.ID
			if o.History == brokenBody {
				m.Data = [][]byte{[]byte(`{"id": "o-6`)}
			}
		})
		if err != nil {
			return err
		}
	}
	show.published(len(orders))

	// Consume the work queue with the policy, and the dead-letter queue to see what it has,
	// until every order is accepted or dead-lettered.
	consuming, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	consume := func(queue string, h client.Handler) {
		stop(conn.Consume(consuming, queue, h, client.ConsumerConfig{}))
	}
	var consumers sync.WaitGroup
	consumers.Go(func() {
		consume(work.Name, client.Chain(show.watch, retry.With(policy))(client.JSON(charge)))
	})
	consumers.Go(func() {
		consume(policy.Names.DeadLetterQueue(work.Name), client.HandlerFunc(show.dead))
	})
	select {
	case <-show.allEnded:
		stop(nil)
	case <-consuming.Done():
	}
	why := context.Cause(consuming)
	consumers.Wait()

	left, err := messagesLeft(context.WithoutCancel(ctx), conn, topology)
	return errors.Join(show.tables(policy.Names.DeadLetterQueue(work.Name), left, why), err)
}

// messagesLeft counts the messages in the queues after the consumers have stopped.
func messagesLeft(ctx context.Context, conn *client.Conn, t declare.Topology) (n uint64, err error) {
	err = briefly(ctx, func(ctx context.Context) error {
		for _, q := range t.Queues {
			info, err := declare.Inspect(ctx, conn.Management(), q.Address().QueueName())
			if err != nil {
				return err
			}
			n += info.Messages
		}
		return nil
	})
	return n, err
}

// patience is the timeout for a broker that stops answering: a run takes 4 s.
const patience = 15 * time.Second

var errPatience = fmt.Errorf("it took longer than %v", patience)

// briefly calls do with a short timeout, even if ctx has ended.
func briefly(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 4*time.Second)
	defer cancel()
	return do(ctx)
}

// runAnywhere runs on the broker at url, or without a URL on a RabbitMQ in memory.
func runAnywhere(ctx context.Context, url string, out io.Writer) error {
	if url != "" {
		return run(ctx, url, out)
	}
	memory, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		return err
	}
	defer memory.Close()
	if url, err = memory.Listen("127.0.0.1:0"); err != nil {
		return err
	}
	fmt.Fprintln(out, "This runs on hopback's RabbitMQ in memory. To use another one, set HOPBACK_URL.")
	fmt.Fprintln(out)
	return run(ctx, url, out)
}

func main() {
	url := flag.String("url", "", "amqp:// `URL` of the broker (default $HOPBACK_URL; without it a RabbitMQ in memory)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := runAnywhere(ctx, cmp.Or(*url, os.Getenv("HOPBACK_URL")), os.Stdout)
	stop()
	switch {
	case errors.Is(err, client.ErrUnreachable):
		fmt.Fprintf(os.Stderr, "quickstart: %v; start a RabbitMQ 4, or run: make demo\n", err)
		os.Exit(1)
	case err != nil:
		fmt.Fprintf(os.Stderr, "quickstart: %v\n", err)
		os.Exit(1)
	}
}
