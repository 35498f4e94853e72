package health_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a service with a consumer that handles two messages at once, in virtual time.
type world struct {
	broker *hopbacktest.Broker
	conn   *client.Conn
	finish chan struct{} // handlers of messages that hang wait for it
}

// build runs f with a service. Without a consumer it only publishes.
func build(t *testing.T, consumer bool, f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{broker: hopbacktest.Start(t, hopbacktest.Config{}), finish: make(chan struct{})}
		var err error
		w.conn, err = client.Connect(t.Context(), w.broker.URL(), client.Config{Dial: w.broker.Dial})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), w.conn.Management(), declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()},
		}})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		if consumer {
			go func() {
				ended <- w.conn.Consume(ctx, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					if body, _ := client.Body(d.Message()); string(body) == `"hang"` {
						<-w.finish
					}
					return nil
				}), client.ConsumerConfig{Concurrency: 2})
			}()
		} else {
			ended <- nil
		}
		time.Sleep(time.Second)
		f(t, w)
		close(w.finish)
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, w.conn.Close(context.Background()))
	})
}

func (w *world) publish(t *testing.T, bodies ...string) {
	t.Helper()
	p, err := client.NewPublisher[string](t.Context(), w.conn, address.Queue("orders"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.PublishAll(t.Context(), bodies))
	require.NoError(t, p.Close(t.Context()))
}

// want is a row of the table of answers.
type want struct {
	live, ready, progress bool
	kinds                 []string
	queue                 string
	since                 time.Duration // how long ago the first problem began
	says                  string        // part of the first problem's error
}

func (w *world) check(t *testing.T, cfg health.Config, want want) {
	t.Helper()
	r, err := health.Check(cfg, w.conn)
	require.NoError(t, err)
	text, err := json.MarshalIndent(r, "", "  ")
	require.NoError(t, err)
	kinds := []string(nil)
	for _, p := range r.Problems {
		kinds = append(kinds, p.Kind)
	}
	assert.Equal(t, want.kinds, kinds, "%s", text)
	assert.Equal(t, []bool{want.live, want.ready, want.progress}, []bool{r.Live, r.Ready, r.Progress}, "live, ready, progress of %s", text)
	if len(want.kinds) > 0 && len(r.Problems) > 0 {
		p := r.Problems[0]
		assert.Equal(t, want.queue, p.Queue)
		assert.WithinDuration(t, time.Now().Add(-want.since), p.Since, 3*time.Second, "%s", text)
		assert.Contains(t, p.Error, want.says)
	}
	// HTTP says the same.
	for path, ok := range map[string]bool{"live": r.Live, "ready": r.Ready, "progress": r.Progress, "": r.Ready} {
		answer := httptest.NewRecorder()
		health.Handler(cfg, w.conn).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/ops/health/"+path, nil))
		status := http.StatusOK
		if !ok {
			status = http.StatusServiceUnavailable
		}
		assert.Equal(t, status, answer.Code, path)
		var same health.Report
		require.NoError(t, json.Unmarshal(answer.Body.Bytes(), &same))
		assert.Len(t, same.Problems, len(r.Problems))
	}
}

var well = want{live: true, ready: true, progress: true}

func TestHealthOfAServiceThatWorks(t *testing.T) {
	t.Parallel()
	build(t, true, func(t *testing.T, w *world) {
		w.check(t, health.Config{}, well)
		w.publish(t, "a", "b")
		time.Sleep(time.Hour) // an idle service is well
		w.check(t, health.Config{}, well)
		r, err := health.Check(health.Config{}, w.conn)
		require.NoError(t, err)
		require.Len(t, r.Consumers, 1)
		assert.Equal(t, "orders", r.Consumers[0].Queue)
		assert.WithinDuration(t, time.Now().Add(-time.Hour), *r.Consumers[0].Delivered, time.Second)
	})
}

func TestAlarmKeepsConsumersReady(t *testing.T) {
	t.Parallel()
	for name, consumer := range map[string]bool{"with a consumer": true, "without one": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			build(t, consumer, func(t *testing.T, w *world) {
				w.broker.SetMemoryAlarm(true)
				time.Sleep(time.Minute)
				w.check(t, health.Config{}, want{live: true, ready: consumer, kinds: []string{"blocked"}, since: time.Minute, says: "alarm"})
				w.broker.SetMemoryAlarm(false)
				time.Sleep(time.Second)
				w.check(t, health.Config{}, well)
			})
		})
	}
}

