package declare_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// Apply can run at each start of a service. If a queue exists with other arguments, the error lists
// what differs, and what you can do.
func ExampleApply() {
	ctx := context.Background()
	broker, err := hopbacktest.New(hopbacktest.Config{}) // RabbitMQ in memory
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)

	orders := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")}
	dead := declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}
	topology := declare.Topology{Queues: []declare.Queue{orders, dead}}
	for range 2 {
		report, err := declare.Apply(ctx, conn.Management(), topology)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(report)
	}

	orders.DeliveryLimit = 7
	_, err = declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{orders, dead}})
	fmt.Println(errors.Is(err, declare.ErrConflict))
	if e, ok := errors.AsType[*declare.Error](err); ok {
		for _, d := range e.Differences {
			fmt.Println(d)
		}
		for _, r := range e.Remedies {
			fmt.Println("-", r)
		}
	}
	// Output:
	// created   queue "orders"
	// created   queue "orders.dead"
	// existed   queue "orders"
	// existed   queue "orders.dead"
	// true
	// x-delivery-limit: the broker has "5", declared is "7"
	// - declare it as it exists
	// - declare it under a new name and move the messages, as package operate/migrate does
	// - delete it once it is empty and unused, and run this again
}
