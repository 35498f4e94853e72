package live_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/middleware/live"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// scene is a broker in memory, in virtual time, with a queue.
type scene struct {
	testing.TB
	broker *hopbacktest.Broker // nil: it is a real one
	url    string
	queue  string
	conn   *client.Conn // of the person who asks
	log    *lockedBuffer
}

type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func newScene(t testing.TB, cfg hopbacktest.Config) *scene {
	s := &scene{TB: t, broker: hopbacktest.Start(t, cfg), log: &lockedBuffer{}, queue: "orders"}
	s.url = s.broker.URL()
	s.declare()
	return s
}

func (s *scene) declare() {
	s.conn = s.connect(s.url)
	_, err := declare.Apply(s.Context(), s.conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: s.queue, DeadLetter: declare.Drop()}}})
	require.NoError(s, err)
}

func (s *scene) connect(url string) *client.Conn {
	cfg := client.Config{Logger: slog.New(slog.NewTextHandler(s.log, nil))}
	if s.broker != nil {
		cfg.Dial = s.broker.Dial
	}
	conn, err := client.Connect(s.Context(), url, cfg)
	require.NoError(s, err)
	s.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// publish publishes n orders.
func (s *scene) publish(n int, edit func(i int, m *client.Message)) {
	p, err := client.NewPublisher[int](s.Context(), s.conn, address.Queue(s.queue), client.PublisherConfig{})
	require.NoError(s, err)
	defer func() { assert.NoError(s, p.Close(s.Context())) }()
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	require.NoError(s, p.PublishAll(s.Context(), all, func(i int, m *client.Message) {
		if edit != nil {
			edit(i, m)
		}
	}))
}

// worker is a worker with its connection.
type worker struct {
	conn    *client.Conn
	handler client.Handler
	stop    func() // waits for the end
}

// work starts a worker whose handlers run until release is closed, and then return what it holds.
func (s *scene) work(host string, concurrency int, release <-chan error) worker {
	conn := s.connect(s.url)
	return s.workOn(conn, host, concurrency, release)
}

func (s *scene) workOn(conn *client.Conn, host string, concurrency int, release <-chan error) worker {
	ctx, cancel := context.WithCancel(s.Context())
	h := live.With(conn, live.Config{Host: host, Version: "v7", StuckAfter: time.Minute})(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
		if ctx.Value(returns{}) != nil {
			return nil
		}
		select {
		case err := <-release:
			return err
		case <-ctx.Done():
			return client.Requeue{}
		}
	}))
	done := make(chan error, 1)
	go func() {
		done <- conn.Consume(ctx, s.queue, h, client.ConsumerConfig{Concurrency: concurrency, Prefetch: concurrency, Grace: time.Second})
	}()
	stop := sync.OnceFunc(func() {
		cancel()
		assert.NoError(s, <-done)
	})
	s.Cleanup(stop)
	return worker{conn, h, stop}
}

// returns marks the ctx of a call of a worker's handler that is to return at once.
type returns struct{}

func (s *scene) ask() live.Fleet {
	s.Helper()
	f, err := live.Ask(s.Context(), s.conn)
	require.NoError(s, err)
	return f
}

func handlers(f live.Fleet) (n int) {
	for _, w := range f.Workers {
		n += len(w.Running) + w.More
	}
	return n
}

