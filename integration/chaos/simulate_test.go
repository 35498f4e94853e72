package chaos

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/retry"
)

// See "make simulate".
var (
	simSeed     = flag.Uint64("simulate.seed", 1, "the first seed")
	simSeeds    = flag.Int("simulate.seeds", 1, "how many seeds, with each version")
	simVersions = flag.String("simulate.versions", "4.3.6,4.0.5", "of RabbitMQ")
	simMessages = flag.Int("simulate.messages", map[bool]int{false: 1600, true: 600}[explore.UnderRace], "with each seed")
	simFaults   = flag.Int("simulate.faults", len(SimulatedKinds), "with each seed")
	simStretch  = flag.Int("simulate.stretch", 1, "by how much what takes time is longer: 720 makes half a day of a minute")
	simKinds    = flag.String("simulate.kinds", "all", fmt.Sprintf("of faults, separated by commas: some of %v", SimulatedKinds))
	simOnly     = flag.String("simulate.only", "", "numbers of the faults that are done, separated by commas; all without")
	simWithout  = flag.String("simulate.without", "", fmt.Sprintf("actors that are left out, separated by commas: some of %v", Actors))
	simLanes    = flag.String("simulate.lanes", "", "lanes that there are besides republish, separated by commas; all without")
	simShrink   = flag.Bool("simulate.shrink", false, "reduce what fails to the fewest faults, actors, and messages")
	simVerbose  = flag.Bool("simulate.verbose", false, "print all that happens")
)

// simHeap is more than simulations need, and less than one message of the stranger's takes of a decoder that
// makes room for what is claimed.
const simHeap = 1 << 30

// watchHeap reports at once when the heap is larger than that. The function that it returns ends this, and
// returns how large the heap was at most. It looks in real time, outside of any bubble.
func watchHeap(t *testing.T) (most func() uint64) {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	end, ended := make(chan struct{}), make(chan struct{})
	var largest uint64
	go func() {
		defer close(ended)
		for again := time.NewTicker(20 * time.Millisecond); ; {
			metrics.Read(samples)
			if now := samples[0].Value.Uint64(); now > largest {
				if largest <= simHeap && now > simHeap {
					t.Error(Violation{Kind: Memory, Detail: fmt.Sprintf("%d MiB of heap: a message takes much more than its size", now>>20)})
				}
				largest = now
			}
			select {
			case <-again.C:
			case <-end:
				again.Stop()
				return
			}
		}
	}()
	return func() uint64 {
		close(end)
		<-ended
		return largest
	}
}

