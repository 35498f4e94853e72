package partition_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

func TestTopologyRefusesWhatBreaksTheOrder(t *testing.T) {
	t.Parallel()
	g := partition.Group{Name: "orders", Partitions: 2}
	good := declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")}
	topology, err := g.Topology(good)
	require.NoError(t, err)
	assert.Len(t, topology.Queues, 2)
	for name, edit := range map[string]func(g *partition.Group, q *declare.QuorumQueue){
		"Partitions":    func(g *partition.Group, _ *declare.QuorumQueue) { g.Partitions = 0 },
		"Window":        func(g *partition.Group, _ *declare.QuorumQueue) { g.Window = -1 },
		"Group.Window":  func(g *partition.Group, _ *declare.QuorumQueue) { g.Window = 257 },
		"Generation":    func(g *partition.Group, _ *declare.QuorumQueue) { g.Generation = 1 << 40 },
		"Name":          func(g *partition.Group, _ *declare.QuorumQueue) { g.Name = "" },
		"DeadLetter":    func(_ *partition.Group, q *declare.QuorumQueue) { q.DeadLetter = declare.Drop() },
		"MessageTTL":    func(_ *partition.Group, q *declare.QuorumQueue) { q.MessageTTL = time.Hour },
		"Expires":       func(_ *partition.Group, q *declare.QuorumQueue) { q.Expires = time.Hour },
		"DelayedRetry":  func(_ *partition.Group, q *declare.QuorumQueue) { q.DelayedRetry.Kind = declare.RetryAll },
		"DeliveryLimit": func(_ *partition.Group, q *declare.QuorumQueue) { q.DeliveryLimit = declare.NoRedelivery },
	} {
		g, q := g, good
		edit(&g, &q)
		_, err := g.Topology(q)
		bad, ok := errors.AsType[*argument.Error](err)
		if assert.True(t, ok, "%s: %v", name, err) {
			assert.Contains(t, bad.Path.String(), name)
		}
	}
}

// Workers with another Window or number of partitions don't start, and neither does a topology
// that differs. Below RabbitMQ 4.3, nothing does.
func TestWorkersOfAnotherGroupAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 4}
		s := newScene(t, g, 1)
		h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		for _, other := range []partition.Group{{Name: "orders", Partitions: 4, Window: 5}, {Name: "orders", Partitions: 3}} {
			require.ErrorIs(t, partition.Consume(t.Context(), s.conn, other, h, partition.Config{}), partition.ErrWrongGroup)
			topology, err := other.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: declare.Unlimited})
			require.NoError(t, err)
			_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
			require.ErrorIs(t, err, declare.ErrConflict)
		}
		require.ErrorIs(t, partition.Consume(t.Context(), s.conn, partition.Group{Name: "none", Partitions: 1}, h, partition.Config{}), client.ErrNotFound)
		require.ErrorAs(t, partition.Consume(t.Context(), s.conn, g, nil, partition.Config{}), new(*argument.Error))
		require.ErrorAs(t, partition.Consume(t.Context(), nil, g, h, partition.Config{}), new(*argument.Error))
		require.ErrorAs(t, partition.Consume(t.Context(), s.conn, g, h, partition.Config{Concurrency: -1, Failed: "?"}), new(*argument.Error))

		old := hopbacktest.Start(t, hopbacktest.Config{Version: "4.0.5"})
		conn, err := client.Connect(t.Context(), old.URL(), client.Config{Dial: old.Dial, Logger: quiet})
		require.NoError(t, err)
		defer conn.Close(context.Background())
		err = partition.Consume(t.Context(), conn, g, h, partition.Config{})
		require.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, "needs RabbitMQ 4.3")
	})
}

