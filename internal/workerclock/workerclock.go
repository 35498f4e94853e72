// Package workerclock lets tests outside of package retry give the workers of a policy
// another clock than the host's.
package workerclock

import (
	"context"
	"time"
)

type key struct{}

// With returns a ctx for client.Conn.Consume. What retry.With and retry.Central decorate
// there goes by now.
func With(ctx context.Context, now func() time.Time) context.Context {
	return context.WithValue(ctx, key{}, now)
}

// From returns the clock that a consumer's ctx has: time.Now, unless With gave it another.
func From(ctx context.Context) func() time.Time {
	if now, ok := ctx.Value(key{}).(func() time.Time); ok {
		return now
	}
	return time.Now
}