// simulate runs one seed in a separate bubble.
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
	only, without, err := parseReduced(*simOnly, *simWithout)
	require.NoError(t, err)
	var lanes []string
	if *simLanes != "" {
		lanes = strings.Split(*simLanes, ",")
		for _, name := range lanes {
			require.Contains(t, append([]string{"dead-letter", "native", "versions", "crowd"}, Actors...), name, "-simulate.lanes")
		}
	}
	began := time.Now()
	heap := watchHeap(t)
	var mu sync.Mutex
	var sum Tally
	faults, silent, violations := map[Kind]int{}, map[Kind]int{}, map[ViolationKind]int{}
	var virtual, healthy time.Duration
	due, claimed, recurred, laned := 0, 0, 0, 0
	t.Run("seeds", func(t *testing.T) {
		for version := range strings.SplitSeq(*simVersions, ",") {
			for i := range *simSeeds {
				seed := *simSeed + uint64(i)
				t.Run(fmt.Sprintf("%s-%d", version, seed), func(t *testing.T) {
					if *simStretch == 1 {
						t.Parallel()
					}
					sim := Simulation{Seed: seed, Version: version, Messages: *simMessages, Faults: *simFaults, Stretch: *simStretch, Kinds: kinds, Only: only, Without: without, Lanes: lanes}
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
					due += rep.Due
					claimed += rep.Claimed
					recurred += rep.Recurred
					laned += rep.Laned
					for k, n := range rep.Faults {
						faults[k] += n
					}
					for k, n := range rep.Silent {
						silent[k] += n
					}
					for k, n := range rep.Count {
						violations[k] += n
					}
					if n := len(rep.Usage); n > 0 {
						t.Logf("REPORT simulate: RabbitMQ %s, seed %d: %v; then %v", version, seed, rep.Usage[0], rep.Usage[n-1])
					}
					for _, v := range rep.Violations {
						t.Errorf("%s (%s)", v, rep.Names[v.Lane])
					}
					if len(rep.Violations) > 0 {
						t.Logf("to see it again: %s", again(sim))
						if file, err := os.CreateTemp("", fmt.Sprintf("hopback-simulate-%s-%d-*.log", version, seed)); err == nil {
							_, _ = file.Write(out.Bytes())
							_ = file.Close()
							t.Logf("what happened is in %s", file.Name())
						}
						if *simShrink {
							sim.Out = nil
							t.Log(explain(shrink(func(sim Simulation) *Simulated { return simulate(t, sim) }, sim, rep)))
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
	t.Logf("REPORT simulate: a message that never fails waited at most %v where nothing was broken; %d retries were due then; %d parked messages were claimed; %d recurring messages came then; %d messages of noisy tenants came by lanes; unreported faults: %v", healthy.Round(time.Millisecond), due, claimed, recurred, laned, sorted(silent))
	assert.Empty(t, violations)
	t.Logf("REPORT simulate: %d MiB of heap", heap()>>20)
	if kinds == nil && only == nil {
		assert.Len(t, faults, min(*simFaults, len(SimulatedKinds)))
	}
}

// Some days with faults that take the longest to be over, in which messages wait for hours and days. "make days" has
// more of everything.
func TestSimulateDays(t *testing.T) {
	rep := simulate(t, Simulation{
		Seed: 6, Messages: 60, Faults: 5, Stretch: 720, Lanes: []string{Scheduled, Recurring}, Without: []string{Stranger},
		Kinds: []Kind{WorkerKilled, BrokerStopped, HalfOpen, ClockJumps, DelayDeleted},
	})
	assert.Empty(t, rep.Violations)
	assert.Greater(t, rep.Virtual, 3*24*time.Hour)
	assert.NotEmpty(t, rep.Usage)
	assert.NotZero(t, rep.Recurred)
	t.Logf("REPORT simulate: %.1f days; %v; then %v", rep.Virtual.Hours()/24, rep.Usage[0], rep.Usage[len(rep.Usage)-1])
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

// counted is a simulation of one lane that has nothing broken but for its first minutes.
func counted() (*simulation, *simLane) {
	s := &simulation{script: Script{Seed: 7, Delays: simDelays}, quiet: []span{{5 * time.Minute, time.Hour}}}
	l := &simLane{simulation: s, script: s.script, name: "republish", ledger: NewLedger(s.script, 0, testMessages)}
	s.lanes, s.waits = []*simLane{l}, [][]wait{make([]wait, testMessages)}
	return s, l
}

func (s *simulation) with(end End, failures int) uint32 {
	for id := range uint32(testMessages) {
		if s.script.Fate(0, id) == (Fate{end, failures}) {
			return id
		}
	}
	panic("no such message")
}

func TestAHealthyMessageThatWaitsIsStarved(t *testing.T) {
	const late = healthyWithin + time.Second
	for name, c := range map[string]struct {
		failures       int
		accepted, took time.Duration
		starved        bool
	}{
		"at once":                        {0, 10 * time.Minute, time.Second, false},
		"late":                           {0, 10 * time.Minute, late, true},
		"late, and something was broken": {0, time.Minute, late, false},
		"late, up to the next fault":     {0, time.Hour - time.Second, late, false},
		"late, and it fails itself":      {1, 10 * time.Minute, late, false},
		"late, while others fail":        {0, 2 * time.Minute, late, true},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := counted()
			s.flowing = []flowing{{0, span{90 * time.Second, 3 * time.Minute}}, {1, span{0, 3 * time.Minute}}}
			s.waits[0][s.with(EndHandled, c.failures)] = wait{c.accepted, c.accepted, c.accepted + c.took}
			s.checkWaits(l)
			assert.Equal(t, c.starved, s.trouble.count[Starved] == 1, "%v", s.trouble.list)
		})
	}
}

func TestARetryThatIsLateIsStalled(t *testing.T) {
	const late = healthyWithin + time.Second
	for name, c := range map[string]struct {
		lane    string
		failed  time.Duration
		took    time.Duration
		stalled bool
	}{
		"in time":                          {"republish", 10 * time.Minute, simDelays[0] + time.Second, false},
		"late":                             {"republish", 10 * time.Minute, simDelays[0] + late, true},
		"late, and something was broken":   {"republish", 4 * time.Minute, simDelays[0] + late, false},
		"late, and its lane was broken":    {"republish", 20 * time.Minute, simDelays[0] + late, false},
		"in time by the later version":     {"versions", 10 * time.Minute, simDelays[0] + late, false},
		"late by the later version, too":   {"versions", 10 * time.Minute, 2*simDelays[0] + late, true},
		"late, long after what was broken": {"republish", 40 * time.Minute, simDelays[0] + late, true},
	} {
		t.Run(name, func(t *testing.T) {
			s, l := counted()
			l.name, l.broken = c.lane, []span{{19 * time.Minute, 25 * time.Minute}}
			id := s.with(EndHandled, 1)
			l.ledger.attempted(record{id: id, attempt: 1, at: uint32(c.failed.Milliseconds()), what: whatFailed})
			l.ledger.attempted(record{id: id, attempt: 2, at: uint32((c.failed + c.took).Milliseconds()), what: whatHandled})
			s.checkRetries(l)
			assert.Equal(t, c.stalled, s.trouble.count[Stalled] == 1, "%v", s.trouble.list)
		})
	}
}

func TestAFaultThatNobodyTellsOfIsSilence(t *testing.T) {
	for name, c := range map[string]struct {
		kind             Kind
		notified, harmed bool
		silent, wrong    int
	}{
		"told":              {ForwardsStuck, true, true, 0, 0},
		"silent":            {ForwardsStuck, false, true, 1, 1},
		"nothing was there": {ForwardsStuck, false, false, 1, 0},
		"need not be told":  {LeaderMoved, false, true, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := counted()
			silent := map[Kind]int{}
			s.judge(1, simFault{kind: c.kind}, c.notified, c.harmed, silent)
			assert.Equal(t, c.silent, silent[c.kind])
			assert.Equal(t, c.wrong, s.trouble.count[Silence])
		})
	}
}

func TestWhatTellsOfAFault(t *testing.T) {
	s, _ := counted()
	s.Out = io.Discard
	log := slog.New(simLog{s, "worker"})
	notifies := func(what func()) bool {
		before := s.heard.Load()
		what()
		return s.heard.Load() > before
	}
	for _, reason := range []client.Reason{retry.ReasonPermanent, retry.ReasonExhausted, reasonDeclined} {
		assert.False(t, notifies(func() { log.Warn("hopback: a message is dead-lettered", "reason", string(reason)) }), "%s is in the script", reason)
	}
	assert.False(t, notifies(func() { log.Error("hopback: a handler panicked; the message is dead-lettered") }))
	assert.False(t, notifies(func() { log.Info("hopback: anything") }))
	assert.True(t, notifies(func() { log.Warn("hopback: a message is dead-lettered", "reason", string(retry.ReasonNoDelayQueue)) }))
	assert.True(t, notifies(func() {
		log.Error("hopback: topology check: found a fault while the consumer runs; fix it as the error says")
	}))
	observe := s.config("worker", 0, SideWorkers).OnEvent
	assert.False(t, notifies(func() { observe(client.Event{Kind: client.EventUp}) }))
	assert.True(t, notifies(func() { observe(client.Event{Kind: client.EventUp, Down: time.Second}) }))
	assert.True(t, notifies(func() { observe(client.Event{Kind: client.EventLost}) }))
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