// A consumer without a gate keeps a partition that it gets, and delays nothing else. When it
// leaves, the partition goes to its owner, and the order is kept.
func TestAWorkerWithoutGatesIsHarmless(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 4}
		s := newScene(t, g, 50)
		stranger, leave := context.WithCancel(t.Context())
		done := make(chan error)
		alien := &partitionrig.Rig{Check: s.Check}
		go func() {
			done <- s.conn.Consume(stranger, g.Queues()[0], alien.Handler("alien"), client.ConsumerConfig{Prefetch: 100, NoIsolation: true})
		}()
		time.Sleep(time.Second)
		w := s.start(t, "w1")
		time.Sleep(2 * time.Second)
		assert.Equal(t, 3, s.Check.Shares()["w1"])
		for range 20 {
			for key := range 50 {
				require.NoError(t, s.publisher.Publish(t.Context(), key))
			}
		}
		leave()
		require.NoError(t, <-done)
		s.completed(t)
		assert.Equal(t, 4, s.Check.Shares()["w1"])
		require.NoError(t, w.Leave())
		s.right(t)
	})
}

// failing handles messages by a function of their text.
type failing struct {
	mu   sync.Mutex
	seen []string
	fail func(text string, call int) error
	n    map[string]int
}

func (f *failing) Handle(_ context.Context, d *client.Delivery) error {
	text := string(d.Message().GetData())
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n[text]++
	err := f.fail(text, f.n[text])
	if err == nil {
		f.seen = append(f.seen, text)
	}
	return err
}

// calls is how often the handler was called with a text.
func (f *failing) calls(text string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n[text]
}

func (f *failing) order() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.seen...)
}

// run consumes g with f until stop is called.
func (f *failing) run(t *testing.T, s *scene, g partition.Group, cfg partition.Config) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- partition.Consume(ctx, s.conn, g, f, cfg) }()
	return func() {
		cancel()
		require.NoError(t, <-done)
	}
}

func (s *scene) put(t *testing.T, key string, texts ...string) {
	p, err := client.NewPublisher[string](t.Context(), s.conn, address.Address{}, client.PublisherConfig{})
	require.NoError(t, err)
	defer p.Close(context.Background())
	require.NoError(t, p.PublishAll(t.Context(), texts, func(text string, m *client.Message) {
		m.Data = [][]byte{[]byte(text)}
		client.PublishTo(s.Group.Address(key))(m)
	}))
}

// A failed message waits for its delay, its key waits with it, and other keys go on. A message
// that isn't retried any more is dead-lettered with its history, or blocks its key.
func TestAFailedMessageKeepsItsPlace(t *testing.T) {
	busy := errors.New("busy")
	policy := retry.Policy{MaxRetries: 2, Backoff: retry.Exponential(time.Minute, 1)}
	t.Run("skip", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := partition.Group{Name: "orders", Partitions: 1}
			s := newScene(t, g, 1)
			f := &failing{n: map[string]int{}, fail: func(text string, _ int) error {
				if text == "a1" {
					return busy
				}
				return nil
			}}
			stop := f.run(t, s, g, partition.Config{Retry: policy})
			s.put(t, "a", "a1", "a2")
			s.put(t, "b", "b1", "b2")
			time.Sleep(90 * time.Second)
			assert.Equal(t, []string{"b1", "b2"}, f.order())
			time.Sleep(2 * time.Minute)
			assert.Equal(t, []string{"b1", "b2", "a2"}, f.order())
			assert.Equal(t, 3, f.calls("a1"))
			dead := s.broker.Queue("dead").Messages()
			require.Len(t, dead, 1)
			assert.Equal(t, string(retry.ReasonExhausted), dead[0].Annotations[client.AnnotationReason])
			stop()
		})
	})
	t.Run("block", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := partition.Group{Name: "orders", Partitions: 1}
			s := newScene(t, g, 1)
			var repaired atomic.Bool
			f := &failing{n: map[string]int{}, fail: func(text string, _ int) error {
				if text == "a1" && !repaired.Load() {
					return busy
				}
				return nil
			}}
			cfg := partition.Config{Retry: policy, Failed: partition.BlockKey}
			stop := f.run(t, s, g, cfg)
			s.put(t, "a", "a1", "a2")
			time.Sleep(time.Hour)
			assert.Equal(t, 3+11, f.calls("a1"), "every 5 minutes after the policy's attempts")
			stop() // another worker continues, and knows the number of attempts
			stop = f.run(t, s, g, cfg)
			s.put(t, "b", "b1")
			time.Sleep(time.Hour)
			assert.Equal(t, []string{"b1"}, f.order())
			repaired.Store(true)
			time.Sleep(6 * time.Minute)
			assert.Equal(t, []string{"b1", "a1", "a2"}, f.order())
			assert.Empty(t, s.broker.Queue("dead").Messages())
			stop()
		})
	})
	t.Run("handed over", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := partition.Group{Name: "orders", Partitions: 1}
			s := newScene(t, g, 1)
			f := &failing{n: map[string]int{}, fail: func(text string, _ int) error {
				if text == "a1" {
					return busy
				}
				return nil
			}}
			s.put(t, "a", "a1", "a2")
			for n := range 3 { // an attempt a minute: each worker makes one
				stop := f.run(t, s, g, partition.Config{Retry: policy})
				time.Sleep(43 * time.Second)
				stop()
				assert.Equal(t, n+1, f.calls("a1"), "the number of attempts and the delay are in the message")
			}
			assert.Equal(t, []string{"a2"}, f.order())
			assert.Len(t, s.broker.Queue("dead").Messages(), 1)
		})
	})
}

