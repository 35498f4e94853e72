package brokerclock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// However long the process is interrupted, and between which steps: the broker's time is never too
// early, and it is exact once a reading was quick.
func TestReadIsNeverTooEarly(t *testing.T) {
	const ahead = time.Hour
	for name, test := range map[string]struct {
		before, after []time.Duration // interruptions of each try, before and after the broker's time is read
		late          time.Duration
	}{
		"none":                  {},
		"before the broker's":   {before: []time.Duration{20 * time.Millisecond}},
		"after the broker's":    {after: []time.Duration{20 * time.Millisecond}},
		"a query":               {before: []time.Duration{time.Second, 20 * time.Millisecond}, after: []time.Duration{time.Second}},
		"always, the best":      {before: []time.Duration{9 * time.Millisecond, 8 * time.Millisecond, 7 * time.Millisecond, 9 * time.Millisecond, 8 * time.Millisecond}, late: 7 * time.Millisecond},
		"always, most of it":    {before: repeat(20 * time.Millisecond), late: 20 * time.Millisecond},
		"always, in the middle": {before: repeat(5 * time.Millisecond), after: repeat(5 * time.Millisecond), late: 5 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := 0
				ask := func(context.Context) (time.Time, error) {
					pause(test.before, n)
					now := time.Now().Add(ahead)
					pause(test.after, n)
					n++
					return now, nil
				}
				r, err := Read(t.Context(), time.Now, ask, ask)
				require.NoError(t, err)
				assert.Equal(t, test.late, r.Broker.Sub(r.Own)-ahead)
				assert.GreaterOrEqual(t, r.Late, test.late)
			})
		})
	}
}

func pause(all []time.Duration, n int) {
	if n < len(all) {
		time.Sleep(all[n])
	}
}

func repeat(d time.Duration) []time.Duration { return []time.Duration{d, d, d, d, d} }

func TestReadReturnsErrors(t *testing.T) {
	broken := errors.New("broken")
	_, err := Read(t.Context(), time.Now, func(context.Context) (time.Time, error) { return time.Time{}, broken }, nil)
	require.ErrorIs(t, err, broken)
	synctest.Test(t, func(t *testing.T) {
		slow := func(context.Context) (time.Time, error) {
			time.Sleep(time.Second)
			return time.Now(), nil
		}
		r, err := Read(t.Context(), time.Now, slow, func(context.Context) (time.Time, error) { return time.Time{}, broken })
		require.NoError(t, err, "the first answer holds")
		assert.Equal(t, Reading{r.Own, r.Own.Add(time.Second), time.Second}, r)
	})
}
