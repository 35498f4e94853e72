package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// errors.Is matches the kind of an error, and errors.As gets its fields. SafeToRetry reports
// whether a repeated call can't create a duplicate.
func ExampleError() {
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

	_, err = client.NewPublisher[string](ctx, conn, address.Queue("nowhere"), client.PublisherConfig{})
	fmt.Println("queue missing:", errors.Is(err, client.ErrNotFound), client.SafeToRetry(err))
	var e *client.Error
	if errors.As(err, &e) {
		fmt.Println(e.Op, e.Target, e.Condition)
	}

	_, err = client.NewPublisher[string](ctx, conn, address.Queue(""), client.PublisherConfig{})
	var invalid *argument.Error
	if errors.As(err, &invalid) { // a mistake in the program: nothing was sent
		fmt.Println(invalid.Path, invalid.Problem)
	}
	// Output:
	// queue missing: true true
	// publish /queues/nowhere amqp:not-found
	// queue name is empty
}
