package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// parkedMessages is how many messages runParked puts into delay.
var parkedMessages = 1_000_000

// runParked has a consumer fail so many messages that all are in delay at once, and
// weighs the client's heap before and after.
func runParked(ctx context.Context, l *lab, c contestant, _ int) (metrics, error) {
	bed, err := l.retryBed(ctx, 1, time.Hour)
	if err != nil {
		return nil, err
	}
	policy := bed.policy
	policy.Strategy = c.peer.(hopback).strategy
	n := parkedMessages
	const first = 1000 // of them are parked before the heap is weighed for the first time
	early, all := newMeter(1, first-1), newMeter(1, n+first-1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error { early.tick(); all.tick(); return errFailed })
	go func() { ended <- hopConsume(ctx, l.url, bed.queues[0], retry.With(policy)(h), 1, 0, nil) }()
	step := func(n int, m *meter) error {
		if err := l.fill(ctx, bed.queues[0], orderBody(256), n); err != nil {
			return err
		}
		select {
		case <-m.done:
			return l.holds(ctx, bed.queues[0], 0)
		case err := <-ended:
			return fmt.Errorf("ended early: %w", err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := step(first, early); err != nil {
		return nil, err
	}
	before := heapInUse()
	if err := step(n, all); err != nil {
		return nil, err
	}
	after := heapInUse()
	cancel()
	return metrics{heap: (after - before) / (1 << 20), rate: all.metrics()[rate]}, <-ended
}

func heapInUse() float64 {
	settleDown()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}