// 200 workers with 5,000 running handlers all answer. Nobody sends anything while nobody asks.
func TestAllWorkersAnswer(t *testing.T) {
	for version, workers := range map[string]int{"4.3.6": 200, "4.0.5": 20, "4.4.0": 20} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, hopbacktest.Config{Version: version, MaxEvents: -1})
				assert.Equal(t, live.Fleet{Workers: []live.Worker{}}, s.ask(), "no worker yet")
				release := make(chan error)
				for i := range workers {
					s.work(fmt.Sprintf("host-%03d", i), 25, release)
				}
				s.publish(25*workers, func(i int, m *client.Message) {
					m.Properties.MessageID = fmt.Sprint("order-", i)
					m.Properties.Subject = new("order.placed")
					m.Properties.GroupID = new("tenant-1")
				})
				time.Sleep(59 * time.Second)
				began := time.Now()
				f := s.ask()
				assert.LessOrEqual(t, time.Since(began), 3*time.Second)
				require.Len(t, f.Workers, workers)
				assert.Zero(t, f.Dropped)
				assert.Equal(t, 25*workers, handlers(f))
				ids := map[string]bool{}
				for i, w := range f.Workers {
					assert.Equal(t, fmt.Sprintf("host-%03d v7", i), w.Host+" "+w.Version)
					assert.Equal(t, []live.Queue{{Name: "orders", Running: 25}}, w.Queues)
					for _, r := range w.Running {
						ids[r.ID] = true
						assert.Equal(t, "orders order.placed tenant-1 1", fmt.Sprint(r.Queue, " ", r.Type, " ", r.Tenant, " ", r.Attempt))
						assert.WithinDuration(t, began.Add(-59*time.Second), r.Since, 10*time.Second)
						assert.False(t, r.Stuck)
					}
				}
				assert.Len(t, ids, 25*workers)
				time.Sleep(10 * time.Second)
				for _, w := range s.ask().Workers {
					assert.Equal(t, []live.Queue{{Name: "orders", Running: 25, Stuck: 25}}, w.Queues)
					assert.True(t, w.Running[24].Stuck)
				}

				close(release)
			})
		})
	}
}

// Nobody sends anything while nobody asks: a worker with live sends the frames of one without.
func TestAnIdleWorkerSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		sent := func() (all []int) {
			for _, c := range s.broker.Connections() {
				all = append(all, c.Frames(hopbacktest.DirectionFromClient))
			}
			return all
		}
		s.work("idle", 1, nil)
		plain := s.connect(s.broker.URL())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- plain.Consume(ctx, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{Concurrency: 1, Prefetch: 1})
		}()
		time.Sleep(time.Minute)
		before := sent()
		require.Len(t, before, 3)
		time.Sleep(8 * time.Minute)
		after := sent()
		assert.InDelta(t, after[2]-before[2], after[1]-before[1], 5, "heartbeats of AMQP")
		cancel()
		require.NoError(t, <-done)
	})
}

// A worker that is gone isn't shown, and one whose connection was lost answers again.
func TestWorkersComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		dies, stops, stays := s.work("dies", 1, nil), s.work("stops", 1, nil), s.work("stays", 1, nil)
		hosts := func() (all []string) {
			for _, w := range s.ask().Workers {
				all = append(all, w.Host)
			}
			return all
		}
		time.Sleep(time.Second)
		assert.Equal(t, []string{"dies", "stays", "stops"}, hosts())
		first := s.ask().Workers[1].ID
		stops.stop()
		assert.Equal(t, []string{"dies", "stays"}, hosts())
		dies.stop() // of its connection nothing is left but its queue
		require.NoError(t, dies.conn.Close(t.Context()))
		assert.Equal(t, []string{"stays"}, hosts())
		for _, c := range s.broker.Connections() {
			c.Cut()
		}
		time.Sleep(30 * time.Second)
		s.broker.Kill()
		time.Sleep(time.Minute)
		s.broker.Restart()
		time.Sleep(time.Minute)
		f := s.ask()
		require.Len(t, f.Workers, 1)
		assert.Equal(t, first, f.Workers[0].ID)
		// Somebody deletes the exchange.
		require.NoError(t, declare.DeleteExchange(t.Context(), s.conn.Management(), "hopback.workers"))
		assert.Empty(t, hosts())
		time.Sleep(11 * time.Minute)
		assert.Equal(t, []string{"stays"}, hosts())
		// The same middleware value, with another consumer.
		stays.stop()
		assert.Empty(t, hosts())
		s.workOn(stays.conn, "stays", 1, nil)
		s.workOn(stays.conn, "stays too", 1, nil)
		time.Sleep(time.Second)
		assert.Equal(t, []string{"stays", "stays too"}, hosts())
	})
}

// A queue that is left by a worker that was killed costs a question at most 2 s.
func TestAWorkerThatWasKilledIsNotShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		s.question("hopback.workers.questions.left", "")
		began := time.Now()
		assert.Empty(t, s.ask().Workers)
		assert.Less(t, time.Since(began), 3*time.Second)
	})
}

