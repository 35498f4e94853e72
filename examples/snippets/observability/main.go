// Command observability is the program of docs/observability.md: it prints the spans of an order that
// fails once.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/hopbackotel"
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
	spans := tracetest.NewInMemoryExporter() // your program exports spans over OTLP, for example
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))

	logs := slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})
	cfg := hopback.Config{Logger: slog.New(hopbackotel.LogHandler(logs))} // adds trace_id and span_id
	if err := hopbackotel.Instrument(&cfg, hopbackotel.Config{TracerProvider: provider}); err != nil {
		return err
	}
	conn, err := hopback.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), cfg)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	orders := hopback.Queue[Order]{Conn: conn, Name: "orders", Retry: hopback.Policy{Backoff: hopback.Delays(time.Second)}}
	if err := orders.Declare(ctx); err != nil {
		return err
	}
	if err := orders.Publish(ctx, Order{ID: "o-1"}); err != nil {
		return err
	}
	err = orders.Consume(ctx, func(ctx context.Context, _ Order) error {
		if hopback.Attempt(ctx) == 1 {
			return errors.New("the bank timed out")
		}
		stop()
		return nil
	}, hopback.ConsumerConfig{})
	for _, s := range spans.GetSpans() {
		fmt.Printf("%s: %s %q\n", s.SpanKind, s.Name, s.Status.Description)
	}
	return err
}
