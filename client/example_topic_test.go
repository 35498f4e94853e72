package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// Events go to a topic exchange. Each queue binds the routing keys that it wants: "*" matches
// one word, "#" any number of words.
func ExamplePublisher_Publish_topic() {
	broker, err := hopbacktest.New(hopbacktest.Config{}) // a broker in memory; a service has a URL
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx := context.Background()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)
	if _, err := declare.Apply(ctx, conn.Management(), declare.Topology{
		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "billing", DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "audit", DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "shop", Queue: "billing", Key: "order.placed"},
			{Source: "shop", Queue: "audit", Key: "order.*"},
		},
	}); err != nil {
		log.Fatal(err)
	}

	// The zero Address: each message names its exchange and routing key.
	publisher, err := client.NewPublisher[string](ctx, conn, address.Address{}, client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer publisher.Close(ctx)
	for _, key := range []string{"order.placed", "order.canceled", "customer.created"} {
		err := publisher.Publish(ctx, "o-1", client.PublishTo(address.Exchange("shop", key)))
		if errors.Is(err, client.ErrUnroutable) {
			fmt.Println(key, "has no queue")
		} else if err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println("billing:", broker.Queue("billing").Counts().Messages)
	fmt.Println("audit:", broker.Queue("audit").Counts().Messages)
	// Output:
	// customer.created has no queue
	// billing: 1
	// audit: 2
}
