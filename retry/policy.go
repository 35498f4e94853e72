package retry

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
)

const (
	// DefaultMaxRetries is Policy.MaxRetries where it is zero.
	DefaultMaxRetries = 5
	// NoRetries as Policy.MaxRetries dead-letters at the first failure.
	NoRetries = -1

	maxRetries   = 1000
	maxImmediate = 100
	// maxRungs bounds how many delay queues one policy asks for.
	maxRungs = 64
)

// defaultDelays are used where Policy.Backoff is nil.
var defaultDelays = []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute}

// Policy says how often, when, how and for which errors a message is retried. The
// zero value retries every error but Permanent ones five times, after 10 s, 1 min,
// 5 min, 10 min and 30 min, by republishing.
//
// Workers that share a queue should share the policy. What its delays need on the
// broker is in Topology.
type Policy struct {
	// MaxRetries is how often a message is retried after its first attempt, so it
	// is handled at most MaxRetries+1 times. 0 means DefaultMaxRetries; NoRetries
	// none at all.
	MaxRetries int
	// Backoff gives the delay before each retry. Default: 10 s, 1 min, 5 min,
	// 10 min, 30 min.
	Backoff Backoff
	// Jitter spreads the delays. With Republish and DeadLetter a spread delay is
	// rounded up to the next one that has a queue. Default: NoJitter.
	Jitter Jitter
	// GiveUpAfter dead-letters a message, with ReasonExhausted, rather than retry
	// it later than this after its first failure, however many retries are left.
	// Default: no such limit.
	GiveUpAfter time.Duration
	// Immediate is how often a failed handler is called again at once, in place,
	// before each delayed retry. They don't count as retries. Default: 0.
	Immediate int
	// RetryIf says which errors are retried; the others are dead-lettered as
	// ReasonPermanent. It isn't asked about errors that a Rule, Permanent, After,
	// Snooze or Discard has decided on. Default: every error.
	RetryIf func(error) bool
	// Rules decide on some errors differently; the first one that matches counts.
	Rules []Rule
	// Strategy is how a message waits. Default: Republish.
	Strategy Strategy
	// AnyDelay, for Republish, waits on a ladder of queues that can hold a message
	// for any delay, in place of one queue for each delay.
	AnyDelay *Ladder
	// Worker names this process in dead letters. Default: the host's name.
	Worker string
	// Names of the exchanges and queues in between.
	Names Names
	// Waive leaves out checks that With makes when a consumer starts.
	Waive []Guard
}

// Rule decides on some errors differently from the rest of the policy.
type Rule struct {
	// If says which errors the rule is for; On makes one.
	If func(error) bool
	// Do is what becomes of the message. Default: Retry.
	Do Action
	// MaxRetries and Backoff hold in place of the policy's, for Retry and
	// RetryUncounted. 0 and nil: the policy's. The limit is on all retries of the
	// message, whatever they were for.
	MaxRetries int
	Backoff    Backoff
}

// Action is what a Rule does.
type Action uint8

const (
	// Retry retries, and counts it.
	Retry Action = iota
	// RetryUncounted retries without using up a retry. Only Policy.GiveUpAfter
	// ends that.
	RetryUncounted
	// DeadLetterNow dead-letters at once, as ReasonPermanent.
	DeadLetterNow
	// DiscardNow accepts the message, as if it had been handled.
	DiscardNow
)

// On makes a condition that is true for errors which match one of targets, by
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

// Ladder returns the delays that p needs queues for, ascending; none for a policy
// whose strategy is Native or that has AnyDelay.
func (p Policy) Ladder() ([]time.Duration, error) {
	pl, err := p.plan()
	if err != nil || !pl.needsRungs() {
		return nil, err
	}
	return slices.Clone(pl.rungs), nil
}

// Delay is the delay before the given retry (1 for the first), without jitter:
// for showing a policy, and for tests of it.
func (p Policy) Delay(retry int) (time.Duration, error) {
	pl, err := p.plan()
	if err != nil {
		return 0, err
	}
	if retry < 1 || retry > pl.max {
		return 0, argument.New("retry", retry, "is not a retry of the policy", fmt.Sprintf("use 1 to %d", pl.max))
	}
	return pl.delays[retry-1], nil
}

// plan is a Policy with its defaults, and its delays worked out once.
type plan struct {
	max       int
	delays    []time.Duration // delays[i] is before retry i+1
	jitter    Jitter
	giveUp    time.Duration
	immediate int
	retryIf   func(error) bool
	rules     []rule
	strategy  Strategy
	ladder    *Ladder
	names     Names
	worker    string
	// workerValue is worker as a value of an annotation.
	workerValue any
	waived      map[Guard]bool
	rungs       []time.Duration // all delays there are, each once, ascending
}

type rule struct {
	applies func(error) bool
	do      Action
	max     int
	delays  []time.Duration
}

