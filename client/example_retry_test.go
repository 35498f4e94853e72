package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os/signal"
	"syscall"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// A worker that retries failed messages with delays and shuts down gracefully: after SIGTERM,
// Consume receives no more messages, lets running handlers finish for up to Grace, and returns
// nil. On Kubernetes, set terminationGracePeriodSeconds to more than Grace + 5 s.
func ExampleConn_Consume_retries() {
	broker, err := hopbacktest.New(hopbacktest.Config{}) // a broker in memory; a service has a URL
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())

	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(10*time.Millisecond, time.Minute)}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "payments"})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[string](ctx, conn, address.Queue("payments"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := publisher.Publish(ctx, "p-1"); err != nil {
		log.Fatal(err)
	}

	pay := client.JSON(func(ctx context.Context, id string) error {
		fmt.Println("attempt", retry.Attempt(ctx), "of", id)
		if retry.Attempt(ctx) == 1 {
			return errors.New("the bank timed out") // retried after 10 ms
		}
		stop() // as SIGTERM does
		return nil
	})
	err = conn.Consume(ctx, "payments", retry.With(policy)(pay), client.ConsumerConfig{Concurrency: 16, Grace: 20 * time.Second})
	fmt.Println("stopped:", err)
	// Output:
	// attempt 1 of p-1
	// attempt 2 of p-1
	// stopped: <nil>
}
