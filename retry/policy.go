package retry

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/hopback/hopback/argument"
)

const (
	// DefaultMaxRetries is Policy.MaxRetries where it is zero.
	DefaultMaxRetries = 5
	// NoRetries as Policy.MaxRetries dead-letters at the first failure.
	NoRetries = -1

	maxRetries = 1000
	// maxRungs bounds how many delay queues one policy asks for.
	maxRungs = 64
	// maxDelay is what x-message-ttl can hold: 2³²-1 ms, 49.7 days.
	maxDelay = math.MaxUint32 * time.Millisecond
)

// defaultDelays are used where Policy.Backoff is nil.
var defaultDelays = []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute}

// Policy says how often, when and for which errors a message is retried. The zero
// value retries every error but Permanent ones five times, after 10 s, 1 min,
// 5 min, 10 min and 30 min.
//
// Workers that share a queue should share the policy, and every policy whose
// delays go through the same exchange needs its delay queues declared: see
// Topology.
type Policy struct {
	// MaxRetries is how often a message is retried after its first attempt, so it
	// is handled at most MaxRetries+1 times. 0 means DefaultMaxRetries; NoRetries
	// none at all.
	MaxRetries int
	// Backoff gives the delay before each retry. Default: 10 s, 1 min, 5 min,
	// 10 min, 30 min.
	Backoff Backoff
	// RetryIf says which errors are retried; the others are dead-lettered as
	// ReasonPermanent. It isn't asked about Permanent errors, which never are, nor
	// about After, which always is. Default: every error.
	RetryIf func(error) bool
	// Names of the exchanges and queues in between.
	Names Names
}

// Backoff gives the delay before a retry: retry is 1 for the first. It must be a
// pure function: the same delay for the same number, always, since the delay
// queues are derived from it.
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
// millisecond are rounded up.
func Exponential(initial time.Duration, factor float64) Backoff {
	return func(retry int) time.Duration {
		d := float64(initial) * math.Pow(factor, float64(max(retry, 1)-1))
		if math.IsNaN(d) || d > float64(maxDelay) {
			return maxDelay + 1 // refused by Policy.Validate
		}
		return wholeMillis(time.Duration(d))
	}
}

// wholeMillis rounds up: a delay is never shorter than asked for.
func wholeMillis(d time.Duration) time.Duration {
	if r := d % time.Millisecond; r > 0 {
		d += time.Millisecond - r
	}
	return d
}

// On makes a Policy.RetryIf that is true for errors which match one of targets, by
// errors.Is.
func On(targets ...error) func(error) bool {
	targets = slices.Clone(targets)
	return func(err error) bool {
		for _, t := range targets {
			if t != nil && errors.Is(err, t) {
				return true
			}
		}
		return false
	}
}

// Validate says what is wrong with p, as an *argument.Error; nil if nothing is.
func (p Policy) Validate() error {
	_, err := p.plan()
	return err
}

// Ladder returns the delays that p needs queues for, ascending.
func (p Policy) Ladder() ([]time.Duration, error) {
	pl, err := p.plan()
	return pl.rungs, err
}

// plan is a Policy with its defaults, its delays worked out once.
type plan struct {
	max     int
	retryIf func(error) bool
	names   Names
	delays  []time.Duration // delays[i] is before retry i+1
	rungs   []time.Duration // the same, each once, ascending
}

func (p Policy) plan() (plan, error) {
	pl := plan{max: p.MaxRetries, retryIf: p.RetryIf}
	switch {
	case pl.max == 0:
		pl.max = DefaultMaxRetries
	case pl.max == NoRetries:
		pl.max = 0
	case pl.max < 0 || pl.max > maxRetries:
		return plan{}, argument.New("Policy.MaxRetries", p.MaxRetries, "is out of range",
			fmt.Sprintf("use 1 to %d, 0 for the default of %d, or retry.NoRetries", maxRetries, DefaultMaxRetries))
	}
	var err error
	if pl.names, err = p.Names.withDefaults(); err != nil {
		return plan{}, err
	}
	backoff := p.Backoff
	if backoff == nil {
		backoff = Delays(defaultDelays...)
	}
	for retry := 1; retry <= pl.max; retry++ {
		d := wholeMillis(backoff(retry))
		if d < time.Millisecond || d > maxDelay {
			return plan{}, argument.New("Policy.Backoff", d, fmt.Sprintf("is the delay before retry %d, and out of range", retry), "use 1 ms to 49 days")
		}
		pl.delays = append(pl.delays, d)
	}
	pl.rungs = slices.Clone(pl.delays)
	slices.Sort(pl.rungs)
	pl.rungs = slices.Compact(pl.rungs)
	if len(pl.rungs) > maxRungs {
		return plan{}, argument.New("Policy.Backoff", len(pl.rungs), fmt.Sprintf("gives more than %d different delays, and each needs a queue", maxRungs),
			"use fewer retries, or a list of delays that ends in one for all the rest")
	}
	return pl, nil
}

// rung is the index of the smallest rung that isn't below d, or of the last one.
func (pl plan) rung(d time.Duration) int {
	i, _ := slices.BinarySearch(pl.rungs, d)
	return min(i, len(pl.rungs)-1)
}
