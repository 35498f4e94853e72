package partition

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// settled is the assignment as what each worker has.
func settled(owners []string, workers ...string) map[string][]int {
	has := map[string][]int{}
	for _, w := range workers {
		has[w] = nil
	}
	for p, w := range owners {
		has[w] = append(has[w], p)
	}
	return has
}

// Workers join and leave at random. Shares differ by at most one, only what has to move does, and
// the order in which partitions then move one by one doesn't change where they go.
func TestAssignmentsAreBalancedAndMoveLittle(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	const partitions = 64
	workers := []string{"w0"}
	has := settled(assign(partitions, map[string][]int{"w0": nil}), "w0")
	for i := range 500 {
		before := map[int]string{}
		for w, all := range has {
			for _, p := range all {
				before[p] = w
			}
		}
		if joins := len(workers) == 1 || len(workers) < 32 && r.IntN(2) == 0; joins {
			w := fmt.Sprint("w", i+1)
			workers = append(workers, w)
			has[w] = nil
		} else {
			at := r.IntN(len(workers))
			delete(has, workers[at])
			workers = append(workers[:at], workers[at+1:]...)
		}
		owners := assign(partitions, has)
		least, most, moved := partitions, 0, 0
		for _, all := range settled(owners, workers...) {
			least, most = min(least, len(all)), max(most, len(all))
		}
		require.LessOrEqual(t, most-least, 1)
		necessary := 0
		for _, w := range workers {
			necessary += max(0, partitions/len(workers)-len(has[w]))
		}
		for p, w := range owners {
			if before[p] != w {
				moved++
			}
		}
		require.LessOrEqual(t, moved, necessary+partitions%len(workers))

		for _, p := range r.Perm(partitions) { // they move one by one
			for w, all := range has {
				for i, q := range all {
					if q == p && w != owners[p] {
						has[w] = append(append([]int{}, all[:i]...), all[i+1:]...)
						require.Equal(t, owners, assign(partitions, has), "given up")
						break
					}
				}
			}
			if before[p] != owners[p] {
				has[owners[p]] = append(has[owners[p]], p)
			}
			require.Equal(t, owners, assign(partitions, has), "taken")
		}
	}
}

func TestAssignmentWithoutWorkersOrWithForgedClaims(t *testing.T) {
	t.Parallel()
	assert.Equal(t, []string{"", ""}, assign(2, nil))
	assert.Equal(t, []string{"a", "a"}, assign(2, map[string][]int{"a": {-1, 5, 0, 0, 1 << 40}}))
	assert.Len(t, settled(assign(3, map[string][]int{"a": {0, 1, 2}, "b": {0, 1, 2}, "c": nil})), 3)
}

// Each partition has its owner and two standbys in line. When a worker is lost, nearly always one
// of those is the next owner.
func TestStandbysAreTheNextOwners(t *testing.T) {
	t.Parallel()
	const partitions, workers = 64, 16
	has := map[string][]int{}
	for w := range workers {
		has[fmt.Sprint("w", w)] = nil
	}
	for p, w := range assign(partitions, has) {
		has[w] = append(has[w], p)
	}
	owners := assign(partitions, has)
	line := make([]map[string]bool, partitions)
	for p := range line {
		line[p] = map[string]bool{}
	}
	for w := range has {
		for p, in := range lines(owners, has, w) {
			if in {
				line[p][w] = true
			}
		}
	}
	for p, w := range owners {
		assert.True(t, line[p][w], "the owner is in line")
		assert.Len(t, line[p], 1+standbys)
	}
	prepared, moved := 0, 0
	for lost := range has {
		left := maps.Clone(has)
		delete(left, lost)
		for p, next := range assign(partitions, left) {
			if owners[p] == lost {
				moved++
				if line[p][next] {
					prepared++
				}
			}
		}
	}
	assert.Equal(t, partitions, moved)
	assert.Greater(t, prepared, moved*3/4)
	t.Logf("in %d of %d cases the next owner is in line", prepared, moved)
}
