package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// A configuration for production: all nodes of the cluster, a name for the management UI, and a
// callback for state changes.
func ExampleConfig() {
	cfg := client.Config{
		Name:      "billing",
		Endpoints: []string{"amqp://rabbit-2:5672/shop", "amqp://rabbit-3:5672/shop"},
		SASL:      client.Plain("billing", "secret"), // keeps the password out of the URLs
		OnEvent: func(e client.Event) {
			if e.Kind == client.EventLost || e.Kind == client.EventBlocked {
				slog.Warn("RabbitMQ", "event", e.String())
			}
		},
	}
	_ = func(ctx context.Context) (*client.Conn, error) {
		return client.Connect(ctx, "amqp://rabbit-1:5672/shop", cfg)
	}
}

// The settings that most consumers need. All others have defaults that adapt.
func ExampleConsumerConfig() {
	cfg := client.ConsumerConfig{
		Concurrency: 16,               // handlers at once; default 1
		Grace:       25 * time.Second, // how long a shutdown waits for handlers; default 30 s
	}
	_ = func(ctx context.Context, conn *client.Conn, handler client.Handler) {
		if err := conn.Consume(ctx, "orders", handler, cfg); err != nil {
			log.Fatal(err) // for instance client.ErrNotFound: declare the queue first
		}
	}
}

// A pause stops all consumers that share a Control; running handlers finish.
func ExampleControl_Pause() {
	var control client.Control // in ConsumerConfig.Control
	resume := control.Pause()
	fmt.Println("paused:", control.Paused())
	resume()
	fmt.Println("paused:", control.Paused())
	// Output:
	// paused: true
	// paused: false
}

// The first middleware is the outermost. Here each attempt has at most 10 s, a panic is an error
// like any other, and all errors are retried.
func ExampleChain() {
	chain := client.Chain(
		retry.With(retry.Policy{MaxRetries: 3}),
		client.Timeout(10*time.Second),
		client.Recover(),
	)
	handler := chain(client.JSON(func(ctx context.Context, o Order) error {
		panic("bug")
	}))
	delivery := client.NewDelivery("orders", client.NewMessage([]byte(`{"id": "o-1"}`)))
	err := handler.Handle(context.Background(), delivery)
	forward, retried := client.OutcomeOf(err).(client.Forward)
	var panicked *client.PanicError
	fmt.Println("retried:", retried, "because of a panic:", errors.As(forward.Err, &panicked))
	// Output: retried: true because of a panic: true
}
