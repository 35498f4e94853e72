// Command concepts is the program of docs/concepts.md: it follows one message from the first attempt
// to the dead-letter queue.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := hopback.Connect(ctx, url, hopback.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	orders := hopback.Queue[Order]{
		Conn:  conn,
		Name:  "orders",
		Retry: hopback.Policy{MaxRetries: 2, Backoff: hopback.Delays(200*time.Millisecond, time.Second)},
	}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	if err := orders.Publish(ctx, Order{ID: "o-1"}); err != nil {
		return err
	}

	// The worker of the queue: its handler fails at each attempt.
	stopped := make(chan error, 1)
	go func() {
		stopped <- orders.Consume(ctx, func(ctx context.Context, o Order) error {
			fmt.Printf("orders: attempt %d of %s\n", hopback.Attempt(ctx), o.ID)
			return errors.New("the bank timed out")
		}, hopback.ConsumerConfig{})
	}()

	// A consumer of the dead-letter queue: it reads the message's history.
	report := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		dead := retry.DeadLetterOf(d.Message())
		fmt.Printf("%s: %s, %d retries, from %s\n", d.Queue(), dead.Reason, dead.Retries, dead.Queue)
		for i, a := range retry.AttemptsOf(d.Message()) {
			fmt.Printf("  attempt %d: %s; delay %v\n", i+1, a.Error, a.Delay)
		}
		stop()
		return nil // acknowledged: the message is gone
	})
	if err := conn.Consume(ctx, "orders.dead", report, client.ConsumerConfig{}); err != nil {
		return err
	}
	return <-stopped
}
