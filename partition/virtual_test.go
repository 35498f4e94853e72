package partition_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
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
	"github.com/hopback/hopback/retry"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// scene is a group on a broker in memory, in virtual time.
type scene struct {
	*partitionrig.Rig
	broker    *hopbacktest.Broker
	conn      *client.Conn
	publisher *partitionrig.Publisher
}

func newScene(t *testing.T, g partition.Group, keys int) *scene {
	b := hopbacktest.Start(t, hopbacktest.Config{})
	s := &scene{broker: b, Rig: &partitionrig.Rig{
		URL: b.URL(), Dial: b.Dial, Group: g, Check: partitionrig.NewCheck(keys, g.Partitions), Handle: 10 * time.Millisecond, Logger: quiet,
		Config: partition.Config{Concurrency: 16, Retry: retry.Policy{Backoff: retry.Exponential(time.Second, 2).Cap(10 * time.Second), MaxRetries: 100}},
	}}
	var err error
	s.conn, err = client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.conn.Close(context.Background())) })
	apply(t, s.conn, g)
	s.publisher, err = s.NewPublisher(t.Context(), s.conn)
	require.NoError(t, err)
	return s
}

// apply declares a group with a dead-letter queue.
func apply(t *testing.T, conn *client.Conn, g partition.Group) {
	topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: declare.Unlimited})
	require.NoError(t, err)
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
	_, err = declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
}

func (s *scene) start(t *testing.T, name string) *partitionrig.Worker {
	w, err := s.Start(t.Context(), name)
	require.NoError(t, err)
	return w
}

// completed waits until all messages are.
func (s *scene) completed(t *testing.T) {
	deadline := time.Now().Add(time.Hour)
	for s.Check.Left() > 0 {
		if !assert.True(t, time.Now().Before(deadline), "%v", s.Check.Report()) {
			for _, q := range s.Group.Queues() {
				info, err := declare.Inspect(t.Context(), s.conn.Management(), q)
				t.Log(q, info.Messages, info.Consumers, err)
			}
			t.Log(s.Check.Shares())
			t.FailNow()
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (s *scene) right(t *testing.T) partitionrig.Report {
	r := s.Check.Report()
	t.Log(r)
	assert.Zero(t, r.Wrong(), "%v", r.First)
	assert.Zero(t, r.Missing)
	return r
}

func TestWorkersShareThePartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, partition.Group{Name: "orders", Partitions: 8}, 100)
		var workers []*partitionrig.Worker
		for i := range 3 {
			workers = append(workers, s.start(t, fmt.Sprint("w", i)))
			time.Sleep(2 * time.Second)
			t.Log(s.Check.Shares())
		}
		assert.ElementsMatch(t, []int{3, 3, 2}, values(s.Check.Shares()))
		for n := range 10 {
			for key := range 100 {
				_ = n
				require.NoError(t, s.publisher.Publish(t.Context(), key))
			}
		}
		s.completed(t)
		for _, w := range workers {
			require.NoError(t, w.Leave())
		}
		r := s.right(t)
		assert.Equal(t, 1000, r.Completed)
	})
}

func values(m map[string]int) (all []int) {
	for _, v := range m {
		all = append(all, v)
	}
	return all
}

// storm is joins, leaves, kills, cuts, and restarts of the broker.
type storm struct {
	*scene
	r       *rand.Rand
	workers []*partitionrig.Worker
	n       int
	counts  map[string]int
	// necessary is how many moves cannot be avoided.
	necessary int
}

func (s *storm) join(t *testing.T) {
	s.n++
	s.workers = append(s.workers, s.start(t, fmt.Sprint("w", s.n)))
	s.counts["joins"]++
	s.necessary += s.Group.Partitions / len(s.workers)
}

func (s *storm) pick() (int, *partitionrig.Worker) {
	i := s.r.IntN(len(s.workers))
	return i, s.workers[i]
}

// strike does one thing at random, with least to most workers.
func (s *storm) strike(t *testing.T, least, most int) {
	x := s.r.IntN(100)
	switch {
	case len(s.workers) < least || x < 30 && len(s.workers) < most:
		s.join(t)
	case x < 55 && len(s.workers) > least:
		i, w := s.pick()
		s.workers = slices.Delete(s.workers, i, i+1)
		s.necessary += s.Check.Shares()[w.Name]
		go func() { assert.NoError(t, w.Leave()) }()
		s.counts["leaves"]++
	case x < 75 && len(s.workers) > least:
		i, w := s.pick()
		s.workers = slices.Delete(s.workers, i, i+1)
		s.necessary += s.Check.Shares()[w.Name]
		w.Kill()
		s.counts["kills"]++
	case x < 97:
		_, w := s.pick()
		s.necessary += s.Check.Shares()[w.Name] // and at most as many go back, which isn't counted
		w.Cut()
		s.counts["cuts"]++
	default:
		s.necessary += s.Group.Partitions
		s.Check.BrokerIsDown()
		s.broker.Kill()
		time.Sleep(time.Duration(s.r.IntN(1000)) * time.Millisecond)
		s.broker.Restart()
		s.Check.BrokerIsBack()
		s.counts["restarts"]++
	}
}

