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

// charge handles one order. If it returns an error, the order comes back later.
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

	orders := hopback.Queue[Order]{
		Conn:  conn,
		Name:  "orders",
		Retry: hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(time.Second, 10*time.Second, time.Minute)},
	}
	if err := orders.Declare(ctx); err != nil { // the queue, its retry queues, and its dead-letter queue
		return err
	}
	if err := orders.Publish(ctx, Order{ID: "o-1"}); err != nil { // nil: RabbitMQ has stored the message
		return err
	}
	return orders.Consume(ctx, charge, hopback.ConsumerConfig{Concurrency: 16}) // until Ctrl-C
}
