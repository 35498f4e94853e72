// Command guarantees is the program of docs/guarantees.md: it prints what is certain after each
// result of Publish.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := hopback.Connect(ctx, url, hopback.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	orders := hopback.Queue[Order]{Conn: conn, Name: "orders"}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	nowhere, err := client.NewPublisher[Order](ctx, conn, address.Exchange("amq.direct", "nobody"), client.PublisherConfig{})
	if err != nil {
		return err
	}

	report(orders.Publish(ctx, Order{ID: "o-1"}))
	report(nowhere.Publish(ctx, Order{ID: "o-2"}))
	report(orders.Publish(ctx, Order{ID: strings.Repeat("x", 17<<20)}))
	return nil
}

func report(err error) {
	switch {
	case err == nil:
		fmt.Println("the broker has it")
	case errors.Is(err, client.ErrUnroutable):
		fmt.Println("no queue is bound; safe to publish again:", client.SafeToRetry(err))
	case errors.Is(err, client.ErrTooLarge):
		fmt.Println("too large, not sent; safe to publish again:", client.SafeToRetry(err))
	default: // client.ErrOutcomeUnknown, for example
		fmt.Println(err, "safe to publish again:", client.SafeToRetry(err))
	}
}
