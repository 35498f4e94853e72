package chaos

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// See "make simulate".
var (
	simSeed     = flag.Uint64("simulate.seed", 1, "the first seed")
	simSeeds    = flag.Int("simulate.seeds", 1, "how many seeds, with each version")
	simVersions = flag.String("simulate.versions", "4.3.6,4.0.5", "of RabbitMQ")
	simMessages = flag.Int("simulate.messages", 1_000, "with each seed")
	simFaults   = flag.Int("simulate.faults", len(SimulatedKinds), "with each seed")
	simKinds    = flag.String("simulate.kinds", "all", "of faults, separated by commas")
	simVerbose  = flag.Bool("simulate.verbose", false, "print all that happens")
)

// simulate runs one seed in a bubble of its own.
func simulate(t *testing.T, sim Simulation) (rep *Simulated) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var err error
		rep, err = sim.Run(t.Context())
		require.NoError(t, err)
	})
	return rep
}

// Every kind of fault is done to a RabbitMQ in memory, with every strategy, and nothing is
// lost, dead by mistake, starved or silent.
func TestSimulate(t *testing.T) {
	kinds, err := parseSimulated(*simKinds)
	require.NoError(t, err)
	began := time.Now()
	var mu sync.Mutex
	var sum Tally
	faults, silent, violations := map[Kind]int{}, map[Kind]int{}, map[ViolationKind]int{}
	var virtual, healthy time.Duration
	t.Run("seeds", func(t *testing.T) {
		for version := range strings.SplitSeq(*simVersions, ",") {
			for i := range *simSeeds {
				seed := *simSeed + uint64(i)
				t.Run(fmt.Sprintf("%s-%d", version, seed), func(t *testing.T) {
					t.Parallel()
					sim := Simulation{Seed: seed, Version: version, Messages: *simMessages, Faults: *simFaults, Kinds: kinds}
					var out bytes.Buffer
					sim.Out = &lockedWriter{w: &out}
					if *simVerbose {
						sim.Out = os.Stderr
					}
					rep := simulate(t, sim)
					mu.Lock()
					defer mu.Unlock()
					sum.add(rep.Tally)
					virtual += rep.Virtual
					healthy = max(healthy, rep.Healthy)
					for k, n := range rep.Faults {
						faults[k] += n
					}
					for k, n := range rep.Silent {
						silent[k] += n
					}
					for k, n := range rep.Count {
						violations[k] += n
					}
					for _, v := range rep.Violations {
						t.Error(v)
					}
					if len(rep.Violations) > 0 {
						t.Logf("to see it again: make simulate SIMULATEFLAGS='-simulate.seed %d -simulate.seeds 1 -simulate.versions %s -simulate.messages %d -simulate.faults %d -simulate.kinds %s'",
							seed, version, *simMessages, *simFaults, *simKinds)
						if file, err := os.CreateTemp("", fmt.Sprintf("hopback-simulate-%s-%d-*.log", version, seed)); err == nil {
							_, _ = file.Write(out.Bytes())
							_ = file.Close()
							t.Logf("what happened is in %s", file.Name())
						}
					}
				})
			}
		}
	})
	n := 0
	for _, k := range faults {
		n += k
	}
	t.Logf("REPORT simulate: %d faults, %d messages, %d accepted, %d handled, %d dead, %d parked, %d duplicates, %d gone with their queue, %d lost, %.1f hours in %.0f s",
		n, sum.Messages, sum.Accepted, sum.Handled, sum.Dead, sum.Parked, sum.Duplicates, sum.Taken, sum.Lost, virtual.Hours(), time.Since(began).Seconds())
	t.Logf("REPORT simulate: a message that never fails waited at most %v where nothing was broken; faults that nobody told of: %v", healthy.Round(time.Millisecond), sorted(silent))
	assert.Empty(t, violations)
	if kinds == nil {
		assert.Len(t, faults, min(*simFaults, len(SimulatedKinds)))
	}
}

func sorted(kinds map[Kind]int) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(kinds)) {
		all = append(all, fmt.Sprintf("%s %d", k, kinds[k]))
	}
	return strings.Join(all, ", ")
}

type lockedWriter struct {
	mu sync.Mutex
	w  *bytes.Buffer
}

func (w *lockedWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.w.Len() > 4<<20 {
		w.w.Reset() // the end is what matters
	}
	return w.w.Write(b)
}

// The schedule is a pure function of the seed.
func TestASeedRepeatsTheSchedule(t *testing.T) {
	schedule := func(seed uint64) (all []string) {
		s := &simulation{Simulation: Simulation{Seed: seed, Faults: 100, Kinds: SimulatedKinds}}
		for _, f := range s.schedule() {
			all = append(all, fmt.Sprint(f.kind, f.lasts, f.dice.Uint64()))
		}
		return all
	}
	assert.Equal(t, schedule(7), schedule(7))
	assert.NotEqual(t, schedule(7), schedule(8))
}
