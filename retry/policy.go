package retry

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
)

const (
	// defaultMaxRetries is the limit where Policy.MaxRetries is 0.
	defaultMaxRetries = 5
	// NoRetries, as Policy.MaxRetries, dead-letters a message at its first failure.
	NoRetries = -1

	maxRetries   = 1000
	maxImmediate = 100
	// maxLevels bounds how many delay queues one policy asks for.
	maxLevels = 64
)

// defaultDelays are used where Policy.Backoff is nil.
var defaultDelays = []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute}

// Policy decides which errors are retried, how often, after which delays, and how a
// message waits. The zero value retries five times, after 10 s, 1 min, 5 min, 10 min
// and 30 min, with StrategyRepublish. It retries every error except Permanent ones.
//
// Workers that share a queue should share the policy. Topology returns the queues
// and exchanges that a policy needs.
type Policy struct {
	// MaxRetries is how often a message is retried after its first attempt, from 1 to
	// 1000. A message has at most MaxRetries+1 attempts. 0 means 5.
	// NoRetries means none.
	MaxRetries int
	// Backoff returns the delay before each retry, from 1 ms to ten years. Default:
	// 10 s, 1 min, 5 min, 10 min, 30 min.
	Backoff Backoff
	// Jitter spreads the delays. It needs StrategyNative, StrategyAuto or AnyDelay: a delay
	// queue holds each message for the same time, so StrategyRepublish and StrategyDeadLetter
	// can't spread anything. Where StrategyAuto doesn't choose StrategyNative, the consumer
	// logs a warning and delays aren't spread. Default: JitterNone.
	Jitter Jitter
	// GiveUpAfter limits the time from a message's first failure to its last retry. A
	// message whose next retry would come later is dead-lettered with ReasonExhausted,
	// however many retries are left. Default: no limit.
	GiveUpAfter time.Duration
	// Immediate is how often a failed handler is called again at once, before each
	// delayed retry. At most 100. These calls don't count as retries. Default: 0.
	Immediate int
	// RetryIf reports whether an error is retried. The others are dead-lettered with
	// ReasonPermanent. It isn't called for errors that a rule, Permanent, After, Snooze
	// or Discard has decided on. Default: every error is retried.
	RetryIf func(error) bool
	// Rules treat some errors differently. The first rule that matches decides.
	Rules []ErrorRule
	// Strategy is how a message waits. Default: StrategyRepublish.
	Strategy Strategy
	// AnyDelay replaces the queue for each delay by a ladder of queues, which holds
	// messages for any delay. It is for StrategyRepublish only. Default: nil, no ladder.
	AnyDelay *Ladder
	// ReplayByMove lets package desk replay dead letters without copying them: Topology
	// gives the dead-letter queues a way back to their work queues. It is for Topology only,
	// and needs new dead-letter queues, or a migration of those that exist. Default: false,
	// and a replay publishes copies.
	ReplayByMove bool
	// Worker names this process in dead letters, in at most 255 bytes. Default: the
	// host's name.
	Worker string
	// LogLevel is the level of the log line about each failed attempt that will be retried.
	// Dead-lettered messages are logged as warnings, whatever it is. Default: slog.LevelInfo.
	LogLevel slog.Level
	// Names are the names of the exchanges and queues that retries go through.
	Names Names
	// Waive lists the guards that only log what they find and refuse nothing. Default:
	// none.
	Waive []Guard
}

// ErrorRule treats some errors differently from the rest of the policy.
type ErrorRule struct {
	// If reports whether the rule is for an error. It must not be nil; On and OnType return one.
	If func(error) bool
	// Do is what becomes of the message. Default: ActionRetry.
	Do ErrorAction
	// MaxRetries and Backoff replace the policy's for ActionRetry and
	// ActionRetryUncounted. 0 and nil mean the policy's. MaxRetries limits all retries of
	// the message, whatever errors they were for.
	MaxRetries int
	Backoff    Backoff
}

// ErrorAction is what an ErrorRule does with a message. The zero value, "", means
// ActionRetry.
type ErrorAction string

const (
	// ActionRetry retries, and counts it. It is the default.
	ActionRetry ErrorAction = "retry"
	// ActionRetryUncounted retries and doesn't count it. Only Policy.GiveUpAfter ends
	// such retries.
	ActionRetryUncounted ErrorAction = "retry-uncounted"
	// ActionDeadLetter dead-letters at once, with ReasonPermanent.
	ActionDeadLetter ErrorAction = "dead-letter"
	// ActionDiscard accepts the message, as if it had been handled.
	ActionDiscard ErrorAction = "discard"
)