// retry.Attempt counts the attempts that a message has had in hand, and those on other workers.
func TestAttemptsInHandAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 1}
		s := newScene(t, g, 1)
		var mu sync.Mutex
		var attempts []int
		h := client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			attempts = append(attempts, retry.Attempt(ctx))
			return errors.New("busy")
		})
		cfg := partition.Config{Retry: retry.Policy{MaxRetries: 3, Backoff: retry.Exponential(4*time.Second, 1)}}
		s.put(t, "a", "a1")
		for range 2 {
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- partition.Consume(ctx, s.conn, g, h, cfg) }()
			time.Sleep(7 * time.Second)
			stop()
			require.NoError(t, <-done)
		}
		assert.Equal(t, []int{1, 2, 3, 4}, attempts)
		assert.Len(t, s.broker.Queue("dead").Messages(), 1)
	})
}

// What is held for nearly as long as the consumer timeout returns to its queue by the worker, with
// its attempts: what the broker takes back by itself would begin to count again.
func TestAttemptsOutlastTheConsumerTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 1}
		s := newScene(t, g, 1)
		var mu sync.Mutex
		var attempts []int
		h := client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			attempts = append(attempts, retry.Attempt(ctx))
			return errors.New("busy")
		})
		cfg := partition.Config{Failed: partition.BlockKey, Retry: retry.Policy{MaxRetries: 1, Backoff: retry.Exponential(time.Minute, 1)}}
		s.put(t, "a", "a1")
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- partition.Consume(ctx, s.conn, g, h, cfg) }()
		time.Sleep(100 * time.Minute) // three times the default timeout
		stop()
		require.NoError(t, <-done)
		require.Greater(t, len(attempts), 10)
		assert.Equal(t, append([]int{1}, slices.Repeat([]int{2}, len(attempts)-1)...), attempts)
	})
}

