package partition_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

var handovers = flag.Int("partition.handovers", 100, "handovers of TestNoHandoverLeavesAPartitionBehind")

// A worker gives up partitions in seven ways, again and again, while it holds messages and others
// wait. Each time all partitions have an owner again, and no message is stuck with one that is
// gone.
func TestNoHandoverLeavesAPartitionBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, partition.Group{Name: "orders", Partitions: 8}, 100)
		n := 0
		start := func() *partitionrig.Worker {
			n++
			return s.start(t, fmt.Sprint("w", n))
		}
		workers := []*partitionrig.Worker{start(), start(), start()}
		ways := []struct {
			name string
			do   func(w *partitionrig.Worker)
			gone bool
		}{
			{"it leaves", func(w *partitionrig.Worker) { require.NoError(t, w.Leave()) }, true},
			{"it crashes", (*partitionrig.Worker).Kill, true},
			{"its connections are cut", (*partitionrig.Worker).Cut, false},
			{"its Conn is closed", func(w *partitionrig.Worker) {
				require.NoError(t, w.Conn().Close(t.Context()))
				<-w.Done()
			}, true},
			{"its network goes silent", func(w *partitionrig.Worker) {
				s.Check.Cut(w.Name)
				for _, c := range s.broker.Connections() {
					if c.Info().Container == w.Name {
						c.Silence(hopbacktest.DirectionFromClient)
						c.Silence(hopbacktest.DirectionToClient)
					}
				}
			}, false},
			{"the broker restarts", func(*partitionrig.Worker) {
				s.broker.Stop()
				s.broker.Restart()
			}, false},
			{"another worker joins", func(*partitionrig.Worker) { workers = append(workers, start()) }, false},
		}
		for i := 0; s.Check.Report().Moves < *handovers; i++ {
			way := ways[i%len(ways)]
			for range 3 {
				for key := range 100 {
					require.NoError(t, s.publisher.Publish(t.Context(), key))
				}
			}
			w := workers[0]
			workers = workers[1:]
			way.do(w)
			if !way.gone {
				workers = append(workers, w)
			} else if len(workers) < 3 {
				workers = append(workers, start())
			}
			deadline := time.Now().Add(10 * time.Minute)
			for s.Check.Left() > 0 || s.Check.Shares()[""] > 0 {
				require.True(t, time.Now().Before(deadline), "%d: %s: %v, %v", i, way.name, s.Check.Shares(), s.Check.Report())
				time.Sleep(100 * time.Millisecond)
			}
		}
		for _, w := range workers {
			assert.NoError(t, w.Leave())
		}
		s.right(t)
	})
}

// A worker whose Conn is closed without patience, and then cut at any frame, returns what it holds
// in its order. There is credit left, so the broker would deliver to it again what it returns one
// by one.
func TestAHurriedWorkerKeepsTheOrder(t *testing.T) {
	for frame := range 6 {
		synctest.Test(t, func(t *testing.T) {
			g := partition.Group{Name: "orders", Partitions: 1}
			s := newScene(t, g, 1)
			conn, err := client.Connect(t.Context(), s.URL, client.Config{Name: "hurried", Dial: s.Dial, Logger: quiet})
			require.NoError(t, err)
			var texts []string
			for i := range 40 {
				texts = append(texts, fmt.Sprintf("a%02d", i))
			}
			s.put(t, "a", texts...)
			done := make(chan error)
			go func() {
				done <- partition.Consume(t.Context(), conn, g, client.HandlerFunc(func(context.Context, *client.Delivery) error {
					return errors.New("busy")
				}), partition.Config{Retry: retry.Policy{Backoff: retry.Exponential(time.Minute, 1)}})
			}()
			time.Sleep(5*time.Second + time.Millisecond)
			for _, c := range s.broker.Connections() {
				if c.Info().Container == "hurried" {
					c.CutAfter(hopbacktest.DirectionFromClient, frame+1)
				}
			}
			expired, cancel := context.WithCancel(t.Context())
			cancel()
			_ = conn.Close(expired)
			<-done
			f := &failing{n: map[string]int{}, fail: func(string, int) error { return nil }}
			stop := f.run(t, s, g, partition.Config{})
			time.Sleep(10 * time.Minute)
			assert.Equal(t, texts, f.order(), "cut after %d frames", frame+1)
			stop()
		})
	}
}
