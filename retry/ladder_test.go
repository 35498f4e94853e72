package retry

import (
	"math"
	"math/bits"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

func ladderOf(t testing.TB, l Ladder) Ladder {
	t.Helper()
	l, err := l.withDefaults(nil)
	require.NoError(t, err)
	return l
}

// longest is the most that a ladder holds a message for.
func longest(l Ladder) time.Duration {
	return time.Duration(uint64(1)<<l.Levels-1) &^ (1<<max(l.Levels-4, 0) - 1) * l.Unit
}

func TestLadderIsLateByLessThanAnEighthWithFourQueuesAtMost(t *testing.T) {
	t.Parallel()
	r := random(t)
	for _, l := range []Ladder{{}, {Unit: time.Millisecond}, {Unit: time.Second, Levels: 3}, {Unit: time.Millisecond, Levels: 32}, {Unit: 7 * time.Millisecond, Levels: 11}, {Levels: 1}} {
		l = ladderOf(t, l)
		top := longest(l)
		check := func(asked time.Duration) {
			held, err := l.Delay(asked)
			require.NoError(t, err)
			steps := l.steps(asked)
			require.Equal(t, time.Duration(steps)*l.Unit, held)
			require.LessOrEqual(t, bits.OnesCount64(steps), 4, "%v", asked)
			require.LessOrEqual(t, bits.Len64(steps)-bits.TrailingZeros64(steps), 4, "%v", asked)
			require.GreaterOrEqual(t, held, min(asked, top), "%v is shortened", asked)
			require.LessOrEqual(t, held, top)
			if asked >= 0 && asked <= top {
				require.Less(t, held, asked*9/8+l.Unit+1, "%v is late", asked)
			}
		}
		for n := range 500 {
			check(time.Duration(n) * l.Unit / 3)
			check(time.Duration(r.Int64N(int64(top))))
		}
		for level := range l.Levels {
			for _, off := range []time.Duration{-1, 0, 1} {
				check(l.Unit<<level + off)
			}
		}
		for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, top - 1, top, top + 1, maxDelay, math.MaxInt64} {
			check(d)
		}
	}
}

func TestLongerDelaysAreNeverHeldShorter(t *testing.T) {
	t.Parallel()
	l := ladderOf(t, Ladder{Unit: time.Millisecond, Levels: 14})
	last := time.Duration(0)
	for d := time.Duration(0); d < 20*time.Second; d += 1100 * time.Microsecond {
		held := time.Duration(l.steps(d)) * l.Unit
		require.GreaterOrEqual(t, held, last, "%v", d)
		last = held
	}
}

// A message walks through the queues of the bits that are set in its delay, highest
// first, waits for exactly that long, and comes home to its own queue.
func TestMessageWalksTheLevelsOfItsDelay(t *testing.T) {
	t.Parallel()
	r := random(t)
	names, err := Names{}.withDefaults(nil)
	require.NoError(t, err)
	for _, l := range []Ladder{{Unit: time.Millisecond, Levels: 6}, {}, {Unit: time.Second, Levels: 1}} {
		l = ladderOf(t, l)
		queues := []string{"orders", "mails", "a.b", "b", "0", "1.0", "1", "..", "0.orders"}
		topology := l.topology(names)
		for _, q := range queues {
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: q, DeadLetter: declare.Drop()})
			topology.Bindings = append(topology.Bindings, l.home(names, q))
		}
		w := newWorld(t, topology)
		steps := []uint64{1, 1<<l.Levels - 1}
		for range 40 {
			steps = append(steps, 1+r.Uint64N(1<<l.Levels-1))
		}
		for _, ask := range steps {
			for _, q := range queues {
				asked := time.Duration(ask) * l.Unit
				to, err := l.address(nil, names, asked, q)
				require.NoError(t, err)
				m := &held{home: q}
				require.True(t, w.publish(to.ExchangeName(), to.RoutingKey(), m))
				w.settle()
				require.Equal(t, []*held{m}, w.take(q), "%v from %q", asked, q)
				var want []string
				for level := l.Levels - 1; level >= 0; level-- {
					if l.steps(asked)>>level&1 == 1 {
						want = append(want, l.form(names).Name(level))
					}
				}
				require.Equal(t, append(want, q), m.path, "%v from %q", asked, q)
				require.Equal(t, time.Duration(l.steps(asked))*l.Unit, m.waited)
			}
		}
		w.empty()
	}
}

func TestLadderIsBounded(t *testing.T) {
	t.Parallel()
	p := Policy{MaxRetries: 1000, Backoff: Exponential(time.Second, 1.01), Jitter: JitterFull, AnyDelay: &Ladder{}}
	topology, err := Topology(p, declare.QuorumQueue{Name: "orders"})
	require.NoError(t, err)
	assert.Len(t, topology.Queues, 20+3, "20 levels, the work queue, its dead-letter queue, and parking")
	// Each address is a link of the forwarder's.
	l := ladderOf(t, *p.AnyDelay)
	names, _ := Names{}.withDefaults(nil)
	addresses := map[string]bool{}
	for n := uint64(1); n < 1<<20; n += 1 + n/1000 {
		to, err := l.address(nil, names, time.Duration(n)*l.Unit, "orders")
		require.NoError(t, err)
		addresses[to.String()] = true
	}
	assert.LessOrEqual(t, len(addresses), 4*8*5, "addresses for all delays there are")
	t.Logf("%d addresses", len(addresses))
}

// A policy whose delays are beyond its ladder would retry too early.
func TestPolicyRefusesDelaysBeyondItsLadder(t *testing.T) {
	t.Parallel()
	p := Policy{MaxRetries: 2, Backoff: Delays(time.Second, 3*time.Minute), AnyDelay: &Ladder{Unit: time.Second, Levels: 8}}
	require.NoError(t, p.Validate())
	p.Backoff = Delays(time.Second, 4*time.Minute) // 240 s is 11110000
	require.NoError(t, p.Validate())
	p.Backoff = Delays(time.Second, 241*time.Second)
	var bad *argument.Error
	require.ErrorAs(t, p.Validate(), &bad)
	assert.Equal(t, "Policy.Backoff", bad.Path.String())
	p.Backoff = nil
	p.Rules = []ErrorRule{{If: On(errA), Backoff: Delays(time.Hour)}}
	require.Error(t, p.Validate())
}

func TestLadderKeyFitsIntoAnAMQP091ShortString(t *testing.T) {
	t.Parallel()
	l := ladderOf(t, Ladder{})
	names, _ := Names{}.withDefaults(nil)
	fits, over := string(make([]byte, 255-40)), string(make([]byte, 255-39))
	for q, ok := range map[string]bool{fits: true, over: false} {
		_, err := l.address(nil, names, time.Second, q)
		assert.Equal(t, ok, err == nil, "%v", err)
	}
}
