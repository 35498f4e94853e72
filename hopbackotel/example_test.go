package hopbackotel_test

import (
	"context"
	"log/slog"
	"os"

	"go.opentelemetry.io/otel"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbackotel"
)

func connect(ctx context.Context, spans sdktrace.SpanExporter, metrics sdkmetric.Reader) (*client.Conn, error) {
	otel.SetTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithBatcher(spans)))
	otel.SetMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(metrics)))

	cfg := client.Config{
		Logger: slog.New(hopbackotel.LogHandler(slog.NewJSONHandler(os.Stderr, nil))), // adds trace_id and span_id
	}
	if err := hopbackotel.Instrument(&cfg, hopbackotel.Config{}); err != nil { // the global providers
		return nil, err
	}
	return client.Connect(ctx, "amqp://guest:guest@localhost:5672/", cfg)
}

// Each connection of this configuration has traces, metrics, and the trace in its log.
func ExampleInstrument() {
	_ = connect
}
