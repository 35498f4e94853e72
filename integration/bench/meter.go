package main

import (
	"math"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
)

// reading is what the process had used at one moment.
type reading struct {
	at             time.Time
	cpu            time.Duration
	mallocs, bytes uint64
}

func read() reading {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return reading{time.Now(), cpuTime(), m.Mallocs, m.TotalAlloc}
}

// cpuTime is what this process has used of the CPU, in user and kernel mode.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// meter measures a stretch of a run in full flow: from when warm messages are done
// until n more are. Peers call tick once for each message that is done.
type meter struct {
	warm, n  int64
	ticks    atomic.Int64
	from, to reading
	done     chan struct{} // closed when the last is done
	profile  *os.File      // for a CPU profile of the stretch, or nil
}

func newMeter(warm, n int) *meter {
	return &meter{warm: int64(max(warm, 1)), n: int64(n), done: make(chan struct{})}
}

// total is how many messages a run needs.
func (m *meter) total() int { return int(m.warm + m.n) }

func (m *meter) tick() {
	switch m.ticks.Add(1) {
	case m.warm:
		m.from = read()
		if m.profile != nil {
			_ = pprof.StartCPUProfile(m.profile) // it fails only where one runs already
		}
	case m.warm + m.n:
		m.to = read()
		if m.profile != nil {
			pprof.StopCPUProfile()
		}
		close(m.done)
	}
}

// Metrics of a run. Those of the flow are a message's.
const (
	rate   = "rate"   // messages a second
	cpu    = "cpu"    // microseconds of this process's CPU
	allocs = "allocs" // allocations
	bytes  = "bytes"  // bytes allocated
	cores  = "cores"  // CPUs that this process kept busy

	// of idle consumers
	goroutines = "goroutines" // of a consumer
	held       = "held"       // KiB of heap and stacks of a consumer
	rss        = "rss"        // MiB of memory that the whole process has
)

type metrics map[string]float64

func (m *meter) metrics() metrics {
	n, took := float64(m.n), m.to.at.Sub(m.from.at).Seconds()
	used := (m.to.cpu - m.from.cpu).Seconds()
	return metrics{
		rate: n / took, cpu: used * 1e6 / n, cores: used / took,
		allocs: float64(m.to.mallocs-m.from.mallocs) / n, bytes: float64(m.to.bytes-m.from.bytes) / n,
	}
}

// spread is the median of several rounds, and the least and the most.
type spread struct {
	Median, Min, Max float64
}

func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{math.NaN(), math.NaN(), math.NaN()}
	}
	v := slices.Sorted(slices.Values(values))
	mid := v[len(v)/2]
	if len(v)%2 == 0 {
		mid = (mid + v[len(v)/2-1]) / 2
	}
	return spread{mid, v[0], v[len(v)-1]}
}
