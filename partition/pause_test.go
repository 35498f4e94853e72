package partition_test

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// pausable is a scene whose workers use package pause.
type pausable struct {
	*scene
	last atomic.Int64 // when a handler began last, in Unix nanoseconds

	mu      sync.Mutex
	changes map[string]string // what each worker was notified of last
}

func newPausable(t *testing.T, g partition.Group, keys int) *pausable {
	p := &pausable{scene: newScene(t, g, keys), changes: map[string]string{}}
	p.Wrap = p.wrap
	return p
}

func (p *pausable) wrap(worker string) client.Middleware {
	return client.Chain(pause.With(pause.Config{OnChange: func(s *pause.State) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.changes[worker] = "resumed"
		if s != nil {
			p.changes[worker] = s.Group + ": " + s.Why
		}
	}}), func(h client.Handler) client.Handler {
		return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
			p.last.Store(time.Now().UnixNano())
			return h.Handle(ctx, d)
		})
	})
}

// publish publishes 50 messages a second until stop is called.
func (p *pausable) publish(t *testing.T, keys int) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ctx.Err() == nil; n++ {
			assert.NoError(t, p.publisher.Publish(context.WithoutCancel(ctx), n*7%keys))
			time.Sleep(20 * time.Millisecond)
		}
	}()
	return func() { cancel(); <-done }
}

// none checks that no handler begins after at.
func (p *pausable) none(t *testing.T, at time.Time, while string) {
	t.Helper()
	assert.LessOrEqual(t, p.last.Load(), at.UnixNano(), while)
}

// Each worker hears all others, so this takes half a minute with 100 of them, and minutes with -race.
var pausedWorkers = flag.Int("partition.paused", 20, "workers of TestAGroupIsPausedForAllItsWorkers, at least 20")

// The workers of a group stop and resume within 2 s. Paused, they keep the order of what they hold, also through a restart
// of the broker, and when partitions get other owners.
func TestAGroupIsPausedForAllItsWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newPausable(t, partition.Group{Name: "orders", Partitions: 8}, 100)
		s.Failing = 0.1
		stop := s.publish(t, 100)
		var workers []*partitionrig.Worker
		for i := range *pausedWorkers {
			workers = append(workers, s.start(t, fmt.Sprint("w", i)))
		}
		time.Sleep(5 * time.Second)
		assert.NotZero(t, s.last.Load())

		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{By: "ada", Why: "the bank is down"}))
		time.Sleep(2 * time.Second)
		paused := time.Now()
		stop()
		time.Sleep(3 * time.Second)
		s.none(t, paused, "nothing")
		owners, held := 0, 0
		for _, w := range workers {
			for _, c := range w.Conn().Stats().Consumers {
				if !c.Partition {
					continue
				}
				assert.True(t, c.Paused, "%s: %s", w.Name, c.Queue)
				assert.Zero(t, c.Handling, "what waits isn't being handled")
				if c.Owner {
					owners, held = owners+1, held+c.Unsettled
					r, err := health.Check(health.Config{}, w.Conn())
					require.NoError(t, err)
					assert.True(t, r.Ready && r.Consumers[0].Paused, "%v", r)
				}
			}
		}
		assert.Equal(t, 8, owners)
		assert.Positive(t, held)

		s.Check.BrokerIsDown()
		s.broker.Kill()
		time.Sleep(time.Second)
		s.broker.Restart()
		s.Check.BrokerIsBack()
		time.Sleep(10 * time.Second)
		s.none(t, paused, "a restart of the broker")
		for i, w := range workers[:*pausedWorkers-10] {
			if i%2 == 0 {
				w.Kill()
			} else {
				require.NoError(t, w.Leave())
			}
		}
		workers = workers[*pausedWorkers-10:]
		for i := range 5 {
			workers = append(workers, s.start(t, fmt.Sprint("late", i)))
		}
		time.Sleep(10 * time.Second)
		s.none(t, paused, "other owners")
		assert.Zero(t, s.Check.Shares()[""], "each has an owner")
		state, is, err := pause.OfGroup(t.Context(), s.conn, "orders")
		require.NoError(t, err)
		assert.True(t, is)
		assert.Equal(t, "orders ada the bank is down", fmt.Sprint(state.Group, " ", state.By, " ", state.Why))
		s.mu.Lock()
		for _, w := range workers {
			if change, asked := s.changes[w.Name]; asked { // a worker that is in no line handles nothing, and doesn't ask
				assert.Equal(t, "orders: the bank is down", change)
			}
		}
		assert.Greater(t, len(s.changes), 8)
		s.mu.Unlock()

		require.NoError(t, pause.ResumeGroup(t.Context(), s.conn, "orders"))
		resumed := time.Now()
		time.Sleep(2 * time.Second)
		assert.Greater(t, s.last.Load(), resumed.UnixNano())
		s.completed(t)
		_, is, err = pause.OfGroup(t.Context(), s.conn, "orders")
		require.NoError(t, err)
		assert.False(t, is)
		for _, w := range workers {
			require.NoError(t, w.Leave())
		}
		s.right(t)
	})
}