func (s *storm) leaveAll(t *testing.T) {
	for _, w := range s.workers {
		assert.NoError(t, w.Leave())
	}
}

// The sizes of TestOrderByKeySurvivesAStorm.
var (
	stormMessages   = flag.Int("partition.messages", 40_000, "messages to publish")
	stormKeys       = flag.Int("partition.keys", 200, "keys")
	stormPartitions = flag.Int("partition.partitions", 16, "partitions")
	stormWorkers    = flag.Int("partition.workers", 6, "workers at most")
	stormStrikes    = flag.Int("partition.strikes", 60, "joins, leaves, kills, cuts, and restarts of the broker")
	stormFailing    = flag.Float64("partition.failing", 0.1, "share of attempts that fail")
)

// Workers come and go while a tenth of the attempts fails and waits for 1 to 10 s.
func TestOrderByKeySurvivesAStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := partition.Group{Name: "orders", Partitions: *stormPartitions}
		s := &storm{scene: newScene(t, g, *stormKeys), r: rand.New(rand.NewPCG(3, 4)), counts: map[string]int{}}
		s.Failing = *stormFailing
		s.join(t)
		const pause = 20 * time.Millisecond
		lasts := time.Duration(*stormStrikes) * 750 * time.Millisecond // on average
		batch := max(1, *stormMessages*int(pause)/int(lasts))
		done := make(chan struct{})
		go func() {
			defer close(done)
			for left := *stormMessages; left > 0; left -= batch {
				all := make([]int, min(batch, left))
				for i := range all {
					all[i] = rand.IntN(*stormKeys)
				}
				assert.NoError(t, s.publisher.Publish(t.Context(), all...))
				time.Sleep(pause)
			}
		}()
		for i := range *stormStrikes { // 1, then the most, then a sixth of them
			least, most := 1+2*i*(*stormWorkers-1)/(*stormStrikes), *stormWorkers
			if 2*i >= *stormStrikes {
				least, most = 1, max(*stormWorkers/6, 2)
			}
			s.strike(t, least, most)
			time.Sleep(time.Duration(s.r.IntN(1500)) * time.Millisecond)
		}
		<-done
		s.completed(t)
		time.Sleep(5 * time.Second)
		t.Log(s.counts, s.Check.Shares(), s.Failures.Load(), "failures")
		for _, n := range s.Check.Shares() {
			assert.LessOrEqual(t, n-g.Partitions/len(s.workers), 1)
		}
		s.leaveAll(t)
		r := s.right(t)
		t.Logf("%d moves, %.2f of the %d that are necessary", r.Moves, float64(r.Moves)/float64(s.necessary), s.necessary)
		assert.LessOrEqual(t, float64(r.Moves), 1.3*float64(s.necessary))
		assert.Less(t, partitionrig.Quantile(r.Silences, 0.99), time.Second)
	})
}

// A tenth of all attempts fails, on half of the keys, and waits for 1 to 10 s. The other half has
// the same throughput as without failures, as long as what waits has room in the windows.
func TestOtherKeysGoOn(t *testing.T) {
	const partitions, keys, lasts = 16, 2500, 60 * time.Second
	run := func(window, rate int, failing float64) (others int) {
		synctest.Test(t, func(t *testing.T) {
			s := newScene(t, partition.Group{Name: "orders", Partitions: partitions, Window: window}, keys)
			s.Config.Retry = retry.Policy{MaxRetries: 100, Backoff: func(int) time.Duration { return time.Second + rand.N(9*time.Second) }}
			s.Failing, s.Fails = failing, func(key int) bool { return key%2 == 0 }
			var done atomic.Int64
			s.Done = func(key int, _ uint32) {
				if key%2 == 1 {
					done.Add(1)
				}
			}
			var workers []*partitionrig.Worker
			for i := range 4 {
				workers = append(workers, s.start(t, fmt.Sprint("w", i)))
			}
			time.Sleep(5 * time.Second)
			const every = 100 * time.Millisecond
			for began := time.Now(); time.Since(began) < lasts; {
				batch := make([]int, rate/int(time.Second/every))
				for i := range batch {
					batch[i] = rand.IntN(keys)
				}
				require.NoError(t, s.publisher.Publish(t.Context(), batch...))
				time.Sleep(every)
			}
			others = int(done.Load())
			s.completed(t)
			for _, w := range workers {
				require.NoError(t, w.Leave())
			}
			s.right(t)
			if failing > 0 {
				assert.Greater(t, s.Failures.Load(), int64(rate)*int64(lasts/time.Second)*9/100)
			}
		})
		return others
	}
	loads := []struct{ window, rate int }{{100, 250}, {256, 500}}
	if explore.UnderRace { // 60,000 messages take two minutes there
		loads = loads[:1]
	}
	for _, c := range loads {
		without, with := run(c.window, c.rate, 0), run(c.window, c.rate, 0.2)
		t.Logf("window %d, %d a second over %d partitions: of the other keys %d messages without failures, %d with, %.1f %%", c.window, c.rate, partitions, without, with, 100*float64(with)/float64(without))
		assert.Greater(t, float64(with), 0.95*float64(without))
	}
}
