package officialclient_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/adapter/officialclient"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

type Order struct{ ID string }

// Retries with backoff on a consumer of the official client, which is replaced when it is lost.
func ExampleServe() {
	const url = "amqp://guest:guest@localhost:5672/"
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	own, err := client.Connect(ctx, url, client.Config{}) // it reconnects by itself
	if err != nil {
		log.Fatal(err)
	}
	env := rabbitmqamqp.NewEnvironment(url, &rabbitmqamqp.AmqpConnOptions{
		RecoveryConfiguration: &rabbitmqamqp.RecoveryConfiguration{ActiveRecovery: false}, // the loop below recovers
	})
	policy := retry.Policy{MaxRetries: 5, Backoff: retry.Exponential(time.Second, 2)}
	charge := retry.With(policy)(client.JSON(func(context.Context, Order) error {
		return nil // or an error, which is retried
	}))
	serve := func() error {
		conn, err := env.NewConnection(ctx)
		if err != nil {
			return err
		}
		defer bounded(conn.Close)
		consumer, err := conn.NewConsumer(ctx, "orders", &rabbitmqamqp.ConsumerOptions{InitialCredits: 64})
		if err != nil {
			return err
		}
		err = officialclient.Serve(ctx, own, consumer, "orders", charge, officialclient.Config{Concurrency: 16, RecoveryPatience: 1})
		if err == nil {
			bounded(consumer.Close) // before the connection, which would count a delivery for all that was prefetched
		}
		return err
	}
	for ctx.Err() == nil {
		if err := serve(); err != nil && !errors.Is(err, client.ErrConnectionLost) {
			log.Print(err)
		}
		time.Sleep(time.Second)
	}
}

// bounded closes something that is lost, perhaps, and then may not return.
func bounded(end func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = end(ctx)
}
