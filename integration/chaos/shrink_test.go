package chaos

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/argument"
)

// shrink reduces a simulation that found something to the fewest faults, actors, and messages with which
// it still finds something of the same kind. It returns the last one that did.
func shrink(run func(Simulation) *Simulated, sim Simulation, rep *Simulated) (Simulation, *Simulated) {
	wanted := rep.Count
	faults, messages := sim.Faults, sim.Messages
	if sim.Only == nil {
		sim.Only = []int{}
		for i := range faults {
			sim.Only = append(sim.Only, i)
		}
	}
	// fails keeps what it has found. What goroutines make of a seed differs, so it tries twice.
	fails := func(less Simulation) bool {
		for range 2 {
			found := run(less)
			for k := range found.Count {
				if wanted[k] > 0 {
					sim, rep = less, found
					return true
				}
			}
		}
		return false
	}
	minimize(sim.Only, func(only []int) bool {
		less := sim
		less.Only = only
		less.Messages = max(messages*len(only)/faults, min(messages, 400)) // as many for each fault
		return fails(less)
	})
	for _, actor := range Actors {
		if !slices.Contains(sim.Without, actor) {
			less := sim
			less.Without = append(slices.Clone(sim.Without), actor)
			fails(less)
		}
	}
	for sim.Messages >= 100 {
		less := sim
		less.Messages /= 2
		if !fails(less) {
			break
		}
	}
	return sim, rep
}

// minimize returns a part of all that still fails. None of its elements can be left out.
func minimize(all []int, fails func([]int) bool) []int {
	for parts := 2; len(all) > 0; {
		size := int(math.Ceil(float64(len(all)) / float64(parts)))
		reduced := false
		for part := range slices.Chunk(slices.Clone(all), size) {
			rest := slices.DeleteFunc(slices.Clone(all), func(x int) bool { return slices.Contains(part, x) })
			if fails(rest) {
				all, reduced = rest, true
				break
			}
		}
		switch {
		case reduced:
			parts = max(parts-1, 2)
		case size == 1:
			return all
		default:
			parts = min(2*parts, len(all))
		}
	}
	return all
}

// explain returns what a reduced simulation did, step by step, and what came of it.
func explain(sim Simulation, rep *Simulated) string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d with RabbitMQ %s, reduced to faults %v, %d messages, without %v:\n", sim.Seed, sim.Version, sim.Only, sim.Messages, sim.Without)
	for i, step := range rep.Steps {
		fmt.Fprintf(&b, "%4d. %s\n", i+1, step)
	}
	for _, k := range slices.Sorted(maps.Keys(rep.Count)) {
		fmt.Fprintf(&b, "      %d times %s, such as: %v\n", rep.Count[k], k, rep.Violations[slices.IndexFunc(rep.Violations, func(v Violation) bool { return v.Kind == k })])
	}
	return b.String() + "again: " + again(sim)
}

// again is the command that repeats a simulation.
func again(sim Simulation) string {
	kinds := *simKinds
	flags := fmt.Sprintf("-simulate.seed %d -simulate.seeds 1 -simulate.versions %s -simulate.messages %d -simulate.faults %d -simulate.kinds %s", sim.Seed, sim.Version, sim.Messages, sim.Faults, kinds)
	if sim.Stretch > 1 {
		flags += fmt.Sprint(" -simulate.stretch ", sim.Stretch)
	}
	if sim.Lanes != nil {
		flags += " -simulate.lanes " + strings.Join(sim.Lanes, ",")
	}
	if sim.Only != nil {
		flags += " -simulate.only=" + strings.Trim(strings.ReplaceAll(fmt.Sprint(sim.Only), " ", ","), "[]")
	}
	if len(sim.Without) > 0 {
		flags += " -simulate.without " + strings.Join(sim.Without, ",")
	}
	return "make simulate SIMULATEFLAGS='" + flags + "'"
}

// parseReduced reads numbers of faults and names of actors, separated by commas.
func parseReduced(faults, actors string) (only []int, without []string, err error) {
	for _, text := range strings.FieldsFunc(faults, func(r rune) bool { return r == ',' }) {
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, nil, argument.New("only", text, "is no number of a fault", "use those that a reduced simulation prints")
		}
		only = append(only, n)
	}
	for _, name := range strings.FieldsFunc(actors, func(r rune) bool { return r == ',' }) {
		if !slices.Contains(Actors, name) {
			return nil, nil, argument.New("without", name, "is no actor", fmt.Sprintf("use some of %v", Actors))
		}
		without = append(without, name)
	}
	return only, without, nil
}

func TestMinimize(t *testing.T) {
	all := make([]int, 50)
	for i := range all {
		all[i] = i
	}
	for _, want := range [][]int{{}, {0}, {49}, {7, 31}, {3, 4, 5, 48}} {
		tries := 0
		got := minimize(all, func(part []int) bool {
			tries++
			return !slices.ContainsFunc(want, func(x int) bool { return !slices.Contains(part, x) })
		})
		assert.Equal(t, want, got)
		assert.Less(t, tries, 120)
	}
}

// Of a schedule in which two faults are wrong only together, these two are left, and nothing else.
func TestAFailingSeedIsReduced(t *testing.T) {
	run := func(sim Simulation) *Simulated {
		rep := &Simulated{Count: map[ViolationKind]int{}}
		if slices.Contains(sim.Only, 3) && slices.Contains(sim.Only, 17) && !slices.Contains(sim.Without, Neighbor) && sim.Messages >= 60 {
			rep.Count[ViolationLost] = 1
			rep.Violations = []Violation{{Kind: ViolationLost, ID: 5}}
			rep.Steps = []string{"12s: a queue is purged"}
		}
		return rep
	}
	whole := Simulation{Seed: 9, Version: "4.3.6", Messages: 1600, Faults: 40}
	sim, rep := shrink(run, whole, &Simulated{Count: map[ViolationKind]int{ViolationLost: 3}})
	assert.Equal(t, []int{3, 17}, sim.Only)
	assert.ElementsMatch(t, []string{Forwarder, Centralized, Partitioned, Scheduled, Parking, Fair, Recurring, Limited, Called, Stranger}, sim.Without)
	assert.Equal(t, 100, sim.Messages)
	text := explain(sim, rep)
	assert.Contains(t, text, "1. 12s: a queue is purged")
	assert.Contains(t, text, "-simulate.only=3,17")
}