// question declares the exchange, and binds a queue to it.
func (s *scene) question(queue, to string) {
	_, err := declare.Apply(s.Context(), s.conn.Management(), declare.Topology{
		Exchanges: []declare.Exchange{{Name: "hopback.workers", Type: declare.ExchangeFanout}},
		Queues:    []declare.Queue{declare.ClassicQueue{Name: queue, DeadLetter: declare.Drop()}},
		Bindings:  []declare.Binding{{Source: "hopback.workers", Queue: queue}},
	})
	require.NoError(s, err)
	if to != "" {
		p, err := client.NewPublisher[*client.Message](s.Context(), s.conn, address.Exchange("hopback.workers", ""), client.PublisherConfig{})
		require.NoError(s, err)
		m := client.NewMessage(nil)
		m.Properties.ReplyTo = &to
		require.NoError(s, p.Publish(s.Context(), m))
		require.NoError(s, p.Close(s.Context()))
	}
}

// forge answers each question with bodies.
func (s *scene) forge(bodies ...[]byte) {
	s.question("forger", "")
	p, err := client.NewPublisher[*client.Message](s.Context(), s.conn, address.Address{}, client.PublisherConfig{})
	require.NoError(s, err)
	ctx, cancel := context.WithCancel(s.Context())
	done := make(chan error, 1)
	go func() {
		done <- s.conn.Consume(ctx, "forger", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			to, err := address.Parse(*d.Message().Properties.ReplyTo)
			if err != nil {
				return err
			}
			var all []*client.Message
			for _, b := range bodies {
				all = append(all, client.NewMessage(b))
			}
			return p.PublishAll(ctx, all, func(_ *client.Message, m *client.Message) { client.PublishTo(to)(m) })
		}), client.ConsumerConfig{})
	}()
	s.Cleanup(func() { cancel(); assert.NoError(s, <-done) })
}

// Another team answers with forged and huge messages: they are bounded, and the worker is shown nevertheless.
func TestForgedAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		s.work("honest", 1, nil)
		queues := strings.TrimSuffix(strings.Repeat(`{"name":"q","running":-1,"stuck":9223372036854775807,"handled":18446744073709551615},`, 300), ",")
		running := strings.TrimSuffix(strings.Repeat(`{"q":"q","a":-1,"age":1},`, 700), ",")
		s.forge(
			nil, []byte("{"), []byte("null"), []byte(`{"id":""}`), []byte(`{"id":7}`), []byte("\x00\xff"),
			[]byte(`{"id":"twice","host":"forged","age":-86400000}`), []byte(`{"id":"twice","host":"forged again"}`),
			[]byte("{\"id\":\"\xff\xfe\",\"host\":\""+strings.Repeat("\xc3", 1000)+"\",\"age\":9223372036853,\"more\":-5}"),
			[]byte(`{"id":"many","queues":[`+queues+`],"running":[`+running+`]}`),
			[]byte(`{"id":"deep","queues":`+strings.Repeat("[", 30_000)),
			[]byte(`{"id":"huge","host":"`+strings.Repeat("h", 5<<20)+`"}`),
		)
		time.Sleep(time.Second)
		now := time.Now()
		f := s.ask()
		assert.Equal(t, 9, f.Dropped)
		hosts := map[string]live.Worker{}
		for _, w := range f.Workers {
			hosts[w.Host] = w
			assert.True(t, utf8.ValidString(w.ID+w.Host+w.Version))
			assert.LessOrEqual(t, len(w.ID+w.Host+w.Version), 2000)
			assert.LessOrEqual(t, len(w.Queues), 200)
			assert.LessOrEqual(t, len(w.Running), 500)
			assert.False(t, w.Since.After(now.Add(3*time.Second)))
			assert.Greater(t, w.Since.Year(), 1800)
			assert.GreaterOrEqual(t, w.More, 0)
			for _, q := range w.Queues {
				assert.GreaterOrEqual(t, min(q.Running, q.Stuck), 0)
				assert.LessOrEqual(t, max(uint64(q.Stuck), q.Handled), uint64(1<<40))
			}
			for _, r := range w.Running {
				assert.GreaterOrEqual(t, r.Attempt, 0)
			}
		}
		assert.Len(t, f.Workers, 4)
		assert.Contains(t, hosts, "honest")
		assert.Contains(t, hosts, "forged")
		text, err := json.Marshal(f)
		require.NoError(t, err)
		assert.Less(t, len(text), 300_000)
	})
}