// A pause outlasts the consumer timeout: what the workers hold returns to its queue, in its order and with its attempts.
func TestAPauseOutlastsTheConsumerTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newPausable(t, partition.Group{Name: "orders", Partitions: 2}, 20)
		s.Failing = 0.5
		workers := []*partitionrig.Worker{s.start(t, "w1"), s.start(t, "w2")}
		for n := range 400 {
			require.NoError(t, s.publisher.Publish(t.Context(), n%20))
		}
		time.Sleep(time.Second)
		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{For: 70 * time.Minute}))
		time.Sleep(2 * time.Second)
		paused := time.Now()
		time.Sleep(69 * time.Minute)
		s.none(t, paused, "two consumer timeouts")
		s.completed(t)
		for _, w := range workers {
			require.NoError(t, w.Leave())
		}
		assert.Zero(t, s.right(t).Duplicates)
	})
}

// Workers that leave while the group is paused leave at once, and lose nothing.
func TestAPausedWorkerLeavesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newPausable(t, partition.Group{Name: "orders", Partitions: 2}, 10)
		w := s.start(t, "w1")
		time.Sleep(5 * time.Second)
		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{For: time.Minute}))
		time.Sleep(2 * time.Second)
		for n := range 100 {
			require.NoError(t, s.publisher.Publish(t.Context(), n%10))
		}
		time.Sleep(2 * time.Second)
		assert.Zero(t, s.last.Load())
		began := time.Now()
		require.NoError(t, w.Leave())
		assert.Less(t, time.Since(began), time.Second)
		w = s.start(t, "w2")
		time.Sleep(50 * time.Second)
		assert.Zero(t, s.last.Load())
		s.completed(t) // the pause ends by itself
		require.NoError(t, w.Leave())
		r := s.right(t)
		assert.Zero(t, r.Duplicates)
	})
}

// A group that is resharded while it is paused stays so in its new partitions.
func TestReshardingAPausedGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from, to := partition.Group{Name: "orders", Partitions: 3}, partition.Group{Name: "orders", Partitions: 5, Generation: 2}
		s := newPausable(t, from, 20)
		next := *s.scene
		next.Rig = &partitionrig.Rig{
			URL: s.URL, Dial: s.Dial, Group: to, Check: partitionrig.NewCheck(1, 5), Handle: s.Handle, Logger: quiet, Config: s.Config, Order: s.Check, Wrap: s.wrap,
		}
		old := s.start(t, "old")
		stop := s.publish(t, 20)
		time.Sleep(5 * time.Second)
		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{Why: "moving"}))
		time.Sleep(2 * time.Second)
		paused := time.Now()
		apply(t, s.conn, to)
		young := next.start(t, "young")
		resharded := make(chan error, 1)
		go func() {
			resharded <- partition.Reshard(t.Context(), s.conn, from, to, partition.ReshardConfig{})
		}()
		time.Sleep(2 * time.Minute)
		s.none(t, paused, "resharding")
		assert.Equal(t, 5, next.Check.Shares()["young"], "the new generation has begun, except for what the old one holds")
		assert.Empty(t, resharded)
		require.NoError(t, pause.ResumeGroup(t.Context(), s.conn, "orders"))
		require.NoError(t, <-resharded)
		stop()
		s.completed(t)
		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{Why: "again"}))
		time.Sleep(2 * time.Second)
		paused = time.Now()
		require.NoError(t, s.publisher.Publish(t.Context(), 1, 2, 3))
		time.Sleep(time.Minute)
		s.none(t, paused, "the new generation")
		require.NoError(t, pause.ResumeGroup(t.Context(), s.conn, "orders"))
		s.completed(t)
		require.NoError(t, old.Leave())
		require.NoError(t, young.Leave())
		s.right(t)
	})
}