var errorActions = []ErrorAction{ActionRetry, ActionRetryUncounted, ActionDeadLetter, ActionDiscard}

// On returns a condition for ErrorRule.If: it is true for errors that match one of
// targets by errors.Is.
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

// OnType returns a condition for ErrorRule.If and Policy.RetryIf: it is true for errors
// that have an E in their chain, by errors.As.
//
//	retry.ErrorRule{If: retry.OnType[*net.OpError](), Backoff: retry.Delays(time.Minute)}
func OnType[E error]() func(error) bool {
	return func(err error) bool {
		_, ok := errors.AsType[E](err)
		return ok
	}
}

// Validate returns the first fault of p, an *argument.Error, or nil.
func (p Policy) Validate() error {
	_, err := p.plan()
	return err
}

// QueueDelays returns the delays that p needs queues for, ascending. A policy with
// StrategyNative or AnyDelay needs none. The error is that of Validate.
func (p Policy) QueueDelays() ([]time.Duration, error) {
	pl, err := p.plan()
	if err != nil || !pl.needsLevels() {
		return nil, err
	}
	return slices.Clone(pl.levels), nil
}

// Delay returns the delay before the given retry, without jitter: to show a policy or
// to test it. The first retry is 1. A retry that p doesn't have is an
// *argument.Error, as is a fault of p.
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
	level     slog.Level
	// replayByMove is for Topology.
	replayByMove bool
	waived       map[Guard]bool
	levels       []time.Duration // all delays there are, each once, ascending
}

type rule struct {
	applies func(error) bool
	do      ErrorAction
	max     int
	delays  []time.Duration
}

func (p Policy) plan() (plan, error) {
	pl := plan{jitter: cmp.Or(p.Jitter, JitterNone), giveUp: p.GiveUpAfter, immediate: p.Immediate, retryIf: p.RetryIf, strategy: cmp.Or(p.Strategy, StrategyRepublish), worker: p.Worker, level: p.LogLevel, replayByMove: p.ReplayByMove}
	var err error
	if pl.max, pl.delays, err = delaysOf(policyPath, p.MaxRetries, defaultMaxRetries, p.Backoff, Delays(defaultDelays...)); err != nil {
		return plan{}, err
	}
	switch {
	case !slices.Contains(jitters, pl.jitter):
		return plan{}, argument.At(policyPath.Field("Jitter"), argument.CodeUnknown, string(p.Jitter), "is unknown", "use NoJitter, EqualJitter or FullJitter")
	case p.GiveUpAfter < 0:
		return plan{}, argument.At(policyPath.Field("GiveUpAfter"), argument.CodeOutOfRange, p.GiveUpAfter, "is negative", "use 0 for no limit")
	case p.Immediate < 0 || p.Immediate > maxImmediate:
		return plan{}, argument.At(policyPath.Field("Immediate"), argument.CodeOutOfRange, p.Immediate, "is out of range", fmt.Sprintf("use 0 to %d", maxImmediate))
	case !slices.Contains(strategies, pl.strategy):
		return plan{}, argument.At(policyPath.Field("Strategy"), argument.CodeUnknown, string(p.Strategy), "is unknown", "use StrategyRepublish, StrategyDeadLetter, StrategyNative or StrategyAuto")
	case !utf8.ValidString(p.Worker) || len(p.Worker) > 255:
		return plan{}, argument.At(policyPath.Field("Worker"), argument.CodeMalformed, p.Worker, "is over 255 bytes or not valid UTF-8", "use a short name")
	}
	if pl.worker == "" {
		pl.worker, _ = os.Hostname()
	}
	if pl.names, err = p.Names.withDefaults(policyPath.Field("Names")); err != nil {
		return plan{}, err
	}
	if p.AnyDelay != nil {
		if pl.strategy != StrategyRepublish {
			return plan{}, argument.At(policyPath.Field("AnyDelay"), argument.CodeConflict, nil, fmt.Sprintf("works only with the strategy %s, and the policy has %s", StrategyRepublish, pl.strategy),
				fmt.Sprintf("leave it out; with %s the work queue itself holds a message for any delay", StrategyNative))
		}
		l, err := p.AnyDelay.withDefaults(policyPath.Field("AnyDelay"))
		if err != nil {
			return plan{}, err
		}
		pl.ladder = &l
	}
	if pl.jitter != JitterNone && pl.needsLevels() && pl.strategy != StrategyAuto {
		return plan{}, argument.At(policyPath.Field("Jitter"), argument.CodeConflict, string(pl.jitter), fmt.Sprintf("has no effect with the delay queues of the strategy %s, each of which holds every message for the same time", pl.strategy),
			"use the strategy native or auto, or republish with a ladder (AnyDelay), or leave it out")
	}
	pl.waived = make(map[Guard]bool, len(p.Waive))
	for i, g := range p.Waive {
		if !slices.Contains(allGuards, g) {
			return plan{}, argument.At(policyPath.Field("Waive").Index(i), argument.CodeUnknown, string(g), "is not a guard that can be waived", "use guards of retry.AllGuards")
		}
		pl.waived[g] = true
	}
	levels, err := pl.addRules(p)
	if err != nil {
		return plan{}, err
	}
	slices.Sort(levels)
	pl.levels = slices.Compact(levels)
	if pl.ladder != nil && len(pl.levels) > 0 {
		if d := pl.levels[len(pl.levels)-1]; pl.ladder.longest() < d {
			return plan{}, argument.At(policyPath.Field("Backoff"), argument.CodeOutOfRange, d, "returns a longer delay than the ladder can hold a message", "give the ladder more levels or a larger unit, or cap the delays")
		}
	}
	if pl.needsLevels() && len(pl.levels) > maxLevels {
		return plan{}, argument.At(policyPath.Field("Backoff"), argument.CodeTooLong, nil, fmt.Sprintf("returns %d different delays, more than %d, and each needs a queue", len(pl.levels), maxLevels),
			"use fewer retries, cap the delays, or use AnyDelay")
	}
	return pl, nil
}

