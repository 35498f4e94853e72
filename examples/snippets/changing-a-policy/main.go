// Command changing-a-policy is the program of docs/changing-a-policy.md: it declares a queue with a
// policy, and then with another one.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

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

	orders := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}
	before := retry.Policy{Backoff: retry.Delays(10*time.Second, time.Minute)}
	after := retry.Policy{Backoff: retry.Delays(5*time.Second, time.Minute)}
	for _, policy := range []retry.Policy{before, after} {
		topology, err := retry.Topology(policy, orders)
		if err != nil {
			return err
		}
		report, err := declare.Apply(ctx, conn.Management(), topology)
		if err != nil {
			return err
		}
		fmt.Println("queues created:", report.Count("created"), "existed:", report.Count("existed"))
	}

	orders.DeliveryLimit = 10 // an argument of a queue that exists
	topology, err := retry.Topology(after, orders)
	if err != nil {
		return err
	}
	_, err = declare.Apply(ctx, conn.Management(), topology)
	fmt.Println("refused:", errors.Is(err, declare.ErrConflict))
	return nil
}
