package ratelimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
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
			above = max(above, to-max(since, from))
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
		above = max(above, until-max(since, from))
	}
	return sum / (until - from).Seconds() / float64(limit), above
}

func (p *plant) now() time.Duration { return time.Since(p.began) }

func (p *plant) of(key string) (running, handled int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.running[key], p.handled[key]
}

func byBody(d *client.Delivery) (string, bool) {
	return strings.Trim(string(d.Message().GetData()), `"`), true
}

// Workers join, leave, and die. Never more calls run than the limit, of a queue or of each key, and at least 95 % of it is used. With
// HOPBACK_LONG=1, 64 workers do so 200 times. Otherwise a key has so few slots that those of one dead worker are a part of them that counts.
func TestCallsAtOnceAreLimitedOverAllWorkers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit, keys, workers, changes int
		used                          float64
	}{"queue": {100, 1, 64, 40, 0.95}, "keys": {10, 4, 16, 10, 0.85}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			switch {
			case os.Getenv("HOPBACK_LONG") != "":
				c.workers, c.changes, c.used = 64, 200, 0.95
			case explore.UnderRace:
				c.changes /= 5
			}
			synctest.Test(t, func(t *testing.T) {
				p := newPlant(t, "4.3.6", "orders")
				p.load("orders", 250*c.changes+6000, func(i int) string { return fmt.Sprint(i % c.keys) })
				cfg := ratelimit.Config{AtOnce: c.limit, Shared: true}
				if c.keys > 1 {
					cfg.Key = byBody
				}
				rng := rand.New(rand.NewPCG(1, 2))
				join := func() *plantWorker {
					w := p.worker()
					stop := w.consume("orders", ratelimit.With(cfg), 8)
					w.leave = func() { stop(); _ = w.conn.Close(context.Background()) }
					return w
				}
				var all []*plantWorker
				for range c.workers {
					all = append(all, join())
				}
				time.Sleep(10 * time.Second)
				calm := p.now()
				for range c.changes {
					i := rng.IntN(len(all))
					switch w := all[i]; {
					case len(all) < c.workers && rng.IntN(2) == 0:
						all = append(all, join())
					case rng.IntN(3) == 0:
						go w.leave()
						all[i] = join()
					default:
						w.die()
						if all = append(all[:i], all[i+1:]...); len(all) < c.workers-8 {
							all = append(all, join())
						}
					}
					time.Sleep(time.Second)
				}
				handled, until := 0, p.now()
				for key := range c.keys {
					share, above := p.use(fmt.Sprint(key), c.limit, calm, until)
					_, n := p.of(fmt.Sprint(key))
					handled += n
					t.Logf("%.1f %% of a limit of %d used by %d to %d workers in %v with %d changes; longest time above it %v", 100*share, c.limit, c.workers-8, c.workers, until-calm, c.changes, above)
					assert.GreaterOrEqual(t, share, c.used)
					assert.Zero(t, above)
				}
				t.Logf("%d handled", handled)
			})
		})
	}
}

// slots returns the names of the queues of slots.
func (p *plant) slots() (names []string) {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/api/queues", nil)
	r.SetBasicAuth("guest", "guest")
	p.broker.HTTPHandler().ServeHTTP(w, r)
	var all []struct{ Name string }
	require.NoError(p, json.Unmarshal(w.Body.Bytes(), &all), w.Body.String())
	for _, q := range all {
		if strings.HasPrefix(q.Name, "hopback.slots.") && !strings.HasSuffix(q.Name, ".wanted") {
			names = append(names, q.Name)
		}
	}
	return names
}

// A worker holds no message that it has no slot for, on RabbitMQ 4.0 neither.
func TestNothingIsHeldInHand(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const limit = 6
				p := newPlant(t, version, "orders")
				p.load("orders", 300, one)
				for range 5 {
					p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true}), 4)
				}
				time.Sleep(5 * time.Second)
				for range 50 {
					time.Sleep(97 * time.Millisecond)
					assert.LessOrEqual(t, p.broker.Queue("orders").Counts().Unacknowledged, limit)
				}
				share, above := p.use("key", limit, 5*time.Second, p.now())
				assert.Greater(t, share, 0.95)
				assert.Zero(t, above)
				time.Sleep(time.Minute)
				_, handled := p.of("key")
				assert.Equal(t, 300, handled)
			})
		})
	}
}

