package explore

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAllSequencesAreTriedOnce(t *testing.T) {
	t.Parallel()
	found := map[string]int{}
	report, err := All(1000, func(r *Run) error {
		s := fmt.Sprint(r.Pick(3))
		if s != "1" { // how many choices follow depends on the ones before
			s += fmt.Sprint(r.Happens(), r.Pick(2))
		}
		found[s]++
		return nil
	})
	require.NoError(t, err)
	assert.True(t, report.Complete)
	assert.Equal(t, 9, report.Runs)
	assert.Equal(t, 3, report.Depth)
	assert.Len(t, found, 9)
	for s, n := range found {
		assert.Equal(t, 1, n, s)
	}
}

// Two counters that go from 0 to 3 in any order have 20 ways, and 16 states.
func TestStatesAreExploredOnce(t *testing.T) {
	t.Parallel()
	for prune, runs := range map[bool]int{false: 20, true: 10} {
		states := map[[2]int]bool{}
		report, err := All(1000, func(r *Run) error {
			var at [2]int
			for {
				states[at] = true
				if prune && r.Seen(func() string { return fmt.Sprint(at) }) {
					return nil
				}
				var can []int
				for i, n := range at {
					if n < 3 {
						can = append(can, i)
					}
				}
				if len(can) == 0 {
					return nil
				}
				at[can[r.Pick(len(can))]]++
			}
		})
		require.NoError(t, err)
		assert.Len(t, states, 16)
		assert.True(t, report.Complete)
		assert.Equal(t, runs, report.Runs)
	}
}

func TestAFailedRunSaysWhatHappened(t *testing.T) {
	t.Parallel()
	wrong := errors.New("wrong")
	_, err := All(1000, func(r *Run) error {
		for i := range 5 {
			if r.Happens() {
				r.Say("crash at %d", i)
				if i == 3 {
					return wrong
				}
			}
		}
		return nil
	})
	require.ErrorIs(t, err, wrong)
	assert.EqualError(t, err, "after 2 runs: wrong\n\tcrash at 3")
	report, err := All(2, func(r *Run) error { r.Pick(100); return nil })
	require.NoError(t, err)
	assert.False(t, report.Complete)
}

// A run whose goroutines race is repeated until it goes the way that its choices lead to.
func TestRunsThatStrayAreRepeated(t *testing.T) {
	t.Parallel()
	found, n := map[int]bool{}, 0
	report, err := All(100, func(r *Run) error {
		if n++; n%2 == 0 {
			r.Pick(3)
			return nil
		}
		found[10*r.Pick(2)+r.Pick(4)] = true
		return nil
	})
	require.NoError(t, err)
	assert.True(t, report.Complete)
	assert.Len(t, found, 8)
	assert.Equal(t, 8, report.Runs)
	assert.Positive(t, report.Strayed)
	_, err = All(10, func(r *Run) error { n++; r.Pick(n); return nil })
	require.ErrorContains(t, err, "depend on more than their choices")
}
