package retry

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/outcome"
)

// fails decides on a first failure with err.
func fails(pl *plan, err error) decision {
	return pl.decide(failure{err: err, says: outcome.Read[client.Outcome](err), now: epoch})
}

var (
	errA = errors.New("a")
	errB = errors.New("b")
	errC = errors.New("c")
)

// randomPolicy is any valid policy, with rules for errA and errB.
func randomPolicy(r *rand.Rand) Policy {
	delays := make([]time.Duration, 1+r.IntN(6))
	for i := range delays {
		delays[i] = time.Duration(1+r.Int64N(int64(time.Hour/time.Millisecond))) * time.Millisecond
	}
	p := Policy{
		MaxRetries: pick(r, 0, NoRetries, 1, 2, 3, 7, 20),
		Backoff:    Delays(delays...),
		Jitter:     pick(r, JitterNone, JitterEqual, JitterFull),
		Strategy:   pick(r, StrategyRepublish, StrategyDeadLetter, StrategyNative, StrategyAuto),
	}
	if r.IntN(3) == 0 {
		p.GiveUpAfter = time.Duration(1 + r.Int64N(int64(3*time.Hour)))
	}
	if r.IntN(2) == 0 {
		p.RetryIf = func(err error) bool { return !errors.Is(err, errC) }
	}
	for _, err := range []error{errA, errB} {
		rule := ErrorRule{If: On(err), Do: pick(r, ActionRetry, ActionRetryUncounted, ActionDeadLetter, ActionDiscard), MaxRetries: pick(r, 0, 1, 4, 30)}
		if rule.MaxRetries == 0 && p.MaxRetries == NoRetries {
			rule.MaxRetries = 2
		}
		if r.IntN(2) == 0 {
			rule.Backoff = Delays(time.Duration(1+r.Int64N(10_000)) * time.Millisecond)
		}
		p.Rules = append(p.Rules, rule)
	}
	if p.Strategy == StrategyRepublish && r.IntN(4) == 0 {
		p.AnyDelay = &Ladder{}
	}
	if p.AnyDelay == nil && (p.Strategy == StrategyRepublish || p.Strategy == StrategyDeadLetter) {
		p.Jitter = JitterNone
	}
	return p
}

// randomError is an error in any wrapping, marks among it.
func randomError(r *rand.Rand, depth int) error {
	if depth == 0 {
		return pick(r, errA, errB, errC, errDown)
	}
	inner := func() error { return randomError(r, depth-1) }
	delay := func() time.Duration {
		return pick(r, -time.Second, 0, 1, time.Microsecond, time.Millisecond, 1500*time.Microsecond, time.Minute, 100*time.Hour, math.MaxInt64)
	}
	switch r.IntN(12) {
	case 0:
		return Permanent(inner())
	case 1:
		return Discard(inner())
	case 2:
		return Snooze(delay())
	case 3, 4:
		return After(delay(), inner())
	case 5:
		return errors.Join(inner(), inner())
	case 6:
		return fmt.Errorf("%w and %w", inner(), inner())
	default:
		return fmt.Errorf("deeper: %w", inner())
	}
}

// With any errors, a message is retried no more often than the largest
// limit says, and each delay can be waited for.
func TestNoMessageHasMoreCountedRetriesThanTheLargestLimit(t *testing.T) {
	t.Parallel()
	r := random(t)
	for range 10_000 {
		p := randomPolicy(r)
		pl := planOf(t, p)
		limit := pl.max
		for _, rule := range pl.rules {
			limit = max(limit, rule.max)
		}
		count, counted, first, now := 0, 0, time.Time{}, epoch
		for step := 0; step < 200; step++ {
			err := randomError(r, r.IntN(4))
			d := pl.decide(failure{err: err, says: outcome.Read[client.Outcome](err), count: count, first: first, now: now, strategy: p.Strategy, u: r.Float64()})
			if d.do != decidedRetry {
				break
			}
			require.GreaterOrEqual(t, d.delay, time.Millisecond, "%v", err)
			require.LessOrEqual(t, d.delay, maxDelay, "%v", err)
			require.True(t, d.count == count || d.count == count+1, "%d after %d", d.count, count)
			held := pl.held(p.Strategy, d.delay)
			if d.count > count {
				counted++
			}
			if pl.giveUp > 0 && (!d.snoozed || !first.IsZero()) {
				if first.IsZero() {
					first = now
				}
				require.LessOrEqual(t, now.Add(held).Sub(first), pl.giveUp, "it comes back after GiveUpAfter: %v", err)
			}
			count = d.count
			now = now.Add(min(held, time.Hour))
		}
		require.LessOrEqual(t, counted, limit, "%+v", p)
	}
}

