package retry

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
)

func TestDelaysGoesThroughItsListAndStaysAtTheEnd(t *testing.T) {
	t.Parallel()
	list := []time.Duration{time.Second, time.Minute}
	b := Delays(list...)
	list[0] = time.Hour // it has a copy
	for retry, want := range map[int]time.Duration{
		math.MinInt: time.Second, -1: time.Second, 0: time.Second, 1: time.Second, 2: time.Minute, 3: time.Minute, math.MaxInt: time.Minute,
	} {
		assert.Equal(t, want, b(retry), "%d", retry)
	}
}

func TestExponentialRoundsUpToWholeMilliseconds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		initial time.Duration
		factor  float64
		want    []time.Duration
	}{
		{time.Second, 1.5, []time.Duration{time.Second, 1500 * time.Millisecond, 2250 * time.Millisecond, 3375 * time.Millisecond, 5063 * time.Millisecond}},
		{time.Second, 1, []time.Duration{time.Second, time.Second, time.Second}},
		{time.Second, 0.5, []time.Duration{time.Second, 500 * time.Millisecond, 250 * time.Millisecond}},
		{time.Microsecond, 10, []time.Duration{time.Millisecond, time.Millisecond, time.Millisecond, time.Millisecond, 10 * time.Millisecond}},
	} {
		for i, want := range c.want {
			assert.Equal(t, want, Exponential(c.initial, c.factor)(i+1), "%v * %v^%d", c.initial, c.factor, i)
		}
	}
}

// What can't be waited for is refused before a message is, on any processor
// makes of it.
func TestPolicyRefusesBackoffOutOfRange(t *testing.T) {
	t.Parallel()
	for name, b := range map[string]Backoff{
		"no delays":                 Delays(),
		"zero":                      Delays(0),
		"negative":                  Delays(time.Second, -time.Second),
		"over ten years":            Delays(maxDelay + 1),
		"the longest there is":      Delays(math.MaxInt64),
		"the shortest there is":     Delays(math.MinInt64),
		"factor 0":                  Exponential(time.Second, 0),
		"factor -2":                 Exponential(time.Second, -2),
		"factor NaN":                Exponential(time.Second, math.NaN()),
		"factor Inf":                Exponential(time.Second, math.Inf(1)),
		"factor -Inf":               Exponential(time.Second, math.Inf(-1)),
		"negative beyond all bound": Exponential(time.Second, -1e300),
		"beyond all bounds":         Exponential(time.Second, 1e300),
		"growing too large":         Exponential(time.Hour, 100),
		"initial 0":                 Exponential(0, 2),
		"initial negative":          Exponential(-time.Second, 2),
		"capped below":              Exponential(time.Second, 2).Cap(0),
		"capped negative":           Exponential(time.Second, 2).Cap(-time.Second),
	} {
		refusesArgument(t, Policy{Backoff: b}, "Policy.Backoff", name)
		refusesArgument(t, Policy{Rules: []ErrorRule{{If: On(errA), Backoff: b}}}, "Policy.Rules[0].Backoff", name)
	}
}

func refusesArgument(t *testing.T, p Policy, name, what string) {
	t.Helper()
	err := p.Validate()
	var bad *argument.Error
	if assert.ErrorAs(t, err, &bad, what) {
		path := bad.Path
		if path[len(path)-1].Kind == "call" {
			path = path[:len(path)-1] // which retry the delay is for
		}
		assert.Equal(t, name, path.String(), what)
	}
	_, err = Topology(p)
	assert.ErrorAs(t, err, &bad, "%s: Topology", what)
}

func TestCapBoundsWhatWouldGrowTooLarge(t *testing.T) {
	t.Parallel()
	for _, factor := range []float64{2, 1e300, math.Inf(1)} {
		p := Policy{MaxRetries: 1000, Backoff: Exponential(time.Second, factor).Cap(time.Hour)}
		require.NoError(t, p.Validate())
		for _, retry := range []int{20, 100, 1000} {
			d, err := p.Delay(retry)
			require.NoError(t, err)
			assert.Equal(t, time.Hour, d)
		}
	}
	assert.Nil(t, Backoff(nil).Cap(time.Second), "the policy's default stays its default")
}

func TestZeroPolicyRetriesFiveTimesOverTheDocumentedDelays(t *testing.T) {
	t.Parallel()
	var p Policy
	require.NoError(t, p.Validate())
	levels, err := p.QueueDelays()
	require.NoError(t, err)
	assert.Equal(t, []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute}, levels)
	for i, want := range levels {
		d, err := p.Delay(i + 1)
		require.NoError(t, err)
		assert.Equal(t, want, d)
	}
	for _, retry := range []int{-1, 0, 6} {
		_, err := p.Delay(retry)
		assert.ErrorAs(t, err, new(*argument.Error), "%d", retry)
	}
}

func TestEmptyEnumsAreTheirDocumentedDefaults(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{Rules: []ErrorRule{{If: On(errA), MaxRetries: 7}}})
	assert.Equal(t, JitterNone, pl.jitter)
	assert.Equal(t, StrategyRepublish, pl.strategy)
	assert.Equal(t, ActionRetry, pl.rules[0].do)
}

