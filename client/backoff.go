package client

import "time"

// ReconnectBackoff is an exponential backoff with full jitter: the upper limit doubles from Min
// to Max, and each pause is a random time between 0 and that limit. The zero value means the
// defaults: 100 ms and 10 s.
type ReconnectBackoff struct {
	Min, Max time.Duration
}
