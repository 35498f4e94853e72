package broker_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// alarms of a broker, and how they are set and cleared.
var alarms = []struct {
	name, set, clear string
}{
	{"memory", "ok = vm_memory_monitor:set_vm_memory_high_watermark({absolute, 1000000}).", "ok = vm_memory_monitor:set_vm_memory_high_watermark(0.6)."},
	{"disk", "ok = rabbit_disk_monitor:set_disk_free_limit(900000000000000).", "ok = rabbit_disk_monitor:set_disk_free_limit(1000000)."},
}

// alarmed says whether the broker has an alarm.
func alarmed(t *testing.T, s *suite.Site) bool {
	t.Helper()
	status, _, err := s.HTTPStatus(http.MethodGet, "/health/checks/local-alarms", nil)
	require.NoError(t, err)
	return status != http.StatusOK
}

// B16: while a broker has an alarm it reads nothing from connections that publish.
// Publishing waits within its ctx, even with the link's credit and the session's
// window used up; receiving, accepting, attaching and retries by settlement go on;
// retries by copies wait; Close ends; and when the alarm is over everything continues, with
// nothing lost.
func TestAlarmStopsPublishingAndNothingElse(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		for _, alarm := range alarms {
			t.Run(alarm.name, func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				const each = 5
				type worker struct {
					queue        string
					policy       retry.Policy
					conn         *client.Conn
					first, again chan struct{}
					copies       bool
				}
				var workers []*worker
				admin, _ := s.Connect(t)
				for name, edit := range suite.Strategies(s) {
					policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(500 * time.Millisecond), Names: retry.Names{Prefix: name + "."}}
					edit(&policy)
					// "auto" is one of the others.
					if name == "auto" {
						continue
					}
					w := &worker{queue: "work-" + name, policy: policy, first: make(chan struct{}, 100), again: make(chan struct{}, 100), copies: name == "republish" || name == "ladder"}
					suite.ApplyRetry(t, admin, policy, declare.QuorumQueue{Name: w.queue, DeliveryLimit: 3})
					p := suite.Publisher[suite.Order](t, admin, address.Queue(w.queue))
					for i := range each {
						suite.Publish(t, p, suite.Order{ID: i})
					}
					w.conn, _ = s.Connect(t)
					workers = append(workers, w)
				}
				suite.Apply(t, admin, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
				suite.Apply(t, admin, suite.QueueOf(declare.QuorumQueue{Name: "plain"}))
				for i := range each {
					suite.Publish(t, suite.Publisher[suite.Order](t, admin, address.Queue("plain")), suite.Order{ID: i})
				}
				wire, through := s.Through(t)
				publishing, log := suite.ConnectTo(t, through)
				p := suite.Publisher[suite.Order](t, publishing, address.Queue("orders"))
				suite.Publish(t, p, suite.Order{ID: -1})
				failing, _ := s.Connect(t)
				failingPublisher := suite.Publisher[suite.Order](t, failing, address.Queue("orders"))

				begin := make(chan struct{})
				for _, w := range workers {
					suite.Consume(t, w.conn, w.queue, retry.With(w.policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
						<-begin
						if retry.Attempt(ctx) == 1 {
							w.first <- struct{}{}
							return errors.New("not yet")
						}
						w.again <- struct{}{}
						return nil
					})), client.ConsumerConfig{Concurrency: 2, Prefetch: 64})
					suite.AwaitConsumers(t, admin, w.queue, 1)
				}

				s.EvalOK(t, alarm.set)
				cleared := false
				clearAlarm := func() {
					if !cleared {
						cleared = true
						s.EvalOK(t, alarm.clear)
						suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
					}
				}
				defer clearAlarm()
				suite.Poll(t, "there is an alarm", func() bool { return alarmed(t, s) })

				suite.Poll(t, "the publisher knows of it", func() bool { _, blocked := p.Blocked(); return blocked })
				assert.False(t, publishing.State().BlockedSince.IsZero())
				// More than credit and window: it ends with its ctx, and has never left.
				const blocked, limit = 1000, 2 * time.Second
				var unknown, unsent, stored atomic.Int64
				began := time.Now()
				var all sync.WaitGroup
				for i := range blocked {
					all.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), limit)
						defer cancel()
						err := p.Publish(ctx, suite.Order{ID: i})
						switch {
						case err == nil:
							stored.Add(1)
						case errors.Is(err, client.ErrOutcomeUnknown):
							unknown.Add(1)
						case errors.Is(err, client.ErrNotSent):
							unsent.Add(1)
						default:
							t.Errorf("%v", err)
						}
						if err != nil {
							assert.ErrorIs(t, err, context.DeadlineExceeded)
						}
					})
				}
				all.Wait()
				took := time.Since(began)
				assert.Less(t, took, limit+suite.LateLimit)
				assert.EqualValues(t, blocked, unsent.Load())
				stream := wire.Sent()

				// A connection that is blocked can be closed.
				cutOff := make(chan error, 1)
				go func() { cutOff <- failingPublisher.Publish(context.Background(), suite.Order{ID: 5000}) }()
				suite.Poll(t, "one publish waits, and blocks the next", func() bool {
					ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
					defer cancel()
					return errors.Is(failingPublisher.Publish(ctx, suite.Order{ID: 5001}), client.ErrNotSent)
				})
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				began = time.Now()
				err := failing.Close(ctx)
				cancel()
				cut := suite.Await(t, cutOff, "Publish returns")
				for _, err := range []error{err, cut} { // it may have left just before the alarm
					assert.True(t, errors.Is(err, client.ErrOutcomeUnknown) || errors.Is(err, client.ErrNotSent), "%v", err)
				}
				closed := time.Since(began)
				assert.Less(t, closed, suite.LateLimit)
				t.Logf("closed in %v: %v", closed.Round(time.Millisecond), err)

				// Consumers attach, receive and settle.
				attached, attaching := s.Connect(t)
				plain := make(chan int, 100)
				suite.Consume(t, attached, "plain", client.JSON(func(_ context.Context, o suite.Order) error { plain <- o.ID; return nil }), client.ConsumerConfig{})
				for i := range each {
					assert.Equal(t, i, suite.Await(t, plain, "a message for who came late"))
				}
				assert.Empty(t, attaching.All())
				close(begin)
				for _, w := range workers {
					for range each {
						suite.Await(t, w.first, w.queue+": an attempt")
					}
				}
				for _, w := range workers {
					if w.copies {
						continue
					}
					for range each {
						suite.Await(t, w.again, w.queue+": a retry by settlement")
					}
				}
				for _, w := range workers {
					if w.copies {
						assert.Empty(t, w.again, w.queue+": a copy can't get through")
					}
				}
				assert.True(t, alarmed(t, s), "all that was while the alarm lasted")
				assert.Empty(t, log.With("lost"))

				suite.Poll(t, "it is logged", func() bool { return len(log.With("accepts no messages")) == 1 })
				clearAlarm()
				suite.Poll(t, "its end is logged", func() bool { return len(log.With("accepts messages again")) == 1 })
				began = time.Now()
				for _, w := range workers {
					if !w.copies {
						continue
					}
					for range each {
						suite.Await(t, w.again, w.queue+": a retry by copy, when the alarm is over")
					}
				}
				suite.Publish(t, p, suite.Order{ID: -2})
				resumed := time.Since(began)
				assert.Greater(t, wire.Sent(), stream)
				assert.Empty(t, log.With("lost"), "the same connection")
				for _, w := range workers {
					suite.Poll(t, w.queue+" is empty", func() bool { return suite.Ready(t, admin, w.queue) == 0 })
					assert.Empty(t, w.again, w.queue+": each once")
				}
				suite.Poll(t, "what was sent is stored", func() bool { return int64(suite.Ready(t, admin, "orders")) >= unknown.Load()+stored.Load()+2 })
				suite.Report(t, s, "%s alarm: of %d publishes %d ended unsent and %d unknown in %v; Close in %v; all went on %v after it", alarm.name, blocked, unsent.Load(), unknown.Load(), took.Round(time.Millisecond), closed.Round(time.Millisecond), resumed.Round(time.Millisecond))
			})
		}
	})
}