func TestUncountedRetriesEndAtGiveUpAfterOnly(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{
		MaxRetries: 1, Backoff: Delays(time.Second), GiveUpAfter: 10 * time.Second,
		Rules: []ErrorRule{{If: On(errA), Do: ActionRetryUncounted}},
	})
	now, first := epoch, time.Time{}
	retries := 0
	for ; ; retries++ {
		d := pl.decide(failure{err: errA, says: outcome.Read[client.Outcome](errA), first: first, now: now})
		if first.IsZero() {
			first = now
		}
		if d.do == decidedDead {
			assert.Equal(t, ReasonExhausted, d.reason)
			assert.ErrorIs(t, d.err, errA)
			assert.EqualError(t, d.err, "dead-lettered 10s after the first failure: a")
			break
		}
		require.Zero(t, d.count)
		now = now.Add(d.delay)
	}
	assert.Equal(t, 10, retries)
}

// A queue holds a message for longer than was asked, where the delay is rounded up;
// that counts, too.
func TestGiveUpAfterLooksAtTheDelayThatTheMessageWillHave(t *testing.T) {
	t.Parallel()
	delays := Delays(10*time.Second, time.Minute)
	for name, c := range map[string]struct {
		policy Policy
		err    error
		want   decided
	}{
		"rounded up beyond it":            {Policy{Backoff: delays, GiveUpAfter: 19 * time.Second}, After(15*time.Second, nil), decidedDead},
		"rounded up within it":            {Policy{Backoff: delays, GiveUpAfter: 20 * time.Second}, After(15*time.Second, nil), decidedRetry},
		"in several parts":                {Policy{Backoff: delays, GiveUpAfter: 30 * time.Second}, After(30*time.Second, nil), decidedRetry},
		"beyond the longest, beyond it":   {Policy{Backoff: delays, GiveUpAfter: time.Hour}, After(time.Hour+time.Second, nil), decidedDead},
		"beyond the longest, within it":   {Policy{Backoff: delays, GiveUpAfter: time.Hour}, After(time.Hour, nil), decidedRetry},
		"not rounded":                     {Policy{Backoff: delays, GiveUpAfter: 45 * time.Second, Strategy: StrategyNative}, After(30*time.Second, nil), decidedRetry},
		"too long":                        {Policy{Backoff: delays, GiveUpAfter: time.Hour, Strategy: StrategyNative}, After(24*time.Hour, nil), decidedDead},
		"rounded on the ladder beyond it": {Policy{Backoff: delays, GiveUpAfter: 17*time.Second + time.Millisecond, AnyDelay: &Ladder{Unit: time.Second}}, After(17*time.Second, nil), decidedDead},
		"rounded on the ladder within it": {Policy{Backoff: delays, GiveUpAfter: 18 * time.Second, AnyDelay: &Ladder{Unit: time.Second}}, After(17*time.Second, nil), decidedRetry},
	} {
		pl := planOf(t, c.policy)
		d := pl.decide(failure{err: c.err, says: outcome.Read[client.Outcome](c.err), now: epoch, strategy: c.policy.Strategy})
		assert.Equal(t, c.want, d.do, "%s: %+v", name, d)
	}
}

// A time in the future is somebody else's clock, or a lie: it must not put
// GiveUpAfter off.
func TestFirstFailureInTheFutureDoesNotPutGivingUpOff(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{Backoff: Delays(time.Minute), GiveUpAfter: 30 * time.Second})
	for _, first := range []time.Time{{}, epoch.Add(time.Second), epoch.AddDate(7000, 0, 0)} {
		d := pl.decide(failure{err: errDown, says: outcome.Read[client.Outcome](errDown), first: first, now: epoch})
		assert.Equal(t, decidedDead, d.do, "%v", first)
	}
	// The time that is written is one that isn't in the future, so it ends later.
	m := client.NewMessage(nil)
	m.Annotations = map[any]any{annotation.Older.First: epoch.AddDate(7000, 0, 0).UnixMilli()}
	h := pl.history(client.NewDelivery("q", m), errDown, pastOf(m, ""), epoch)
	assert.Equal(t, epoch.UnixMilli(), notified(h).First)
}

func TestFirstFailureLongAgoGivesUpAtOnce(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{GiveUpAfter: time.Hour})
	d := pl.decide(failure{err: errDown, says: outcome.Read[client.Outcome](errDown), first: time.UnixMilli(1), now: epoch})
	assert.Equal(t, decidedDead, d.do)
	assert.Equal(t, ReasonExhausted, d.reason)
}

