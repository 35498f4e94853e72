package brokerclock

import (
	"context"
	"time"
)

type ownKey struct{}

// WithOwnClock returns a ctx for client.Conn.Consume, for tests. What retry.With and retry.Central decorate there
// goes by now, in place of the host's clock.
func WithOwnClock(ctx context.Context, now func() time.Time) context.Context {
	return context.WithValue(ctx, ownKey{}, now)
}

// OwnClock returns the clock that a consumer's ctx has: time.Now, unless WithOwnClock gave it another.
func OwnClock(ctx context.Context) func() time.Time {
	if now, ok := ctx.Value(ownKey{}).(func() time.Time); ok {
		return now
	}
	return time.Now
}
