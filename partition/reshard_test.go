package partition_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/dev/partitionrig"
	"github.com/hopback/hopback/partition"
)

// A group moves from 16 to 24 partitions while 2,000 messages a second are published, and a worker
// of each generation crashes.
func TestReshardingKeepsTheOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := partition.Group{Name: "orders", Partitions: 16}
		to := partition.Group{Name: "orders", Partitions: 24, Generation: 2}
		s := newScene(t, from, 500)
		s.Handle = time.Millisecond
		next := *s
		next.Rig = &partitionrig.Rig{
			URL: s.URL, Dial: s.Dial, Group: to, Check: partitionrig.NewCheck(1, 24), Handle: s.Handle, Logger: quiet, Config: s.Config, Order: s.Check,
		}
		var old, young []*partitionrig.Worker
		for i := range 3 {
			old = append(old, s.start(t, fmt.Sprint("old", i)))
		}
		publishing, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			for key := 0; publishing.Err() == nil; key++ {
				batch := make([]int, 20)
				for i := range batch {
					batch[i] = (key*7 + i*13) % 500
				}
				assert.NoError(t, s.publisher.Publish(context.WithoutCancel(publishing), batch...))
				time.Sleep(10 * time.Millisecond)
			}
		}()
		time.Sleep(5 * time.Second)
		apply(t, s.conn, to)
		for i := range 3 {
			young = append(young, next.start(t, fmt.Sprint("young", i)))
		}
		time.Sleep(5 * time.Second)
		assert.Empty(t, next.Check.Shares()["young0"], "they wait")
		go func() {
			time.Sleep(100 * time.Millisecond)
			old[0].Kill()
		}()
		finished := 0
		require.NoError(t, partition.Reshard(t.Context(), s.conn, from, to, partition.ReshardConfig{Progress: func(n, _ int) { finished = n }}))
		assert.Equal(t, 16, finished)
		require.NoError(t, partition.Reshard(t.Context(), s.conn, from, to, partition.ReshardConfig{}), "once more")
		time.Sleep(5 * time.Second)
		young[0].Kill()
		stop()
		<-done
		s.completed(t)
		for _, w := range append(old[1:], young[1:]...) {
			require.NoError(t, w.Leave())
		}
		s.right(t)
		assert.Zero(t, next.Check.Report().DoubleOwned)
		assert.NotEmpty(t, next.Check.Report().Moves)

		topology, err := from.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: declare.Unlimited})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
		require.ErrorIs(t, err, declare.ErrConflict, "the old generation can't come back")
	})
}

func TestReshardRefusesWrongGenerations(t *testing.T) {
	t.Parallel()
	require.Error(t, partition.Reshard(t.Context(), nil, partition.Group{}, partition.Group{}, partition.ReshardConfig{}))
}
