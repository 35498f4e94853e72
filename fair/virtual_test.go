package fair_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/retry"
)

var (
	silent = slog.New(slog.NewTextHandler(io.Discard, nil))
	policy = retry.Policy{Strategy: retry.StrategyNative, MaxRetries: 100, Backoff: retry.Delays(time.Second)}
)

// job is the body of a message.
type job struct {
	Tenant string
	N      int
	Sent   time.Time
}

// scene is a fair queue on a broker in memory, in virtual time.
type scene struct {
	broker    *hopbacktest.Broker
	conn      *client.Conn
	queue     fair.Queue
	publisher *client.Publisher[job]
	// handle is the handler. Nil: it takes 5 ms.
	handle func(ctx context.Context, j job) error
	cfg    fair.Config

	mu      sync.Mutex
	sent    int
	handled map[int]int // times, by N
	delays  map[string][]time.Duration
	moved   int // handled copies
	lanes   int // handled in lanes
}

func newScene(t *testing.T, cfg hopbacktest.Config) *scene {
	s := &scene{broker: hopbacktest.Start(t, cfg), queue: fair.Queue{Name: "orders"}, handled: map[int]int{}, delays: map[string][]time.Duration{}}
	s.cfg = fair.Config{Concurrency: 8, Retry: policy}
	s.conn = s.connect(t, s.broker.Dial)
	topology, err := s.queue.Topology(policy, declare.QuorumQueue{})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	s.publisher, err = client.NewPublisher[job](t.Context(), s.conn, address.Address{}, client.PublisherConfig{Pending: 1000})
	require.NoError(t, err)
	return s
}

func (s *scene) connect(t *testing.T, dial func(context.Context, string, string) (net.Conn, error)) *client.Conn {
	conn, err := client.Connect(t.Context(), s.broker.URL(), client.Config{Dial: dial, Logger: silent})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// publish publishes n messages of a tenant at once.
func (s *scene) publish(t *testing.T, tenant string, n int) {
	jobs := make([]job, n)
	s.mu.Lock()
	for i := range jobs {
		s.sent++
		jobs[i] = job{tenant, s.sent, time.Now()}
	}
	s.mu.Unlock()
	to := s.queue.To(tenant)
	require.NoError(t, s.publisher.PublishAll(t.Context(), jobs, func(_ job, m *client.Message) { to(m) }))
}

// worker is a process with one connection.
type worker struct {
	cancel context.CancelFunc
	done   chan error
	mu     sync.Mutex
	conns  []net.Conn
	dead   bool
}

func (s *scene) start(t *testing.T) *worker {
	w := &worker{done: make(chan error, 1)}
	conn := s.connect(t, func(ctx context.Context, network, to string) (net.Conn, error) {
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
	ctx, cancel := context.WithCancel(t.Context())
	w.cancel = cancel
	go func() {
		w.done <- fair.Consume(ctx, conn, s.queue, client.JSON(func(ctx context.Context, j job) error { return s.run(ctx, w, j) }), s.cfg)
		w.mu.Lock()
		dead := w.dead
		w.mu.Unlock()
		if !dead {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	return w
}

func (s *scene) run(ctx context.Context, w *worker, j job) error {
	d, _ := client.DeliveryFrom(ctx)
	s.mu.Lock()
	s.delays[j.Tenant] = append(s.delays[j.Tenant], time.Since(j.Sent))
	s.mu.Unlock()
	if s.handle == nil {
		time.Sleep(5 * time.Millisecond)
	} else if err := s.handle(ctx, j); err != nil {
		return err
	}
	w.mu.Lock()
	dead := w.dead
	w.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !dead {
		s.handled[j.N]++
		if d.Queue() != s.queue.Name {
			s.lanes++
		}
		if d.Annotation("x-exchange") != "orders.in" {
			s.moved++
		}
	}
	return nil
}

func (w *worker) leave(t *testing.T) {
	w.cancel()
	assert.NoError(t, <-w.done)
}

// kill cuts the connection for good.
func (w *worker) kill() {
	w.mu.Lock()
	w.dead = true
	for _, c := range w.conns {
		_ = c.Close()
	}
	w.mu.Unlock()
	w.cancel()
}

// all waits until all messages were handled, and returns how often one was handled twice.
func (s *scene) all(t *testing.T) (twice int) {
	for deadline := time.Now().Add(2 * time.Hour); ; time.Sleep(100 * time.Millisecond) {
		s.mu.Lock()
		handled, sent := len(s.handled), s.sent
		s.mu.Unlock()
		if handled == sent {
			break
		}
		if !time.Now().Before(deadline) {
			for _, q := range s.queue.Queues() {
				t.Logf("%s: %+v", q, s.broker.Queue(q).Counts())
			}
			require.FailNow(t, "messages are missing", "%d of %d", sent-handled, sent)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.handled {
		twice += n - 1
	}
	return twice
}

func quantile(all []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(all))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// quiet publishes messages of many tenants at random until stop is closed, and then returns.
func (s *scene) quiet(t *testing.T, tenants int, every time.Duration, stop <-chan struct{}) {
	r := rand.New(rand.NewPCG(1, 2))
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(r.ExpFloat64() * float64(every))):
			s.publish(t, fmt.Sprint("quiet", r.IntN(tenants)), 1)
		}
	}
}

func (s *scene) quietDelays() (all []time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for tenant, d := range s.delays {
		if len(tenant) > 5 && tenant[:5] == "quiet" {
			all = append(all, d...)
		}
	}
	return all
}

func TestANoisyTenantDelaysNobody(t *testing.T) {
	for name, slow := range map[string]time.Duration{"quick": 5 * time.Millisecond, "slow": 200 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, hopbacktest.Config{})
				s.handle = func(_ context.Context, j job) error {
					if j.Tenant == "noisy" {
						time.Sleep(slow)
					} else {
						time.Sleep(5 * time.Millisecond)
					}
					return nil
				}
				workers := []*worker{s.start(t), s.start(t)}
				stop := make(chan struct{})
				ended := make(chan struct{})
				go func() { s.quiet(t, 200, 5*time.Millisecond, stop); close(ended) }()
				time.Sleep(2 * time.Second)
				began := time.Now()
				ideal := 10 * time.Second
				if explore.UnderRace {
					ideal = 3 * time.Second
				}
				n := int(ideal / slow * 15)
				s.publish(t, "noisy", n)
				for s.count("noisy") < n {
					time.Sleep(10 * time.Millisecond)
				}
				took := time.Since(began)
				close(stop)
				<-ended
				assert.Zero(t, s.all(t))
				for _, w := range workers {
					w.leave(t)
				}
				quiet := s.quietDelays()
				s.mu.Lock()
				t.Logf("%d noisy took %v, ideal %v; moved %d, in lanes %d; %d quiet p50 %v p99 %v max %v", n, took, ideal, s.moved, s.lanes, len(quiet), quantile(quiet, .5), quantile(quiet, .99), quantile(quiet, 1))
				s.mu.Unlock()
				assert.Less(t, quantile(quiet, .99), 5*time.Millisecond)
				// Each worker keeps one of eight slots in reserve, and two if the noisy handlers are slow.
				assert.Less(t, took, ideal+map[string]time.Duration{"quick": ideal / 10, "slow": 3 * ideal / 10}[name]+200*time.Millisecond)
			})
		})
	}
}

func (s *scene) count(tenant string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.delays[tenant])
}

func firstAttempt(ctx context.Context) bool { return retry.Attempt(ctx) == 1 }

var long = os.Getenv("HOPBACK_LONG") != ""