// Thousands of forged answers end a question, and are bounded.
func TestAFloodOfAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{MaxEvents: -1})
		var all [][]byte
		for i := range 5000 {
			all = append(all, fmt.Appendf(nil, `{"id":"forged-%d"}`, i))
		}
		s.forge(all...)
		began := time.Now()
		f := s.ask()
		assert.Less(t, time.Since(began), 5*time.Second)
		assert.LessOrEqual(t, len(f.Workers), 2000)
		assert.LessOrEqual(t, len(f.Workers)+f.Dropped, 4000)
	})
}

// Questions that are huge, or name a queue of somebody else, write nothing anywhere, and a flood of them doesn't keep the
// worker from its work.
func TestForgedQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{MaxEvents: -1})
		release := make(chan error)
		s.work("honest", 1, release)
		time.Sleep(time.Second)
		for _, to := range []string{"/queues/victim", "/queues/hopback.workers.questions.x", "/exchanges/hopback.workers", "victim", "/queues/", "\x00", "/queues/hopback.workers.answers.gone"} {
			s.question("victim", to)
		}
		p, err := client.NewPublisher[*client.Message](t.Context(), s.conn, address.Exchange("hopback.workers", ""), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), client.NewMessage(bytes.Repeat([]byte("q"), 8<<20))))
		flood := make([]*client.Message, 500)
		for i := range flood {
			flood[i] = client.NewMessage(nil)
			flood[i].Properties.ReplyTo = new("/queues/victim")
		}
		require.NoError(t, p.PublishAll(t.Context(), flood))
		time.Sleep(10 * time.Second)
		assert.EqualValues(t, 7+1+500, s.broker.Queue("victim").Counts().Ready, "the questions, and no answer")
		assert.Len(t, s.ask().Workers, 1)
		s.publish(1, nil)
		release <- nil
		assert.NotContains(t, s.log.String(), "level=WARN")
	})
}

// In an alarm nobody answers, and nothing waits: handlers continue, and Ask returns.
func TestAnAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		release := make(chan error)
		w := s.work("worker", 2, release)
		s.publish(3, nil)
		time.Sleep(time.Second)
		s.broker.SetMemoryAlarm(true)
		late := s.work("starts late", 1, release)
		began := time.Now()
		_, err := live.Ask(t.Context(), s.conn)
		require.ErrorContains(t, err, "alarm")
		assert.LessOrEqual(t, time.Since(began), 11*time.Second)
		release <- nil
		time.Sleep(time.Second)
		release <- errors.New("the bank is down")
		time.Sleep(time.Minute)
		s.broker.SetMemoryAlarm(false)
		time.Sleep(time.Minute)
		f := s.ask()
		require.Len(t, f.Workers, 2)
		assert.Equal(t, "starts late", f.Workers[0].Host)
		assert.EqualValues(t, 2, f.Workers[0].Queues[0].Handled+f.Workers[1].Queues[0].Handled)
		assert.EqualValues(t, 1, f.Workers[0].Queues[0].Failed+f.Workers[1].Queues[0].Failed)
		w.stop()
		late.stop()
	})
}

// A worker without the permissions handles its messages, and its log says why it isn't shown.
func TestMissingPermissions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		s.broker.AddUser("plain", "secret")
		require.NoError(t, s.broker.SetPermissions("plain", "/", "^$", "^$", "^orders$"))
		plain := s.connect(strings.Replace(s.broker.URL(), "guest:guest", "plain:secret", 1))
		release := make(chan error)
		s.workOn(plain, "plain", 1, release)
		s.publish(20, nil)
		for range 20 {
			release <- nil
			time.Sleep(time.Minute)
		}
		assert.Empty(t, s.ask().Workers)
		assert.Equal(t, 1, strings.Count(s.log.String(), "level=WARN"), s.log.String())
		assert.Contains(t, s.log.String(), "this worker isn't shown among the live ones")
		_, err := live.Ask(t.Context(), plain)
		require.ErrorIs(t, err, client.ErrUnauthorized)
		require.NoError(t, s.broker.SetPermissions("plain", "/", `^hopback\.workers`, `^(hopback\.workers.*|amq\.default)$`, `^(orders$|hopback\.workers)`))
		time.Sleep(10 * time.Minute)
		f, err := live.Ask(t.Context(), plain)
		require.NoError(t, err)
		assert.Len(t, f.Workers, 1)
	})
}

