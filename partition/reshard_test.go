package partition_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/integration/partitionrig"
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

// Workers of the next generation may wait for Reshard for as long as they like, without a warning.
func TestWorkersWaitForReshardQuietly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		var log syncBuffer
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
		require.NoError(t, err)
		from, to := partition.Group{Name: "orders", Partitions: 2}, partition.Group{Name: "orders", Partitions: 3, Generation: 2}
		ctx, stop := context.WithCancel(t.Context())
		var working sync.WaitGroup
		for _, g := range []partition.Group{from, to} {
			apply(t, conn, g)
			working.Go(func() {
				assert.NoError(t, partition.Consume(ctx, conn, g, client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), partition.Config{}))
			})
		}
		time.Sleep(time.Hour)
		require.NoError(t, partition.Reshard(t.Context(), conn, from, to, partition.ReshardConfig{}))
		time.Sleep(time.Minute)
		stop()
		working.Wait()
		require.NoError(t, conn.Close(t.Context()))
		assert.Empty(t, strings.Count(log.String(), "level=WARN"), "%.500s", log.String())
	})
}

func TestReshardRefusesWrongGenerations(t *testing.T) {
	t.Parallel()
	require.Error(t, partition.Reshard(t.Context(), nil, partition.Group{}, partition.Group{}, partition.ReshardConfig{}))
}

// A Reshard is killed after each of its writes to the broker, and called again, while a key is in hand
// and another team's queue is bound to the group. No message is lost, and the order of each key is kept.
// The same goes for a group that was declared before the exchange Name.now existed.
func TestReshardCanBeKilledAtEveryStep(t *testing.T) {
	for _, before := range []bool{false, true} {
		steps, ended, stride := 0, false, 1
		if explore.UnderRace {
			stride = 4
		}
		for ; !ended; steps += stride {
			require.Less(t, steps, 500)
			synctest.Test(t, func(t *testing.T) { ended = killReshard(t, steps+1, before) })
		}
		t.Log(steps, "steps")
		assert.Greater(t, steps, 30)
	}
}

// killReshard kills a Reshard at its nth write, and reports whether it ended before that.
func killReshard(t *testing.T, n int, before bool) (ended bool) {
	from := partition.Group{Name: "orders", Partitions: 3}
	to := partition.Group{Name: "orders", Partitions: 4, Generation: 2}
	s := newScene(t, from, 20)
	foreign := declare.Topology{
		Queues:   []declare.Queue{declare.QuorumQueue{Name: "audit", DeadLetter: declare.Drop()}},
		Bindings: []declare.Binding{{Source: "orders", Queue: "audit"}},
	}
	if before {
		require.NoError(t, declare.DeleteExchange(t.Context(), s.conn.Management(), "orders.now"))
		foreign.Bindings = append(foreign.Bindings, declare.Binding{Source: "orders", Exchange: "orders.1"})
	}
	_, err := declare.Apply(t.Context(), s.conn.Management(), foreign)
	require.NoError(t, err)
	next := *s
	next.Rig = &partitionrig.Rig{
		URL: s.URL, Dial: s.Dial, Group: to, Check: partitionrig.NewCheck(1, 4), Handle: s.Handle, Logger: quiet, Config: s.Config, Order: s.Check,
	}
	var fixed atomic.Bool
	for _, rig := range []*partitionrig.Rig{s.Rig, next.Rig} {
		rig.Failing, rig.Fails = 1, func(key int) bool { return key == 0 && !fixed.Load() }
	}
	old := s.start(t, "old")
	apply(t, s.conn, to)
	young := next.start(t, "young")
	publishing, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for publishing.Err() == nil {
			for key := range 20 {
				assert.NoError(t, s.publisher.Publish(context.WithoutCancel(publishing), key))
			}
			time.Sleep(2 * time.Second)
		}
	}()
	time.Sleep(2 * time.Second)
	time.AfterFunc(30*time.Second, func() { fixed.Store(true) })

	killed, kill := context.WithCancel(t.Context())
	defer kill()
	var writes atomic.Int64
	conn, err := client.Connect(t.Context(), s.URL, client.Config{Logger: quiet, Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		if killed.Err() != nil {
			return nil, errors.New("killed")
		}
		c, err := s.Dial(ctx, network, address)
		return &counted{Conn: c, wrote: func() bool {
			nth := writes.Add(1)
			if nth == int64(n) {
				kill()
			}
			return nth < int64(n)
		}}, err
	}})
	if err == nil {
		err = partition.Reshard(killed, conn, from, to, partition.ReshardConfig{Late: time.Second})
		_ = conn.Close(killed)
	}
	ended = err == nil
	kill()
	time.Sleep(5 * time.Second)
	require.NoError(t, partition.Reshard(t.Context(), s.conn, from, to, partition.ReshardConfig{Late: time.Second}), "after %d writes", n)
	stop()
	<-done
	s.completed(t)
	require.NoError(t, old.Leave())
	require.NoError(t, young.Leave())
	s.right(t)
	return ended
}

// counted is a connection that ends when wrote returns false.
type counted struct {
	net.Conn
	wrote func() bool
}

func (c *counted) Write(b []byte) (int, error) {
	if !c.wrote() {
		_ = c.Conn.Close()
		return 0, net.ErrClosed
	}
	return c.Conn.Write(b)
}
