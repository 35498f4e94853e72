// Command cookbook is the first program of docs/cookbook.md: one event reaches several services.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

var policy = retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, time.Minute)}

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := client.Connect(ctx, url, client.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(ctx)

	// A queue for each service, each with its own retries, behind a topic exchange.
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "billing"}, declare.QuorumQueue{Name: "audit"})
	if err != nil {
		return err
	}
	topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "shop", Type: declare.ExchangeTopic})
	topology.Bindings = append(topology.Bindings,
		declare.Binding{Source: "shop", Queue: "billing", Key: "order.placed"},
		declare.Binding{Source: "shop", Queue: "audit", Key: "order.#"},
	)
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return err
	}

	// Without an address, each message names its own.
	events, err := client.NewPublisher[Order](ctx, conn, address.Address{}, client.PublisherConfig{})
	if err != nil {
		return err
	}
	for _, event := range []string{"order.placed", "order.canceled"} {
		if err := events.Publish(ctx, Order{ID: "o-1"}, client.PublishTo(address.Exchange("shop", event))); err != nil {
			return err
		}
	}
	for _, queue := range []string{"billing", "audit"} { // each in its own process, normally
		info, err := declare.Inspect(ctx, conn.Management(), queue)
		if err != nil {
			return err
		}
		fmt.Println(queue, "has", info.Messages)
	}
	return nil
}
