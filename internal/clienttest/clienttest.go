// Package clienttest lets tests outside of package client see soon what a client does
// after hours: the replacement of sessions, and of those of consumers that starve.
package clienttest

import "time"

// Settings are what a test changes. Zero keeps the client's own value.
type Settings struct {
	// RenewAfter is after how many deliveries a session is replaced by another.
	RenewAfter uint64
	// Starving is for how long a consumer with credit gets nothing before it looks whether
	// its queue has messages.
	Starving time.Duration
}

// Set returns a copy of config, a client.Config, with these settings. Package client sets
// it.
var Set func(config any, s Settings) any
