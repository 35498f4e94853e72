package retry_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os/signal"
	"syscall"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

// A worker retries failed orders until it gets SIGTERM. Then Consume stops receiving, lets running
// handlers finish within ConsumerConfig.Grace, and returns nil. Messages that aren't finished by
// then are delivered again, to this worker or another one.
func ExampleWith_gracefulShutdown() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()

	// RabbitMQ in memory. A service connects to "amqp://user:password@host:5672/", without Dial.
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())

	policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(10*time.Millisecond, 50*time.Millisecond)}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}

	orders, err := client.NewPublisher[Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := orders.Publish(ctx, Order{ID: "o-1"}); err != nil {
		log.Fatal(err)
	}

	charge := func(ctx context.Context, o Order) error {
		if n := retry.Attempt(ctx); n < 3 {
			fmt.Println("attempt", n, "failed")
			return errors.New("the bank timed out")
		}
		fmt.Println("charged", o.ID)
		stop() // cancels ctx, as SIGTERM does
		return nil
	}
	err = conn.Consume(ctx, "orders", retry.With(policy)(client.JSON(charge)), client.ConsumerConfig{Grace: 20 * time.Second})
	fmt.Println("stopped:", err)
	// Output:
	// attempt 1 failed
	// attempt 2 failed
	// charged o-1
	// stopped: <nil>
}
