package pause_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

// scene is a broker in memory, in virtual time, with a publisher that publishes ten messages a second.
type scene struct {
	*testing.T
	broker *hopbacktest.Broker
	conn   *client.Conn // the operator's

	mu      sync.Mutex
	handled map[string][]time.Time // by worker
	changes map[string][]string
}

func newScene(t *testing.T, cfg hopbacktest.Config, topology declare.Topology) *scene {
	s := &scene{T: t, broker: hopbacktest.Start(t, cfg), handled: map[string][]time.Time{}, changes: map[string][]string{}}
	s.conn = s.connect()
	if topology.Queues == nil {
		topology.Queues = []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}
	}
	_, err := declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	return s
}

func (s *scene) connect() *client.Conn {
	conn, err := client.Connect(s.Context(), s.broker.URL(), client.Config{Dial: s.broker.Dial, Logger: silent})
	require.NoError(s, err)
	s.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// publish publishes ten messages a second until the scene ends.
func (s *scene) publish(to address.Address) {
	ctx, stop := context.WithCancel(s.Context())
	p, err := client.NewPublisher[string](ctx, s.connect(), to, client.PublisherConfig{})
	require.NoError(s, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			_ = p.Publish(ctx, "an order")
			time.Sleep(100 * time.Millisecond)
		}
	}()
	s.Cleanup(func() { stop(); <-done })
}

// work starts a worker with another connection.
func (s *scene) work(name string) (stop func()) {
	ctx, cancel := context.WithCancel(s.Context())
	conn := s.connect()
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.handled[name] = append(s.handled[name], time.Now())
		return nil
	})
	watched := pause.With(pause.Config{OnChange: func(p *pause.State) {
		s.mu.Lock()
		defer s.mu.Unlock()
		text := "resumed"
		if p != nil {
			text = p.By + ": " + p.Why
		}
		s.changes[name] = append(s.changes[name], text)
	}})
	done := make(chan error, 1)
	go func() { done <- conn.Consume(ctx, "orders", watched(h), client.ConsumerConfig{}) }()
	stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(s, <-done)
	})
	s.Cleanup(stop)
	return stop
}

// since returns how many messages were handled after a time.
func (s *scene) since(at time.Time) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, all := range s.handled {
		for _, when := range all {
			if when.After(at) {
				n++
			}
		}
	}
	return n
}

// 100 workers stop and resume within 2 s, and stay paused over restarts of all workers and of the broker.
func TestAQueueIsPausedForAllItsWorkers(t *testing.T) {
	number := map[string]int{"4.3.6": 100, "4.0.5": 10, "4.4.0": 10}
	if explore.UnderRace {
		number["4.3.6"] = 20
	}
	for version, number := range number {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, hopbacktest.Config{Version: version}, declare.Topology{})
				s.publish(address.Queue("orders"))
				var workers []func()
				for i := range number {
					workers = append(workers, s.work(fmt.Sprint("worker", i)))
				}
				time.Sleep(10 * time.Second)
				assert.NotZero(t, s.since(time.Now().Add(-time.Second)))

				require.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{By: "ada", Why: "the bank is down"}))
				time.Sleep(2 * time.Second)
				paused := time.Now()
				time.Sleep(10 * time.Second)
				s.broker.Kill()
				time.Sleep(time.Second)
				s.broker.Restart()
				time.Sleep(30 * time.Second)
				for i, stop := range workers {
					stop()
					s.work(fmt.Sprint("worker", number+i))
				}
				time.Sleep(30 * time.Second)
				assert.Zero(t, s.since(paused))
				state, is, err := pause.Of(t.Context(), s.conn, "orders")
				require.NoError(t, err)
				assert.True(t, is)
				assert.Equal(t, "ada: the bank is down", state.By+": "+state.Why)
				assert.Zero(t, state.Until)

				require.NoError(t, pause.Resume(t.Context(), s.conn, "orders"))
				time.Sleep(2 * time.Second)
				s.mu.Lock()
				for i := range number {
					assert.Equal(t, []string{"ada: the bank is down"}, s.changes[fmt.Sprint("worker", i)])
					assert.Equal(t, []string{"ada: the bank is down", "resumed"}, s.changes[fmt.Sprint("worker", number+i)])
				}
				s.mu.Unlock()
				assert.Greater(t, s.since(paused), 500, "the backlog")
				require.NoError(t, pause.Resume(t.Context(), s.conn, "orders"), "again")
				_, is, err = pause.Of(t.Context(), s.conn, "orders")
				require.NoError(t, err)
				assert.False(t, is)
			})
		})
	}
}

