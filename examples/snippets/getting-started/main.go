// Command getting-started is the program of docs/getting-started.md: it publishes an order for each
// argument, and charges orders until it is interrupted.
package main

import (
	"cmp"
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/hopback/hopback"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

var policy = hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(time.Second, 10*time.Second, time.Minute)}

// charge handles one order.
func charge(ctx context.Context, o Order) error {
	switch {
	case o.ID == "gift":
		return hopback.Permanent(errors.New("a gift has no price")) // a retry can't help
	case hopback.Attempt(ctx) == 1:
		return errors.New("the bank timed out") // a retry can
	}
	log.Println("charged", o.ID)
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

// run publishes an order for each of ids, and charges orders until ctx ends.
func run(ctx context.Context, ids []string) error {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := hopback.Connect(ctx, url, hopback.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())

	orders := hopback.Queue[Order]{Conn: conn, Name: "orders", Retry: policy}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	for _, id := range ids {
		if err := orders.Publish(ctx, Order{ID: id}); err != nil {
			return err
		}
	}
	return orders.Consume(ctx, charge, hopback.ConsumerConfig{})
}
