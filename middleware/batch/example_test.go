package batch_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/retry"
)

type order struct {
	ID int `json:"id"`
}

// Of a hundred orders one fails. It alone is retried, and the others are accepted.
func Example() {
	ctx, stop := context.WithCancel(context.Background())
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())

	policy := retry.Policy{Backoff: retry.Delays(10 * time.Millisecond)}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	orders := make([]order, 100)
	for i := range orders {
		orders[i].ID = i
	}
	if err := publisher.PublishAll(ctx, orders); err != nil {
		log.Fatal(err)
	}

	handler := batch.JSON(batch.Config{Wait: time.Second}, func(_ context.Context, items []*batch.Item[order]) error {
		fmt.Println("a batch of", len(items))
		for _, item := range items {
			if item.Value.ID == 37 && retry.Attempt(item.Context()) == 1 {
				item.Fail(errors.New("the customer is locked"))
			}
		}
		if len(items) == 1 {
			stop()
		}
		return nil
	})
	if err := conn.Consume(ctx, "orders", retry.With(policy)(handler), client.ConsumerConfig{}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// a batch of 100
	// a batch of 1
}

// A statement for all messages fails for all. Split repeats it for each message alone, so
// only the one at fault fails.
func ExampleConfig_split() {
	insert := func(ids []int) error {
		for _, id := range ids {
			if id == 2 {
				return errors.New("duplicate key")
			}
		}
		return nil
	}
	handler := batch.JSON(batch.Config{Size: 3, Split: true}, func(_ context.Context, items []*batch.Item[order]) error {
		ids := make([]int, len(items))
		for i, item := range items {
			ids[i] = item.Value.ID
		}
		return insert(ids)
	})

	results := make([]chan error, 3)
	for i := range results {
		results[i] = make(chan error, 1)
		message := client.NewMessage(fmt.Appendf(nil, `{"id": %d}`, i+1))
		go func() { results[i] <- handler.Handle(context.Background(), client.NewDelivery("orders", message)) }()
	}
	for _, result := range results {
		fmt.Println(<-result)
	}
	// Output:
	// <nil>
	// duplicate key
	// <nil>
}
