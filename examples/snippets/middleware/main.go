// Command middleware is the program of docs/middleware.md: it handles an order that arrives twice, and
// fails once.
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
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

func charge(ctx context.Context, o Order) error {
	if hopback.Attempt(ctx) == 1 {
		return errors.New("the bank timed out")
	}
	log.Println("charged", o.ID)
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := hopback.Connect(ctx, url, hopback.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	policy := hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(time.Second)}
	orders := hopback.Queue[Order]{Conn: conn, Name: "orders", Retry: policy}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	for range 2 { // the same message twice
		id := func(m *hopback.Message) { m.Properties.MessageID = "order-1" }
		if err := orders.Publish(ctx, Order{ID: "o-1"}, id); err != nil {
			return err
		}
	}

	// The first is the outermost.
	handler := client.Chain(
		retry.With(policy),
		dedupe.With(dedupe.Config{OnDuplicate: func(*client.Delivery) { log.Println("a duplicate") }}),
		client.Timeout(10*time.Second),
	)(client.JSON(charge))
	return conn.Consume(ctx, "orders", handler, client.ConsumerConfig{})
}