// Of several marks in one error the order is Discard, Permanent, Snooze or After
// (the outermost, or first joined, of those two), the rules, RetryIf.
func TestPrecedenceOfMarksAndRules(t *testing.T) {
	t.Parallel()
	policy := Policy{
		MaxRetries: 3, Backoff: Delays(time.Second), Strategy: StrategyNative,
		RetryIf: func(error) bool { return false },
		Rules: []ErrorRule{
			{If: On(errA), Do: ActionDeadLetter},
			{If: On(errB), Do: ActionDiscard},
			{If: On(errA, errB, errC), Do: ActionRetry, Backoff: Delays(7 * time.Second)},
		},
	}
	pl := planOf(t, policy)
	retried := func(delay time.Duration, count int) decision {
		return decision{do: decidedRetry, delay: delay, count: count}
	}
	dead := decision{do: decidedDead, reason: ReasonPermanent}
	discarded := decision{do: decidedDiscard}
	deep := func(err error) error {
		for range 50 {
			err = fmt.Errorf("deep: %w", errors.Join(errDown, err))
		}
		return err
	}
	for name, c := range map[string]struct {
		err  error
		want decision
	}{
		"Discard":                     {Discard(errDown), discarded},
		"Discard of nothing":          {Discard(nil), discarded},
		"Discard around Permanent":    {Discard(Permanent(errDown)), discarded},
		"Discard, deep":               {fmt.Errorf("a: %w", fmt.Errorf("b: %w", Discard(nil))), discarded},
		"Discard joined with Discard": {errors.Join(Discard(errDown), nil, Discard(nil)), discarded},
		// What loses the message never wins.
		"Permanent around Discard":              {Permanent(Discard(errDown)), dead},
		"Permanent joined with Discard":         {errors.Join(Permanent(errDown), Discard(nil)), dead},
		"Discard joined with Permanent":         {errors.Join(Discard(nil), Permanent(errDown)), dead},
		"Discard joined with a failure":         {errors.Join(Discard(nil), errC), retried(7*time.Second, 1)},
		"Discard joined with After":             {errors.Join(Discard(nil), After(time.Minute, nil)), retried(time.Minute, 1)},
		"After around Discard":                  {After(time.Minute, Discard(errDown)), retried(time.Minute, 1)},
		"Discard joined last":                   {errors.Join(errDown, Snooze(1), Permanent(errA), Discard(nil)), dead},
		"Permanent":                             {Permanent(errDown), dead},
		"Permanent, deep":                       {deep(Permanent(errDown)), dead},
		"Permanent around After":                {Permanent(After(time.Minute, errDown)), dead},
		"After around Permanent":                {After(time.Minute, Permanent(errDown)), dead},
		"After joined with Permanent":           {errors.Join(After(time.Minute, nil), Permanent(errDown)), dead},
		"Snooze":                                {Snooze(time.Minute), retried(time.Minute, 0)},
		"Snooze, deep":                          {deep(Snooze(time.Minute)), retried(time.Minute, 0)},
		"Snooze before a rule that discards":    {errors.Join(errB, Snooze(time.Minute)), retried(time.Minute, 0)},
		"Snooze joined before After":            {errors.Join(Snooze(time.Minute), After(time.Second, nil)), retried(time.Minute, 0)},
		"After joined before Snooze":            {errors.Join(After(time.Second, nil), Snooze(time.Minute)), retried(time.Second, 1)},
		"After around After":                    {After(time.Second, After(time.Minute, errDown)), retried(time.Second, 1)},
		"After of nothing":                      {After(time.Minute, nil), retried(time.Minute, 1)},
		"After, deep":                           {deep(After(time.Minute, nil)), retried(time.Minute, 1)},
		"After of an error that RetryIf denies": {After(time.Minute, errDown), retried(time.Minute, 1)},
		"After in a rule that dead-letters":     {After(time.Minute, errA), dead},
		"After in a rule that discards":         {After(time.Minute, errB), discarded},
		"After in a rule that retries":          {After(time.Minute, errC), retried(time.Minute, 1)},
		"the first rule":                        {fmt.Errorf("%w", errA), dead},
		"the first rule that matches a join":    {errors.Join(errB, errA), dead},
		"the second rule":                       {errB, discarded},
		"the third rule, before RetryIf":        {errC, retried(7*time.Second, 1)},
		"RetryIf":                               {errDown, dead},
	} {
		got := fails(pl, c.err)
		got.err, got.asked, got.snoozed = nil, false, false
		assert.Equal(t, c.want, got, name)
	}
}

