package chaos

import (
	"fmt"
	"runtime"
	"time"
)

// Grown is a simulation of days that uses more at its end than after its first day.
const Grown ViolationKind = "grown"

// longest is how long a simulation may take: times are counted in milliseconds, in 32 bits.
const longest = 49 * 24 * time.Hour

// usage is what a simulation of days uses when it is idle.
type usage struct {
	at                          time.Duration
	heap                        uint64
	goroutines, conns, sessions int
}

func (u usage) String() string {
	return fmt.Sprintf("%.1f MiB of heap, %d goroutines, %d connections, %d sessions after %.1f days", float64(u.heap)/(1<<20), u.goroutines, u.conns, u.sessions, u.at.Hours()/24)
}

// use notes what is in use, from the end of the first day on. No other simulation runs in this process.
func (s *simulation) use() {
	if s.Stretch == 1 || time.Since(s.began) < 24*time.Hour {
		return
	}
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u := usage{at: time.Since(s.began), heap: m.HeapAlloc, goroutines: runtime.NumGoroutine()}
	for _, c := range s.broker.Connections() {
		u.conns++
		u.sessions += c.Info().Sessions
	}
	s.usage = append(s.usage, u)
}

// checkUsage compares what was in use before the last fault with what was after the first day. The broker in memory
// and the log of the run take some of the heap.
func (s *simulation) checkUsage() {
	if time.Since(s.began) > longest {
		s.wrong(ViolationStuck, 0, "it took %v, and times are right for %v only: use fewer faults", time.Since(s.began), longest)
	}
	if len(s.usage) == 0 {
		return
	}
	first, last := s.usage[0], s.usage[len(s.usage)-1]
	if last.heap > first.heap+mayGrow || last.goroutines > first.goroutines*11/10 || last.conns > first.conns || last.sessions > first.sessions*11/10 {
		s.wrong(Grown, 0, "%v; then %v", first, last)
	}
}

// mayGrow is by how much the heap may grow in weeks.
const mayGrow = 64 << 20

// heartbeat and idleTimeout are longer in a simulation of days: signs of life would take most of its time.
func (c Simulation) heartbeat() time.Duration {
	if c.Stretch > 1 {
		return 20 * time.Minute
	}
	return time.Minute
}

func (c Simulation) idleTimeout() time.Duration {
	if c.Stretch > 1 {
		return 20 * time.Minute
	}
	return simIdle
}

// affords reports whether an actor takes part. In a simulation of days, two have only some of the seeds: their workers
// ask the broker each second, which takes five times as long as all others do.
func (c Simulation) affords(actor string) bool {
	return c.Stretch <= 1 || actor != Partitioned && actor != Limited || actor == Partitioned && c.Seed%8 == 0 || actor == Limited && c.Seed%8 == 4
}

// stretch is how long d is in a simulation of days.
func (c Simulation) stretch(d time.Duration) time.Duration {
	return d * time.Duration(max(c.Stretch, 1))
}

func (c Simulation) stretchAll(all [maxRetries]time.Duration) [maxRetries]time.Duration {
	for i, d := range all {
		all[i] = c.stretch(d)
	}
	return all
}

// nightly are times at half past two in Berlin, which some night doesn't have and some night has twice.
type nightly struct{}

var berlin = func() *time.Location {
	l, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		panic(err)
	}
	return l
}()

func (nightly) String() string { return "each night" }

func (nightly) Next(t time.Time) time.Time {
	t = t.In(berlin)
	for day := t.Day(); ; day++ {
		if at := time.Date(t.Year(), t.Month(), day, 2, 30, 0, 0, berlin); at.After(t) {
			return at
		}
	}
}
