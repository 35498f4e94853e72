package clockstep

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// This would tell if package time kept its readings elsewhere.
func TestStepMovesTheWallClockOnly(t *testing.T) {
	check := func(t *testing.T) {
		for _, by := range []time.Duration{0, 1, -1, time.Second, -time.Hour, 24 * time.Hour} {
			began := time.Now()
			before := Step(began, 0)
			time.Sleep(time.Millisecond)
			now := time.Now()
			after := Step(now, by)
			assert.Equal(t, now.Sub(began), after.Sub(before), "%v: the monotonic readings", by)
			assert.Equal(t, now.Add(by).UnixNano(), after.UnixNano())
			assert.Equal(t, now.Add(by).Round(0), after.Round(0), "the wall clock")
			assert.Equal(t, after.UnixNano()+1, after.Add(1).UnixNano())
		}
	}
	check(t)
	synctest.Test(t, check)
}
