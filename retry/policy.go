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
	// NoRetries, as [Policy.MaxRetries], dead-letters a message at its first failure.
	NoRetries = -1

	maxRetries   = 1000
	maxImmediate = 100
	// maxLevels bounds how many delay queues one policy asks for.
	maxLevels = 64
)

// defaultDelays are used where Policy.Backoff is nil.
var defaultDelays = []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute}

// Policy decides which errors are retried, how often, after which delays, and where a message
// waits. The zero value retries every error except [Permanent] ones five times, after 10 s, 1
// min, 5 min, 10 min, and 30 min, with [StrategyRepublish].
//
// Pass it to [With], or to [Central]. [Topology] returns the queues and exchanges that it needs.
// Workers that share a queue should share the policy. An invalid policy keeps a consumer from
// starting; [Policy.Validate] returns the error earlier.
type Policy struct {
	// MaxRetries is how often a message is retried after its first attempt, from 1 to 1000. A
	// message has at most MaxRetries+1 attempts. Use [NoRetries] to dead-letter at the first
	// failure. Default: 0, which means 5.
	MaxRetries int
	// Backoff returns the delay before each retry, from 1 ms to ten years. Default: 10 s, 1 min,
	// 5 min, 10 min, 30 min.
	Backoff Backoff
	// Jitter randomizes the delays. It needs StrategyNative, StrategyAuto, or AnyDelay, because a
	// delay queue delays each message for the same time. If StrategyAuto doesn't choose
	// StrategyNative, the consumer logs a warning and doesn't randomize. Default: JitterNone.
	Jitter Jitter
	// GiveUpAfter limits the time from a message's first failure to its last retry, including the
	// time for which [client.Park] had it wait since then. If the next retry would come later, the
	// message is dead-lettered with [ReasonExhausted], even if it has retries left. Default: no
	// limit.
	GiveUpAfter time.Duration
	// Immediate is how often a failed handler is called again at once, before each delayed retry,
	// from 0 to 100. These calls don't count as retries. Default: 0.
	Immediate int
	// RetryIf reports whether an error is retried. Messages with other errors are dead-lettered
	// with [ReasonPermanent]. It isn't called for errors that a rule, Permanent, After, Snooze,
	// or Discard decides. Default: every error is retried.
	RetryIf func(error) bool
	// Rules treat some errors differently. The first matching rule decides. Default: none.
	Rules []ErrorRule
	// Strategy decides where a message waits. Default: StrategyRepublish.
	Strategy Strategy
	// AnyDelay replaces the queue for each delay with a ladder of queues that can delay messages
	// for any time. It works with StrategyRepublish only. Default: nil, no ladder.
	AnyDelay *Ladder
	// ReplayByMove lets package desk replay dead letters by moving them, without copies:
	// [Topology] gives the dead-letter queues a route back to their work queues. It changes the
	// arguments of dead-letter queues, so existing ones need a migration. Only Topology uses it.
	// Default: false, and a replay publishes copies.
	ReplayByMove bool
	// Claimable makes each message claimable while it waits for its retry: a client.Claimer can
	// cancel it, run it now, or reschedule it. Its token is its message-id, if that is a string of 1
	// to 512 bytes, or a UUID in its text form; others wait without a token. It needs
	// StrategyNative, or StrategyAuto where that chooses native, and RabbitMQ 4.4: with
	// StrategyNative on RabbitMQ 4.3 the consumer doesn't start. Any consumer of the queue
	// can then claim a message by its message-id. Default: false.
	Claimable bool
	// Worker is the name of this process in the history of messages, at most 255 bytes. Default:
	// the host name.
	Worker string
	// LogLevel is the level of log lines about failed attempts that will be retried. At
	// slog.LevelDebug each attempt is a line; at higher levels the consumer combines them, as
	// client.Config.Logger describes. Dead-lettered messages are always logged as warnings.
	// Default: slog.LevelInfo.
	LogLevel slog.Level
	// Names are the names of the exchanges and queues that retries use. Default: see [Names].
	Names Names
	// Waive disables checks of the topology: their findings are only logged, and don't keep the
	// consumer from starting. See [Guard]. Default: none.
	Waive []Guard
}

// ErrorRule treats some errors differently from the rest of the policy. See [Policy.Rules].
type ErrorRule struct {
	// If reports whether the rule applies to an error. Use [On], [OnType], [OnReason], or
	// [OnHeader], or write your own. Required.
	If func(error) bool
	// Do is what happens to the message. Default: ActionRetry.
	Do ErrorAction
	// MaxRetries and Backoff replace the policy's for ActionRetry and ActionRetryUncounted.
	// MaxRetries limits all retries of the message, including those for other errors. Default: 0
	// and nil, which mean the policy's.
	MaxRetries int
	Backoff    Backoff
}

// ErrorAction is what an [ErrorRule] does with a message. The zero value, "", means ActionRetry.
type ErrorAction string

const (
	// ActionRetry retries the message and counts the retry. It is the default.
	ActionRetry ErrorAction = "retry"
	// ActionRetryUncounted retries the message without counting. Only [Policy.GiveUpAfter] limits
	// such retries.
	ActionRetryUncounted ErrorAction = "retry-uncounted"
	// ActionDeadLetter dead-letters the message at once, with [ReasonPermanent]. With [Central],
	// a message that the broker dead-lettered keeps its reason.
	ActionDeadLetter ErrorAction = "dead-letter"
	// ActionDiscard acknowledges the message, as if it had been handled.
	ActionDiscard ErrorAction = "discard"
)

