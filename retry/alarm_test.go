package retry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// alarmed is a service in virtual time that starts its consumer during an alarm.
type alarmed struct {
	broker *hopbacktest.Broker
	conn   *client.Conn
	ended  chan error

	mu    sync.Mutex
	calls map[string][]int // attempts by message
}

// inAlarm publishes messages, raises an alarm, and starts a consumer with the handler.
func inAlarm(t *testing.T, version string, p retry.Policy, work declare.QuorumQueue, h func(*client.Delivery) error, f func(t *testing.T, w *alarmed, stop func())) {
	synctest.Test(t, func(t *testing.T) {
		w := &alarmed{broker: hopbacktest.Start(t, hopbacktest.Config{Version: version}), ended: make(chan error, 1), calls: map[string][]int{}}
		connect := func() *client.Conn {
			conn, err := client.Connect(t.Context(), w.broker.URL(), client.Config{Dial: w.broker.Dial, Logger: slog.New(slog.DiscardHandler)})
			require.NoError(t, err)
			return conn
		}
		admin := connect()
		topology, err := retry.Topology(p, work)
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), admin.Management(), topology)
		require.NoError(t, err)
		pub, err := client.NewPublisher[string](t.Context(), admin, address.Queue("work"), client.PublisherConfig{Codec: client.RawCodec{}})
		require.NoError(t, err)
		for _, kind := range []string{"well", "fail", "permanent", "panic", "reject", "discard"} {
			for i := range 3 {
				require.NoError(t, pub.Publish(t.Context(), fmt.Sprint(kind, " ", i)))
			}
		}
		require.NoError(t, admin.Close(context.Background()))
		w.broker.SetMemoryAlarm(true)
		w.conn = connect()
		ctx, stop := context.WithCancel(t.Context())
		go func() {
			w.ended <- w.conn.Consume(ctx, "work", retry.With(p)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
				body, _ := client.Body(d.Message())
				w.mu.Lock()
				w.calls[string(body)] = append(w.calls[string(body)], retry.Attempt(ctx))
				w.mu.Unlock()
				return h(d)
			})), client.ConsumerConfig{Concurrency: 2, Prefetch: 2})
		}()
		f(t, w, stop)
		stop()
		require.NoError(t, w.conn.Close(context.Background()))
	})
}

// alarmHandler fails as the message says, once.
func alarmHandler(d *client.Delivery) error {
	body, _ := client.Body(d.Message())
	kind := string(body[:len(body)-2])
	switch {
	case retry.Count(d.Message()) > 0 || kind == "well":
		return nil
	case kind == "permanent":
		return retry.Permanent(errors.New("never"))
	case kind == "panic":
		panic("a bug")
	case kind == "reject":
		return client.DeadLetter{Reason: "mine", Err: errors.New("no")}
	case kind == "discard":
		return retry.Discard(errors.New("old"))
	}
	return errors.New("not yet")
}

func (w *alarmed) attempts(body string) []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.calls[body])
}

// A consumer starts during an alarm, with each strategy. It handles its backlog, holds what fails, and
// retries or dead-letters that after the check.
func TestAConsumerWithRetriesStartsDuringAnAlarm(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.0.5", "4.3.6", "4.4.0"} {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative, retry.StrategyAuto} {
			if version == "4.0.5" && strategy == retry.StrategyNative {
				continue
			}
			t.Run(fmt.Sprint(version, " ", strategy), func(t *testing.T) {
				t.Parallel()
				p := retry.Policy{Backoff: retry.Delays(10 * time.Second), Strategy: strategy, GiveUpAfter: time.Hour}
				inAlarm(t, version, p, declare.QuorumQueue{Name: "work"}, alarmHandler, func(t *testing.T, w *alarmed, stop func()) {
					time.Sleep(10 * time.Minute)
					for _, kind := range []string{"well", "fail", "permanent", "panic", "reject", "discard"} {
						for i := range 3 {
							assert.Equal(t, []int{1}, w.attempts(fmt.Sprint(kind, " ", i)), kind)
						}
					}
					c := w.broker.Queue("work").Counts()
					assert.Equal(t, []int{0, 12, 12}, []int{c.Ready, c.Unacknowledged, c.Messages}, "what was handled and discarded is gone, the rest is held")
					assert.Zero(t, w.broker.Queue("work.dead").Counts().Messages)
					r, err := health.Check(health.Config{}, w.conn)
					require.NoError(t, err)
					assert.True(t, r.Ready, "%+v", r.Problems)
					require.Len(t, r.Problems, 1)
					assert.Equal(t, "blocked", r.Problems[0].Kind)

					w.broker.SetMemoryAlarm(false)
					time.Sleep(time.Minute)
					for i := range 3 {
						assert.Equal(t, []int{1, 2}, w.attempts(fmt.Sprint("fail ", i)))
					}
					assert.Zero(t, w.broker.Queue("work").Counts().Messages)
					reasons := map[any]int{}
					for _, m := range w.broker.Queue("work.dead").Messages() {
						reasons[m.Annotations[client.AnnotationReason]]++
					}
					assert.Equal(t, map[any]int{string(retry.ReasonPermanent): 3, string(client.ReasonPanicked): 3, "mine": 3}, reasons)
					stop()
					require.NoError(t, <-w.ended)
				})
			})
		}
	}
}