func TestPolicyRefusesEachBadFieldByItsName(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 256)
	for name, p := range map[string]Policy{
		"Policy.MaxRetries":               {MaxRetries: 1001},
		"Policy.Jitter":                   {Jitter: "some"},
		"Policy.GiveUpAfter":              {GiveUpAfter: -1},
		"Policy.Immediate":                {Immediate: 101},
		"Policy.Strategy":                 {Strategy: "copy"},
		"Policy.Worker":                   {Worker: long},
		"Policy.AnyDelay":                 {Strategy: StrategyNative, AnyDelay: &Ladder{}},
		"Policy.Waive[0]":                 {Waive: []Guard{GuardStrategy}},
		"Policy.Rules[1].If":              {Rules: []ErrorRule{{If: On(errA)}, {}}},
		"Policy.Rules[0].Do":              {Rules: []ErrorRule{{If: On(errA), Do: "ignore"}}},
		"Policy.Rules[0].MaxRetries":      {Rules: []ErrorRule{{If: On(errA), MaxRetries: -2}}},
		"Policy.AnyDelay.Unit":            {AnyDelay: &Ladder{Unit: time.Microsecond}},
		"Policy.AnyDelay.Levels":          {AnyDelay: &Ladder{Levels: 33}},
		"Policy.Names.RetryExchange":      {Names: Names{RetryExchange: long}},
		"Policy.Names.RequeueExchange":    {Names: Names{RequeueExchange: long}},
		"Policy.Names.DeadLetterExchange": {Names: Names{DeadLetterExchange: "a\nb"}},
		"Policy.Names.GivenUpExchange":    {Names: Names{GivenUpExchange: "\xff"}},
		"Policy.Names.ReturnExchange":     {Names: Names{ReturnExchange: long}},
		"Policy.Names.ReplayExchange":     {Names: Names{ReplayExchange: long}},
		"Policy.Names.Parking":            {Names: Names{Parking: long}},
		"Policy.Names.DelayPrefix":        {Names: Names{DelayPrefix: long}},
		"Policy.Names.HoldPrefix":         {Names: Names{HoldPrefix: long}},
		"Policy.Names.LadderPrefix":       {Names: Names{LadderPrefix: long}},
		"Policy.Names.DeadSuffix":         {Names: Names{DeadSuffix: "\xff"}},
	} {
		refusesArgument(t, p, name, name)
	}
	refusesArgument(t, Policy{AnyDelay: &Ladder{Unit: time.Hour, Levels: 32}}, "Policy.AnyDelay", "")
	for _, p := range []Policy{{MaxRetries: -2}, {MaxRetries: math.MinInt}, {MaxRetries: math.MaxInt}} {
		refusesArgument(t, p, "Policy.MaxRetries", "")
	}
	refusesArgument(t, Policy{Immediate: -1}, "Policy.Immediate", "")
	refusesArgument(t, Policy{Worker: "\xff"}, "Policy.Worker", "")
	refusesArgument(t, Policy{Waive: []Guard{"typo"}}, "Policy.Waive[0]", "")
	refusesArgument(t, Policy{MaxRetries: NoRetries, Rules: []ErrorRule{{If: On(errA), Do: ActionRetryUncounted}}}, "Policy.Rules[0].MaxRetries", "no delay to wait for")
	refusesArgument(t, Policy{MaxRetries: 65, Backoff: func(retry int) time.Duration { return time.Duration(retry) * time.Second }}, "Policy.Backoff", "65 queues")
}

func TestManyDelaysAreFineWhereTheyNeedNoQueues(t *testing.T) {
	t.Parallel()
	p := Policy{MaxRetries: 1000, Backoff: func(retry int) time.Duration { return time.Duration(retry) * time.Second }}
	assert.Error(t, p.Validate())
	p.Strategy = StrategyNative
	assert.NoError(t, p.Validate())
	p.Strategy, p.AnyDelay = StrategyRepublish, &Ladder{}
	assert.NoError(t, p.Validate())
}

func TestOnMatchesItsTargetsAndNoNil(t *testing.T) {
	t.Parallel()
	on := On(nil, errA)
	assert.True(t, on(errA))
	assert.False(t, on(errB))
	assert.False(t, on(nil))
	assert.False(t, On()(errA))
}

// typedError is an error with a separate type, as libraries have them.
type typedError struct{ code int }

func (e *typedError) Error() string { return "code " + strconv.Itoa(e.code) }

func TestOnTypeMatchesByTheTypeOfAnErrorInTheChain(t *testing.T) {
	t.Parallel()
	on := OnType[*typedError]()
	assert.True(t, on(&typedError{7}))
	assert.True(t, on(fmt.Errorf("charge: %w", errors.Join(errA, &typedError{7}))))
	assert.True(t, on(Permanent(&typedError{7})))
	assert.False(t, on(errA))
	assert.False(t, on(nil))
	byInterface := OnType[interface {
		error
		Timeout() bool
	}]()
	assert.True(t, byInterface(fmt.Errorf("dial: %w", os.ErrDeadlineExceeded)))
	assert.False(t, byInterface(errA))

	pl := planOf(t, Policy{MaxRetries: 3, Backoff: Delays(time.Second), Rules: []ErrorRule{{If: on, Backoff: Delays(time.Minute)}}, RetryIf: byInterface})
	assert.Equal(t, time.Minute, fails(pl, fmt.Errorf("charge: %w", &typedError{7})).delay, "the rule")
	assert.Equal(t, time.Second, fails(pl, os.ErrDeadlineExceeded).delay, "RetryIf")
	assert.Equal(t, ReasonPermanent, fails(pl, errA).reason)
}
