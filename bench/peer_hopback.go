package main

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/retry"
)

// hopback is the SDK, as its documentation uses it.
type hopback struct {
	strategy retry.Strategy
	// traced has OpenTelemetry follow all messages, none of whose traces is sampled.
	traced bool
	// batch, if not 0, is how many messages a batch has; handlers how many run at once, 0 for one;
	// takes how long one takes.
	batch, handlers int
	// callers is how many publish at once; 0 means inFlight.
	callers int
	takes   time.Duration
	// window is how many messages may be under way; 0 means inFlight.
	window int
}

// with is ctx for hopConnect.
func (p hopback) with(ctx context.Context) context.Context {
	if p.traced {
		return context.WithValue(ctx, tracedKey{}, true)
	}
	return ctx
}

type tracedKey struct{}

func hopConnect(ctx context.Context, url string) (*client.Conn, func(), error) {
	cfg := client.Config{Name: "hopback-bench", Logger: quiet}
	if ctx.Value(tracedKey{}) != nil {
		// Metrics are read once a minute by default; the reader here is asked by nobody.
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

// publish has inFlight callers, or p.callers, each of which waits for its message.
func (p hopback) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	return p.publishTo(ctx, url, address.Queue(queue), body, m)
}

func (p hopback) publishTo(ctx context.Context, url string, to address.Address, body []byte, m *meter) error {
	conn, hangUp, err := hopConnect(p.with(ctx), url)
	if err != nil {
		return err
	}
	defer hangUp()
	pub, err := client.NewPublisher[[]byte](ctx, conn, to, client.PublisherConfig{Codec: client.RawCodec{}})
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

func (p hopback) consume(ctx context.Context, url, queue string, json bool, m *meter) error {
	if p.batch > 0 {
		return hopConsume(ctx, url, queue, batch.JSON(batch.Config{Size: p.batch}, func(_ context.Context, items []*batch.Item[order]) error {
			time.Sleep(p.takes)
			for range items {
				m.tick()
			}
			return nil
		}), 1, p.window, m.done)
	}
	var h client.Handler = client.HandlerFunc(func(context.Context, *client.Delivery) error { m.tick(); return nil })
	if json {
		h = client.JSON(func(context.Context, order) error {
			time.Sleep(p.takes)
			m.tick()
			return nil
		})
	}
	return hopConsume(p.with(ctx), url, queue, h, max(p.handlers, 1), p.window, m.done)
}

func hopConsume(ctx context.Context, url, queue string, h client.Handler, concurrency, prefetch int, done <-chan struct{}) error {
	conn, hangUp, err := hopConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-done:
			cancel()
		case <-ctx.Done():
		}
	}()
	return conn.Consume(ctx, queue, h, client.ConsumerConfig{Concurrency: concurrency, Prefetch: cmp.Or(prefetch, inFlight)})
}

func (p hopback) fail(ctx context.Context, url string, bed *retryBed, concurrency int, handle func([]byte) (time.Duration, bool)) error {
	policy := bed.policy
	policy.Strategy = p.strategy
	single := len(bed.delays) == 1
	h := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		delay, again := handle(d.Message().GetData())
		switch {
		case !again:
			return nil
		case single:
			return errFailed
		}
		return retry.After(delay, errFailed)
	})
	return hopConsume(ctx, url, bed.queues[0], retry.With(policy)(h), concurrency, 0, nil)
}

// centralPeer is the central retrier, as its documentation runs it.
type centralPeer struct {
	// instances is how many there are, each with a connection of its own. 0 means one.
	instances int
	// distance is how far away the broker is, in each direction.
	distance time.Duration
	// window is an instance's prefetch. 0 means centralWindow.
	window int
	// published is for failures that their worker has published to the failed queue, so they
	// lack the broker's history of a dead letter.
	published bool
	// whole has a worker reject what the instances handle, as they do.
	whole bool
}

// centralWindow is what the documentation recommends.
const centralWindow = 1000

func (p centralPeer) run(ctx context.Context, url string, bed *retryBed, cfg retry.CentralConfig, m *meter) error {
	if p.distance > 0 {
		line, err := farAway(url, p.distance)
		if err != nil {
			return err
		}
		defer line.close()
		url = line.url
	}
	var all []func(context.Context) error
	for range p.all() {
		all = append(all, func(ctx context.Context) error { return p.instance(ctx, url, bed, cfg, m) })
	}
	if p.whole {
		rejecting := client.HandlerFunc(func(context.Context, *client.Delivery) error { return client.Modify{DeadLetter: true} })
		all = append(all, func(ctx context.Context) error { return hopConsume(ctx, url, bed.queues[0], rejecting, 16, 0, nil) })
	}
	ended := make(chan error, len(all))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, run := range all {
		go func() {
			ended <- run(ctx)
			cancel() // one that fails ends all
		}()
	}
	var errs []error
	for range all {
		errs = append(errs, <-ended)
	}
	return errors.Join(errs...)
}

func (p centralPeer) all() int { return max(p.instances, 1) }

func (p centralPeer) prefetch() int { return cmp.Or(p.window, centralWindow) }

func (p centralPeer) instance(ctx context.Context, url string, bed *retryBed, cfg retry.CentralConfig, m *meter) error {
	conn, hangUp, err := hopConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	central := retry.Central(bed.policy, cfg)
	h := client.Wrap(central, func(ctx context.Context, d *client.Delivery) error {
		m.tick()
		return central.Handle(ctx, d)
	})
	return conn.Consume(ctx, cfg.FailedQueueOf(bed.policy), h, client.ConsumerConfig{Prefetch: p.prefetch(), NoQuarantine: true})
}

// reject fills a work queue and rejects all of it, into the failed queue.
func (l *lab) reject(ctx context.Context, queue, failed string, n int) error {
	if err := l.fill(ctx, queue, orderBody(256), n); err != nil {
		return err
	}
	seen := make(chan struct{})
	var left atomic.Int64
	left.Store(int64(n))
	err := hopConsume(ctx, l.url, queue, client.HandlerFunc(func(context.Context, *client.Delivery) error {
		if left.Add(-1) == 0 {
			close(seen)
		}
		return client.Modify{DeadLetter: true}
	}), 1, 0, seen)
	if err != nil {
		return err
	}
	// The broker dead-letters behind the settlements.
	for range 20 {
		if err = l.holds(ctx, failed, uint64(n)); err == nil || ctx.Err() != nil {
			break
		}
	}
	return err
}

func (hopback) stream(ctx context.Context, url, queue string, in <-chan []byte, ready func(), got func([]byte)) error {
	conn, hangUp, err := hopConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	p, err := client.NewPublisher[[]byte](ctx, conn, address.Queue(queue), client.PublisherConfig{Codec: client.RawCodec{}})
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	failed := make(chan error, 1+inFlight)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range inFlight {
		wg.Go(func() {
			for {
				select {
				case body := <-in:
					if err := p.Publish(ctx, body); err != nil && ctx.Err() == nil {
						failed <- err
						cancel()
						return
					}
				case <-ctx.Done():
					return
				}
			}
		})
	}
	h := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error { got(d.Message().GetData()); return nil })
	wg.Go(func() {
		failed <- conn.Consume(ctx, queue, h, client.ConsumerConfig{Prefetch: inFlight})
	})
	ready()
	wg.Wait()
	close(failed)
	var errs []error
	for err := range failed {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (hopback) survive(ctx context.Context, url, queue string, got func([]byte)) error {
	h := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error { got(d.Message().GetData()); return nil })
	return hopConsume(ctx, url, queue, h, 1, 0, nil)
}