// An alarm that lasts longer than ForwardPatience costs no message a failed delivery, even
// where a forward has stalled before and the consumer knows that its queue keeps dead
// letters. Nothing is logged as an error.
func TestAlarmUsesUpNoForwardPatience(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		const messages, patience = 20, 500 * time.Millisecond
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second), Strategy: retry.StrategyRepublish}
		// Each failed delivery doubles the patience. So 6 have the first message wait for over
		// half a minute until its delay queue is there again. 1 would be 1.5 s, which a busy
		// broker may take for that, and the message would rightly end in orders.dead.
		work := declare.QuorumQueue{Name: "orders", DeliveryLimit: 6}
		admin, _ := s.Connect(t)
		suite.ApplyRetry(t, admin, policy, work)
		conn, log := s.Connect(t)
		begin, retried := make(chan struct{}), make(chan int, 10*messages)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			if d, _ := client.DeliveryFrom(ctx); retry.Count(d.Message()) > 0 {
				retried <- o.ID
				return nil
			}
			if o.ID >= 0 {
				<-begin
			}
			return errors.New("not yet")
		})), client.ConsumerConfig{Concurrency: messages, Prefetch: 2 * messages, ForwardPatience: patience})
		suite.AwaitConsumers(t, admin, "orders", 1)
		p := suite.Publisher[suite.Order](t, admin, address.Queue("orders"))

		_, err := declare.DeleteQueue(t.Context(), admin.Management(), "delay_1s")
		require.NoError(t, err)
		suite.Publish(t, p, suite.Order{ID: -1})
		suite.Poll(t, "a forward is given up", func() bool { return len(log.With("returns to its queue")) > 0 })
		suite.ApplyRetry(t, admin, policy, work)
		assert.Equal(t, -1, suite.Await(t, retried, "its retry"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		s.EvalOK(t, alarms[0].set)
		clearAlarm := sync.OnceFunc(func() {
			s.EvalOK(t, alarms[0].clear)
			suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
		})
		defer clearAlarm()
		suite.Poll(t, "there is an alarm", func() bool { return alarmed(t, s) })
		earlier := len(log.With(" ERROR "))
		close(begin)
		suite.Poll(t, "all wait", func() bool { c := conn.Stats().Consumers; return len(c) == 1 && c[0].Forwarding == messages })
		time.Sleep(10 * patience) // that of three deliveries is 7 times as long; each that fails is an error in the log
		clearAlarm()
		for range messages {
			suite.Await(t, retried, "a retry")
		}
		suite.Poll(t, "the queue is empty", func() bool { return suite.Ready(t, admin, "orders") == 0 })
		assert.Zero(t, suite.Ready(t, admin, "orders.dead"))
		assert.Len(t, log.With(" ERROR "), earlier, "%q", log.With(" ERROR "))
	})
}

