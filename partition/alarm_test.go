package partition_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/partition"
)

// Workers that start during an alarm handle what waits, in its order, although they can't hear each
// other. When it is over, they share the partitions.
func TestWorkersStartDuringAnAlarm(t *testing.T) {
	for _, crash := range []bool{false, true} {
		t.Run(fmt.Sprint("crash ", crash), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, partition.Group{Name: "orders", Partitions: 6, Window: 20}, 30)
				for range 10 {
					for key := range 30 {
						require.NoError(t, s.publisher.Publish(t.Context(), key))
					}
				}
				s.broker.SetMemoryAlarm(true)
				var workers []*partitionrig.Worker
				for i := range 3 {
					workers = append(workers, s.start(t, fmt.Sprint("w", i)))
				}
				if crash {
					time.Sleep(1100 * time.Millisecond)
					for owner := range s.Check.Shares() { // any that has partitions
						for _, w := range workers {
							if w.Name == owner {
								w.Kill()
							}
						}
						break
					}
				}
				time.Sleep(30 * time.Second)
				assert.Zero(t, s.Check.Left(), "%v", s.Check.Report())
				s.broker.SetMemoryAlarm(false)
				time.Sleep(time.Minute)
				t.Log(s.Check.Shares())
				if !crash {
					assert.ElementsMatch(t, []int{2, 2, 2}, values(s.Check.Shares()))
				}
				for key := range 30 {
					require.NoError(t, s.publisher.Publish(t.Context(), key))
				}
				s.completed(t)
				for _, w := range workers {
					_ = w.Leave()
				}
				s.right(t)
			})
		})
	}
}

// A worker whose group has another window than the queues is found out after the alarm.
func TestAWorkerOfAnotherGroupStopsAfterAnAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, partition.Group{Name: "orders", Partitions: 2, Window: 20}, 2)
		s.broker.SetMemoryAlarm(true)
		s.Group.Window = 10
		w := s.start(t, "w")
		time.Sleep(time.Minute)
		select {
		case <-w.Done():
			t.Error("it ended during the alarm", w.Err())
		default:
		}
		s.broker.SetMemoryAlarm(false)
		<-w.Done()
		require.ErrorIs(t, w.Err(), partition.ErrWrongGroup)
		require.ErrorIs(t, w.Leave(), partition.ErrWrongGroup)
	})
}

// A later generation waits for the end of the alarm, because which messages belong to the one before can
// only be read with requests. It says so, and the service counts as ready.
func TestALaterGenerationWaitsForTheEndOfAnAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first := partition.Group{Name: "orders", Partitions: 2, Window: 20}
		s := newScene(t, first, 10)
		w := s.start(t, "first")
		time.Sleep(5 * time.Second)
		second := partition.Group{Name: "orders", Partitions: 2, Window: 20, Generation: 2}
		apply(t, s.conn, second)
		require.NoError(t, partition.Reshard(t.Context(), s.conn, first, second, partition.ReshardConfig{}))
		require.NoError(t, w.Leave())
		for key := range 10 {
			require.NoError(t, s.publisher.Publish(t.Context(), key))
		}
		s.broker.SetMemoryAlarm(true)
		var log syncBuffer
		s.Group, s.Logger = second, slog.New(slog.NewTextHandler(&log, nil))
		w = s.start(t, "second")
		time.Sleep(time.Minute)
		assert.Equal(t, 10, s.Check.Left())
		r, err := health.Check(health.Config{}, w.Conn())
		require.NoError(t, err)
		assert.True(t, r.Ready, "%+v", r.Problems)
		require.Len(t, r.Problems, 1)
		assert.Equal(t, "blocked", r.Problems[0].Kind)
		assert.Contains(t, log.String(), "consumers can't start yet")
		assert.Contains(t, log.String(), "alarm")
		s.broker.SetMemoryAlarm(false)
		s.completed(t)
		require.NoError(t, w.Leave())
		s.right(t)
	})
}

// In an alarm that lasts for a day, a worker that hears nobody says so about once an hour.
func TestAnAlarmOfADayIsFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		var log syncBuffer
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		require.NoError(t, err)
		g := partition.Group{Name: "orders", Partitions: 1}
		apply(t, conn, g)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- partition.Consume(ctx, conn, g, client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), partition.Config{})
		}()
		time.Sleep(time.Minute)
		broker.SetMemoryAlarm(true)
		time.Sleep(24 * time.Hour)
		broker.SetMemoryAlarm(false)
		time.Sleep(time.Minute)
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close(t.Context()))
		for _, line := range []string{"no beat of the group's workers", "a queue for the beats of the group's workers can't be declared"} {
			n := strings.Count(log.String(), line)
			assert.GreaterOrEqual(t, n, 24, line)
			assert.Less(t, n, 40, line)
		}
	})
}
