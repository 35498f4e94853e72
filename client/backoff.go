package client

import "time"

// ReconnectBackoff is a pause that doubles from Min to Max, with full jitter: each
// pause is random between 0 and that value. Zero means the defaults: 100 ms and 10 s.
type ReconnectBackoff struct {
	Min, Max time.Duration
}
