package ratelimit_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
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

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

// shop is a queue with a backlog on a broker in memory, in virtual time.
type shop struct {
	*testing.T
	broker *hopbacktest.Broker
	cfg    ratelimit.Config
	began  time.Time

	mu      sync.Mutex
	started []time.Duration // when handlers started, since began
}

func newShop(t *testing.T, backlog int, cfg ratelimit.Config) *shop {
	s := &shop{T: t, broker: hopbacktest.Start(t, hopbacktest.Config{}), cfg: cfg, began: time.Now()}
	conn := s.connect(s.broker.Dial)
	_, err := declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited},
	}})
	require.NoError(t, err)
	p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{Pending: 1000})
	require.NoError(t, err)
	require.NoError(t, p.PublishAll(t.Context(), make([]int, backlog)))
	return s
}

func (s *shop) connect(dial func(context.Context, string, string) (net.Conn, error)) *client.Conn {
	conn, err := client.Connect(s.Context(), s.broker.URL(), client.Config{Dial: dial, Logger: silent})
	require.NoError(s, err)
	s.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// process is a worker with a connection.
type process struct {
	leave func()
	mu    sync.Mutex
	conns []net.Conn
	dead  bool
}

func (s *shop) work() *process {
	w := &process{}
	conn := s.connect(func(ctx context.Context, network, to string) (net.Conn, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.dead {
			return nil, errors.New("killed")
		}
		c, err := s.broker.Dial(ctx, network, to)
		if err == nil {
			w.conns = append(w.conns, c)
		}
		return c, err
	})
	ctx, cancel := context.WithCancel(s.Context())
	h := ratelimit.With(s.cfg)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
		w.mu.Lock()
		dead := w.dead
		w.mu.Unlock()
		if !dead { // what a killed process does isn't seen
			s.mu.Lock()
			s.started = append(s.started, time.Since(s.began))
			s.mu.Unlock()
		}
		return nil
	}))
	done := make(chan error, 1)
	go func() { done <- conn.Consume(ctx, "orders", h, client.ConsumerConfig{Concurrency: 8}) }()
	w.leave = sync.OnceFunc(func() {
		cancel()
		assert.NoError(s, <-done)
		_ = conn.Close(context.Background())
	})
	s.Cleanup(w.leave)
	return w
}

// kill ends a process without a word to the broker.
func (w *process) kill() {
	w.mu.Lock()
	w.dead = true
	for _, c := range w.conns {
		_ = c.Close()
	}
	w.mu.Unlock()
	w.leave()
}

// seconds returns how many handlers started in each second from one on until another one.
func (s *shop) seconds(from, until time.Duration) []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]int, int((until-from)/time.Second))
	for _, at := range s.started {
		if i := int((at - from) / time.Second); at >= from && i < len(all) {
			all[i]++
		}
	}
	return all
}

// 64 workers that join, leave, and die (200 times with HOPBACK_LONG=1) start no more than the limit for longer than 2 s,
// and at least 95 % of it.
func TestALimitIsSharedByAllWorkers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit, workers = 100, 64
		changes := 40
		switch {
		case os.Getenv("HOPBACK_LONG") != "":
			changes = 200
		case explore.UnderRace:
			changes = 8
		}
		s := newShop(t, 400*changes+5000, ratelimit.Config{PerSecond: limit, Shared: true})
		rng := rand.New(rand.NewPCG(1, 2))
		var all []*process
		for range workers {
			all = append(all, s.work())
		}
		time.Sleep(10 * time.Second)
		calm := time.Since(s.began)
		for range changes {
			i := rng.IntN(len(all))
			switch w := all[i]; {
			case len(all) < workers && rng.IntN(2) == 0:
				all = append(all, s.work())
			case rng.IntN(2) == 0:
				w.leave()
				all[i] = s.work()
			default:
				w.kill()
				all = append(all[:i], all[i+1:]...)
				if len(all) < workers-8 {
					all = append(all, s.work())
				}
			}
			time.Sleep(time.Second)
		}
		seconds := s.seconds(calm, time.Since(s.began))
		total, above, longest := 0, 0, 0
		for _, n := range seconds {
			total += n
			if above++; n <= limit+limit/10 { // who calls at which time in a second is chance
				above = 0
			}
			longest = max(longest, above)
		}
		t.Logf("%d of %d in %d s; longest time above the limit %d s; %v", total, limit*len(seconds), len(seconds), longest, seconds)
		assert.LessOrEqual(t, longest, 2)
		assert.GreaterOrEqual(t, total, limit*len(seconds)*95/100)
		assert.LessOrEqual(t, total, limit*len(seconds)*101/100)
	})
}

// A restart of the broker, after which consumers come back one by one, and an alarm, in which it answers nothing.
func TestASharedLimitThroughARestartAndAnAlarm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit = 100
		s := newShop(t, 20_000, ratelimit.Config{PerSecond: limit, Shared: true})
		for range 20 {
			s.work()
		}
		time.Sleep(10 * time.Second)
		calm := time.Since(s.began)
		for range 3 {
			s.broker.Kill()
			time.Sleep(2 * time.Second)
			s.broker.Restart()
			time.Sleep(10 * time.Second)
		}
		restarted := time.Since(s.began)
		s.broker.SetMemoryAlarm(true)
		early := s.work()
		time.Sleep(20 * time.Second)
		s.broker.SetMemoryAlarm(false)
		time.Sleep(10 * time.Second)
		early.leave()
		above := 0
		seconds := s.seconds(calm, time.Since(s.began))
		for _, n := range seconds {
			if above++; n <= limit+limit/20 { // those that had waited start at once, and each worker's first call
				above = 0
			}
			assert.LessOrEqual(t, above, 2, "%v", seconds)
		}
		for _, n := range s.seconds(restarted+2*time.Second, restarted+19*time.Second) {
			assert.InDelta(t, limit, n, limit/10)
		}
	})
}

// Each key's limit is shared, too. Consumers of one process that share a Middleware share its part.
func TestTheLimitOfAKeyIsShared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 3000, ratelimit.Config{PerSecond: 10, Shared: true, Key: func(d *client.Delivery) (string, bool) { return string(d.Message().GetData()), true }})
		for range 5 {
			s.work()
		}
		time.Sleep(20 * time.Second)
		for _, n := range s.seconds(5*time.Second, 20*time.Second) {
			assert.InDelta(t, 10, n, 2)
		}
	})
}

func TestASharedLimitNeedsABroker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 1, ratelimit.Config{})
		conn := s.connect(s.broker.Dial)
		h := ratelimit.With(ratelimit.Config{PerSecond: 1, Shared: true})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
		err := client.Prepare(t.Context(), h, client.Start{Queue: "orders", Management: conn.Management()})
		require.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, "ratelimit.Config.Shared")
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders"}), "a test without a broker")
		require.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
	})
}
