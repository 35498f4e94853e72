package hopback_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// A queue can treat some errors differently, and have settings of RabbitMQ.
func ExampleQueue() {
	errBusy := errors.New("the bank is busy")
	queue := hopback.Queue[Payment]{
		Name: "payments",
		Retry: hopback.Policy{
			MaxRetries: 3,
			Backoff:    hopback.Delays(10*time.Second, time.Minute),
			Rules: []retry.ErrorRule{
				{If: retry.On(errBusy), MaxRetries: 10, Backoff: hopback.Delays(5 * time.Minute)},
			},
		},
		Settings: declare.QuorumQueue{DeliveryLimit: 20, MaxLength: 100_000},
	}
	topology, err := queue.Topology() // what Declare creates
	if err != nil {
		fmt.Println(err)
	}
	for _, q := range topology.Queues {
		fmt.Println(q.Address().QueueName())
	}
	// Unordered output:
	// payments
	// payments.dead
	// delay_10s
	// delay_60s
	// delay_300s
	// parking_queue
}

// An edit sets headers and properties of a message.
func ExampleQueue_Publish() {
	var payments hopback.Queue[Payment] // with Conn and Name, see the package's example
	_ = func(ctx context.Context) error {
		return payments.Publish(ctx, Payment{ID: "p-1"}, func(m *hopback.Message) {
			m.Properties.MessageID = "p-1"
			m.ApplicationProperties = map[string]any{"tenant": "a"}
		})
	}
}

// Permanent dead-letters a message that no retry can save; After asks for another delay.
func ExamplePermanent() {
	errDeclined := errors.New("card declined")
	charge := func(ctx context.Context, p Payment) error {
		switch {
		case p.Cents <= 0:
			return hopback.Permanent(errDeclined) // to payments.dead, at once
		case p.Cents > 100_000:
			return hopback.After(time.Hour, errors.New("over today's limit"))
		}
		return nil // acknowledged
	}
	fmt.Println(charge(context.Background(), Payment{ID: "p-1"}))
	fmt.Println(charge(context.Background(), Payment{ID: "p-2", Cents: 200_000}))
	// Output:
	// card declined
	// over today's limit
}