// A pause ends by itself, also in an alarm, in which the broker answers nothing, and when the broker's clock differs.
func TestAPauseEndsAfterItsTime(t *testing.T) {
	for name, during := range map[string]func(*scene){
		"quiet": func(*scene) {},
		"alarm": func(s *scene) { s.broker.SetMemoryAlarm(true) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, hopbacktest.Config{}, declare.Topology{})
				s.broker.StepClock(-time.Hour)
				s.publish(address.Queue("orders"))
				s.work("worker")
				require.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{For: time.Minute}))
				began := time.Now()
				time.Sleep(5 * time.Second)
				during(s)
				time.Sleep(53 * time.Second)
				assert.Zero(t, s.since(began.Add(2*time.Second)))
				time.Sleep(12 * time.Second)
				assert.NotZero(t, s.since(began.Add(2*time.Second)))
				s.broker.SetMemoryAlarm(false)
				_, is, err := pause.Of(t.Context(), s.conn, "orders")
				require.NoError(t, err)
				assert.False(t, is)
			})
		})
	}
}

// Only the last of several pauses counts.
func TestThePauseOfAQueueIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{}, declare.Topology{})
		s.work("worker")
		for i := range 3 {
			require.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{By: "ada", Why: fmt.Sprint(i), For: time.Hour}))
			time.Sleep(5 * time.Second)
		}
		var both sync.WaitGroup
		for range 5 {
			both.Go(func() {
				assert.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{By: "bob"}))
			})
		}
		both.Wait()
		time.Sleep(5 * time.Second)
		state, is, err := pause.Of(t.Context(), s.conn, "orders")
		require.NoError(t, err)
		assert.True(t, is)
		assert.Equal(t, "bob", state.By)
		assert.Contains(t, state.String(), `by "bob"`)
		require.NoError(t, pause.Resume(t.Context(), s.conn, "orders"))
		time.Sleep(5 * time.Second)
		s.mu.Lock()
		defer s.mu.Unlock()
		assert.Equal(t, []string{"ada: 0", "ada: 1", "ada: 2", "bob: ", "resumed"}, s.changes["worker"])
	})
}

// A worker that starts in an alarm can't ask whether the queue is paused, and handles: the backlog may be the
// alarm's reason. It asks again later.
func TestAWorkerStartsDuringAnAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{}, declare.Topology{})
		s.publish(address.Queue("orders"))
		time.Sleep(10 * time.Second)
		require.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{Why: "the bank is down"}))
		s.broker.SetMemoryAlarm(true)
		s.work("worker")
		time.Sleep(20 * time.Second)
		assert.NotZero(t, s.since(time.Time{}))
		s.broker.SetMemoryAlarm(false)
		time.Sleep(10 * time.Second)
		calm := time.Now()
		time.Sleep(10 * time.Second)
		assert.Zero(t, s.since(calm))
	})
}

// Connections that are lost and answers that don't come change nothing.
func TestAnUnreachableBrokerChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{}, declare.Topology{})
		s.publish(address.Queue("orders"))
		s.work("worker")
		require.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{}))
		time.Sleep(2 * time.Second)
		paused := time.Now()
		for range 20 {
			for _, c := range s.broker.Connections() {
				c.Cut()
			}
			time.Sleep(time.Second)
		}
		release := s.broker.HoldAnswers()
		time.Sleep(30 * time.Second)
		release()
		s.broker.Kill()
		time.Sleep(time.Minute)
		s.broker.Restart()
		time.Sleep(time.Minute)
		assert.Zero(t, s.since(paused))
		require.NoError(t, pause.Resume(t.Context(), s.conn, "orders"))
		time.Sleep(2 * time.Second)
		assert.NotZero(t, s.since(paused))
	})
}

// api is the HTTP API of a broker.
type api struct{ http.Handler }

func (a api) VHost() string { return "/" }

func (a api) Get(_ context.Context, path string) ([]byte, error) {
	req := httptest.NewRequest(http.MethodGet, "/api"+path, nil)
	req.SetBasicAuth("guest", "guest")
	rec := httptest.NewRecorder()
	a.ServeHTTP(rec, req)
	if rec.Code != http.StatusOK {
		return nil, errors.New(rec.Body.String())
	}
	return rec.Body.Bytes(), nil
}