// A worker counts what it has handled within the last hour, and what of that has failed.
func TestTheLastHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		release := make(chan error, 1)
		s.work("worker", 1, release)
		s.publish(120, nil)
		time.Sleep(time.Second)
		counts := func() string {
			q := s.ask().Workers[0].Queues[0]
			return fmt.Sprint(q.Handled, " ", q.Failed)
		}
		for i := range 120 { // for two hours
			if i%3 == 0 {
				release <- client.DeadLetter{Reason: "no"}
			} else {
				release <- nil
			}
			time.Sleep(time.Minute)
			if i == 29 {
				assert.Equal(t, "30 10", counts())
			}
		}
		assert.Contains(t, []string{"59 19", "59 20", "60 20"}, counts())
		time.Sleep(30 * time.Minute)
		assert.Contains(t, []string{"29 10", "29 9", "30 10"}, counts())
		time.Sleep(3 * time.Hour)
		assert.Equal(t, "0 0", counts())
	})
}

// An answer has the handlers that have run longest, and how many others didn't fit.
func TestAnAnswerIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{MaxEvents: -1})
		w := s.work("busy", 1000, nil)
		s.publish(1000, func(i int, m *client.Message) {
			m.Properties.MessageID = fmt.Sprint("order-", i, strings.Repeat("<", 1000))
			m.Properties.Subject = new(strings.Repeat("<", 1000))
		})
		time.Sleep(2 * time.Minute)
		f := s.ask()
		require.Len(t, f.Workers, 1)
		x := f.Workers[0]
		assert.NotEmpty(t, x.Running)
		assert.Equal(t, 1000, len(x.Running)+x.More)
		assert.Equal(t, 1000, x.Queues[0].Stuck)
		var stuck []instrument.StuckStats
		require.NotPanics(t, func() { stuck = w.conn.Stats().Stuck })
		assert.Equal(t, []instrument.StuckStats{{Queue: "orders", Handlers: 1000}}, stuck)
		w.stop()
		time.Sleep(time.Second)
		assert.Empty(t, w.conn.Stats().Stuck)
	})
}

// A panic counts as a failure, and a message that is requeued as not failed doesn't. A full queue for questions that refuses
// one keeps nobody from answering.
func TestAPanicFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		conn := s.connect(s.broker.URL())
		calls := 0
		h := live.With(conn, live.Config{Host: "worker"})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			if calls++; calls == 1 {
				return client.Requeue{}
			}
			panic("a panic")
		}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- conn.Consume(ctx, "orders", h, client.ConsumerConfig{Concurrency: 1}) }()
		s.publish(1, nil)
		time.Sleep(time.Second)
		_, err := declare.Apply(t.Context(), s.conn.Management(), declare.Topology{
			Queues:   []declare.Queue{declare.ClassicQueue{Name: "full", DeadLetter: declare.Drop(), MaxLength: 1, Overflow: declare.OverflowRejectPublish}},
			Bindings: []declare.Binding{{Source: "hopback.workers", Queue: "full"}},
		})
		require.NoError(t, err)
		for range 3 {
			f := s.ask()
			require.Len(t, f.Workers, 1)
			assert.Equal(t, []live.Queue{{Name: "orders", Handled: 2, Failed: 1}}, f.Workers[0].Queues)
		}
		cancel()
		require.NoError(t, <-done)
	})
}