func TestRuleWithItsOwnLimitLooksAtAllRetriesOfTheMessage(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{MaxRetries: 2, Backoff: Delays(time.Second), Rules: []ErrorRule{{If: On(errA), MaxRetries: 4, Backoff: Delays(time.Minute)}}})
	for count, want := range []decided{decidedRetry, decidedRetry, decidedRetry, decidedRetry, decidedDead} {
		assert.Equal(t, want, pl.decide(failure{err: errA, says: outcome.Read[client.Outcome](errA), count: count, now: epoch}).do, "%d", count)
	}
	for count, want := range []decided{decidedRetry, decidedRetry, decidedDead, decidedDead, decidedDead} {
		assert.Equal(t, want, pl.decide(failure{err: errB, says: outcome.Read[client.Outcome](errB), count: count, now: epoch}).do, "%d", count)
	}
	assert.Equal(t, []time.Duration{time.Second, time.Minute}, pl.levels)
}

func TestSnoozeNeitherCountsNorEndsWhenRetriesAreUsedUp(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{MaxRetries: 2, Backoff: Delays(time.Second), GiveUpAfter: time.Second})
	for _, count := range []int{0, 2, 1000, math.MaxInt32} {
		d := pl.decide(failure{err: Snooze(time.Hour), says: outcome.Read[client.Outcome](Snooze(time.Hour)), count: count, now: epoch})
		assert.Equal(t, decidedRetry, d.do, "there was no failure that GiveUpAfter could begin at")
		assert.Equal(t, count, d.count)
	}
	d := pl.decide(failure{err: Snooze(time.Hour), says: outcome.Read[client.Outcome](Snooze(time.Hour)), first: epoch.Add(-time.Second), now: epoch})
	assert.Equal(t, decidedDead, d.do, "there was")
}

func TestDelayThatAHandlerAsksForIsBounded(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{Strategy: StrategyNative})
	for asked, want := range map[time.Duration]time.Duration{
		math.MinInt64: time.Millisecond, -1: time.Millisecond, 0: time.Millisecond, 1: time.Millisecond,
		1500 * time.Microsecond: 2 * time.Millisecond,
		math.MaxInt64:           maxDelay,
		math.MaxInt64 - 1:       maxDelay,
	} {
		assert.Equal(t, want, fails(pl, After(asked, nil)).delay, "%d", asked)
		assert.Equal(t, want, fails(pl, Snooze(asked)).delay, "%d", asked)
	}
}

func TestJitterStaysWithinItsBounds(t *testing.T) {
	t.Parallel()
	r := random(t)
	for range 2500 {
		d := time.Duration(1+r.Int64N(int64(pick(r, time.Second, time.Hour, maxDelay)/time.Millisecond))) * time.Millisecond
		u := pick(r, 0, r.Float64(), math.Nextafter(1, 0))
		none, half, full := JitterNone.spread(d, u), JitterEqual.spread(d, u), JitterFull.spread(d, u)
		require.Equal(t, d, none)
		require.GreaterOrEqual(t, half, d/2)
		require.GreaterOrEqual(t, full, time.Millisecond)
		for _, spread := range []time.Duration{half, full} {
			require.LessOrEqual(t, spread, d)
			require.Zero(t, spread%time.Millisecond)
		}
	}
}

// For any delay, the levels hold a message for at least that long, for no longer than
// the next longer rung, and in few parts.
func TestRungsNeverShortenADelay(t *testing.T) {
	t.Parallel()
	r := random(t)
	for range 60 {
		p := randomPolicy(r)
		p.Strategy = pick(r, StrategyRepublish, StrategyDeadLetter)
		p.AnyDelay, p.Jitter = nil, JitterNone
		pl := planOf(t, p)
		if len(pl.levels) == 0 {
			continue
		}
		longest := pl.levels[len(pl.levels)-1]
		for d := time.Duration(1); d < 3*longest; d += longest/97 + 1 {
			all, parts := time.Duration(0), 0
			for ; all < d; parts++ {
				all += pl.levels[pl.leg(d, d-all)]
			}
			require.Equal(t, all, pl.held(p.Strategy, d))
			require.LessOrEqual(t, parts, 17)
			if up, _ := slices.BinarySearch(pl.levels, d); up < len(pl.levels) {
				require.LessOrEqual(t, all, pl.levels[up])
			}
		}
		require.Equal(t, 1000*longest, pl.held(p.Strategy, 1000*longest))
		require.GreaterOrEqual(t, pl.held(p.Strategy, maxDelay), maxDelay)
		for _, level := range pl.levels {
			require.Equal(t, level, pl.held(p.Strategy, level))
		}
	}
}
