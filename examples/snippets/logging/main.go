// Command logging is the program of docs/logging.md: one order fails twice, and what is logged about it.
package main

import (
	"cmp"
	"context"
	"errors"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/hopback/hopback"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	// hopback logs to this logger, with the attributes that you give it.
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelInfo})).With("service", "billing")
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := hopback.Connect(ctx, url, hopback.Config{Logger: logger})
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())

	orders := hopback.Queue[Order]{
		Conn: conn,
		Name: "orders",
		Retry: hopback.Policy{
			MaxRetries: 1,
			Backoff:    hopback.Delays(100 * time.Millisecond),
			LogLevel:   slog.LevelInfo, // the default; slog.LevelDebug hides attempts that will be retried
		},
	}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	if err := orders.Publish(ctx, Order{ID: "o-1"}); err != nil {
		return err
	}
	charge := func(ctx context.Context, o Order) error {
		if hopback.Attempt(ctx) == 2 {
			stop() // this program ends after the last attempt
		}
		return errors.New("the bank timed out")
	}
	return orders.Consume(ctx, charge, hopback.ConsumerConfig{})
}