// Alarms that come and go during a stream of messages cost neither the session nor a
// message, nor do they make duplicates: nothing is on its way that the broker doesn't
// take.
func TestAlarmsDuringAStreamCostNothing(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		rounds := 5
		if os.Getenv("HOPBACK_LONG") != "" {
			rounds = 100
		}
		seen := &suite.Events{}
		conn, log := s.Connect(t, func(c *client.Config) { c.OnEvent = seen.Observe })
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		over, ended := make(chan struct{}), make(chan struct{})
		var accepted atomic.Int64
		go func() {
			defer close(ended)
			for orders := make([]suite.Order, 2000); !suite.IsOver(over); accepted.Add(int64(len(orders))) {
				if err := p.PublishAll(t.Context(), orders); !assert.NoError(t, err) {
					return
				}
			}
		}()
		// RabbitMQ notifies each session of a connection by itself. If one heard late that an alarm is over,
		// the connection would report it and the next as one. So each step waits for its event.
		for n := range rounds {
			s.EvalOK(t, alarms[0].set)
			suite.Poll(t, "the alarm is reported", func() bool { return len(seen.Of("connection", client.EventBlocked)) == n+1 })
			s.EvalOK(t, alarms[0].clear)
			suite.Poll(t, "its end is reported", func() bool { return len(seen.Of("connection", client.EventUnblocked)) == n+1 })
			before := accepted.Load()
			suite.Poll(t, "publishing continues", func() bool { return accepted.Load() > before })
		}
		close(over)
		<-ended
		suite.Publish(t, p, suite.Order{})
		suite.Poll(t, "each is there once", func() bool { return suite.Ready(t, conn, "orders") == int(accepted.Load())+1 })
		assert.Empty(t, log.With("lost"))
		assert.Len(t, seen.Of("connection", client.EventBlocked), rounds)
		assert.Len(t, seen.Of("connection", client.EventUnblocked), rounds)
		suite.Report(t, s, "%d messages through %d alarms", accepted.Load()+1, rounds)
	})
}