func (p Policy) plan() (plan, error) {
	pl := plan{jitter: p.Jitter, giveUp: p.GiveUpAfter, immediate: p.Immediate, retryIf: p.RetryIf, strategy: p.Strategy, worker: p.Worker}
	var err error
	if pl.max, pl.delays, err = delaysOf("Policy", p.MaxRetries, DefaultMaxRetries, p.Backoff, Delays(defaultDelays...)); err != nil {
		return plan{}, err
	}
	switch {
	case p.Jitter > FullJitter:
		return plan{}, argument.New("Policy.Jitter", int(p.Jitter), "is unknown", "use NoJitter, EqualJitter or FullJitter")
	case p.GiveUpAfter < 0:
		return plan{}, argument.New("Policy.GiveUpAfter", p.GiveUpAfter, "is negative", "use 0 for no limit")
	case p.Immediate < 0 || p.Immediate > maxImmediate:
		return plan{}, argument.New("Policy.Immediate", p.Immediate, "is out of range", fmt.Sprintf("use 0 to %d", maxImmediate))
	case p.Strategy > Auto:
		return plan{}, argument.New("Policy.Strategy", int(p.Strategy), "is unknown", "use Republish, DeadLetter, Native or Auto")
	case !utf8.ValidString(p.Worker) || len(p.Worker) > 255:
		return plan{}, argument.New("Policy.Worker", p.Worker, "is over 255 bytes or not valid UTF-8", "use a short name")
	}
	if pl.worker == "" {
		pl.worker, _ = os.Hostname()
	}
	pl.workerValue = pl.worker
	if pl.names, err = p.Names.withDefaults(); err != nil {
		return plan{}, err
	}
	if p.AnyDelay != nil {
		if p.Strategy != Republish {
			return plan{}, argument.New("Policy.AnyDelay", p.Strategy, "goes with Republish only", "leave it nil: Native holds a message for any delay by itself")
		}
		l, err := p.AnyDelay.withDefaults()
		if err != nil {
			return plan{}, err
		}
		pl.ladder = &l
	}
	pl.waived = make(map[Guard]bool, len(p.Waive))
	for _, g := range p.Waive {
		if !slices.Contains(allGuards, g) {
			return plan{}, argument.New("Policy.Waive", string(g), "is not a guard", "use one of the Guard constants")
		}
		pl.waived[g] = true
	}
	rungs := slices.Clone(pl.delays)
	for i, r := range p.Rules {
		name := fmt.Sprintf("Policy.Rules[%d]", i)
		if r.If == nil {
			return plan{}, argument.New(name+".If", nil, "is nil", "say which errors the rule is for, with retry.On(err) for example")
		}
		if r.Do > DiscardNow {
			return plan{}, argument.New(name+".Do", int(r.Do), "is unknown", "use Retry, RetryUncounted, DeadLetterNow or DiscardNow")
		}
		fallback := p.Backoff
		if fallback == nil {
			fallback = Delays(defaultDelays...)
		}
		limit := p.MaxRetries
		if r.MaxRetries != 0 {
			limit = r.MaxRetries
		}
		own := rule{applies: r.If, do: r.Do}
		if own.max, own.delays, err = delaysOf(name, limit, DefaultMaxRetries, r.Backoff, fallback); err != nil {
			return plan{}, err
		}
		if r.Do == RetryUncounted && len(own.delays) == 0 {
			return plan{}, argument.New(name+".MaxRetries", r.MaxRetries, "leaves no delay to wait for", "give at least 1")
		}
		pl.rules = append(pl.rules, own)
		if r.Do == Retry || r.Do == RetryUncounted {
			rungs = append(rungs, own.delays...)
		}
	}
	slices.Sort(rungs)
	pl.rungs = slices.Compact(rungs)
	if pl.ladder != nil && len(pl.rungs) > 0 {
		if d := pl.rungs[len(pl.rungs)-1]; pl.held(Republish, d) < d {
			return plan{}, argument.New("Policy.Backoff", d, "is longer than AnyDelay can hold a message", "give the ladder more levels or a larger unit, or cap the delays")
		}
	}
	if pl.needsRungs() && len(pl.rungs) > maxRungs {
		return plan{}, argument.New("Policy.Backoff", len(pl.rungs), fmt.Sprintf("gives more than %d different delays, and each needs a queue", maxRungs),
			"use fewer retries, cap the delays, or use AnyDelay")
	}
	return pl, nil
}

func delaysOf(name string, limit, fallbackLimit int, backoff, fallback Backoff) (int, []time.Duration, error) {
	switch {
	case limit == 0:
		limit = fallbackLimit
	case limit == NoRetries:
		limit = 0
	case limit < 0 || limit > maxRetries:
		return 0, nil, argument.New(name+".MaxRetries", limit, "is out of range",
			fmt.Sprintf("use 1 to %d, 0 for the default, or retry.NoRetries", maxRetries))
	}
	if backoff == nil {
		backoff = fallback
	}
	delays := make([]time.Duration, 0, limit)
	for retry := 1; retry <= limit; retry++ {
		d := wholeMillis(backoff(retry))
		if d < time.Millisecond || d > maxDelay {
			return 0, nil, argument.New(name+".Backoff", d, fmt.Sprintf("is the delay before retry %d, and out of range", retry), "use 1 ms to ten years")
		}
		delays = append(delays, d)
	}
	return limit, delays, nil
}

// needsRungs says whether a queue is needed for each delay.
func (pl *plan) needsRungs() bool { return pl.strategy != Native && pl.ladder == nil }

// rung is the index of the smallest rung that isn't below d, or of the last one;
// -1 if there is none.
func (pl *plan) rung(d time.Duration) int {
	i, _ := slices.BinarySearch(pl.rungs, d)
	return min(i, len(pl.rungs)-1)
}
