package inside

import (
	"context"
	"time"
)

// TestSettings let tests outside of package client see soon what a client does after hours: replacing
// sessions, also those of consumers that starve. Zero keeps the client's own value.
type TestSettings struct {
	// RenewAfter is after how many deliveries a session is replaced by another.
	RenewAfter uint64
	// Starving is for how long a consumer with credit gets nothing before it checks whether its queue
	// has messages.
	Starving time.Duration
}

type testSettingsKey struct{}

// WithTestSettings returns a ctx for client.Connect, whose Conn has these settings.
func WithTestSettings(ctx context.Context, s TestSettings) context.Context {
	return context.WithValue(ctx, testSettingsKey{}, s)
}

// TestSettingsOf returns the settings that Connect's ctx has.
func TestSettingsOf(ctx context.Context) TestSettings {
	s, _ := ctx.Value(testSettingsKey{}).(TestSettings)
	return s
}