// The limit of a key counts for that key alone: a backlog of one key delays no others, and is handled at nearly the
// speed that its limit allows.
func TestCallsOfAKeyAtOnceAreLimitedOverAllWorkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit = 4
		p := newPlant(t, "4.3.6", "orders")
		p.takes = func() time.Duration { return 200 * time.Millisecond }
		p.load("orders", 1000, func(int) string { return "noisy" })
		for range 6 {
			p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true, Key: byBody}), 8)
		}
		time.Sleep(10 * time.Second)
		for i := range 10 {
			quiet := func(int) string { return fmt.Sprint("quiet", i) }
			p.load("orders", 2, quiet)
			time.Sleep(2 * time.Second)
			_, handled := p.of(quiet(0))
			assert.Equal(t, 2, handled, "a quiet key waits for none")
		}
		share, above := p.use("noisy", limit, 5*time.Second, p.now())
		t.Logf("%.1f %% of the noisy key's limit used", 100*share)
		assert.Greater(t, share, 0.9)
		assert.Zero(t, above)
		time.Sleep(time.Minute)
		_, handled := p.of("noisy")
		assert.Equal(t, 1000, handled)
		assert.Empty(t, p.slots(), "all are let go")
	})
}

// Where messages can't wait in their queue, those of a key wait in hand, up to a second or, on RabbitMQ 4.0, until there is a
// slot: their return would be counted.
func TestAKeysMessagesWaitWithoutDelays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlant(t, "4.0.5", "orders")
		p.load("orders", 200, func(i int) string { return fmt.Sprint(i % 3) })
		for range 3 {
			p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: 2, Shared: true, Key: byBody}), 8)
		}
		time.Sleep(5 * time.Minute)
		for key := range 3 {
			_, above := p.use(fmt.Sprint(key), 2, 0, p.now())
			assert.Zero(t, above)
			_, handled := p.of(fmt.Sprint(key))
			assert.InDelta(t, 66, handled, 1)
		}
	})
}

// In an alarm, workers keep their slots and handle messages; nobody gets one. Afterwards, everything is as before.
func TestAnAlarmTakesNoSlots(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]func(*client.Delivery) (string, bool){"all": nil, "by key": byBody} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const limit = 10
				p := newPlant(t, "4.3.6", "orders")
				p.load("orders", 5000, one)
				limited := func() client.Middleware {
					return ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true, Key: key})
				}
				old := []*plantWorker{p.worker(), p.worker()}
				for _, w := range old {
					w.consume("orders", limited(), 5)
				}
				time.Sleep(10 * time.Second)
				p.broker.SetMemoryAlarm(true)
				late := p.worker()
				stopLate := late.consume("orders", limited(), 5)
				time.Sleep(20 * time.Second)
				share, above := p.use("key", limit, 12*time.Second, 30*time.Second)
				assert.Zero(t, above)
				assert.Greater(t, share, 0.8)
				late.mu.Lock()
				assert.Empty(t, late.running, "it has no slot")
				late.mu.Unlock()
				began := p.now()
				stopLate()
				assert.Less(t, p.now()-began, time.Second, "it stops at once, also in an alarm")
				old[0].die()
				p.worker().consume("orders", limited(), 5)
				time.Sleep(20 * time.Second)
				p.broker.SetMemoryAlarm(false)
				time.Sleep(5 * time.Second)
				calm := p.now()
				time.Sleep(20 * time.Second)
				share, above = p.use("key", limit, calm, p.now())
				assert.Zero(t, above)
				assert.Greater(t, share, 0.8)
			})
		})
	}
}

