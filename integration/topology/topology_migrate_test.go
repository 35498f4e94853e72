package topology_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/migrate"
)

// A queue is moved with 10,000 messages in it, while publishers go on and consumers
// of the old and of the new queue take messages: none is lost. HOPBACK_LONG=1 makes
// it 100,000, which takes a minute or two.
func TestMigrateMovesALiveQueueWithoutLoss(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		before, during := int64(9_000), int64(1_000)
		if os.Getenv("HOPBACK_LONG") != "" {
			before, during = 90_000, 10_000
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}},
			Queues:    []declare.Queue{declare.ClassicQueue{Name: "orders", DeadLetter: declare.Drop(), Version: 2}},
			Bindings:  []declare.Binding{{Source: "shop", Queue: "orders", Key: "order.#"}},
		})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		p := suite.Publisher[int](t, conn, address.Exchange("shop", "order.placed"))
		var next atomic.Int64
		publishUpTo := func(n int64) *sync.WaitGroup {
			var wg sync.WaitGroup
			for range 200 {
				wg.Go(func() {
					for {
						id := next.Add(1) - 1
						if id >= n {
							next.Add(-1)
							return
						}
						if !assert.NoError(t, p.Publish(ctx, int(id))) {
							return
						}
					}
				})
			}
			return &wg
		}
		publishUpTo(before).Wait()

		var mu sync.Mutex
		seen := make([]int, before+during)
		count := func(ctx context.Context, id int) error {
			mu.Lock()
			seen[id]++
			mu.Unlock()
			return nil
		}
		began := time.Now()
		stopOld := suite.Consume(t, conn, "orders", client.JSON(func(ctx context.Context, id int) error {
			// One in a hundred takes its time, and so is held while the queue moves.
			if id%100 == 0 {
				select {
				case <-time.After(20 * time.Millisecond):
				case <-ctx.Done():
				}
			}
			return count(ctx, id)
		}), client.ConsumerConfig{Prefetch: 10})
		publishing := publishUpTo(before + during)

		var report1 migrate.Report
		migrated, api := make(chan error, 1), s.API(t)
		go func() {
			var err error
			report1, err = migrate.Run(ctx, conn, api, migrate.Config{
				Old: "orders", New: declare.QuorumQueue{Name: "orders.v2", DeliveryLimit: 5, DeadLetter: declare.Drop()},
			})
			migrated <- err
		}()
		suite.Poll(t, "the new queue is there", func() bool {
			_, err := declare.Inspect(ctx, conn.Management(), "orders.v2")
			return err == nil
		})
		suite.Consume(t, conn, "orders.v2", client.JSON(count), client.ConsumerConfig{Concurrency: 10, Prefetch: 1000})
		publishing.Wait()
		require.NoError(t, stopOld(), "the last consumer of the old queue goes")
		select {
		case err := <-migrated:
			require.NoError(t, err)
		case <-ctx.Done():
			require.FailNow(t, "the migration doesn't end")
		}
		assert.True(t, report1.Deleted)
		assert.Equal(t, 1, report1.Bindings)
		_, err := declare.Inspect(ctx, conn.Management(), "orders")
		require.ErrorIs(t, err, declare.ErrNotFound)

		lost, twice := 0, 0
		suite.Poll(t, "everything is handled", func() bool {
			mu.Lock()
			defer mu.Unlock()
			lost, twice = 0, 0
			for _, n := range seen {
				if n == 0 {
					lost++
				} else {
					twice += n - 1
				}
			}
			return lost == 0
		})
		assert.Zero(t, lost)
		suite.Report(t, s, "%d messages, %d of them moved, lost %d, duplicated %d, in %v", before+during, report1.Moved, lost, twice, time.Since(began).Round(time.Millisecond))
	})
}

