package partition_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// A replay puts dead letters at the end of their partition: behind what waits there, also behind
// a later message of their key that is waiting for its retry. Among each other they keep their
// order. After a Reshard, a replay to the exchange reaches the new partitions.
func TestReplayedMessagesComeLastAndInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: 2}
		s := newScene(t, g, 1)
		var broken atomic.Bool
		broken.Store(true)
		f := &failing{n: map[string]int{}, fail: func(text string, call int) error {
			switch {
			case broken.Load() && text < "a3":
				return retry.Permanent(errors.New("no such product"))
			case text == "a3" && call < 3:
				return errors.New("busy")
			}
			return nil
		}}
		cfg := partition.Config{Retry: retry.Policy{Backoff: retry.Exponential(time.Minute, 1)}}
		stop := f.run(t, s, g, cfg)
		s.put(t, "a", "a1", "a2", "a3", "a4")
		time.Sleep(30 * time.Second)
		assert.Empty(t, f.order(), "a3 waits, and a4 behind it")
		require.Len(t, s.broker.Queue("dead").Messages(), 2)
		broken.Store(false)
		d, err := desk.New(s.conn, desk.Config{})
		require.NoError(t, err)
		report, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "dead", All: true})
		require.NoError(t, err)
		assert.EqualValues(t, 2, report.Replayed)
		time.Sleep(10 * time.Minute)
		assert.Equal(t, []string{"a3", "a4", "a1", "a2"}, f.order())

		broken.Store(true)
		s.put(t, "a", "a1", "a2")
		time.Sleep(time.Minute)
		require.Len(t, s.broker.Queue("dead").Messages(), 2)
		broken.Store(false)
		next := partition.Group{Name: "orders", Partitions: 3, Generation: 2}
		apply(t, s.conn, next)
		require.NoError(t, partition.Reshard(t.Context(), s.conn, g, next, partition.ReshardConfig{}))
		stop()
		young := &failing{n: map[string]int{}, fail: func(string, int) error { return nil }}
		stop = young.run(t, s, next, cfg)
		report, err = d.Replay(t.Context(), desk.ReplayConfig{Queue: "dead", All: true, ToExchange: true})
		require.NoError(t, err)
		assert.EqualValues(t, 2, report.Replayed)
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"a1", "a2"}, young.order())
		stop()
	})
}