// A retry has its attempt, and its message its ID, of any type.
func TestAttemptsAndIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		policy := retry.Policy{Strategy: retry.StrategyNative, Backoff: retry.Exponential(time.Second, 1)}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "retried"})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
		require.NoError(t, err)
		conn := s.connect(s.broker.URL())
		h := live.With(conn, live.Config{Host: "worker"})(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			if retry.Attempt(ctx) < 3 {
				return errors.New("the bank is down")
			}
			<-ctx.Done()
			return client.Requeue{}
		}))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- conn.Consume(ctx, "retried", retry.With(policy)(h), client.ConsumerConfig{Concurrency: 3, Grace: time.Second})
		}()
		p, err := client.NewPublisher[string](t.Context(), s.conn, address.Queue("retried"), client.PublisherConfig{})
		require.NoError(t, err)
		for _, id := range []any{uint64(7), []byte{1, 0xff}, strings.Repeat("ä", 500)} {
			require.NoError(t, p.Publish(t.Context(), "an order", func(m *client.Message) { m.Properties.MessageID = id }))
		}
		time.Sleep(time.Minute)
		f := s.ask()
		require.Len(t, f.Workers[0].Running, 3)
		for _, r := range f.Workers[0].Running {
			assert.Equal(t, 3, r.Attempt)
			assert.NotEmpty(t, r.ID)
			assert.LessOrEqual(t, len(r.ID), 260)
		}
		assert.EqualValues(t, 6, f.Workers[0].Queues[0].Failed)
		cancel()
		require.NoError(t, <-done)
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		nothing := client.HandlerFunc(func(context.Context, *client.Delivery) error { panic("a panic") })
		for text, h := range map[string]client.Handler{
			"conn":       live.With(nil, live.Config{})(nothing),
			"Host":       live.With(s.conn, live.Config{Host: "\xff"})(nothing),
			"Version":    live.With(s.conn, live.Config{Version: strings.Repeat("v", 256)})(nothing),
			"StuckAfter": live.With(s.conn, live.Config{StuckAfter: -1})(nothing),
			"handler":    live.With(s.conn, live.Config{})(nil),
		} {
			err := s.conn.Consume(t.Context(), "orders", h, client.ConsumerConfig{})
			require.ErrorAs(t, err, new(*argument.Error), text)
			assert.ErrorContains(t, err, text)
		}
		_, err := live.Ask(t.Context(), nil)
		require.ErrorAs(t, err, new(*argument.Error))
		h := live.With(s.conn, live.Config{})(nothing)
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders"}), "a test without a broker")
		assert.Panics(t, func() { _ = h.Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil))) })
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = live.Ask(ctx, s.conn)
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, s.conn.Close(t.Context()))
		_, err = live.Ask(t.Context(), s.conn)
		require.ErrorIs(t, err, client.ErrClosed)
	})
}

// watch watches until the scene ends. shown returns the last Fleet.
func (s *scene) watch() (shown func() live.Fleet, stop func()) {
	ctx, cancel := context.WithCancel(s.Context())
	var mu sync.Mutex
	var last live.Fleet
	done := make(chan error, 1)
	go func() {
		done <- live.Watch(ctx, s.conn, func(f live.Fleet) {
			mu.Lock()
			defer mu.Unlock()
			last = f
		})
	}()
	stop = sync.OnceFunc(func() { cancel(); assert.NoError(s, <-done) })
	s.Cleanup(stop)
	return func() live.Fleet {
		mu.Lock()
		defer mu.Unlock()
		return last
	}, stop
}

// frames is how many frames the workers have sent.
func (s *scene) frames() (n int) {
	for _, c := range s.broker.Connections() {
		n += c.Frames(hopbacktest.DirectionFromClient)
	}
	return n
}

// Watch shows 200 workers with 5,000 running handlers as Ask does, for a fraction of the messages: also if all of them
// change all the time, at most 50 answers come in 2 s. When nobody watches, nobody sends anything.
func TestWatchingManyWorkersCostsLittle(t *testing.T) {
	if explore.UnderRace {
		t.Skip("the costs are measured without the race detector")
	}
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{MaxEvents: -1})
		const workers, each = 200, 25
		release := make(chan error)
		var all []client.Handler
		for i := range workers {
			all = append(all, s.work(fmt.Sprintf("host-%03d", i), each, release).handler)
		}
		s.publish(workers*each, nil)
		time.Sleep(5 * time.Second)
		shown, stop := s.watch()
		time.Sleep(2 * time.Second)
		require.Len(t, shown().Workers, workers)
		assert.Equal(t, workers*each, handlers(shown()))
		time.Sleep(20 * time.Second) // they know how often to answer
		most := 0
		per2s := func() (frames int) {
			began := s.frames()
			for range 20 {
				before := s.frames()
				time.Sleep(2 * time.Second)
				most = max(most, s.frames()-before)
				f := shown()
				assert.Len(t, f.Workers, workers)
				assert.Equal(t, workers*each, handlers(f))
				assert.Zero(t, f.Dropped)
			}
			return (s.frames() - began) / 20
		}
		calm := per2s()
		quick := client.NewDelivery("orders", client.NewMessage(nil))
		busy, end := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(busy)
			for {
				for _, h := range all {
					_ = h.Handle(context.WithValue(t.Context(), returns{}, true), quick)
				}
				select {
				case <-end:
					return
				case <-time.After(time.Second):
				}
			}
		}()
		changing := per2s()
		close(end)
		<-busy
		asked := s.frames()
		s.ask()
		asked = s.frames() - asked
		t.Logf("frames in 2 s: %d if nothing changes, %d if everything does; %d for one Ask", calm, changing, asked)
		assert.Less(t, most, workers+workers/2, "all get a question at once, and grant credit for the next, but not all answer then")
		assert.Less(t, calm, asked/3)
		assert.Less(t, changing, asked/2)
		stop()
		time.Sleep(30 * time.Second)
		quiet := s.frames()
		time.Sleep(time.Minute)
		assert.Less(t, s.frames()-quiet, 10*workers, "keepalives only")
		close(release)
	})
}

