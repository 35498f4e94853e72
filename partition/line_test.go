package partition_test

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/partition"
)

// inLine is how many of the workers are in line for each partition.
func (s *scene) inLine(workers []*partitionrig.Worker) []int {
	count := map[string]int{}
	for _, w := range workers {
		for _, c := range w.Conn().Stats().Consumers {
			count[c.Queue]++
		}
	}
	var all []int
	for _, q := range s.Group.Queues() {
		all = append(all, count[q])
	}
	return all
}

// The owner of a partition and two standbys are in line for it, or all workers if there are fewer.
func TestThreeWorkersAreInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const partitions = 16
		s := newScene(t, partition.Group{Name: "orders", Partitions: partitions}, 100)
		var workers []*partitionrig.Worker
		check := func() {
			t.Helper()
			time.Sleep(10 * time.Second)
			assert.Equal(t, slices.Repeat([]int{min(len(workers), 3)}, partitions), s.inLine(workers), "%d workers", len(workers))
			shares := slices.Sorted(maps.Values(s.Check.Shares()))
			assert.LessOrEqual(t, shares[len(shares)-1]-shares[0], 1, "%v", shares)
			assert.Len(t, shares, len(workers))
		}
		for n := range 12 {
			workers = append(workers, s.start(t, fmt.Sprint("w", n)))
			if n < 4 || n == 11 {
				check()
			}
		}
		moves := s.Check.Report().Moves
		time.Sleep(time.Minute)
		assert.Equal(t, moves, s.Check.Report().Moves, "nothing moves without a reason")
		for len(workers) > 1 {
			w := workers[0]
			workers = workers[1:]
			if len(workers)%2 == 0 {
				w.Kill()
			} else {
				require.NoError(t, w.Leave())
			}
			if len(workers) < 4 || len(workers) == 10 {
				check()
			}
		}
		require.NoError(t, workers[0].Leave())
		s.right(t)
	})
}

// Most workers crash at once, so some partitions lose all that are in line for them. Those that are
// left notice it when they hear no more of the others.
func TestALineThatIsLostAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, partition.Group{Name: "orders", Partitions: 16}, 100)
		var workers []*partitionrig.Worker
		for n := range 8 {
			workers = append(workers, s.start(t, fmt.Sprint("w", n)))
		}
		time.Sleep(10 * time.Second)
		for key := range 100 {
			require.NoError(t, s.publisher.Publish(t.Context(), key, key, key))
		}
		require.Contains(t, s.inLine(workers[:2]), 0, "no partition will lose its line: the test shows nothing")
		for _, w := range workers[2:] {
			w.Kill()
		}
		time.Sleep(5 * time.Second)
		assert.Equal(t, map[string]int{"w0": 8, "w1": 8}, s.Check.Shares())
		s.completed(t)
		for _, w := range workers[:2] {
			require.NoError(t, w.Leave())
		}
		s.right(t)
	})
}

// A worker that may not consume from a partition doesn't start. One that has started, and has to
// take over a partition that it may not consume from, tries again, and handles the others.
func TestAWorkerMayNotConsumeFromAPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const all = `^orders\.`
		g := partition.Group{Name: "orders", Partitions: 8}
		s := newScene(t, g, 100)
		s.broker.AddUser("worker", "secret")
		allow := func(read string) {
			require.NoError(t, s.broker.SetPermissions("worker", "/", all, all, read))
		}
		u, err := url.Parse(s.URL)
		require.NoError(t, err)
		u.User = url.UserPassword("worker", "secret")
		ours := &partitionrig.Rig{URL: u.String(), Dial: s.Dial, Group: g, Check: s.Check, Handle: s.Handle, Logger: quiet, Config: s.Config}
		allow(`^orders\.1\.(members|00[0-6])`)
		conn, err := client.Connect(t.Context(), ours.URL, client.Config{Dial: s.broker.Dial, Logger: quiet})
		require.NoError(t, err)
		err = partition.Consume(t.Context(), conn, g, client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), partition.Config{Worker: "refused"})
		require.ErrorIs(t, err, client.ErrUnauthorized)
		require.ErrorContains(t, err, "orders.1.007")
		require.NoError(t, conn.Close(t.Context()))

		var others []*partitionrig.Worker
		for n := range 7 {
			others = append(others, s.start(t, fmt.Sprint("w", n)))
		}
		allow(all)
		last, err := ours.Start(t.Context(), "last")
		require.NoError(t, err)
		time.Sleep(10 * time.Second)
		had := s.Check.Shares()["last"]
		require.Equal(t, 1, had)
		allow(`^orders\.1\.members`)
		for _, w := range others {
			require.NoError(t, w.Leave())
		}
		time.Sleep(10 * time.Second)
		assert.Less(t, s.Check.Shares()["last"], g.Partitions)
		for key := range 100 {
			require.NoError(t, s.publisher.Publish(t.Context(), key))
		}
		allow(all)
		s.completed(t)
		time.Sleep(2 * time.Second)
		assert.Equal(t, map[string]int{"last": g.Partitions}, s.Check.Shares())
		require.NoError(t, last.Leave())
		s.right(t)
	})
}