// Anybody who may bind the queue may write such a binding, with anything in it.
func TestForgedPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{}, declare.Topology{})
		s.work("worker")
		require.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{Why: "ours"}))
		time.Sleep(2 * time.Second)
		for _, args := range []map[string]any{
			nil, {"x-hopback-since": "now", "x-hopback-until": true, "x-hopback-by": int64(7), "x-hopback-why": []any{"a"}},
			{"x-hopback-since": int64(1 << 62), "x-hopback-until": int64(-1 << 62), "x-hopback-why": strings.Repeat("ä", 50_000)},
		} {
			_, err := declare.Apply(t.Context(), s.conn.Management(), declare.Topology{Bindings: []declare.Binding{
				{Source: "hopback.pauses", Queue: "orders", Key: "orders", Arguments: args},
			}})
			require.NoError(t, err)
			time.Sleep(2 * time.Second)
			state, _, err := pause.Of(t.Context(), s.conn, "orders")
			require.NoError(t, err)
			assert.LessOrEqual(t, len(state.Why), 200)
			assert.LessOrEqual(t, len(state.String()), 1000)
			_, err = json.Marshal(state)
			require.NoError(t, err)
			all, err := pause.All(t.Context(), s.conn, api{s.broker.HTTPHandler()})
			require.NoError(t, err)
			if state.Queue == "" {
				assert.Empty(t, all, "its time is over")
			} else {
				assert.Equal(t, []pause.State{state}, all)
			}
		}
		require.NoError(t, pause.Resume(t.Context(), s.conn, "orders"))
		_, err := declare.Apply(t.Context(), s.conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "other", DeadLetter: declare.Drop()}},
			Bindings: []declare.Binding{{Source: "hopback.pauses", Queue: "other", Key: "orders", Arguments: map[string]any{"x-hopback-since": int64(1 << 62)}}}})
		require.NoError(t, err)
		all, err := pause.All(t.Context(), s.conn, api{s.broker.HTTPHandler()})
		require.NoError(t, err)
		assert.Empty(t, all, "no worker reads this binding")
		time.Sleep(2 * time.Second)
		s.publish(address.Queue("orders"))
		time.Sleep(2 * time.Second)
		assert.NotZero(t, s.since(time.Time{}))
	})
}

// A fair queue's workers are paused in all lanes.
func TestAFairQueueIsPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := fair.Queue{Name: "orders", Lanes: 2}
		policy := retry.Policy{Strategy: retry.StrategyNative}
		topology, err := q.Topology(policy, declare.QuorumQueue{})
		require.NoError(t, err)
		s := newScene(t, hopbacktest.Config{}, topology)
		p, err := client.NewPublisher[string](t.Context(), s.conn, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		var handled atomic.Int64
		h := pause.With(pause.Config{Queue: "orders"})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			time.Sleep(10 * time.Millisecond)
			handled.Add(1)
			return nil
		}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- fair.Consume(ctx, s.conn, q, h, fair.Config{Concurrency: 4, Retry: policy}) }()
		for range 2000 {
			require.NoError(t, p.Publish(t.Context(), "an order", q.To("noisy")))
		}
		require.NoError(t, pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{}))
		time.Sleep(2 * time.Second)
		paused := handled.Load()
		assert.Less(t, paused, int64(2000))
		time.Sleep(time.Minute)
		assert.Equal(t, paused, handled.Load())
		require.NoError(t, pause.Resume(t.Context(), s.conn, "orders"))
		time.Sleep(time.Minute)
		assert.EqualValues(t, 2000, handled.Load())
		cancel()
		require.NoError(t, <-done)
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{}, declare.Topology{})
		for text, err := range map[string]error{
			"conn":             pause.Pause(t.Context(), nil, "orders", pause.PauseConfig{}),
			"queue":            pause.Resume(t.Context(), s.conn, ""),
			"PauseConfig.For":  pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{For: -1}),
			"PauseConfig.Why":  pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{Why: strings.Repeat("w", 201)}),
			"PauseConfig.By":   pause.Pause(t.Context(), s.conn, "orders", pause.PauseConfig{By: "\xff"}),
			"Config.Queue":     s.conn.Consume(t.Context(), "orders", pause.With(pause.Config{Queue: ".."})(client.HandlerFunc(nil)), client.ConsumerConfig{}),
			"pause's":          s.conn.Consume(t.Context(), "orders", pause.With(pause.Config{})(nil), client.ConsumerConfig{}),
			"can't be paused ": client.Prepare(t.Context(), pause.With(pause.Config{})(client.HandlerFunc(nil)), client.Start{Queue: "orders", Management: s.conn.Management()}),
		} {
			require.ErrorAs(t, err, new(*argument.Error), text)
			assert.ErrorContains(t, err, text)
		}
		for _, err := range []error{pause.Pause(t.Context(), s.conn, "none", pause.PauseConfig{}), pause.Resume(t.Context(), s.conn, "none")} {
			require.ErrorIs(t, err, declare.ErrNotFound)
		}
		_, _, err := pause.Of(t.Context(), s.conn, "none")
		require.ErrorIs(t, err, declare.ErrNotFound)
		h := pause.With(pause.Config{})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders"}), "a test without a broker")
		require.NoError(t, h.Handle(t.Context(), nil))
	})
}