// Reshard finishes a paused group whose old partitions are empty.
func TestReshardingAnEmptyGroupThatIsPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from, to := partition.Group{Name: "orders", Partitions: 3}, partition.Group{Name: "orders", Partitions: 5, Generation: 2}
		s := newPausable(t, from, 20)
		w := s.start(t, "old")
		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{}))
		time.Sleep(5 * time.Second)
		apply(t, s.conn, to)
		require.NoError(t, partition.Reshard(t.Context(), s.conn, from, to, partition.ReshardConfig{}))
		require.NoError(t, w.Leave())
	})
}

// A message with the annotation of a marker waits as others do.
func TestAForgedMarkerIsPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 1}
		s := newPausable(t, g, 1)
		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{}))
		w := s.start(t, "w")
		p, err := client.NewPublisher[string](t.Context(), s.conn, g.Address("a"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), "forged", func(m *client.Message) { m.Annotations = map[any]any{"x-opt-hopback-marker": "forged/forged"} }))
		time.Sleep(time.Minute)
		assert.Zero(t, s.last.Load())
		require.NoError(t, pause.ResumeGroup(t.Context(), s.conn, "orders"))
		time.Sleep(3 * time.Second)
		assert.NotZero(t, s.last.Load())
		require.NoError(t, w.Leave())
	})
}

// A handler that waits for a place among the running ones when its worker is paused doesn't begin, nor one that counts as poison.
func TestAPausedWorkerStartsNoHandlerThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 2}
		s := newScene(t, g, 1)
		var begun atomic.Int64
		release := make(chan struct{})
		h := pause.With(pause.Config{})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			begun.Add(1)
			<-release
			return nil
		}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- partition.Consume(ctx, s.conn, g, h, partition.Config{Concurrency: 1, Retry: retry.Policy{MaxRetries: 1}})
		}()
		for i := range 40 {
			s.put(t, fmt.Sprint("key", i), "m")
		}
		time.Sleep(5 * time.Second)
		require.EqualValues(t, 1, begun.Load())
		require.NoError(t, pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{}))
		time.Sleep(2 * time.Second)
		close(release)
		time.Sleep(time.Minute)
		assert.EqualValues(t, 1, begun.Load())
		require.NoError(t, pause.ResumeGroup(t.Context(), s.conn, "orders"))
		time.Sleep(5 * time.Second)
		assert.EqualValues(t, 40, begun.Load())
		cancel()
		require.NoError(t, <-done)
	})
}

func TestPausesOfGroupsAreChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 2}
		s := newScene(t, g, 1)
		err := pause.Pause(t.Context(), s.conn, g.Queues()[0], pause.PauseConfig{})
		require.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, "PauseGroup")
		for _, err := range []error{pause.PauseGroup(t.Context(), s.conn, "none", pause.PauseConfig{}), pause.ResumeGroup(t.Context(), s.conn, "none")} {
			require.ErrorIs(t, err, declare.ErrNotFound)
		}
		_, _, err = pause.OfGroup(t.Context(), s.conn, "none")
		require.ErrorIs(t, err, declare.ErrNotFound)
		for name, err := range map[string]error{
			"conn": pause.PauseGroup(t.Context(), nil, "orders", pause.PauseConfig{}), "group": pause.ResumeGroup(t.Context(), s.conn, ""),
			"PauseConfig.For": pause.PauseGroup(t.Context(), s.conn, "orders", pause.PauseConfig{For: -1}),
		} {
			require.ErrorAs(t, err, new(*argument.Error), name)
			assert.ErrorContains(t, err, name)
		}
		require.NoError(t, pause.ResumeGroup(t.Context(), s.conn, "orders"), "it isn't paused")
	})
}
