package main_test

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

type Order struct {
	ID    string `json:"id"`
	Cents int    `json:"cents"`
}

// charge is the work. What it returns decides what becomes of the message.
func charge(ctx context.Context, o Order) error {
	if o.Cents <= 0 {
		return retry.Permanent(errors.New("nothing to charge")) // to the dead-letter queue
	}
	if d, _ := client.DeliveryFrom(ctx); retry.Count(d.Message()) == 0 {
		return errors.New("the bank timed out") // comes back in a second
	}
	log.Println("charged", o.ID)
	return nil // accepted
}

func work(ctx context.Context, url string, handle func(context.Context, Order) error) error {
	conn, err := client.Connect(ctx, url, client.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())

	policy := retry.Policy{
		MaxRetries: 3,
		Backoff:    retry.Delays(time.Second, 10*time.Second, time.Minute),
	}
	orders := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}
	topology, err := retry.Topology(policy, orders)
	if err != nil {
		return err
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return err
	}

	publisher, err := client.NewPublisher[Order](ctx, conn, orders.Address(), client.PublisherConfig{})
	if err != nil {
		return err
	}
	if err := publisher.Publish(ctx, Order{ID: "o-1", Cents: 995}); err != nil {
		return err // nil only when the broker has the message
	}

	// Until ctx ends; then running handlers finish, and it returns nil.
	handler := retry.With(policy)(client.JSON(handle))
	return conn.Consume(ctx, orders.Name, handler, client.ConsumerConfig{Concurrency: 16})
}

func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := work(ctx, "amqp://guest:guest@localhost:5672/", charge); err != nil {
		log.Fatal(err)
	}
}
