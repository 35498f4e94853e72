// Package renewal says when a session is replaced by another, and lets tests have
// that sooner: what happens after two billion deliveries is seen after fifty.
package renewal

import (
	"context"
	"time"
)

// Starving is for how long a consumer with credit gets nothing before it looks whether
// its queue has messages, and has its session replaced.
const Starving = 30 * time.Second

type starvingKey struct{}

// WithStarving returns a ctx for client.Connect whose consumers look after d.
func WithStarving(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, starvingKey{}, d)
}

// StarvingFrom is Starving, or what WithStarving has set.
func StarvingFrom(ctx context.Context) time.Duration {
	if d, ok := ctx.Value(starvingKey{}).(time.Duration); ok && d > 0 {
		return d
	}
	return Starving
}

// After is after how many deliveries a session is replaced. Delivery-ids are 32
// bits wide, and go-amqp never gets past the last one.
const After = 1 << 31

type key struct{}

// With returns a ctx for client.Connect whose sessions are replaced after n
// deliveries.
func With(ctx context.Context, n uint64) context.Context { return context.WithValue(ctx, key{}, n) }

// From is After, or what With has set.
func From(ctx context.Context) uint64 {
	if n, ok := ctx.Value(key{}).(uint64); ok && n > 0 {
		return n
	}
	return After
}
