package retry_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// A worker in any language only rejects a failed message. Central, in another process, has the
// broker return it after a delay.
func ExampleCentral() {
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	broker, err := hopbacktest.New(hopbacktest.Config{}) // RabbitMQ in memory
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())

	policy := retry.Policy{
		MaxRetries: 3,
		Backoff:    retry.Delays(10 * time.Millisecond),
		Rules:      []retry.ErrorRule{{If: retry.OnReason("invalid"), Do: retry.ActionDeadLetter}},
	}
	cfg := retry.CentralConfig{Queues: []string{"orders"}}
	topology, err := retry.CentralTopology(policy, cfg, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}

	// The central retrier.
	central := make(chan error, 1)
	go func() {
		central <- conn.Consume(ctx, "failed_queue", retry.Central(policy, cfg), client.ConsumerConfig{Prefetch: 1000, NoIsolation: true})
	}()

	// The worker. It doesn't use package retry: it rejects, with the reason in a header.
	orders, err := client.NewPublisher[string](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := orders.Publish(ctx, "o-1"); err != nil {
		log.Fatal(err)
	}
	deliveries := 0
	err = conn.Consume(ctx, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		if deliveries++; deliveries < 3 {
			fmt.Println("delivery", deliveries, "rejected")
			return client.Modify{DeadLetter: true, Annotations: map[string]any{"x-reason": "timeout"}}
		}
		fmt.Println("delivery", deliveries, "handled, after", retry.Count(d.Message()), "retries")
		stop()
		return nil
	}), client.ConsumerConfig{})
	fmt.Println(err, <-central)
	// Output:
	// delivery 1 rejected
	// delivery 2 rejected
	// delivery 3 handled, after 2 retries
	// <nil> <nil>
}