// A fault that the check finds after the alarm stops the consumer. The queue has no dead-letter
// exchange: it would have dropped each dead letter.
func TestAFaultFoundAfterAnAlarmStopsTheConsumer(t *testing.T) {
	t.Parallel()
	p := retry.Policy{Backoff: retry.Delays(10 * time.Second)}
	inAlarm(t, "4.3.6", p, declare.QuorumQueue{Name: "work", DeadLetter: declare.Drop()}, alarmHandler, func(t *testing.T, w *alarmed, _ func()) {
		time.Sleep(time.Minute)
		assert.Equal(t, 12, w.broker.Queue("work").Counts().Unacknowledged)
		w.broker.SetMemoryAlarm(false)
		err := <-w.ended
		var found *retry.GuardError
		require.ErrorAs(t, err, &found)
		assert.Equal(t, retry.GuardDeadLetter, found.Guard)
		assert.Equal(t, 12, w.broker.Queue("work").Counts().Ready)
	})
}

// A consumer that drains during the alarm returns what it holds, and its check ends.
func TestAConsumerThatStartedDuringAnAlarmDrains(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.0.5", "4.3.6"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			inAlarm(t, version, retry.Policy{Strategy: retry.StrategyAuto}, declare.QuorumQueue{Name: "work"}, alarmHandler, func(t *testing.T, w *alarmed, stop func()) {
				time.Sleep(time.Minute)
				began := time.Now()
				stop()
				require.NoError(t, <-w.ended)
				assert.Less(t, time.Since(began), time.Second)
				assert.Equal(t, 12, w.broker.Queue("work").Counts().Ready)
			})
		})
	}
}

// A lost connection during the alarm costs the check nothing but time.
func TestAConsumerThatStartedDuringAnAlarmLosesItsConnection(t *testing.T) {
	t.Parallel()
	p := retry.Policy{Backoff: retry.Delays(10 * time.Second), Strategy: retry.StrategyAuto}
	inAlarm(t, "4.3.6", p, declare.QuorumQueue{Name: "work"}, alarmHandler, func(t *testing.T, w *alarmed, stop func()) {
		time.Sleep(time.Minute)
		w.broker.Stop()
		time.Sleep(time.Minute)
		w.broker.Restart()
		time.Sleep(time.Minute)
		assert.Equal(t, 12, w.broker.Queue("work").Counts().Unacknowledged)
		w.broker.SetMemoryAlarm(false)
		time.Sleep(2 * time.Minute)
		assert.Zero(t, w.broker.Queue("work").Counts().Messages)
		assert.Equal(t, 9, w.broker.Queue("work.dead").Counts().Messages)
		stop()
		require.NoError(t, <-w.ended)
	})
}

// Central starts during an alarm, too. It discards what the policy discards, holds the rest, and retries
// or dead-letters that after the check.
func TestCentralStartsDuringAnAlarm(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.0.5", "4.3.6", "4.4.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				broker := hopbacktest.Start(t, hopbacktest.Config{Version: version})
				connect := func() *client.Conn {
					conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
					require.NoError(t, err)
					return conn
				}
				p := retry.Policy{
					MaxRetries: 1, Backoff: retry.Delays(10 * time.Second), GiveUpAfter: time.Hour,
					Rules: []retry.ErrorRule{{If: retry.OnReason("old"), Do: retry.ActionDiscard}},
				}
				cfg := retry.CentralConfig{Queues: []string{"orders"}}
				admin := connect()
				topology, err := retry.CentralTopology(p, cfg, declare.QuorumQueue{Name: "orders"})
				require.NoError(t, err)
				_, err = declare.Apply(t.Context(), admin.Management(), topology)
				require.NoError(t, err)
				pub, err := client.NewPublisher[string](t.Context(), admin, address.Queue("orders"), client.PublisherConfig{Codec: client.RawCodec{}})
				require.NoError(t, err)
				for i := range 6 {
					require.NoError(t, pub.Publish(t.Context(), []string{"old", "slow"}[i%2]))
				}
				var attempts atomic.Int32
				reject := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					body, _ := client.Body(d.Message())
					attempts.Add(1)
					return client.Modify{DeadLetter: true, Annotations: map[string]any{"x-reason": string(body)}}
				})
				work := func(ctx context.Context, conn *client.Conn) func() {
					ctx, stop := context.WithCancel(ctx)
					ended := make(chan error, 1)
					go func() { ended <- conn.Consume(ctx, "orders", reject, client.ConsumerConfig{Concurrency: 1}) }()
					return func() {
						stop()
						require.NoError(t, <-ended)
					}
				}
				stopWork := work(t.Context(), admin)
				time.Sleep(time.Second)
				stopWork()
				require.NoError(t, admin.Close(context.Background()))
				assert.Equal(t, 6, broker.Queue("failed_queue").Counts().Ready)

				broker.SetMemoryAlarm(true)
				conn := connect()
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() {
					ended <- conn.Consume(ctx, "failed_queue", retry.Central(p, cfg), client.ConsumerConfig{Prefetch: 2, NoIsolation: true})
				}()
				time.Sleep(10 * time.Minute)
				c := broker.Queue("failed_queue").Counts()
				assert.Equal(t, []int{0, 3}, []int{c.Ready, c.Unacknowledged}, "three are discarded, the others held")
				r, err := health.Check(health.Config{}, conn)
				require.NoError(t, err)
				assert.True(t, r.Ready, "%+v", r.Problems)

				broker.SetMemoryAlarm(false)
				stopWork = work(t.Context(), conn)
				time.Sleep(time.Minute)
				assert.EqualValues(t, 9, attempts.Load(), "six before the alarm, and a retry of the others")
				assert.Zero(t, broker.Queue("failed_queue").Counts().Messages)
				assert.Equal(t, 3, broker.Queue("orders.dead").Counts().Messages)
				for _, m := range broker.Queue("orders.dead").Messages() {
					assert.Equal(t, string(retry.ReasonExhausted), m.Annotations[client.AnnotationReason])
				}
				stop()
				require.NoError(t, <-ended)
				stopWork()
				require.NoError(t, conn.Close(context.Background()))
			})
		})
	}
}
