package officialclient_test

import (
	"context"
	"log"
	"time"

	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/adapter/officialclient"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

type Order struct{ ID string }

// Retries with back-off on connections of the official client.
func ExampleConsume() {
	env := rabbitmqamqp.NewEnvironment("amqp://guest:guest@localhost:5672/", &rabbitmqamqp.AmqpConnOptions{
		RecoveryConfiguration: &rabbitmqamqp.RecoveryConfiguration{ActiveRecovery: false}, // Consume recovers
	})
	policy := retry.Policy{MaxRetries: 5, Backoff: retry.Exponential(time.Second, 2)}
	charge := client.JSON(func(context.Context, Order) error {
		return nil // or an error, which is retried
	})
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if err := officialclient.Consume(ctx, env.NewConnection, "orders", retry.With(policy)(charge), officialclient.Config{Concurrency: 16}); err != nil {
		log.Fatal(err)
	}
}
