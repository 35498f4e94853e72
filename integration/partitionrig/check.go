// Package partitionrig runs workers of package partition that join, leave, crash, and lose
// connections, and checks what they do to each message. Tests and examples use it.
package partitionrig

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// Check accounts for every message. A message is one of a key's, numbered from 1 in the order of
// publishing. Its memory depends on the number of keys, not of messages. It is safe for concurrent
// use.
type Check struct {
	mu        sync.Mutex
	keys      []keyState
	owners    []ownership
	gone      map[string]bool // workers that have crashed
	down      bool            // the broker
	published int
	report    Report
}

type keyState struct {
	published uint32
	completed uint32 // all up to this one
	running   string // the worker that handles one
	handlers  int
}

type ownership struct {
	worker string
	free   time.Time // since when it has no owner
	down   bool      // because the broker was down
}

// Report is what was found.
type Report struct {
	Published, Completed, Duplicates int
	// Early are messages that began before an earlier one of their key was completed, Twice are
	// keys that two handlers had at once, and DoubleOwned are partitions that two workers had.
	Early, Twice, DoubleOwned int
	First                     []string // descriptions of the first of them
	// Missing are messages that weren't completed.
	Missing int
	// Moves counts how often a worker got a partition, and Silences are the times from the end of
	// an owner to the beginning of the next. Restarts are those that began while the broker was
	// down, or when it was killed.
	Moves              int
	Silences, Restarts []time.Duration
}

// NewCheck checks so many keys and partitions.
func NewCheck(keys, partitions int) *Check {
	return &Check{keys: make([]keyState, keys), owners: make([]ownership, partitions), gone: map[string]bool{}}
}

// Publish returns the number of the next message of a key.
func (c *Check) Publish(key int) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.published++
	c.keys[key].published++
	return c.keys[key].published
}

func (c *Check) found(count *int, format string, args ...any) {
	*count++
	if len(c.report.First) < 20 {
		c.report.First = append(c.report.First, fmt.Sprintf(format, args...))
	}
}

// Begin is called when a handler begins.
func (c *Check) Begin(worker string, key int, n uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone[worker] {
		return
	}
	k := &c.keys[key]
	if n > k.completed+1 {
		c.found(&c.report.Early, "%s began %d/%d, and only %d are completed", worker, key, n, k.completed)
	}
	if k.handlers > 0 {
		c.found(&c.report.Twice, "%s began %d/%d while %s handles the key", worker, key, n, k.running)
	}
	k.handlers++
	k.running = worker
}

// End is called when it has returned. completed says that nothing more will happen to the message.
// It returns false for a worker that has crashed, which must settle nothing.
func (c *Check) End(worker string, key int, n uint32, completed bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone[worker] {
		return false
	}
	k := &c.keys[key]
	k.handlers--
	switch {
	case !completed:
	case n <= k.completed:
		c.report.Duplicates++
	default:
		c.report.Completed += int(n - k.completed)
		k.completed = n
	}
	return true
}

// Assigned is partition.Config.OnAssigned of a worker.
func (c *Check) Assigned(worker string, partition int, owned bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := &c.owners[partition]
	switch {
	case c.gone[worker]:
	case owned && o.worker != "" && o.worker != worker:
		c.found(&c.report.DoubleOwned, "%s has partition %d, and so has %s", worker, partition, o.worker)
		fallthrough
	case owned:
		switch {
		case o.free.IsZero():
		case o.down:
			c.report.Restarts = append(c.report.Restarts, time.Since(o.free))
		default:
			c.report.Silences = append(c.report.Silences, time.Since(o.free))
		}
		c.report.Moves++
		*o = ownership{worker: worker}
	case o.worker == worker:
		c.freeOne(o)
	}
}

// Gone says that a worker has crashed: what it does from now on doesn't count.
func (c *Check) Gone(worker string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone[worker] = true
	c.free(worker)
	for i := range c.keys {
		if k := &c.keys[i]; k.handlers > 0 && k.running == worker {
			k.handlers--
		}
	}
}

// Cut says that a worker has lost its connection, and so its partitions. It hasn't noticed yet.
func (c *Check) Cut(worker string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.free(worker)
}

// BrokerIsDown says that partitions can't have an owner from now on, and BrokerIsBack that they can.
func (c *Check) BrokerIsDown() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = true
	for i := range c.owners {
		if o := &c.owners[i]; o.worker != "" || !o.free.IsZero() {
			c.freeOne(o)
		}
	}
}

// BrokerIsBack ends BrokerIsDown.
func (c *Check) BrokerIsBack() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = false
}

func (c *Check) free(worker string) {
	for i := range c.owners {
		if o := &c.owners[i]; o.worker == worker {
			c.freeOne(o)
		}
	}
}

func (c *Check) freeOne(o *ownership) { *o = ownership{free: time.Now(), down: c.down} }

// Shares is how many partitions each worker has. Those without an owner are under "".
func (c *Check) Shares() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := map[string]int{}
	for _, o := range c.owners {
		all[o.worker]++
	}
	return all
}

// Left is how many messages aren't completed.
func (c *Check) Left() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.published - c.report.Completed
}

// Report returns what was found.
func (c *Check) Report() Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.report
	r.Published, r.Missing = c.published, c.published-c.report.Completed
	r.Silences, r.Restarts = slices.Sorted(slices.Values(r.Silences)), slices.Sorted(slices.Values(r.Restarts))
	return r
}

// Quantile is a quantile of sorted durations.
func Quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Wrong are the violations; 0: none.
func (r Report) Wrong() int { return r.Early + r.Twice + r.DoubleOwned }

func (r Report) String() string {
	text := fmt.Sprintf("%d published, %d missing, %d twice; violations: %d early, %d keys at once, %d partitions at once; %d moves, silence p50 %v, p99 %v, max %v",
		r.Published, r.Missing, r.Duplicates, r.Early, r.Twice, r.DoubleOwned, r.Moves,
		Quantile(r.Silences, 0.5).Round(time.Millisecond), Quantile(r.Silences, 0.99).Round(time.Millisecond), Quantile(r.Silences, 1).Round(time.Millisecond))
	if len(r.Restarts) > 0 {
		text += fmt.Sprintf(", from a kill of the broker on p50 %v, max %v", Quantile(r.Restarts, 0.5).Round(time.Millisecond), Quantile(r.Restarts, 1).Round(time.Millisecond))
	}
	return text
}
