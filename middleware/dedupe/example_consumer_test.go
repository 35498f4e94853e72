package dedupe_test

import (
	"context"
	"fmt"
	"log"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
)

// A publisher sends a payment twice, because it missed the first confirmation. The consumer
// charges it once, since both messages have the same message-id.
func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	broker, err := hopbacktest.New(hopbacktest.Config{}) // a broker in memory; a service has a URL
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())
	policy, queue := retry.Policy{}, declare.QuorumQueue{Name: "payments"}
	topology, err := retry.Topology(policy, queue)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[string](ctx, conn, queue.Address(), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	for range 2 {
		err := publisher.Publish(ctx, "p-1", func(m *client.Message) { m.Properties.MessageID = "p-1" })
		if err != nil {
			log.Fatal(err)
		}
	}

	once := dedupe.With(dedupe.Config{
		OnDuplicate: func(d *client.Delivery) {
			fmt.Println("ignored a duplicate of", d.Message().Properties.MessageID)
			stop()
		},
	})
	charge := client.JSON(func(ctx context.Context, id string) error {
		fmt.Println("charged", id)
		return nil
	})
	if err := conn.Consume(ctx, "payments", retry.With(policy)(once(charge)), client.ConsumerConfig{}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// charged p-1
	// ignored a duplicate of p-1
}