// Watch notices that a worker starts, changes, or leaves, and that the exchange is new.
func TestWatchFollowsTheWorkers(t *testing.T) {
	for _, version := range []string{"4.3.6", "4.0.5", "4.4.0"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, hopbacktest.Config{Version: version, MaxEvents: -1})
				shown, _ := s.watch()
				time.Sleep(5 * time.Second)
				assert.Empty(t, shown().Workers)
				release := make(chan error)
				first := s.work("first", 1, release)
				time.Sleep(5 * time.Second)
				require.Len(t, shown().Workers, 1, "nobody was there before, so it is found soon")
				second := s.work("second", 1, release)
				time.Sleep(13 * time.Second)
				require.Len(t, shown().Workers, 2)
				s.publish(2, nil)
				time.Sleep(5 * time.Second)
				assert.Equal(t, 2, handlers(shown()))
				release <- nil
				time.Sleep(5 * time.Second)
				assert.Equal(t, 1, handlers(shown()))
				first.stop()
				time.Sleep(16 * time.Second)
				require.Len(t, shown().Workers, 1)
				assert.Equal(t, "second", shown().Workers[0].Host)
				close(release)
				second.stop()
				time.Sleep(16 * time.Second)
				assert.Empty(t, shown().Workers)
			})
		})
	}
}

// Questions that ask for answers too often, for too long, or for too many, are bounded, and so are forged answers.
func TestForgedWatchersAndAnswersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{MaxEvents: -1})
		release := make(chan error)
		h := s.work("honest", 1, release).handler
		time.Sleep(time.Second)
		var queues []declare.Queue
		for i := range 50 {
			queues = append(queues, declare.ClassicQueue{Name: fmt.Sprint("hopback.workers.answers.forged", i), DeadLetter: declare.Drop()})
		}
		_, err := declare.Apply(t.Context(), s.conn.Management(), declare.Topology{Queues: queues})
		require.NoError(t, err)
		p, err := client.NewPublisher[*client.Message](t.Context(), s.conn, address.Exchange("hopback.workers", ""), client.PublisherConfig{})
		require.NoError(t, err)
		for _, ms := range []any{int64(1), int64(-1 << 63), int64(1<<63 - 1), "often", nil} {
			for i := range 50 {
				m := client.NewMessage(nil)
				m.Properties.ReplyTo = new(fmt.Sprint("/queues/hopback.workers.answers.forged", i))
				m.ApplicationProperties = map[string]any{"x-hopback-every": ms, "x-hopback-for": ms}
				_ = p.Publish(t.Context(), m)
				time.Sleep(100 * time.Millisecond)
			}
		}
		time.Sleep(time.Minute)
		count := func() (n int) {
			for _, q := range queues {
				n += int(s.broker.Queue(q.Address().QueueName()).Counts().Ready)
			}
			return n
		}
		before := count()
		assert.Less(t, before, 600)
		for range 60 {
			_ = h.Handle(context.WithValue(t.Context(), returns{}, true), client.NewDelivery("orders", client.NewMessage(nil)))
			time.Sleep(time.Second)
		}
		assert.LessOrEqual(t, count()-before, 4*60)
		time.Sleep(2 * time.Minute)
		before = count()
		time.Sleep(2 * time.Minute)
		assert.Equal(t, before, count(), "all of them are over")

		var flood [][]byte
		for i := range 5000 {
			flood = append(flood, fmt.Appendf(nil, `{"id":"forged-%d","every":9223372036854775807,"age":-9223372036854775808}`, i))
		}
		s.forge(flood...)
		shown, _ := s.watch()
		time.Sleep(5 * time.Second)
		assert.LessOrEqual(t, len(shown().Workers), 2000)
		assert.LessOrEqual(t, len(shown().Workers)+shown().Dropped, 6000)
		close(release)
	})
}