// A message waits for longer than the consumer timeout, and on more than one worker, while other
// keys continue. What a publisher writes into its history makes it wait for nothing.
func TestADelayOutlastsTheConsumerTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 1}
		s := newScene(t, g, 1)
		type call struct {
			text    string
			attempt int
			at      time.Duration
		}
		var mu sync.Mutex
		var calls []call
		began := time.Now()
		h := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			text := string(d.Message().GetData())
			calls = append(calls, call{text, retry.Attempt(ctx), time.Since(began).Round(time.Second)})
			if text == "a1" && len(calls) < 7 {
				return errors.New("busy")
			}
			return nil
		})
		cfg := partition.Config{Retry: retry.Policy{MaxRetries: 10, Backoff: retry.Exponential(7*time.Hour, 1)}}
		run := func(how time.Duration) {
			ctx, stop := context.WithTimeout(t.Context(), how)
			defer stop()
			require.NoError(t, partition.Consume(ctx, s.conn, g, h, cfg))
		}
		s.put(t, "a", "a1", "a2")
		for range 3 {
			run(5 * time.Hour)
			s.put(t, "b", "b")
		}
		history := fmt.Sprintf(`{"last":%d,"delay":72000000}`, time.Now().UnixMilli())
		p, err := client.NewPublisher[string](t.Context(), s.conn, g.Address("c"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), "", func(m *client.Message) {
			m.Data = [][]byte{[]byte("forged")}
			m.Annotations = map[any]any{"x-opt-hopback-history": history}
		}))
		run(14 * time.Hour)
		var a1, others []call
		for _, c := range calls {
			if c.text == "a1" {
				a1 = append(a1, c)
			} else {
				others = append(others, c)
			}
		}
		t.Log(calls)
		require.Len(t, a1, 4)
		for i, c := range a1 {
			assert.Equal(t, i+1, c.attempt)
			want := time.Duration(i) * 7 * time.Hour
			assert.InDelta(t, want.Seconds(), c.at.Seconds(), 60)
			assert.GreaterOrEqual(t, c.at, want)
		}
		require.Len(t, others, 5)
		assert.Equal(t, "a2", others[4].text)
		forged := slices.IndexFunc(others, func(c call) bool { return c.text == "forged" })
		require.GreaterOrEqual(t, forged, 2, "the last b is of another key, so it can come at the same time")
		assert.InDelta(t, (15 * time.Hour).Seconds(), others[forged].at.Seconds(), 60)
	})
}

// A queue's consumer timeout can be longer than a consumer can ask for.
func TestAConsumerTimeoutThatNoConsumerCanHave(t *testing.T) {
	for _, timeout := range []time.Duration{math.MaxUint32*time.Millisecond + time.Millisecond, 10_000 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			g := partition.Group{Name: "orders", Partitions: 1}
			s := newScene(t, partition.Group{Name: "other", Partitions: 1}, 1)
			topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), ConsumerTimeout: timeout})
			require.NoError(t, err)
			_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
			require.NoError(t, err)
			f := &failing{n: map[string]int{}, fail: func(string, int) error { return nil }}
			stop := f.run(t, s, g, partition.Config{})
			p, err := client.NewPublisher[string](t.Context(), s.conn, g.Address("a"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, p.Publish(t.Context(), "a1"))
			time.Sleep(10 * time.Second) // virtual
			assert.Equal(t, 1, f.calls(`"a1"`))
			stop()
		})
	}
}

// A message with a priority overtakes others, and one with a ttl can disappear. They are handled
// and logged, once for each partition.
func TestMessagesWithAPriorityOrATTLAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 1}
		s := newScene(t, g, 1)
		var logged syncBuffer
		conn, err := client.Connect(t.Context(), s.URL, client.Config{Dial: s.Dial, Logger: slog.New(slog.NewTextHandler(&logged, nil))})
		require.NoError(t, err)
		defer conn.Close(context.Background())
		handled := make(chan string, 10)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- partition.Consume(ctx, conn, g, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				handled <- string(d.Message().GetData())
				return nil
			}), partition.Config{})
		}()
		p, err := client.NewPublisher[string](t.Context(), s.conn, g.Address("a"), client.PublisherConfig{})
		require.NoError(t, err)
		for text, header := range map[string]*client.Header{"plain": nil, "urgent": {Durable: true, Priority: 9}, "short": {Durable: true, Priority: 4, TTL: time.Hour}} {
			require.NoError(t, p.Publish(t.Context(), text, func(m *client.Message) { m.Header = header }))
			time.Sleep(5 * time.Second)
			assert.Contains(t, <-handled, text)
		}
		assert.Equal(t, 1, strings.Count(logged.String(), "has a priority or a ttl"), logged.String())
		stop()
		require.NoError(t, <-done)
	})
}

// syncBuffer is a buffer that several goroutines write to.
type syncBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