var errorActions = []ErrorAction{ActionRetry, ActionRetryUncounted, ActionDeadLetter, ActionDiscard}

// On returns a condition for [ErrorRule.If] and [Policy.RetryIf]: it is true for errors that
// match one of targets with errors.Is.
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

// OnType returns a condition for [ErrorRule.If] and [Policy.RetryIf]: it is true for errors that
// have an E in their chain, found with errors.As.
//
//	retry.ErrorRule{If: retry.OnType[*net.OpError](), Backoff: retry.Delays(time.Minute)}
func OnType[E error]() func(error) bool {
	return func(err error) bool {
		_, ok := errors.AsType[E](err)
		return ok
	}
}

// Validate returns the first error in p, an *argument.Error, or nil.
func (p Policy) Validate() error {
	_, err := p.plan()
	return err
}

// QueueDelays returns the delays that need a delay queue, in ascending order. A policy with
// StrategyNative or AnyDelay needs none. The error is that of [Policy.Validate].
func (p Policy) QueueDelays() ([]time.Duration, error) {
	pl, err := p.plan()
	if err != nil || !pl.needsLevels() {
		return nil, err
	}
	return slices.Clone(pl.levels), nil
}

// Delay returns the delay before the given retry, without jitter. Use it to show or test a
// policy. The first retry is 1. The error is an *argument.Error if p is invalid or has no such
// retry.
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
	names     Names
	worker    string
	level     slog.Level
	// replayByMove is for Topology.
	replayByMove bool
	claimable    bool
	waived       map[Guard]bool
	delayQueues
}

type rule struct {
	applies func(error) bool
	do      ErrorAction
	max     int
	delays  []time.Duration
}

func (p Policy) plan() (plan, error) {
	pl := plan{jitter: cmp.Or(p.Jitter, JitterNone), giveUp: p.GiveUpAfter, immediate: p.Immediate, retryIf: p.RetryIf, strategy: cmp.Or(p.Strategy, StrategyRepublish), worker: p.Worker, level: p.LogLevel, replayByMove: p.ReplayByMove, claimable: p.Claimable}
	var err error
	if pl.max, pl.delays, err = delaysOf(policyPath, p.MaxRetries, defaultMaxRetries, p.Backoff, Delays(defaultDelays...)); err != nil {
		return plan{}, err
	}
	switch {
	case !slices.Contains(jitters, pl.jitter):
		return plan{}, argument.At(policyPath.Field("Jitter"), argument.CodeUnknown, string(p.Jitter), "is unknown", "use JitterNone, JitterEqual, or JitterFull")
	case p.GiveUpAfter < 0:
		return plan{}, argument.At(policyPath.Field("GiveUpAfter"), argument.CodeOutOfRange, p.GiveUpAfter, "is negative", "use 0 for no limit")
	case p.Immediate < 0 || p.Immediate > maxImmediate:
		return plan{}, argument.At(policyPath.Field("Immediate"), argument.CodeOutOfRange, p.Immediate, "is out of range", fmt.Sprintf("use 0 to %d", maxImmediate))
	case !slices.Contains(strategies, pl.strategy):
		return plan{}, argument.At(policyPath.Field("Strategy"), argument.CodeUnknown, string(p.Strategy), "is unknown", "use StrategyRepublish, StrategyDeadLetter, StrategyNative, or StrategyAuto")
	case !utf8.ValidString(p.Worker) || len(p.Worker) > 255:
		return plan{}, argument.At(policyPath.Field("Worker"), argument.CodeMalformed, p.Worker, "is over 255 bytes or not valid UTF-8", "use a short name")
	}
	if pl.worker == "" {
		pl.worker, _ = os.Hostname()
	}
	if pl.names, err = p.Names.withDefaults(policyPath.Field("Names")); err != nil {
		return plan{}, err
	}
	if p.Claimable && pl.strategy != StrategyNative && pl.strategy != StrategyAuto {
		return plan{}, argument.At(policyPath.Field("Claimable"), argument.CodeConflict, nil, fmt.Sprintf("has no effect with the strategy %s: messages in delay queues can't be claimed", pl.strategy),
			"use the strategy native or auto, or leave it out")
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
		return plan{}, argument.At(policyPath.Field("Jitter"), argument.CodeConflict, string(pl.jitter), fmt.Sprintf("has no effect with the delay queues of the strategy %s, because a delay queue delays all messages for the same time", pl.strategy),
			"use the strategy native or auto, or republish with a ladder (AnyDelay), or leave it out")
	}
	pl.waived = make(map[Guard]bool, len(p.Waive))
	for i, g := range p.Waive {
		if !slices.Contains(allGuards, g) {
			return plan{}, argument.At(policyPath.Field("Waive").Index(i), argument.CodeUnknown, string(g), "is not a check that can be disabled", "use values that retry.AllGuards returns")
		}
		pl.waived[g] = true
	}
	levels, err := pl.addRules(p)
	if err != nil {
		return plan{}, err
	}
	slices.Sort(levels)
	pl.levels = slices.Compact(levels)
	if d := pl.longest(); pl.longestPart() < d {
		return plan{}, argument.At(policyPath.Field("Backoff"), argument.CodeOutOfRange, d, "returns a longer delay than the ladder supports", "give the ladder more levels or a larger unit, or cap the delays")
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
			return nil, argument.At(at.Field("Do"), argument.CodeUnknown, string(r.Do), "is unknown", "use ActionRetry, ActionRetryUncounted, ActionDeadLetter, or ActionDiscard")
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
			"use a value in that range, 0 for the default, or retry.NoRetries")
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
