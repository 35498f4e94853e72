package main

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// hopback is the SDK, as its documentation uses it.
type hopback struct {
	strategy retry.Strategy
}

func hopConnect(ctx context.Context, url string) (*client.Conn, func(), error) {
	conn, err := client.Connect(ctx, url, client.Config{Name: "hopback-bench", Logger: quiet})
	if err != nil {
		return nil, nil, err
	}
	return conn, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}, nil
}

// publish has inFlight callers, each of which waits for its message.
func (hopback) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	conn, hangUp, err := hopConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	p, err := client.NewPublisher[[]byte](ctx, conn, address.Queue(queue), client.PublisherConfig{Codec: client.RawCodec{}})
	if err != nil {
		return err
	}
	return together(inFlight, m.total(), func() error {
		if err := p.Publish(ctx, body); err != nil {
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

func (hopback) consume(ctx context.Context, url, queue string, json bool, m *meter) error {
	var h client.Handler = client.HandlerFunc(func(context.Context, *client.Delivery) error { m.tick(); return nil })
	if json {
		h = client.JSON(func(context.Context, order) error { m.tick(); return nil })
	}
	return hopConsume(ctx, url, queue, h, 1, m.done)
}

func hopConsume(ctx context.Context, url, queue string, h client.Handler, concurrency int, done <-chan struct{}) error {
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
	return conn.Consume(ctx, queue, h, client.ConsumerConfig{Concurrency: concurrency, Prefetch: inFlight})
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
	return hopConsume(ctx, url, bed.queues[0], retry.With(policy)(h), concurrency, nil)
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
	return hopConsume(ctx, url, queue, h, 1, nil)
}
