// Command partitions is the first program of docs/partitions.md: changes of each customer are handled in
// the order of publication.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/partition"
)

type Change struct {
	Customer string `json:"customer"`
	N        int    `json:"n"`
}

func main() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	conn, err := client.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	check(err)
	defer conn.Close(context.Background())

	changes := partition.Group{Name: "changes", Partitions: 4}
	topology, err := changes.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("changes-dlq")})
	check(err)
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "changes-dlq", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
	_, err = declare.Apply(ctx, conn.Management(), topology)
	check(err)

	p, err := client.NewPublisher[Change](ctx, conn, address.Address{}, client.PublisherConfig{})
	check(err)
	for n := range 3 {
		change := Change{"anna", n + 1}
		check(p.Publish(ctx, change, client.PublishTo(changes.Address(change.Customer))))
	}

	// Start this in as many processes as you like.
	handler := client.JSON(func(_ context.Context, c Change) error {
		fmt.Println(c.Customer, c.N)
		if c.N == 3 {
			stop()
		}
		return nil
	})
	check(partition.Consume(ctx, conn, changes, handler, partition.Config{}))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
