package retry

import (
	"math"
	"slices"
	"time"
)

// Backoff gives the delay before a retry: retry is 1 for the first. It must be a
// pure function: the same delay for the same number, always, since the delay
// queues are derived from it. Randomness comes from Policy.Jitter.
type Backoff func(retry int) time.Duration

// Delays is a Backoff that goes through a list and stays at its end.
func Delays(delays ...time.Duration) Backoff {
	delays = slices.Clone(delays)
	return func(retry int) time.Duration {
		if len(delays) == 0 {
			return 0 // refused by Policy.Validate
		}
		return delays[min(max(retry, 1), len(delays))-1]
	}
}

// Exponential is a Backoff that begins with initial and grows by factor:
// Exponential(time.Second, 1.5) gives 1 s, 1.5 s, 2.25 s, ... Fractions of a
// millisecond are rounded up. Cap bounds it.
func Exponential(initial time.Duration, factor float64) Backoff {
	return func(retry int) time.Duration {
		d := float64(initial) * math.Pow(factor, float64(max(retry, 1)-1))
		if math.IsNaN(d) || d > float64(maxDelay) {
			return tooLong // refused by Policy.Validate, unless capped
		}
		return wholeMillis(time.Duration(d))
	}
}

// Cap bounds b: no delay is longer than limit.
func (b Backoff) Cap(limit time.Duration) Backoff {
	if b == nil {
		return nil
	}
	return func(retry int) time.Duration { return min(b(retry), limit) }
}

const (
	// maxDelay is the longest x-message-ttl that RabbitMQ takes: ten years.
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

// Jitter spreads delays, so that messages which failed together don't come back
// together.
type Jitter uint8

const (
	// NoJitter, the default, takes delays as they are.
	NoJitter Jitter = iota
	// EqualJitter takes half of the delay, and a random part of the other half.
	EqualJitter
	// FullJitter takes a random part of the whole delay.
	FullJitter
)

// spread applies the jitter. u is random, at least 0 and below 1.
func (j Jitter) spread(d time.Duration, u float64) time.Duration {
	switch j {
	case EqualJitter:
		d = d/2 + time.Duration(u*float64(d-d/2))
	case FullJitter:
		d = time.Duration(u * float64(d))
	}
	return max(wholeMillis(d), time.Millisecond)
}
