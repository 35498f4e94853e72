package fair_test

import (
	"context"
	"fmt"
	"log"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// One tenant has a thousand messages in the queue, and another one's message is handled long before they are done.
func Example() {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())

	invoices := fair.Queue{Name: "invoices"}
	policy := retry.Policy{Strategy: retry.StrategyNative}
	topology, err := invoices.Topology(policy, declare.QuorumQueue{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[string](ctx, conn, address.Address{}, client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	imported := invoices.To("large")
	if err := publisher.PublishAll(ctx, make([]string, 1000), func(_ string, m *client.Message) { imported(m) }); err != nil {
		log.Fatal(err)
	}
	if err := publisher.Publish(ctx, "invoice 1 of a small customer", invoices.To("small")); err != nil {
		log.Fatal(err)
	}

	handle := func(ctx context.Context, text string) error {
		if text != "" {
			fmt.Println(text)
			stop()
			return nil
		}
		<-client.Draining(ctx) // an import takes its time
		return nil
	}
	if err := fair.Consume(ctx, conn, invoices, client.JSON(handle), fair.Config{Retry: policy}); err != nil {
		log.Fatal(err)
	}
	// Output: invoice 1 of a small customer
}
