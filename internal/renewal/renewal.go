// Package renewal says when a session is replaced by another, and lets tests have
// that sooner: what happens after two billion deliveries is seen after fifty.
package renewal

import "context"

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
