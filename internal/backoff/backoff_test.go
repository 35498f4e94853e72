package backoff

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// linear makes pauses that a test can tell apart.
func linear(failures int) time.Duration { return time.Duration(failures+1) * time.Minute }

// lives makes a try that succeeds, and is lost after d; a negative d is a refusal.
func lives(d time.Duration) func(*Try) {
	return func(t *Try) {
		if d >= 0 {
			t.Up()
			time.Sleep(d)
		}
	}
}

func TestOnlyWhatHasWorkedStartsTheBackoffOver(t *testing.T) {
	refused, short, long := lives(-1), lives(provenAfter-1), lives(provenAfter)
	worked := func(t *Try) { t.Worked() }
	slow := func(*Try) { time.Sleep(time.Hour) } // and then a refusal
	synctest.Test(t, func(t *testing.T) {
		var pauses []time.Duration
		var attempts []int
		todo := []func(*Try){refused, refused, long, refused, short, refused, worked, short, slow, long, long, refused, refused}
		var ended time.Time
		for try := range Tries(t.Context(), linear) {
			if !ended.IsZero() {
				pauses = append(pauses, time.Since(ended)/time.Minute)
			}
			if len(todo) == 0 {
				break
			}
			attempts = append(attempts, try.Attempt())
			todo[0](try)
			todo, ended = todo[1:], time.Now()
		}
		assert.Equal(t, []int{1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 1, 1, 2}, attempts)
		assert.Equal(t, []time.Duration{1, 2, 0, 1, 2, 3, 0, 1, 2, 0, 0, 1, 2}, pauses)
	})
}

func TestTriesEndWithTheirContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, cancelAfter := range map[string]time.Duration{"before": 0, "in a pause": time.Second} {
			ctx, cancel := context.WithTimeout(t.Context(), cancelAfter)
			began, tries := time.Now(), 0
			for range Tries(ctx, linear) {
				tries++
			}
			cancel()
			assert.Equal(t, 1, tries, name)
			assert.Equal(t, cancelAfter, time.Since(began), name)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		tries := 0
		for try := range Tries(ctx, linear) {
			tries++
			try.Worked()
			cancel() // while something is open
		}
		assert.Equal(t, 1, tries)
	})
}

func TestPausesStayWithinTheirBounds(t *testing.T) {
	for range 2_000 {
		b := Exponential{Min: 1 + rand.N(time.Duration(1)<<rand.IntN(40))}
		b.Max = b.Min + rand.N(time.Duration(1)<<rand.IntN(45))
		n := rand.IntN(100)
		d := b.Pause(n)
		require.Positive(t, d)
		require.LessOrEqual(t, d, b.Max+time.Millisecond, "%v, failure %d", b, n)
		if n < 10 {
			require.LessOrEqual(t, d, b.Min<<n+time.Millisecond, "%v, failure %d", b, n)
		}
	}
}
