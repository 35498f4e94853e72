package engine

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// Broker is a RabbitMQ in memory. It is safe for concurrent use.
//
// One lock guards all of it. It is held for short computations only, and nothing is
// called out while it is held.
type Broker struct {
	cfg     Config
	version version
	started time.Time

	mu       sync.Mutex
	running  bool
	closed   bool
	vhosts   map[string]*vhost
	users    map[string]*User
	conns    []*Connection
	alarms   map[Alarm]bool
	dirty    []*queue
	onward   []onward
	messages int64
	bytes    int64
	clock    int64         // in ms, as of this hold of the lock; 0: not read yet
	ahead    time.Duration // how far the clock was set ahead of this host's
	lines    ring[line]
	logged   uint64        // how many lines there have been
	changed  chan struct{} // closed at the next change, nil if nobody waits
	serial   uint64
}

// version is what depends on RabbitMQ's version.
type version struct {
	full  string
	newer bool // 4.3 and later
	// newest is 4.4 and later: queues hold published messages until their time, and consumers
	// claim parked ones.
	newest bool
	// durableByDefault is whether a message without a header is durable.
	durableByDefault bool
}

func versionOf(full string) version {
	newer := !strings.HasPrefix(full, "4.0.")
	return version{full, newer, strings.HasPrefix(full, "4.4."), !newer}
}

// New starts a Broker. It is to be closed.
func New(cfg Config) (*Broker, error) {
	full := cfg.Version
	switch full {
	case "", "4.3":
		full = "4.3.6"
	case "4.0":
		full = "4.0.5"
	case "4.4":
		full = "4.4.0"
	case "4.4.0", "4.3.6", "4.0.5":
	default:
		return nil, fmt.Errorf("hopbacktest: no version %q: use 4.4.0, 4.3.6, or 4.0.5", cfg.Version)
	}
	orElse(&cfg.Node, "rabbit@memory")
	if !slices.Contains(cfg.Nodes, cfg.Node) {
		cfg.Nodes = append([]string{cfg.Node}, cfg.Nodes...)
	}
	orElse(&cfg.DeadLetterRetry, 180*time.Second)
	orElse(&cfg.ConsumerTimeout, 30*time.Minute)
	orElse(&cfg.MaxMessageSize, 16<<20)
	orElse(&cfg.MaxMessages, 10_000_000)
	orElse(&cfg.MaxBytes, 1<<30)
	orElse(&cfg.MaxLog, 10_000)
	b := &Broker{
		cfg: cfg, version: versionOf(full), started: time.Now(), running: true,
		vhosts: map[string]*vhost{}, users: map[string]*User{}, alarms: map[Alarm]bool{},
	}
	b.lock()
	defer b.unlock()
	b.addVHost("/")
	guest := b.putUser("guest", "guest", []string{"administrator"})
	guest.permissions["/"] = everything
	return b, nil
}

func orElse[T comparable](v *T, otherwise T) {
	var zero T
	if *v == zero {
		*v = otherwise
	}
}

// Close closes every connection and ends every timer.
func (b *Broker) Close() {
	b.lock()
	defer b.unlock()
	if b.closed {
		return
	}
	b.stop()
	b.closed = true
	for _, v := range b.vhosts {
		for _, q := range v.queues {
			q.halt()
		}
	}
}

// halt stops the queue's timers.
func (q *queue) halt() {
	if q.timer != nil {
		q.timer.Stop()
	}
	q.wakeAt = 0
	if q.worker != nil {
		q.worker.stop()
	}
}

// Version is the full version, "4.4.0", "4.3.6", or "4.0.5".
func (b *Broker) Version() string {
	b.peek()
	defer b.mu.Unlock()
	return b.version.full
}

func (b *Broker) lock() { b.mu.Lock() }

// unlock does what has become possible in queues, and lets others go on.
func (b *Broker) unlock() {
	b.runDirty()
	for i := 0; i < len(b.onward); i++ {
		l := b.onward[i]
		b.onward[i] = onward{}
		if !l.to.gone {
			l.to.receive(l.m, nil, nil)
		}
		b.runDirty()
	}
	b.onward = b.onward[:0]
	b.clock = 0
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
	b.mu.Unlock()
}

// runDirty looks at the queues that something has changed.
func (b *Broker) runDirty() {
	for i := 0; i < len(b.dirty); i++ {
		b.dirty[i].run()
		b.dirty[i] = nil
	}
	b.dirty = b.dirty[:0]
}

// peek is lock for those who change nothing; they call b.mu.Unlock.
func (b *Broker) peek() { b.mu.Lock(); b.clock = 0 }

// Changed is closed when something has changed since the call. To wait for a condition,
// call it, look, and wait if the condition isn't there yet.
func (b *Broker) Changed() <-chan struct{} {
	b.peek()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return b.changed
}

// now is the time in milliseconds. It stands still while the lock is held.
func (b *Broker) now() int64 {
	if b.clock == 0 {
		b.clock = time.Now().Add(b.ahead).UnixMilli()
	}
	return b.clock
}

// StepClock sets the clock by d.
func (b *Broker) StepClock(d time.Duration) {
	b.lock()
	defer b.unlock()
	b.ahead += d
}

// count counts messages that queues hold.
func (b *Broker) count(n, bytes int64) {
	b.messages += n
	b.bytes += bytes
}

func (b *Broker) overfull() bool {
	return b.messages >= int64(b.cfg.MaxMessages) || b.bytes >= b.cfg.MaxBytes
}

// linkScope is what ends with an attach that fails, and by what a publisher does wrong.
func (b *Broker) linkScope() Scope {
	if b.version.newer {
		return ScopeLink
	}
	return ScopeSession
}

// OpenProperties are the properties of the broker's open frame.
func (b *Broker) OpenProperties() frames.Map {
	text := func(key, value string) frames.Entry { return frames.Entry{Key: frames.Symbol(key), Value: value} }
	m := frames.Map{
		text("node", b.cfg.Node), text("cluster_name", b.cfg.Node), text("copyright", "hopbacktest"), text("platform", "Go"),
		text("product", "RabbitMQ"), text("version", b.version.full),
	}
	return m
}

// next returns a number that was never returned before.
func (b *Broker) next() uint64 {
	b.serial++
	return b.serial
}
