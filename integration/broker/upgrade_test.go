package broker_test

import (
	"context"
	"fmt"
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
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

// upgradable is a broker of RabbitMQ 4.3 that becomes one of 4.4, on its data.
type upgradable struct {
	url     string
	upgrade func(ctx context.Context) error
}

func inMemoryUpgradable(t *testing.T) upgradable {
	m, err := hopbacktest.New(hopbacktest.Config{Version: "4.3.6", DeadLetterRetry: 10 * time.Second})
	require.NoError(t, err)
	t.Cleanup(m.Close)
	url, err := m.Listen("127.0.0.1:0")
	require.NoError(t, err)
	return upgradable{url, func(context.Context) error {
		m.Stop()
		time.Sleep(time.Second) // it takes a while
		return m.Upgrade("4.4.0")
	}}
}

func realUpgradable(t *testing.T) upgradable {
	b, err := rabbitmq.Own(t.Context(), os.Stderr, "4.3")
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, b.Release(context.Background())) })
	return upgradable{b.URL, func(ctx context.Context) error { return b.Upgrade(ctx, "4.4") }}
}

// A node is upgraded from 4.3 to 4.4 in place while messages wait: retries of each strategy, and
// scheduled ones in the ladder. None is lost or early, and each waits as long as it was told to. What
// is scheduled afterwards, by the same publisher, waits in its queue.
func TestMessagesWaitThroughAnUpgradeTo44(t *testing.T) {
	for name, start := range map[string]func(*testing.T) upgradable{"real": realUpgradable, "memory": inMemoryUpgradable} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "real" {
				suite.NeedPrivate(t)
				if os.Getenv("HOPBACK_TREE_4_4") == "" {
					t.Skip("a node can be upgraded in place only to a RabbitMQ 4.4 in HOPBACK_TREE_4_4")
				}
			}
			waitThroughUpgrade(t, start(t))
		})
	}
}

// waited notes when a message was due, and when it came.
type waited struct {
	mu    sync.Mutex
	due   map[string]time.Time
	came  map[string][]time.Time
	early []string
}

func (w *waited) expect(id string, due time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.due[id] = due
}

// scheduled handles messages that were scheduled.
func (w *waited) scheduled(_ context.Context, d *client.Delivery) error {
	id := d.Message().Properties.MessageID.(string)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.came[id] = append(w.came[id], time.Now())
	if due, ok := d.Annotation(annotation.Due).(int64); ok {
		w.due[id] = time.UnixMilli(due)
	}
	return nil
}

// retried fails until the message has waited for each of its delays.
func (w *waited) retried(delays []time.Duration, failed *atomic.Int64) func(context.Context, *client.Delivery) error {
	type attempt struct {
		n  int
		at time.Time
	}
	last := map[string]attempt{}
	return func(ctx context.Context, d *client.Delivery) error {
		id := d.Message().Properties.MessageID.(string)
		w.mu.Lock()
		defer w.mu.Unlock()
		n := retry.Attempt(ctx) - 1
		// The same attempt again is one whose outcome the broker hadn't heard of when it stopped. A broker
		// rounds the time at which a message comes down to a millisecond.
		if was, ok := last[id]; ok && n > was.n && time.Since(was.at) <= delays[n-1]-time.Millisecond {
			w.early = append(w.early, fmt.Sprintf("%s, attempt %d after attempt %d, by %v", id, n+1, was.n+1, delays[n-1]-time.Since(was.at)))
		}
		if n == len(delays) {
			w.came[id] = append(w.came[id], time.Now())
			return nil
		}
		// A repeated attempt may be a duplicate's: the first one's copy was confirmed, and its settlement
		// was lost with the broker. What follows belongs to either.
		if was, ok := last[id]; !ok || n > was.n {
			last[id] = attempt{n, time.Now()}
		}
		failed.Add(1)
		return fmt.Errorf("attempt %d fails", n+1)
	}
}