// addRules adds the policy's rules. It returns the delays of all retries.
func (pl *plan) addRules(p Policy) ([]time.Duration, error) {
	levels := slices.Clone(pl.delays)
	for i, r := range p.Rules {
		at := policyPath.Field("Rules").Index(i)
		if r.If == nil {
			return nil, argument.At(at.Field("If"), argument.CodeMissing, nil, "is nil", "set it, for example with retry.On(err)")
		}
		do := cmp.Or(r.Do, ActionRetry)
		if !slices.Contains(errorActions, do) {
			return nil, argument.At(at.Field("Do"), argument.CodeUnknown, string(r.Do), "is unknown", "use ActionRetry, ActionRetryUncounted, ActionDeadLetter or ActionDiscard")
		}
		fallback := p.Backoff
		if fallback == nil {
			fallback = Delays(defaultDelays...)
		}
		limit := p.MaxRetries
		if r.MaxRetries != 0 {
			limit = r.MaxRetries
		}
		own := rule{applies: r.If, do: do}
		var err error
		if own.max, own.delays, err = delaysOf(at, limit, defaultMaxRetries, r.Backoff, fallback); err != nil {
			return nil, err
		}
		if do == ActionRetryUncounted && len(own.delays) == 0 {
			return nil, argument.At(at.Field("MaxRetries"), argument.CodeOutOfRange, r.MaxRetries, "leaves the rule without a retry", "use at least 1")
		}
		pl.rules = append(pl.rules, own)
		if do == ActionRetry || do == ActionRetryUncounted {
			levels = append(levels, own.delays...)
		}
	}
	return levels, nil
}

// policyPath is where the errors of a Policy begin.
var policyPath = argument.Root("Policy")

// delaysOf returns the delay before each retry of the policy or rule that at leads to.
func delaysOf(at argument.Path, limit, fallbackLimit int, backoff, fallback Backoff) (int, []time.Duration, error) {
	switch {
	case limit == 0:
		limit = fallbackLimit
	case limit == NoRetries:
		limit = 0
	case limit < 0 || limit > maxRetries:
		return 0, nil, argument.At(at.Field("MaxRetries"), argument.CodeOutOfRange, limit, fmt.Sprintf("is not from 1 to %d", maxRetries),
			"use one of these, 0 for the default, or retry.NoRetries")
	}
	if backoff == nil {
		backoff = fallback
	}
	delays := make([]time.Duration, 0, limit)
	for retry := 1; retry <= limit; retry++ {
		d := wholeMillis(backoff(retry))
		if d < time.Millisecond || d > maxDelay {
			return 0, nil, argument.At(at.Field("Backoff").Call(retry), argument.CodeOutOfRange, d, "is a delay out of range", "use 1 ms to ten years")
		}
		delays = append(delays, d)
	}
	return limit, delays, nil
}

// needsLevels says whether a queue is needed for each delay.
func (pl *plan) needsLevels() bool { return pl.strategy != StrategyNative && pl.ladder == nil }

// longest is the longest delay that the policy has of itself.
func (pl *plan) longest() time.Duration {
	if len(pl.levels) == 0 {
		return 0
	}
	return pl.levels[len(pl.levels)-1]
}