// A move that ends half way is taken up again; one that is over is success.
func TestMigrateCanBeRunAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{
			Queues:   []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}},
			Bindings: []declare.Binding{{Source: "amq.topic", Queue: "orders", Key: "#"}, {Source: "amq.headers", Queue: "orders", Match: declare.MatchAny, Headers: map[string]any{"a": 1}}},
		})
		p := suite.Publisher[int](t, conn, address.Queue("orders"))
		for i := range 100 {
			suite.Publish(t, p, i)
		}
		cfg := migrate.Config{Old: "orders", New: declare.QuorumQueue{Name: "new", DeadLetter: declare.Drop(), DeliveryLimit: 3}, Quiet: 3 * time.Second}
		ended, api := errors.New("the operator had enough"), s.API(t)
		newQueue := func() (declare.QueueInfo, error) { return declare.Inspect(t.Context(), conn.Management(), "new") }
		for step, reached := range map[string]func() bool{
			"at once":               func() bool { return true },
			"declared":              func() bool { _, err := newQueue(); return err == nil },
			"unbound":               func() bool { return len(oldBindings(t, s)) == 0 },
			"messages on their way": func() bool { info, err := newQueue(); return err == nil && info.Messages > 0 },
		} {
			ctx, cancel := context.WithCancelCause(t.Context())
			done := make(chan error, 1)
			go func() {
				_, err := migrate.Run(ctx, conn, api, cfg)
				done <- err
			}()
			suite.Poll(t, step, reached)
			cancel(ended)
			require.Error(t, suite.Await(t, done, step), step)
		}
		report, err := migrate.Run(t.Context(), conn, s.API(t), cfg)
		require.NoError(t, err)
		assert.True(t, report.Deleted)
		assert.GreaterOrEqual(t, suite.Ready(t, conn, "new"), 100)
		v, err := check.Read(t.Context(), s.Sources(t, conn), declare.Topology{})
		require.NoError(t, err)
		require.Len(t, v.Bindings, 2)
		assert.Equal(t, "new", v.Bindings[0].Queue)
		assert.Equal(t, "new", v.Bindings[1].Queue)

		report, err = migrate.Run(t.Context(), conn, s.API(t), cfg)
		require.NoError(t, err)
		assert.Equal(t, migrate.Report{Deleted: true}, report)
	})
}

// oldBindings are those of the queue that is moved.
func oldBindings(t *testing.T, s *suite.Site) []declare.Binding {
	t.Helper()
	snapshot, err := check.Read(t.Context(), check.Sources{HTTP: s.API(t)}, declare.Topology{})
	require.NoError(t, err)
	return slices.DeleteFunc(snapshot.Bindings, func(b declare.Binding) bool { return b.Queue != "orders" })
}

// Deletion with guards: what is in use stays.
func TestDeleteOnlyWhatIsEmptyAndUnused(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		src := s.Sources(t, conn)
		shop := declare.Topology{Exchanges: []declare.Exchange{{Name: "shop"}}}
		suite.Apply(t, conn, declare.Topology{
			Exchanges: shop.Exchanges,
			Queues:    []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}},
			Bindings:  []declare.Binding{{Source: "shop", Queue: "orders", Key: "k"}},
		})
		suite.Publish(t, suite.Publisher[int](t, conn, address.Queue("orders")), 1)
		_, err := audit.DeleteQueueIf(t.Context(), src, "orders", audit.DeleteCondition{Empty: true})
		require.ErrorIs(t, err, declare.ErrInUse)
		assert.ErrorContains(t, err, "it contains 1 ready message;")
		_, err = declare.Purge(t.Context(), conn.Management(), "orders")
		require.NoError(t, err)
		_, err = audit.DeleteQueueIf(t.Context(), src, "orders", audit.DeleteCondition{Unused: true})
		require.ErrorIs(t, err, declare.ErrInUse)
		assert.ErrorContains(t, err, `the exchange "shop" is bound to it`)
		_, err = audit.DeleteUnused(t.Context(), src, shop)
		require.ErrorIs(t, err, declare.ErrInUse)

		stop := suite.Consume(t, conn, "orders", client.JSON(func(context.Context, int) error { return nil }), client.ConsumerConfig{})
		suite.AwaitConsumers(t, conn, "orders", 1)
		_, err = audit.DeleteQueueIf(t.Context(), check.Sources{AMQP: conn.Management()}, "orders", audit.DeleteCondition{Empty: true, Unused: true})
		require.ErrorIs(t, err, declare.ErrInUse)
		assert.ErrorContains(t, err, "it has 1 consumer;")
		require.NoError(t, stop())
		suite.AwaitConsumers(t, conn, "orders", 0)

		require.NoError(t, declare.DeleteBinding(t.Context(), conn.Management(), declare.Binding{Source: "shop", Queue: "orders", Key: "k"}))
		_, err = audit.DeleteUnused(t.Context(), src, shop)
		require.NoError(t, err)
		suite.Poll(t, "it is deleted once the counts say that nothing holds it", func() bool {
			_, err := audit.DeleteQueueIf(t.Context(), src, "orders", audit.DeleteCondition{Empty: true, Unused: true})
			return err == nil
		})
		_, err = audit.DeleteQueueIf(t.Context(), src, "orders", audit.DeleteCondition{Empty: true, Unused: true})
		require.NoError(t, err, "what isn't there is no error")
		_, err = audit.DeleteUnused(t.Context(), check.Sources{AMQP: conn.Management()}, shop)
		require.ErrorContains(t, err, "HTTP API")
	})
}
