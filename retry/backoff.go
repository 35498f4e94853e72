package retry

import (
	"math"
	"slices"
	"time"
)

// Backoff returns the delay before a retry. The first retry is 1. Use [Delays] or [Exponential],
// or write your own.
//
//   - A Backoff must always return the same delay for the same retry, because the delay queues
//     are derived from it.
//   - For randomness set [Policy.Jitter].
//   - Fractions of a millisecond are rounded up.
type Backoff func(retry int) time.Duration

// Delays returns a Backoff that uses the delays one after the other. Later retries use the last
// one. Without delays, [Policy.Validate] returns an error.
func Delays(delays ...time.Duration) Backoff {
	delays = slices.Clone(delays)
	return func(retry int) time.Duration {
		if len(delays) == 0 {
			return 0 // refused by Policy.Validate
		}
		return delays[min(max(retry, 1), len(delays))-1]
	}
}

// Exponential returns a Backoff that starts with initial and multiplies the delay by factor for
// each further retry: Exponential(time.Second, 1.5) returns 1 s, 1.5 s, 2.25 s, and so on. Limit
// it with [Backoff.Cap].
func Exponential(initial time.Duration, factor float64) Backoff {
	return func(retry int) time.Duration {
		d := float64(initial) * math.Pow(factor, float64(max(retry, 1)-1))
		if math.IsNaN(d) || d > float64(maxDelay) {
			return tooLong // refused by Policy.Validate, unless capped
		}
		return wholeMillis(time.Duration(d))
	}
}

// Cap returns a Backoff with the delays of b, but none longer than limit.
func (b Backoff) Cap(limit time.Duration) Backoff {
	if b == nil {
		return nil
	}
	return func(retry int) time.Duration { return min(b(retry), limit) }
}

const (
	// maxDelay is the longest x-message-ttl that RabbitMQ accepts: ten years.
	maxDelay = 10 * 365 * 24 * time.Hour
	tooLong  = maxDelay + time.Millisecond
)

// wholeMillis rounds up: a delay is never shorter than asked for.
func wholeMillis(d time.Duration) time.Duration {
	if r := d % time.Millisecond; r > 0 {
		d += time.Millisecond - r
	}
	return d
}

// Jitter randomizes delays, so that messages that failed together don't return together. See
// [Policy.Jitter] for the strategies that support it. The zero value, "", means JitterNone.
type Jitter string

const (
	// JitterNone doesn't change the delays. It is the default.
	JitterNone Jitter = "none"
	// JitterEqual waits for half of the delay plus a random part of the other half.
	JitterEqual Jitter = "equal"
	// JitterFull waits for a random part of the delay, at least 1 ms.
	JitterFull Jitter = "full"
)

var jitters = []Jitter{JitterNone, JitterEqual, JitterFull}

// spread applies the jitter. u is random, at least 0 and below 1.
func (j Jitter) spread(d time.Duration, u float64) time.Duration {
	switch j {
	case JitterEqual:
		d = d/2 + time.Duration(u*float64(d-d/2))
	case JitterFull:
		d = time.Duration(u * float64(d))
	}
	return max(wholeMillis(d), time.Millisecond)
}