// A connection that is made in an alarm, over the endpoint whose node leads a queue, asks
// for the leader on its first session. What it asks isn't answered, and hurts nothing: the
// alarm is reported after Up, requests end unsent with their ctx, Close ends at once, and
// nobody is notified that the alarm is over before it is.
func TestConnectionsAreMadeAndClosedInAnAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		suite.Apply(t, admin, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		s.EvalOK(t, alarms[0].set)
		cleared := false
		clearAlarm := func() {
			if !cleared {
				cleared = true
				s.EvalOK(t, alarms[0].clear)
				suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
			}
		}
		defer clearAlarm()
		suite.Poll(t, "there is an alarm", func() bool { return alarmed(t, s) })

		connect := func() (*client.Conn, *suite.Events, *suite.Logbook) {
			seen := &suite.Events{}
			conn, log := s.Connect(t, func(c *client.Config) {
				c.Endpoints, c.PreferLeaderOf, c.OnEvent = []string{s.AMQPURL()}, "orders", seen.Observe
			})
			return conn, seen, log
		}
		kept, keptEvents, keptLog := connect()
		closed, closedEvents, closedLog := connect()
		for _, conn := range []*client.Conn{kept, closed} {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			_, _, err := conn.Management().Request(ctx, http.MethodGet, "/queues/orders", nil)
			cancel()
			require.ErrorIs(t, err, client.ErrNotSent)
		}
		suite.Poll(t, "the alarm is logged", func() bool { return len(closedLog.With("accepts no messages")) == 1 })
		began := time.Now()
		require.NoError(t, closed.Close(context.Background()))
		took := time.Since(began)
		assert.Less(t, took, suite.LateLimit)
		assert.Len(t, closedEvents.Of("connection", client.EventBlocked), 1)
		assert.Empty(t, closedEvents.Of("connection", client.EventUnblocked))
		assert.Empty(t, closedLog.With("accepts messages again"))
		suite.Report(t, s, "Close in an alarm, after a request: %v", took.Round(time.Millisecond))

		clearAlarm()
		suite.Publish(t, suite.Publisher[suite.Order](t, kept, address.Queue("orders")), suite.Order{})
		suite.Poll(t, "its end is reported", func() bool { return len(keptEvents.Of("connection", client.EventUnblocked)) == 1 })
		suite.Poll(t, "and logged", func() bool { return len(keptLog.With("accepts messages again")) == 1 })
	})
}