func waitThroughUpgrade(t *testing.T, b upgradable) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	const each = 50
	delays := []time.Duration{2 * time.Second, 25 * time.Second}
	conn, _ := suite.ConnectTo(t, b.url, suite.Soon)
	policies := map[string]retry.Policy{
		"republish":   {Strategy: retry.StrategyRepublish},
		"ladder":      {Strategy: retry.StrategyRepublish, AnyDelay: &retry.Ladder{}},
		"dead-letter": {Strategy: retry.StrategyDeadLetter},
		"native":      {Strategy: retry.StrategyNative},
		"auto":        {Strategy: retry.StrategyAuto},
	}
	retries := &waited{due: map[string]time.Time{}, came: map[string][]time.Time{}}
	var failed atomic.Int64
	for name, policy := range policies {
		queue := "work-" + name
		policy.Backoff = retry.Delays(delays...)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: queue, DeliveryLimit: 5})
		handler := retry.With(policy)(client.HandlerFunc(retries.retried(delays, &failed)))
		suite.Consume(t, conn, queue, handler, client.ConsumerConfig{Concurrency: 8})
		suite.Load(t, conn, queue, each, func(i int, m *client.Message) {
			id := fmt.Sprintf("%s-%d", name, i)
			m.Properties = &client.Properties{MessageID: id}
			retries.expect(id, time.Time{})
		})
	}
	ladder, err := schedule.Topology(schedule.Names{}, "bound")
	require.NoError(t, err)
	ladder.Queues = append(ladder.Queues, suite.Quorum("bound", declare.Drop()), suite.Quorum("unbound", declare.Drop()))
	suite.Apply(t, conn, ladder)
	scheduled := &waited{due: map[string]time.Time{}, came: map[string][]time.Time{}}
	suite.Dispatch(t, conn, schedule.DispatchConfig{})
	publishers := map[string]*schedule.Publisher[int]{}
	for _, queue := range []string{"bound", "unbound"} {
		suite.Consume(t, conn, queue, client.HandlerFunc(scheduled.scheduled), client.ConsumerConfig{Concurrency: 8})
		publishers[queue], err = schedule.NewPublisher[int](ctx, conn, address.Queue(queue), schedule.PublisherConfig{})
		require.NoError(t, err)
	}
	plan := func(n int, horizon time.Duration) {
		for queue, p := range publishers {
			for i := range n {
				s, err := p.Publish(ctx, schedule.After(time.Duration(i+1)*horizon/time.Duration(n)), i)
				require.NoError(t, err, queue)
				scheduled.expect(s.ID, s.Due)
			}
		}
	}
	plan(each, 45*time.Second)
	suite.Poll(t, "the second attempts", func() bool { return failed.Load() == int64(len(policies)*each*2) }) // now each waits for its last
	suite.Poll(t, "their outcomes are settled", func() bool {
		unsettled := 0
		for _, c := range conn.Stats().Consumers {
			unsettled += c.Unsettled
		}
		return unsettled == 0
	})
	began := time.Now()
	require.NoError(t, b.upgrade(ctx))
	down := time.Since(began)
	plan(each, 20*time.Second)
	suite.Poll(t, "4.4", func() bool { return conn.Broker().AtLeast(4, 4) })
	back := time.Now()
	for _, w := range []*waited{retries, scheduled} {
		for came, of := w.progress(); came < of; came, of = w.progress() {
			require.NoError(t, ctx.Err(), "%d of %d came", came, of)
			time.Sleep(100 * time.Millisecond)
		}
	}
	came, _ := retries.progress()
	retries.mu.Lock()
	assert.Empty(t, retries.early, "early retries")
	retries.mu.Unlock()
	fmt.Printf("REPORT %s: down for %v; %d retries; %s\n", t.Name(), down.Round(time.Second), came, scheduled.lateness(t, back))
	assert.Zero(t, suite.Ready(t, conn, schedule.Names{}.UndeliverableQueue()))
}

func (w *waited) progress() (came, of int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.came), len(w.due)
}

// lateness is how late those came that were due when the broker was back. None may be early.
func (w *waited) lateness(t *testing.T, back time.Time) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var late []time.Duration
	twice := 0
	for id, at := range w.came {
		slices.SortFunc(at, time.Time.Compare)
		l := at[0].Sub(w.due[id])
		assert.GreaterOrEqual(t, l, time.Duration(0), "%s is early", id)
		if w.due[id].After(back) {
			late = append(late, l)
		}
		twice += len(at) - 1
	}
	return fmt.Sprintf("%d scheduled messages, %d of them due afterwards, late by %s; %d came twice", len(w.came), len(late), suite.Spread(late), twice)
}
