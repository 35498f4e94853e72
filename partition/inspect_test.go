package partition_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/partition"
)

// owners counts the partitions of each owner.
func owners(t *testing.T, s *scene, g partition.Group) map[string]int {
	states, err := partition.Inspect(t.Context(), s.conn, g)
	require.NoError(t, err)
	shares := map[string]int{}
	for i, state := range states {
		assert.Equal(t, i, state.Partition)
		assert.Equal(t, g.Queues()[i], state.Queue)
		shares[state.Owner]++
	}
	return shares
}

// Anybody can ask who has which partition, and how many messages wait. The counts of a worker's
// Conn and its health name its own.
func TestInspectNamesTheOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 8}
		s := newScene(t, g, 100)
		assert.Equal(t, map[string]int{"": 8}, owners(t, s, g), "nobody is there")
		for key := range 100 {
			require.NoError(t, s.publisher.Publish(t.Context(), key))
		}
		states, err := partition.Inspect(t.Context(), s.conn, g)
		require.NoError(t, err)
		waiting := 0
		for _, state := range states {
			waiting += int(state.Waiting)
		}
		assert.Equal(t, 100, waiting)

		first, second := s.start(t, "w1"), s.start(t, "w2")
		time.Sleep(5 * time.Second)
		asked := time.Now()
		assert.Equal(t, map[string]int{"w1": 4, "w2": 4}, owners(t, s, g))
		assert.Less(t, time.Since(asked), time.Second, "they answer at once")
		states, err = partition.Inspect(t.Context(), s.conn, g)
		require.NoError(t, err)
		for _, state := range states {
			assert.Zero(t, state.Waiting)
		}
		for _, w := range []*partitionrig.Worker{first, second} {
			mine, others := 0, 0
			for _, c := range w.Conn().Stats().Consumers {
				switch {
				case c.Owner:
					assert.True(t, c.Partition)
					mine++
				case c.Partition:
					others++
				}
			}
			assert.Equal(t, []int{4, 4}, []int{mine, others})
			report, err := health.Check(health.Config{}, w.Conn())
			require.NoError(t, err)
			mine = 0
			for _, c := range report.Consumers {
				if c.Owner != nil && *c.Owner {
					mine++
				}
			}
			assert.Equal(t, 4, mine)
			assert.True(t, report.Ready, "a partition of another worker is no problem: %v", report.Problems)
		}
		require.NoError(t, first.Leave())
		assert.Equal(t, map[string]int{"w2": 8}, owners(t, s, g))
		require.NoError(t, second.Leave())
		s.right(t)
	})
}

// Find returns the generation in use and the one that waits, also after the old queues are gone.
func TestFindReadsTheGenerations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 2, Window: 10}
		s := newScene(t, g, 1)
		find := func() (now, next partition.Group) {
			now, next, err := partition.Find(t.Context(), s.conn, "orders")
			require.NoError(t, err)
			return now, next
		}
		now, next := find()
		assert.Equal(t, partition.Group{Name: "orders", Partitions: 2, Window: 10, Generation: 1}, now)
		assert.Zero(t, next)
		second := partition.Group{Name: "orders", Partitions: 3, Window: 20, Generation: 2}
		apply(t, s.conn, second)
		now, next = find()
		assert.Equal(t, 1, now.Generation)
		assert.Equal(t, second, next)

		w := s.start(t, "w1")
		require.NoError(t, partition.Reshard(t.Context(), s.conn, now, next, partition.ReshardConfig{}))
		require.NoError(t, w.Leave())
		now, next = find()
		assert.Equal(t, second, now)
		assert.Zero(t, next)
		for _, q := range g.Queues() {
			_, err := declare.DeleteQueue(t.Context(), s.conn.Management(), q)
			require.NoError(t, err)
		}
		now, _ = find()
		assert.Equal(t, second, now)

		_, _, err := partition.Find(t.Context(), s.conn, "none")
		require.ErrorIs(t, err, declare.ErrNotFound)
		_, err = declare.Apply(t.Context(), s.conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "other.1.000", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		_, _, err = partition.Find(t.Context(), s.conn, "other")
		require.ErrorIs(t, err, partition.ErrWrongGroup)
		for _, name := range []string{"", "a\nb"} {
			_, _, err = partition.Find(t.Context(), s.conn, name)
			require.ErrorAs(t, err, new(*argument.Error))
		}
		_, _, err = partition.Find(t.Context(), nil, "orders")
		require.ErrorAs(t, err, new(*argument.Error))
		_, err = partition.Inspect(t.Context(), nil, g)
		require.ErrorAs(t, err, new(*argument.Error))
		_, err = partition.Inspect(t.Context(), s.conn, partition.Group{})
		require.ErrorAs(t, err, new(*argument.Error))
		_, err = partition.Inspect(t.Context(), s.conn, g)
		require.ErrorIs(t, err, declare.ErrNotFound)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = partition.Inspect(ctx, s.conn, second)
		require.Error(t, err)
	})
}