func TestDeletedQueueIsNamed(t *testing.T) {
	t.Parallel()
	build(t, true, func(t *testing.T, w *world) {
		_, err := declare.DeleteQueue(t.Context(), w.conn.Management(), "orders")
		require.NoError(t, err)
		time.Sleep(4 * time.Second)
		gone := want{live: true, ready: true, kinds: []string{"queue-missing"}, queue: "orders", since: 4 * time.Second, says: "not found"}
		w.check(t, health.Config{}, gone)
		time.Sleep(time.Minute)
		gone.ready, gone.since = false, 64*time.Second
		w.check(t, health.Config{}, gone)
		_, err = declare.Apply(t.Context(), w.conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		time.Sleep(time.Minute)
		w.check(t, health.Config{}, well)
	})
}

func TestStuckHandlersAreNamed(t *testing.T) {
	t.Parallel()
	build(t, true, func(t *testing.T, w *world) {
		cfg := health.Config{StuckAfter: time.Minute, StuckForGood: 10 * time.Minute} // RabbitMQ takes a delivery back after 30
		w.publish(t, "hang")
		time.Sleep(2 * time.Minute)
		stuck := want{live: true, ready: true, kinds: []string{"stuck"}, queue: "orders", since: 2 * time.Minute}
		w.check(t, cfg, stuck)
		w.check(t, health.Config{}, well) // five minutes are allowed
		time.Sleep(10 * time.Minute)
		stuck.since += 10 * time.Minute
		w.check(t, cfg, stuck) // the other handler works
		w.publish(t, "hang", "waits")
		time.Sleep(5 * time.Minute)
		stuck.since += 5 * time.Minute
		w.check(t, cfg, stuck)
		time.Sleep(6 * time.Minute)
		stuck.since += 6 * time.Minute
		stuck.live = false // both hang now, and have for ten minutes
		w.check(t, cfg, stuck)
		stuck.live = true
		w.check(t, health.Config{StuckAfter: time.Minute}, stuck) // unless a restart wasn't asked for
		w.finish <- struct{}{}
		w.finish <- struct{}{}
		time.Sleep(time.Second)
		w.check(t, cfg, well)
	})
}

func TestServiceIsUnreadyOnlyWhenReconnectingTakesLong(t *testing.T) {
	t.Parallel()
	build(t, true, func(t *testing.T, w *world) {
		w.broker.Kill()
		time.Sleep(3 * time.Second)
		lost := want{live: true, ready: true, kinds: []string{"disconnected"}, since: 3 * time.Second}
		w.check(t, health.Config{}, lost)
		time.Sleep(time.Hour)
		lost.ready, lost.since = false, time.Hour+3*time.Second
		w.check(t, health.Config{}, lost)
		w.broker.Restart()
		time.Sleep(time.Minute)
		w.check(t, health.Config{}, well)
	})
}

func TestForwardsThatWaitAreANote(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- conn.Consume(ctx, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				return client.Forward{To: address.Queue("missing"), Message: client.Copy(d.Message())}
			}), client.ConsumerConfig{ForwardPatience: time.Hour})
		}()
		w := &world{broker: broker, conn: conn}
		w.publish(t, "a")
		time.Sleep(10 * time.Minute)
		w.check(t, health.Config{}, want{live: true, ready: true, progress: true, kinds: []string{"forwards-wait"}, queue: "orders", since: 10 * time.Minute, says: "not found"})
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close(context.Background()))
		r, err := health.Check(health.Config{}, conn)
		require.NoError(t, err)
		assert.False(t, r.Live || r.Ready || r.Progress)
		assert.Equal(t, "closed", r.Problems[0].Kind)
	})
}

func TestBadConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	_, err := health.Check(health.Config{StuckAfter: -1})
	require.ErrorAs(t, err, new(*argument.Error))
	_, err = health.Check(health.Config{}, nil)
	require.ErrorAs(t, err, new(*argument.Error))
	assert.PanicsWithError(t, err.Error(), func() { health.Handler(health.Config{}, nil) })
	r, err := health.Check(health.Config{})
	require.NoError(t, err)
	assert.Equal(t, []bool{true, false, false}, []bool{r.Live, r.Ready, r.Progress})

	answer := httptest.NewRecorder()
	health.Handler(health.Config{}).ServeHTTP(answer, httptest.NewRequest(http.MethodPost, "/live", nil))
	assert.Equal(t, http.StatusMethodNotAllowed, answer.Code)
	answer = httptest.NewRecorder()
	health.Handler(health.Config{}).ServeHTTP(answer, httptest.NewRequest(http.MethodHead, "/live/", nil))
	assert.Equal(t, http.StatusOK, answer.Code)
	assert.Equal(t, "no-store", answer.Header().Get("Cache-Control"))
	assert.False(t, errors.Is(err, client.ErrClosed))
}

// A requester that can't receive replies makes the service unready after a while.
func TestRequesterWithoutReplies(t *testing.T) {
	build(t, true, func(t *testing.T, w *world) {
		q, err := rpc.NewRequester[string, string](t.Context(), w.conn, address.Queue("orders"), rpc.RequesterConfig{Replies: rpc.RepliesByQueue})
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close(context.Background())) }()
		report, err := health.Check(health.Config{}, w.conn)
		require.NoError(t, err)
		assert.True(t, report.Ready && report.Progress, "%+v", report)

		// The virtual host has no room for its queue any more.
		call := func(method, path, body string) []byte {
			request := httptest.NewRequest(method, path, strings.NewReader(body))
			request.SetBasicAuth("guest", "guest")
			answer := httptest.NewRecorder()
			w.broker.HTTPHandler().ServeHTTP(answer, request)
			require.Equal(t, 2, answer.Code/100, answer.Body)
			return answer.Body.Bytes()
		}
		call(http.MethodPut, "/api/vhost-limits/%2F/max-queues", `{"value":1}`)
		var queues []struct{ Name string }
		require.NoError(t, json.Unmarshal(call(http.MethodGet, "/api/queues", ""), &queues))
		require.Len(t, queues, 2)
		for _, x := range queues {
			if x.Name != "orders" {
				require.NoError(t, w.broker.Queue(x.Name).Forget())
			}
		}
		time.Sleep(time.Second)
		report, err = health.Check(health.Config{}, w.conn)
		require.NoError(t, err)
		require.Len(t, report.Problems, 1)
		p := report.Problems[0]
		assert.Equal(t, "no-replies", p.Kind)
		assert.Equal(t, "/queues/orders", p.Queue)
		assert.NotEmpty(t, p.Error)
		assert.True(t, report.Ready && !report.Progress, "%+v", report)
		time.Sleep(time.Minute)
		report, err = health.Check(health.Config{}, w.conn)
		require.NoError(t, err)
		assert.False(t, report.Ready)
	})
}

// waits is a handler whose Prepare waits for an answer of the broker, as retry.Central's does.
type waits struct{ client.Handler }

func (w waits) Prepare(ctx context.Context, s client.Start) error {
	_, err := declare.Inspect(ctx, s.Management, s.Queue)
	return err
}

// A service whose consumers can't start before the end of an alarm is ready: it is no reason to end a
// deployment.
func TestHealthOfAServiceThatStartsDuringAnAlarm(t *testing.T) {
	t.Parallel()
	build(t, false, func(t *testing.T, w *world) {
		w.broker.SetDiskAlarm(true)
		time.Sleep(time.Second)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- w.conn.Consume(ctx, "orders", waits{client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })}, client.ConsumerConfig{})
		}()
		time.Sleep(time.Hour)
		w.check(t, health.Config{}, want{live: true, ready: true, kinds: []string{"blocked"}, since: time.Hour, says: "alarm"})
		w.broker.SetDiskAlarm(false)
		time.Sleep(time.Second)
		w.check(t, health.Config{}, well)
		stop()
		require.NoError(t, <-ended)
		w.broker.SetDiskAlarm(true)
		time.Sleep(time.Second)
		w.check(t, health.Config{}, want{live: true, kinds: []string{"blocked"}, says: "alarm"})
	})
}