// Whose connection is lost has lost its slots: no call starts with one of them. Those that run are above the limit until
// they return.
func TestALostConnectionIsALossOfSlots(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]func(*client.Delivery) (string, bool){"all": nil, "by key": byBody} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const limit = 10
				p := newPlant(t, "4.3.6", "orders")
				p.load("orders", 5000, one)
				for range 4 {
					p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true, Key: key}), 5)
				}
				time.Sleep(10 * time.Second)
				calm := p.now()
				for range 10 {
					all := p.broker.Connections()
					all[rand.IntN(len(all))].Cut()
					time.Sleep(3 * time.Second)
				}
				p.broker.Kill()
				time.Sleep(3 * time.Second)
				p.broker.Restart()
				time.Sleep(15 * time.Second)
				share, above := p.use("key", limit, calm, p.now())
				t.Logf("%.1f %% used; longest time above %v", 100*share, above)
				assert.LessOrEqual(t, above, 800*time.Millisecond, "a handler's time")
				assert.Greater(t, share, 0.6)
			})
		})
	}
}

// Somebody deletes the queue of a slot, and another worker gets it. Its first owner notices within about a second.
func TestASlotWhoseQueueIsDeletedIsLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlant(t, "4.3.6", "orders")
		p.takes = func() time.Duration { return 100 * time.Millisecond }
		p.load("orders", 5000, one)
		for range 2 {
			p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: 1, Shared: true}), 5)
		}
		time.Sleep(10 * time.Second)
		for range 10 {
			require.NoError(t, p.broker.Queue("hopback.slots.orders.all.0").Forget())
			time.Sleep(5 * time.Second)
		}
		share, above := p.use("key", 1, 5*time.Second, p.now())
		assert.Less(t, above, 2*time.Second)
		assert.Greater(t, share, 0.9)
	})
}

// Workers with another limit, as in a rolling deployment, share what is below both.
func TestTheLimitChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlant(t, "4.3.6", "orders")
		p.load("orders", 5000, one)
		with := func(n int) func() {
			return p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: n, Shared: true}), 8)
		}
		stops := []func(){with(12), with(12)}
		time.Sleep(5 * time.Second)
		with(4)
		stops[0]()
		with(4)
		time.Sleep(10 * time.Second)
		_, above := p.use("key", 12, 0, p.now())
		assert.Zero(t, above)
		stops[1]()
		calm := p.now()
		time.Sleep(20 * time.Second)
		share, above := p.use("key", 4, calm+3*time.Second, p.now())
		assert.Zero(t, above)
		assert.Greater(t, share, 0.95)
	})
}

// Keys and the queue's name may be anything, and as many as there are: each has at most as many queues as calls, and
// they are gone soon.
func TestHostileKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		queue := strings.Repeat("ü/.%", 51)[:255]
		p := newPlant(t, "4.3.6", queue)
		p.takes = func() time.Duration { return time.Millisecond }
		key := func(i int) string { return fmt.Sprint(strings.Repeat("k/\x00*#.ü", 50), i) }
		p.load(queue, 2500, key)
		p.worker().consume(queue, ratelimit.With(ratelimit.Config{AtOnce: 2, Shared: true, Key: byBody}), 16)
		most := 0
		for range 60 {
			time.Sleep(500 * time.Millisecond)
			most = max(most, len(p.slots()))
		}
		assert.LessOrEqual(t, most, 1000+2*16)
		assert.NotZero(t, most)
		p.mu.Lock()
		assert.Len(t, p.handled, 2500)
		p.mu.Unlock()
		assert.Empty(t, p.slots())
	})
}

// A consumer that stops returns what waits at once, and lets its slots go. Another one on its connection is another
// worker: the two don't have a slot together.
func TestConsumersOfAConnectionAreWorkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlant(t, "4.3.6", "orders")
		p.takes = func() time.Duration { return time.Second }
		p.load("orders", 200, one)
		w := p.worker()
		var stops []func()
		for range 4 {
			stops = append(stops, w.consume("orders", ratelimit.With(ratelimit.Config{AtOnce: 3, Shared: true}), 2))
		}
		time.Sleep(20 * time.Second)
		for _, stop := range stops[1:] {
			began := p.now()
			stop()
			assert.LessOrEqual(t, p.now()-began, time.Second, "no longer than its calls")
			time.Sleep(3 * time.Second)
		}
		_, above := p.use("key", 3, 0, p.now())
		assert.Zero(t, above)
		assert.Len(t, p.slots(), 2)
		stops[0]()
		time.Sleep(time.Second)
		assert.Empty(t, p.slots())
	})
}

func TestADrainReturnsWhatWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlant(t, "4.0.5", "orders")
		p.takes = func() time.Duration { return 25 * time.Second }
		p.load("orders", 8, one)
		p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: 1, Shared: true, Key: byBody}), 1)
		time.Sleep(10 * time.Second)
		stop := p.worker().consume("orders", ratelimit.With(ratelimit.Config{AtOnce: 1, Shared: true, Key: byBody}), 4)
		time.Sleep(10 * time.Second)
		began := p.now()
		stop()
		assert.Less(t, p.now()-began, time.Second)
	})
}

// Consumers of two queues share a limit under a name. One that has nothing to do lets its slots go.
func TestQueuesShareALimit(t *testing.T) {
	t.Parallel()
	for name, together := range map[string]bool{"in a process": true, "in two": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const limit = 4
				p := newPlant(t, "4.3.6", "orders", "bills")
				limited := ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true, Name: "bank"})
				w := p.worker()
				w.consume("orders", limited, 4)
				if !together {
					w, limited = p.worker(), ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true, Name: "bank"})
				}
				p.load("orders", 100, one)
				time.Sleep(5 * time.Second)
				w.consume("bills", limited, 4)
				time.Sleep(30 * time.Second)
				for range 5 {
					for _, queue := range []string{"bills", "orders"} {
						_, before := p.of("key")
						p.load(queue, 60, one)
						time.Sleep(20 * time.Second)
						_, after := p.of("key")
						assert.Equal(t, 60, after-before, queue)
					}
				}
				_, above := p.use("key", limit, 0, p.now())
				assert.Zero(t, above)
			})
		})
	}
}

func TestALimitOfCallsInAProcess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlant(t, "4.3.6", "orders", "bills")
		limited := ratelimit.With(ratelimit.Config{AtOnce: 3, PerSecond: 1000, Burst: 100})
		for _, queue := range []string{"orders", "bills"} {
			p.load(queue, 50, one)
			p.worker().consume(queue, limited, 8)
		}
		w := p.worker()
		w.consume("orders", ratelimit.With(ratelimit.Config{AtOnce: 2, Key: func(d *client.Delivery) (string, bool) {
			key, _ := byBody(d)
			return key, key != "free"
		}}), 8)
		p.load("orders", 30, func(i int) string { return []string{"a", "b", "free"}[i%3] })
		time.Sleep(2 * time.Minute)
		_, above := p.use("key", 5, 0, p.now())
		assert.Zero(t, above)
		for key, most := range map[string]int{"a": 5, "b": 5} {
			_, above = p.use(key, most, 0, p.now())
			assert.Zero(t, above)
		}
		p.mu.Lock()
		assert.Equal(t, map[string]int{"key": 100, "a": 10, "b": 10, "free": 10}, p.handled)
		p.mu.Unlock()
		assert.Empty(t, p.slots())

		h := ratelimit.With(ratelimit.Config{AtOnce: 1})(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			<-ctx.Done()
			return nil
		}))
		ctx, cancel := context.WithCancel(t.Context())
		results := make(chan error, 2)
		for range 2 {
			go func() { results <- h.Handle(ctx, delivery("orders", "1")) }()
		}
		time.Sleep(time.Second)
		cancel()
		var waited error
		for range 2 {
			waited = errors.Join(waited, <-results)
		}
		requeue, ok := client.OutcomeOf(waited).(client.Requeue)
		require.True(t, ok)
		assert.False(t, requeue.Failed)
		assert.ErrorIs(t, waited, context.Canceled)
		assert.Error(t, h.Handle(ctx, delivery("orders", "1")))
	})
}

func TestALimitOfCallsIsRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlant(t, "4.3.6", "orders", "bills")
		w := p.worker()
		none := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		for field, cfg := range map[string]ratelimit.Config{"AtOnce": {AtOnce: 1001}, "Name": {AtOnce: 1, Name: ".."}} {
			err := w.conn.Consume(t.Context(), "orders", ratelimit.With(cfg)(none), client.ConsumerConfig{})
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "ratelimit.Config."+field)
		}
		shared := ratelimit.With(ratelimit.Config{AtOnce: 1, Shared: true})
		w.consume("orders", shared, 1)
		time.Sleep(time.Second)
		err := w.conn.Consume(t.Context(), "bills", shared(none), client.ConsumerConfig{})
		require.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, "ratelimit.Config.Name")

		p.broker.AddUser("worker", "secret")
		require.NoError(t, p.broker.SetPermissions("worker", "/", "^$", "^$", "^orders$"))
		url := strings.Replace(p.broker.URL(), "guest:guest", "worker:secret", 1)
		conn, err := client.Connect(t.Context(), url, client.Config{Dial: p.broker.Dial, Logger: silent})
		require.NoError(t, err)
		defer conn.Close(context.Background())
		shared = ratelimit.With(ratelimit.Config{AtOnce: 1, Shared: true})
		require.ErrorIs(t, conn.Consume(t.Context(), "orders", shared(none), client.ConsumerConfig{}), client.ErrUnauthorized)
		require.NoError(t, p.broker.SetPermissions("worker", "/", `^hopback\.slots\.orders\.`, "^$", "^orders$"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, conn.Consume(ctx, "orders", shared(none), client.ConsumerConfig{}))

		err = client.Prepare(t.Context(), shared(none), client.Start{Queue: "orders", Management: conn.Management()})
		require.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, "ratelimit.Config.Shared")
		require.NoError(t, client.Prepare(t.Context(), shared(none), client.Start{Queue: "orders"}), "a test without a broker")
		require.NoError(t, shared(none).Handle(t.Context(), delivery("orders", "1")))
	})
}

// A worker that stops in an alarm can't let its slots go before that is over. Its connection and its Middleware can be used
// again.
func TestAWorkerStopsInAnAlarmAndStartsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit = 4
		p := newPlant(t, "4.3.6", "orders")
		p.load("orders", 2000, one)
		limited := ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true})
		w := p.worker()
		stop := w.consume("orders", limited, 8)
		other := p.worker()
		other.consume("orders", ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true}), 8)
		time.Sleep(10 * time.Second)
		p.broker.SetMemoryAlarm(true)
		time.Sleep(5 * time.Second)
		stop()
		time.Sleep(10 * time.Second)
		p.broker.SetMemoryAlarm(false)
		time.Sleep(5 * time.Second)
		calm := p.now()
		for range 10 {
			stop = w.consume("orders", limited, 8)
			time.Sleep(3 * time.Second)
			stop()
			stop = w.consume("orders", limited, 8)
			time.Sleep(3 * time.Second)
			stop()
		}
		share, above := p.use("key", limit, calm, p.now())
		assert.Zero(t, above)
		assert.Greater(t, share, 0.9)
		time.Sleep(5 * time.Second)
		assert.Len(t, p.slots(), limit)
	})
}

// A worker that loses the permission for slots keeps those that it has, and takes others when it has it again.
func TestThePermissionIsLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit = 4
		p := newPlant(t, "4.3.6", "orders")
		p.load("orders", 2000, one)
		limited := func() client.Middleware { return ratelimit.With(ratelimit.Config{AtOnce: limit, Shared: true}) }
		p.worker().consume("orders", limited(), 2)
		stop := p.worker().consume("orders", limited(), 2)
		time.Sleep(5 * time.Second)
		require.NoError(t, p.broker.SetPermissions("guest", "/", "^$", ".*", ".*"))
		time.Sleep(20 * time.Second)
		share, _ := p.use("key", limit, 6*time.Second, p.now())
		assert.Greater(t, share, 0.95)
		stop()
		require.NoError(t, p.broker.SetPermissions("guest", "/", ".*", ".*", ".*"))
		p.worker().consume("orders", limited(), 4)
		time.Sleep(5 * time.Second)
		calm := p.now()
		time.Sleep(10 * time.Second)
		share, above := p.use("key", limit, calm, p.now())
		assert.Greater(t, share, 0.95)
		assert.Zero(t, above)
	})
}
