package ratelimit_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/ratelimit"
)

// plant is a queue whose workers' handlers take a while, in virtual time.
type plant struct {
	*testing.T
	broker *hopbacktest.Broker
	began  time.Time
	takes  func() time.Duration // what a handler takes

	mu      sync.Mutex
	running map[string]int // handlers that run, by key
	handled map[string]int
	changes []change
}

// change is when the number of running handlers of a key changed, and to what.
type change struct {
	at  time.Duration
	key string
	n   int
}

func newPlant(t *testing.T, version string, queues ...string) *plant {
	p := &plant{T: t, broker: hopbacktest.Start(t, hopbacktest.Config{Version: version}), began: time.Now(), running: map[string]int{}, handled: map[string]int{}}
	p.takes = func() time.Duration { return 200*time.Millisecond + rand.N(600*time.Millisecond) }
	conn := p.connect(p.broker.Dial)
	var topology declare.Topology
	for _, q := range queues {
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: q, DeadLetter: declare.Drop()})
	}
	_, err := declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
	return p
}

func (p *plant) connect(dial func(context.Context, string, string) (net.Conn, error)) *client.Conn {
	conn, err := client.Connect(p.Context(), p.broker.URL(), client.Config{Dial: dial, Logger: silent})
	require.NoError(p, err)
	p.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// load publishes n messages whose bodies are keys.
func (p *plant) load(queue string, n int, key func(i int) string) {
	conn := p.connect(p.broker.Dial)
	pub, err := client.NewPublisher[string](p.Context(), conn, address.Queue(queue), client.PublisherConfig{Pending: 1000})
	require.NoError(p, err)
	all := make([]string, n)
	for i := range all {
		all[i] = key(i)
	}
	require.NoError(p, pub.PublishAll(p.Context(), all))
	require.NoError(p, conn.Close(p.Context()))
}

func one(int) string { return "key" }

// plantWorker is a process with a connection. What it does isn't seen once it is killed.
type plantWorker struct {
	*process
	plant   *plant
	conn    *client.Conn
	running map[string]int
}

func (p *plant) worker() *plantWorker {
	w := &plantWorker{process: &process{}, plant: p, running: map[string]int{}}
	w.conn = p.connect(func(ctx context.Context, network, to string) (net.Conn, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.dead {
			return nil, errors.New("killed")
		}
		c, err := p.broker.Dial(ctx, network, to)
		if err == nil {
			w.conns = append(w.conns, c)
		}
		return c, err
	})
	return w
}

// count notes that a handler of a key has begun or ended.
func (w *plantWorker) count(key string, by int) {
	p := w.plant
	p.mu.Lock()
	defer p.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead {
		return
	}
	w.running[key] += by
	p.running[key] += by
	if by < 0 {
		p.handled[key]++
	}
	p.changes = append(p.changes, change{time.Since(p.began), key, p.running[key]})
}

func (w *plantWorker) Handle(_ context.Context, d *client.Delivery) error {
	key, _ := byBody(d)
	w.count(key, 1)
	time.Sleep(w.plant.takes())
	w.count(key, -1)
	return nil
}

// consume starts a consumer, and returns what stops it.
func (w *plantWorker) consume(queue string, limit client.Middleware, handlers int) (stop func()) {
	ctx, cancel := context.WithCancel(w.plant.Context())
	done := make(chan error, 1)
	go func() { done <- w.conn.Consume(ctx, queue, limit(w), client.ConsumerConfig{Concurrency: handlers}) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, client.ErrClosed) { // it was killed
			assert.NoError(w.plant, err)
		}
	})
	w.plant.Cleanup(stop)
	return stop
}

// die ends the process without a word to the broker.
func (w *plantWorker) die() {
	p := w.plant
	p.mu.Lock()
	w.mu.Lock()
	w.dead = true
	for _, c := range w.conns {
		_ = c.Close()
	}
	for key, n := range w.running {
		if n > 0 {
			p.running[key] -= n
			p.changes = append(p.changes, change{time.Since(p.began), key, p.running[key]})
		}
	}
	w.mu.Unlock()
	p.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = w.conn.Close(ctx)
}

// use returns how much of a limit a key's handlers used between two times, from 0 to 1, and the longest time above it.
func (p *plant) use(key string, limit int, from, until time.Duration) (share float64, above time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at, n, since := from, 0, time.Duration(-1)
	var sum float64
	step := func(to time.Duration, next int) {
		if to = min(to, until); to > at {
			sum += (to - at).Seconds() * float64(n)
			at = to
		}
		if next > limit && since < 0 {
			since = to
		}
		if next <= limit && since >= 0 {
			above = max(above, to-since)
			since = -1
		}
		n = next
	}
	for _, c := range p.changes {
		if c.key == key {
			step(c.at, c.n)
		}
	}
	step(until, n)
	if since >= 0 {
		above = max(above, until-since)
	}
	return sum / (until - from).Seconds() / float64(limit), above
}

func (p *plant) now() time.Duration { return time.Since(p.began) }

func (p *plant) of(key string) (running, handled int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.running[key], p.handled[key]
}

func byBody(d *client.Delivery) (string, bool) { return strings.Trim(string(d.Message().GetData()), `"`), true }

// 64 workers join, leave, and die (200 times with HOPBACK_LONG=1). Never more calls run than the limit, and at least 95 % of it is
// used.
func TestCallsAtOnceAreLimitedOverAllWorkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit, workers = 100, 64
		changes := 40
		if os.Getenv("HOPBACK_LONG") != "" {
			changes = 200
		}
		p := newPlant(t, "4.3.6", "orders")
		p.load("orders", 250*changes+6000, one)
		rng := rand.New(rand.NewPCG(1, 2))
		join := func() *plantWorker {
			w := p.worker()
			stop := w.consume("orders", ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true}), 8)
			w.leave = func() { stop(); _ = w.conn.Close(context.Background()) }
			return w
		}
		var all []*plantWorker
		for range workers {
			all = append(all, join())
		}
		time.Sleep(10 * time.Second)
		calm := p.now()
		for range changes {
			i := rng.IntN(len(all))
			switch w := all[i]; {
			case len(all) < workers && rng.IntN(2) == 0:
				all = append(all, join())
			case rng.IntN(3) == 0:
				go w.leave()
				all[i] = join()
			default:
				w.die()
				if all = append(all[:i], all[i+1:]...); len(all) < workers-8 {
					all = append(all, join())
				}
			}
			time.Sleep(time.Second)
		}
		share, above := p.use("key", limit, calm, p.now())
		_, handled := p.of("key")
		t.Logf("%.1f %% of the limit used by %d to %d workers in %v with %d changes; longest time above it %v; %d handled", 100*share, workers-8, workers, p.now()-calm, changes, above, handled)
		assert.GreaterOrEqual(t, share, 0.95)
		assert.Zero(t, above)
	})
}
