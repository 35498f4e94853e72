package main

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/stream"
)

// hopback is the SDK, as its documentation uses it.
type hopback struct {
	// traced has OpenTelemetry follow all messages, none of whose traces is sampled.
	traced bool
	// handlers is how many run at once; 0 means one.
	handlers int
	// callers is how many publish at once; 0 means inFlight.
	callers int
}

func (p hopback) connect(ctx context.Context, url string) (*client.Conn, func(), error) {
	cfg := client.Config{Name: "hopback-bench", Logger: quiet}
	if p.traced {
		// Metrics are read once a minute by default; nobody asks the reader here.
		traces := trace.NewTracerProvider(trace.WithSampler(trace.NeverSample()))
		if err := hopbackotel.Instrument(&cfg, hopbackotel.Config{TracerProvider: traces, MeterProvider: metric.NewMeterProvider(metric.WithReader(metric.NewManualReader()))}); err != nil {
			return nil, nil, err
		}
	}
	conn, err := client.Connect(ctx, url, cfg)
	if err != nil {
		return nil, nil, err
	}
	return conn, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}, nil
}

// publish has inFlight callers, or p.callers. Each waits for its message.
func (p hopback) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	conn, hangUp, err := p.connect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	pub, err := client.NewPublisher[[]byte](ctx, conn, address.Queue(queue), client.PublisherConfig{Codec: client.RawCodec{}})
	if err != nil {
		return err
	}
	return together(cmp.Or(p.callers, inFlight), m.total(), func() error {
		if err := pub.Publish(ctx, body); err != nil {
			return err
		}
		m.tick()
		return nil
	})
}

// together calls do n times, by so many goroutines at once, until one fails.
func together(goroutines, n int, do func() error) error {
	var left atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	failed := make(chan error, goroutines)
	for range goroutines {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := do(); err != nil {
					left.Store(0)
					failed <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(failed)
	return <-failed
}

func (p hopback) consume(ctx context.Context, url, queue string, m *meter) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-m.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	return p.consumeUntil(ctx, url, queue, max(p.handlers, 1), client.HandlerFunc(func(context.Context, *client.Delivery) error { m.tick(); return nil }))
}

func (p hopback) consumeUntil(ctx context.Context, url, queue string, concurrency int, h client.Handler) error {
	conn, hangUp, err := p.connect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	return conn.Consume(ctx, queue, h, client.ConsumerConfig{Concurrency: concurrency, Prefetch: inFlight})
}

func (p hopback) fail(ctx context.Context, url string, bed *retryBed, concurrency int, m *meter) error {
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error { m.tick(); return errFailed })
	return p.consumeUntil(ctx, url, bed.queues[0], concurrency, retry.With(bed.policy)(h))
}

func (p hopback) read(ctx context.Context, url, name string, m *meter) error {
	conn, hangUp, err := p.connect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error {
		m.tick()
		if ifDone(m) != nil {
			cancel()
		}
		return nil
	})
	// Positions are saved, as they would be.
	return stream.Consume(ctx, conn, name, h, stream.Config{Consumer: "bench", Offsets: &stream.MemoryStore{}, Prefetch: streamCredit, Logger: quiet})
}
