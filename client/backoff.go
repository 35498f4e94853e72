package client

import (
	"math/rand/v2"
	"time"
)

// ReconnectBackoff is a pause that doubles from Min to Max, with full jitter: each
// pause is random between 0 and that value. Zero means the defaults: 100 ms and 10 s.
type ReconnectBackoff struct {
	Min, Max time.Duration
}

// pause is how long to wait after the nth failure in a row: random between
// nothing and Min·2ⁿ, at most Max. The jitter keeps many clients from coming
// back in step.
func (b ReconnectBackoff) pause(n int) time.Duration {
	d := b.Max
	if n < 32 && b.Min<<n < b.Max && b.Min<<n > 0 {
		d = b.Min << n
	}
	return rand.N(d) + time.Millisecond
}
