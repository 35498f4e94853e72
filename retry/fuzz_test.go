package retry

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/outcome"
)

func FuzzParseCount(f *testing.F) {
	for _, c := range hostileCounts {
		if s, ok := c.claim.(string); ok && len(s) < 100 {
			f.Add(s, 0.0, int64(0))
		}
	}
	f.Add("1", math.NaN(), int64(math.MinInt64))
	f.Fuzz(func(t *testing.T, text string, float float64, long int64) {
		for _, claim := range []any{text, float, float32(float), long, uint64(long), int8(long)} {
			n, isText := parseCount(claim)
			require.GreaterOrEqual(t, n, 0)
			require.LessOrEqual(t, n, math.MaxInt32)
			_, ok := claim.(string)
			require.Equal(t, ok, isText)
			// What is written is read back, so that retries can't start again.
			m := &client.Message{ApplicationProperties: map[string]any{CountProperty: claim}}
			setCount(m, CountProperty, n+1)
			require.Equal(t, min(n+1, math.MaxInt32), Count(m))
		}
	})
}

func FuzzAutopsy(f *testing.F) {
	f.Add("rejected", "exhausted", "orders", int64(1), 2.5, byte(0))
	f.Add("expired", "retry", "delay_1s", int64(math.MaxInt64), math.NaN(), byte(3))
	f.Fuzz(func(t *testing.T, died, reason, queue string, number int64, float float64, kinds byte) {
		// Every annotation with every kind of value.
		values := []any{died, reason, queue, number, float, uint64(number), time.UnixMilli(number), []any{died}, map[string]any{queue: number}, nil, true, []byte(reason)}
		m := &client.Message{Annotations: map[any]any{}}
		for i, key := range []string{
			"x-last-death-reason", client.AnnotationReason, "x-last-death-queue", annotation.Retries, annotation.Older.First, annotation.Older.Last,
			annotation.Queue, annotation.Exchange, annotation.Older.Worker, annotation.Older.ErrorType, client.AnnotationError, annotation.Delay, annotation.DeliveryTime,
		} {
			m.Annotations[key] = values[(i+int(kinds))%len(values)]
		}
		d := DeadLetterOf(m)
		require.GreaterOrEqual(t, d.Retries, 0)
		require.False(t, d.FirstFailure.Before(time.Time{}))
		if due, asked := heldUntil(m); asked > 0 {
			left, _ := (&clock{own: func() time.Time { return epoch }}).arrived(due, asked, 0)
			require.GreaterOrEqual(t, left, time.Duration(0))
			require.LessOrEqual(t, left, asked)
		}
		if d.Reason == ReasonUnroutable {
			require.Positive(t, d.Retries)
		}
	})
}

func FuzzRoutingKey(f *testing.F) {
	for _, queue := range []string{"orders", "a.b", "*", "a.#.b", "a*", "", "..", strings.Repeat("x", 250), "\xff"} {
		f.Add(int64(10_000), queue, "orders")
	}
	f.Fuzz(func(t *testing.T, millis int64, queue, other string) {
		d := time.Duration(millis%maxDelay.Milliseconds()) * time.Millisecond
		key, err := RoutingKey(d, queue)
		if err != nil {
			return
		}
		require.LessOrEqual(t, len(key), 255)
		require.Equal(t, fmt.Sprintf("delay.%d.%s", d.Milliseconds(), queue), key)
		split := func(s string) []string { return strings.Split(s, ".") }
		require.True(t, topicMatches(split("*.*."+queue), split(key)), "it finds its way back")
		require.Equal(t, d >= 0, topicMatches(split(delayKey(d.Abs())), split(key)), "and to its delay queue")
		if checkQueue(nil, other) == nil && other != queue {
			require.False(t, topicMatches(split("*.*."+other), split(key)), "and to no other queue: %q", other)
		}
	})
}

func FuzzDecide(f *testing.F) {
	f.Add(uint64(1), 0, int64(0), 0.5)
	f.Add(uint64(2), math.MaxInt32, int64(math.MaxInt64), 0.0)
	f.Fuzz(func(t *testing.T, seed uint64, count int, first int64, u float64) {
		if count < 0 || count > math.MaxInt32 || !(u >= 0 && u < 1) {
			return // Count and the caller see to that
		}
		r := rand.New(rand.NewPCG(seed, 0))
		p := randomPolicy(r)
		pl := planOf(t, p)
		err := randomError(r, r.IntN(6))
		x := failure{err: err, says: outcome.Read[client.Outcome](err), count: count, first: millis(first), now: epoch, strategy: p.Strategy, u: u}
		d := pl.decide(x)
		again := pl.decide(x)
		require.Equal(t, fmt.Sprint(d.err), fmt.Sprint(again.err))
		again.err = d.err
		require.Equal(t, d, again, "it is a pure function")
		switch d.do {
		case decidedDead:
			require.NotEmpty(t, d.reason)
			require.Error(t, d.err)
		case decidedDiscard:
			discards := errors.As(err, new(*outcome.Discard))
			for _, rule := range pl.rules {
				discards = discards || rule.do == ActionDiscard && rule.applies(err)
			}
			require.True(t, discards, "%v", err)
		case decidedRetry:
			require.True(t, d.count == count || d.count == count+1)
			require.GreaterOrEqual(t, d.delay, time.Millisecond)
			require.LessOrEqual(t, d.delay, maxDelay)
			require.False(t, errors.As(err, new(*outcome.Permanent)))
			if pl.giveUp > 0 && !x.first.IsZero() {
				require.LessOrEqual(t, epoch.Add(pl.held(p.Strategy, d.delay)).Sub(since(x.first, epoch)), pl.giveUp)
			}
		}
	})
}
