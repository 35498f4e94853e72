// Package clienttest lets tests outside of package client see soon what a client does
// after hours: the replacement of sessions, and of those of consumers that starve.
package clienttest

import (
	"context"
	"time"
)

// Settings are what a test changes. Zero keeps the client's own value.
type Settings struct {
	// RenewAfter is after how many deliveries a session is replaced by another.
	RenewAfter uint64
	// Starving is for how long a consumer with credit gets nothing before it looks whether
	// its queue has messages.
	Starving time.Duration
}

type key struct{}

// With returns a ctx for client.Connect, whose Conn has these settings.
func With(ctx context.Context, s Settings) context.Context { return context.WithValue(ctx, key{}, s) }

// From returns the settings that Connect's ctx has.
func From(ctx context.Context) Settings {
	s, _ := ctx.Value(key{}).(Settings)
	return s
}
