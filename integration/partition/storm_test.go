package partition_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// The sizes of TestOrderByKeyOnABroker. HOPBACK_LONG=1 has larger defaults.
var (
	messages   = flag.Int("partition.messages", suite.Sized(6_000, 1_000_000), "messages to publish")
	keys       = flag.Int("partition.keys", suite.Sized(300, 10_000), "keys")
	partitions = flag.Int("partition.partitions", suite.Sized(8, 64), "partitions")
	most       = flag.Int("partition.workers", suite.Sized(4, 16), "workers at most")
	strikes    = flag.Int("partition.strikes", suite.Sized(10, 500), "joins, leaves, kills, cuts, and, with HOPBACK_LONG=1, restarts of the broker")
)

func newRig(s *suite.Site, g partition.Group, keys int) *partitionrig.Rig {
	return &partitionrig.Rig{
		URL: s.AMQPURL(), Group: g, Check: partitionrig.NewCheck(keys, g.Partitions), Handle: 10 * time.Millisecond, Logger: slogOf(s),
		Config: partition.Config{Concurrency: 32, Retry: retry.Policy{Backoff: retry.Exponential(100*time.Millisecond, 2).Cap(time.Second), MaxRetries: 100}},
	}
}

// Workers join, leave, crash, and lose their connections, while 2 % of the attempts fail. No
// message is lost, and none begins before those before it of its key are completed.
func TestOrderByKeyOnABroker(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return // refused: see TestWorkersOfAnotherGroupAreRefused
		}
		var own *rabbitmq.Broker
		if suite.Long() && !suite.InMemory(s) {
			var err error
			own, err = rabbitmq.Own(t.Context(), os.Stderr, s.Version)
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
			s = suite.NewSite(t, own)
		}
		conn, _ := s.Connect(t)
		g := partition.Group{Name: "orders", Partitions: *partitions}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{})
		rig := newRig(s, g, *keys)
		rig.Failing = 0.02
		var workers []*partitionrig.Worker
		n := 0
		join := func() {
			n++
			w, err := rig.Start(t.Context(), fmt.Sprint("w", n))
			require.NoError(t, err)
			workers = append(workers, w)
		}
		join()
		publisher, err := rig.NewPublisher(t.Context(), conn)
		require.NoError(t, err)
		published := make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		began := time.Now()
		go func() {
			published <- func() error {
				for left := *messages; left > 0 && ctx.Err() == nil; left -= 100 {
					batch := make([]int, min(left, 100))
					for i := range batch {
						batch[i] = rand.IntN(*keys)
					}
					if err := publisher.Publish(ctx, batch...); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
		counts := map[string]int{}
		for strike := range *strikes { // 1 worker, then the most, then a sixth of them
			time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
			i := rand.IntN(len(workers))
			least, most := 1+2*strike*(*most-1)/(*strikes), *most
			if 2*strike >= *strikes {
				least, most = 1, max(most/6, 2)
			}
			switch x := rand.IntN(10); {
			case own != nil && strike%50 == 49:
				counts["restarts"]++
				rig.Check.BrokerIsDown()
				require.NoError(t, own.Kill(t.Context()))
				require.NoError(t, own.Start(t.Context()))
				rig.Check.BrokerIsBack()
			case len(workers) < least || x < 4 && len(workers) < most:
				counts["joins"]++
				join()
			case x < 6 && len(workers) > least:
				counts["leaves"]++
				w := workers[i]
				workers = slices.Delete(workers, i, i+1)
				go func() { assert.NoError(t, w.Leave()) }()
			case x < 8 && len(workers) > least:
				counts["kills"]++
				workers[i].Kill()
				workers = slices.Delete(workers, i, i+1)
			default:
				counts["cuts"]++
				workers[i].Cut()
			}
		}
		require.NoError(t, <-published)
		progress, last := time.Now(), 0
		for rig.Check.Left() > 0 {
			if left := rig.Check.Left(); left != last {
				progress, last = time.Now(), left
			}
			require.Less(t, time.Since(progress), time.Minute, "nothing happens: %v, %v", rig.Check.Report(), rig.Check.Shares())
			time.Sleep(50 * time.Millisecond)
		}
		took := time.Since(began)
		defer func() {
			if t.Failed() {
				t.Log(rig.Check.Shares(), len(workers))
			}
		}()
		suite.Poll(t, "shares are balanced", func() bool {
			shares := rig.Check.Shares()
			for _, w := range workers {
				if n := shares[w.Name]; n < *partitions/len(workers) || n > (*partitions+len(workers)-1)/len(workers) {
					return false
				}
			}
			return true
		})
		for _, w := range workers {
			require.NoError(t, w.Leave())
		}
		r := rig.Check.Report()
		suite.Report(t, s, "partitions: %v; %v in %v", r, counts, took.Round(time.Second))
		assert.Zero(t, r.Wrong(), "%v", r.First)
		assert.Zero(t, r.Missing)
	})
}
