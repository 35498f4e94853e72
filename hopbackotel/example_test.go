package hopbackotel_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/hopbacktest"
)

// Instrument adds traces and metrics to each connection of a configuration, and LogHandler the
// ids of the trace to log records. A program has exporters in place of the recorder.
func ExampleInstrument() {
	spans := tracetest.NewSpanRecorder()
	traces := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	metrics := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))
	cfg := hopback.Config{
		Logger: slog.New(hopbackotel.LogHandler(slog.NewJSONHandler(os.Stderr, nil))), // adds trace_id and span_id
	}
	// Without a TracerProvider and MeterProvider, the global ones are used.
	err := hopbackotel.Instrument(&cfg, hopbackotel.Config{TracerProvider: traces, MeterProvider: metrics})
	if err != nil {
		log.Fatal(err)
	}

	broker, err := hopbacktest.New(hopbacktest.Config{}) // a broker in memory; a service has a URL
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	cfg.Dial = broker.Dial
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	conn, err := hopback.Connect(ctx, broker.URL(), cfg)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())
	orders := hopback.Queue[string]{Conn: conn, Name: "orders", Retry: hopback.Policy{Backoff: hopback.Delays(10 * time.Millisecond)}}
	if err := orders.Declare(ctx); err != nil {
		log.Fatal(err)
	}
	if err := orders.Publish(ctx, "o-1"); err != nil {
		log.Fatal(err)
	}
	handle := func(ctx context.Context, id string) error {
		if hopback.Attempt(ctx) == 1 {
			return errors.New("the bank timed out")
		}
		stop()
		return nil
	}
	if err := orders.Consume(ctx, handle, hopback.ConsumerConfig{}); err != nil {
		log.Fatal(err)
	}
	for _, span := range spans.Ended() {
		fmt.Println(span.Name())
	}
	// Unordered output:
	// publish orders
	// process orders
	// publish retry_exchange:delay.10.orders
	// settle orders
	// process orders
	// settle orders
}
