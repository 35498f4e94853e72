package integration

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/adapter/officialclient"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

var errDown = errors.New("the service is down")

func handler(f func(d *client.Delivery) error) client.Handler {
	return client.HandlerFunc(func(_ context.Context, d *client.Delivery) error { return f(d) })
}

// times counts how often each key was seen.
type times struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *times) add(key string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[key]++
	return c.n[key]
}

// more is how many were seen again.
func (c *times) more() (again int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.n {
		again += n - 1
	}
	return again
}

func (c *times) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.n)
}

func message(id string) *client.Message {
	m := client.NewMessage([]byte("body of " + id))
	m.Properties.MessageID = id
	return m
}

func messages(prefix string, n int) []*client.Message {
	ms := make([]*client.Message, n)
	for i := range ms {
		ms[i] = message(fmt.Sprintf("%s-%d", prefix, i))
	}
	return ms
}

func id(d *client.Delivery) string { return fmt.Sprint(d.Message().Properties.MessageID) }

func TestRetryHopsBackAndSucceeds(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(150*time.Millisecond, 300*time.Millisecond)}
		s.work(t, policy, declare.QuorumQueue{Name: "orders"})
		got := make(chan *client.Message, 10)
		stop := s.official(t, "orders", 100, retry.With(policy)(handler(func(d *client.Delivery) error {
			got <- d.Message()
			if retry.Count(d.Message()) < 2 {
				return errDown
			}
			return nil
		})), officialclient.Config{})
		m := message("o-1")
		m.Properties.To, m.Properties.UserID = new("/what/the/sender/set"), []byte("guest")
		m.ApplicationProperties = map[string]any{"tenant": "blue"}
		began := time.Now()
		s.publish(t, "orders", m)
		for try := range 3 {
			g := next(t, got, "attempt")
			assert.Equal(t, try, retry.Count(g))
			assert.Equal(t, "o-1", g.Properties.MessageID)
			if assert.NotNil(t, g.Properties.To) {
				assert.Equal(t, "/what/the/sender/set", *g.Properties.To, "a link for each address leaves it alone")
			}
			assert.Equal(t, "blue", g.ApplicationProperties["tenant"])
			assert.Equal(t, uint8(4), g.Header.Priority)
			user, checked := client.UserID(g)
			assert.Equal(t, "guest", user)
			assert.True(t, checked, "the copies are published by the same user")
		}
		assert.GreaterOrEqual(t, time.Since(began), 450*time.Millisecond)
		stop()
		assert.Zero(t, s.length(t, "orders"))
		assert.Zero(t, s.length(t, "orders.dead"))
	})
}

func TestExhaustedIsDeadLetteredWithReason(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond)}
		s.work(t, policy, declare.QuorumQueue{Name: "orders"})
		s.official(t, "orders", 100, retry.With(policy)(handler(func(*client.Delivery) error { return errDown })), officialclient.Config{})
		s.publish(t, "orders", message("o-1"))
		m := s.take(t, "orders.dead", 1)[0]
		assert.Equal(t, "o-1", m.Properties.MessageID)
		assert.Equal(t, string(retry.ReasonExhausted), m.Annotations[client.AnnotationReason])
		assert.Equal(t, errDown.Error(), m.Annotations[client.AnnotationError])
		assert.Equal(t, 2, retry.Count(m))
	})
}

// Both of retry's strategies that settle, rather than publish, work by what the
// official client can say.
func TestRetryBySettlement(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		for _, strategy := range []retry.Strategy{retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && !s.newer() {
				continue
			}
			queue := string(strategy)
			policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(200 * time.Millisecond), Strategy: strategy}
			s.work(t, policy, declare.QuorumQueue{Name: queue, DeliveryLimit: 5})
			type attempt struct {
				count  int
				failed uint32
				at     time.Time
			}
			got := make(chan attempt, 10)
			stop := s.official(t, queue, 100, retry.With(policy)(handler(func(d *client.Delivery) error {
				got <- attempt{retry.Count(d.Message()), d.DeliveryCount(), time.Now()}
				return errDown
			})), officialclient.Config{})
			s.publish(t, queue, message("o-1"))
			last := time.Time{}
			for i := range 4 {
				a := next(t, got, "an attempt")
				assert.Equal(t, i, a.count, queue)
				if i > 0 {
					assert.GreaterOrEqual(t, a.at.Sub(last), 180*time.Millisecond, queue)
				}
				last = a.at
				if strategy == retry.StrategyDeadLetter {
					assert.EqualValues(t, i, a.failed, "each retry uses up a delivery, with the official client")
				} else {
					assert.Zero(t, a.failed)
				}
			}
			m := s.take(t, policy.Names.DeadLetterQueue(queue), 1)[0]
			assert.Equal(t, string(retry.ReasonExhausted), m.Annotations[client.AnnotationReason])
			stop()
		}
	})
}

func TestPanicIsDeadLettered(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.work(t, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
		stop := s.official(t, "orders", 100, handler(func(d *client.Delivery) error {
			if id(d) == "bad" {
				panic("no such thing")
			}
			return nil
		}), officialclient.Config{})
		s.publish(t, "orders", message("bad"), message("good"))
		m := s.take(t, "orders.dead", 1)[0]
		assert.Equal(t, "bad", m.Properties.MessageID)
		assert.Equal(t, string(client.ReasonPanicked), m.Annotations[client.AnnotationReason])
		assert.Contains(t, m.Annotations[client.AnnotationError], "no such thing")
		stop()
		assert.Zero(t, s.length(t, "orders"))
	})
}

// The official client can't count a failed delivery that stays in its queue, and
// without the adapter's own count a message that always fails would be redelivered without end
// on 4.3.
func TestFailureLimitEndsRequeueing(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.work(t, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
		var tries atomic.Int64
		s.official(t, "orders", 100, handler(func(*client.Delivery) error {
			tries.Add(1)
			return errDown // no decorator: requeued as failed
		}), officialclient.Config{FailureLimit: 3})
		s.publish(t, "orders", message("o-1"))
		m := s.take(t, "orders.dead", 1)[0]
		assert.Equal(t, string(client.ReasonFailureLimit), m.Annotations[client.AnnotationReason])
		assert.Equal(t, errDown.Error(), m.Annotations[client.AnnotationError])
		assert.EqualValues(t, 4, tries.Load(), "a limit of 3 allows 4 deliveries, as RabbitMQ's does")
		assert.EqualValues(t, 0, m.Annotations["x-opt-hopback-failures"], "a replay starts over")
	})
}

// The retry exchange is missing: each attach to it ends a session on 4.0. The
// originals must stay, and the forwards to other addresses go on.
func TestForwardToNowhereKeepsTheOriginal(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited},
			declare.QuorumQueue{Name: "elsewhere", DeadLetter: declare.Drop()},
		}})
		const n = 60
		var lost times
		var first atomic.Pointer[sync.Once]
		first.Store(new(sync.Once))
		missing := make(chan struct{})
		stop := s.official(t, "orders", 100, handler(func(d *client.Delivery) error {
			c := client.Copy(d.Message())
			if strings.HasPrefix(id(d), "bad") {
				lost.add(id(d))
				first.Load().Do(func() { close(missing) })
				return client.Forward{To: address.Exchange("missing", "k"), Message: c}
			}
			return client.Forward{To: address.Queue("elsewhere"), Message: c}
		}), officialclient.Config{Concurrency: 4, ForwardPatience: 3 * time.Second, FailureLimit: -1})
		s.publish(t, "orders", messages("bad", 5)...)
		next(t, missing, "a forward to nowhere")
		s.publish(t, "orders", messages("good", n)...)
		seen := map[any]int{}
		for _, m := range s.take(t, "elsewhere", n) {
			seen[m.Properties.MessageID]++
		}
		assert.Len(t, seen, n, "no forward is lost, and none is sent twice: the missing exchange disturbs nobody")
		assert.Equal(t, 5, lost.len())
		stop()
		eventually(t, "the originals are in their queue", func() bool { return s.length(t, "orders") == 5 })
	})
}

// The message is stored nowhere when the broker answers "released", for which the
// official client has no error.
func TestUnroutableForwardKeepsTheOriginal(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "empty", Type: declare.ExchangeTopic}},
			Queues:    []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.ToQueue("dead")}, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()}},
		})
		var tries atomic.Int64
		stop := s.official(t, "orders", 100, handler(func(d *client.Delivery) error {
			if tries.Add(1) == 2 {
				return nil
			}
			return client.Forward{To: address.Exchange("empty", "k"), Message: client.Copy(d.Message())}
		}), officialclient.Config{ForwardPatience: time.Second})
		s.publish(t, "orders", message("o-1"))
		eventually(t, "it comes back", func() bool { return tries.Load() == 2 })
		stop()
		assert.Zero(t, s.length(t, "orders"))
	})
}

// A queue without a dead-letter exchange would drop what goes back too often.
func TestUnroutableForwardIsKeptWhereTheQueueWouldDropTheOriginal(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "empty", Type: declare.ExchangeTopic}},
			Queues:    []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop(), DeliveryLimit: 1}},
		})
		log := &logged{}
		var tries atomic.Int64
		stop := s.official(t, "orders", 100, handler(func(d *client.Delivery) error {
			tries.Add(1)
			return client.Forward{To: address.Exchange("empty", "k"), Message: client.Copy(d.Message())}
		}), officialclient.Config{ForwardPatience: 300 * time.Millisecond, FailureLimit: 1, Logger: slog.New(log)})
		s.publish(t, "orders", message("o-1"))
		eventually(t, "more rounds of patience than the limits have room for", func() bool { return log.count("the original is kept, because its queue") > 3 })
		assert.EqualValues(t, 1, tries.Load(), "it isn't handled again in the meantime")
		s.apply(t, declare.Topology{
			Queues:   []declare.Queue{declare.QuorumQueue{Name: "later", DeadLetter: declare.Drop()}},
			Bindings: []declare.Binding{{Source: "empty", Queue: "later", Key: "k"}},
		})
		assert.Equal(t, "o-1", s.take(t, "later", 1)[0].Properties.MessageID)
		stop()
		assert.Zero(t, s.length(t, "orders"))
	})
}

// logged counts what was logged.
type logged struct {
	mu    sync.Mutex
	lines []string
}

func (l *logged) Enabled(context.Context, slog.Level) bool { return true }
func (l *logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logged) WithGroup(string) slog.Handler            { return l }
func (l *logged) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, r.Message)
	return nil
}

func (l *logged) count(text string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

func TestNothingIsLostWhenConnectionsAreKilled(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const n = 300
		policy := retry.Policy{MaxRetries: 200, Backoff: retry.Delays(100*time.Millisecond, 500*time.Millisecond)}
		s.work(t, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})
		var done, handled times
		var calm atomic.Bool
		var err error
		s.own, err = client.Connect(within(t), s.proxied(), client.Config{Reconnect: client.ReconnectBackoff{Max: 500 * time.Millisecond}, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.own.Close(within(t)) })
		s.official(t, "orders", 100, retry.With(policy)(handler(func(d *client.Delivery) error {
			handled.add(id(d))
			if retry.Count(d.Message()) < 3 || !calm.Load() {
				return errDown
			}
			done.add(id(d))
			return nil
		})), officialclient.Config{Concurrency: 16})
		s.publish(t, "orders", messages("m", n)...)
		eventually(t, "retries are in progress", func() bool { return handled.len() > n/2 })
		cuts := 0
		for range 5 {
			eventually(t, "both connections are there to be cut", func() bool { return s.proxy.Open() >= 2 })
			time.Sleep(100 * time.Millisecond) // so that publishes and settlements are in flight
			cuts += s.cut()
		}
		s.proxy.Refuse()
		cuts += s.cut()
		time.Sleep(300 * time.Millisecond) // the broker is away
		require.NoError(t, s.proxy.Admit())
		killed := 0
		eventually(t, "the broker ends them, too", func() bool {
			killed += s.kill(t)
			return killed > 0
		})
		calm.Store(true)
		eventually(t, "every message succeeds", func() bool { return done.len() == n })
		eventually(t, "nothing is left", func() bool { return s.length(t, "orders") == 0 })
		assert.Zero(t, s.length(t, "orders.dead"))
		fmt.Printf("REPORT %s %s: %d connections cut, %d ended by the broker, %d messages, 0 lost, %d duplicates\n", t.Name(), s.FullVersion, cuts, killed, n, done.more())
	})
}

func TestSideBySideWithHopbacksConsumer(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const n = 200
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		s.work(t, policy, declare.QuorumQueue{Name: "orders"})
		var done, ours, theirs times
		work := func(mine *times) client.Handler {
			return retry.With(policy)(handler(func(d *client.Delivery) error {
				mine.add(id(d))
				if retry.Count(d.Message()) < 2 {
					return errDown
				}
				done.add(id(d))
				return nil
			}))
		}
		s.official(t, "orders", 5, work(&theirs), officialclient.Config{})
		consumeWith(t, func(ctx context.Context) error {
			return s.conn.Consume(ctx, "orders", work(&ours), client.ConsumerConfig{Prefetch: 5})
		})
		s.publish(t, "orders", messages("m", n)...)
		eventually(t, "every message succeeds", func() bool { return done.len() == n })
		assert.Positive(t, ours.len())
		assert.Positive(t, theirs.len())
		assert.Zero(t, done.more(), "none is handled twice")
		assert.Zero(t, s.length(t, "orders.dead"))
	})
}

// The official client panics on these messages in Receive. With one credit nothing else is
// prefetched, and so nothing else is counted.
func TestUnreadableMessageHarmsNoOther(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.work(t, retry.Policy{}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 4})
		const n = 30
		var done times
		s.official(t, "orders", 1, handler(func(d *client.Delivery) error {
			done.add(id(d))
			return nil
		}), officialclient.Config{})
		ms := messages("m", n)
		for _, m := range ms[5:7] {
			m.Annotations = amqp.Annotations{"x-stream-offset": "not a number"}
		}
		s.publish(t, "orders", ms...)
		eventually(t, "all others are handled", func() bool { return done.len() == n-2 })
		eventually(t, "the culprits are dead letters", func() bool { return s.length(t, "orders.dead") == 2 })
		for _, m := range s.take(t, "orders.dead", 2) {
			assert.Contains(t, []any{"m-5", "m-6"}, m.Properties.MessageID)
		}
	})
}

// Its link ends without its connection, which the official client doesn't repair.
func TestConsumerIsRebuiltWhenItsQueueComesBack(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		q := declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}
		s.apply(t, declare.Topology{Queues: []declare.Queue{q}})
		got := make(chan string, 10)
		s.official(t, "orders", 100, handler(func(d *client.Delivery) error {
			got <- id(d)
			return nil
		}), officialclient.Config{})
		s.publish(t, "orders", message("before"))
		assert.Equal(t, "before", next(t, got, "the first message"))
		s.http(t, "DELETE", "/queues/"+s.vhost+"/orders", nil)
		time.Sleep(300 * time.Millisecond) // let it fail to attach, which would leave a ghost behind
		s.apply(t, declare.Topology{Queues: []declare.Queue{q}})
		s.publish(t, "orders", message("after"))
		assert.Equal(t, "after", next(t, got, "the message in the new queue"))
		eventually(t, "one consumer and no ghost", func() bool {
			var info struct{ Consumers int }
			s.http(t, "GET", "/queues/"+s.vhost+"/orders", &info)
			return info.Consumers == 1
		})
	})
}

func TestDrain(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "next", DeadLetter: declare.Drop()},
		}})
		const n = 20
		started, finish := make(chan struct{}, n), make(chan struct{})
		stop := s.official(t, "orders", 8, handler(func(d *client.Delivery) error {
			started <- struct{}{}
			<-finish
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		}), officialclient.Config{Concurrency: 2})
		s.publish(t, "orders", messages("m", n)...)
		next(t, started, "a handler")
		next(t, started, "another")
		go func() {
			time.Sleep(200 * time.Millisecond) // the drain has begun
			close(finish)
		}()
		stop()
		assert.Empty(t, started, "no handler begins in a drain")
		assert.Equal(t, 2, s.length(t, "next"), "what was begun is carried out")
		eventually(t, "the rest is back", func() bool { return s.length(t, "orders") == n-2 })
		for _, m := range s.take(t, "orders", n-2) {
			count := uint32(0)
			if m.Header != nil {
				count = m.Header.DeliveryCount
			}
			if s.newer() {
				assert.Zero(t, count, "a drain counts no delivery")
			} else {
				assert.LessOrEqual(t, count, uint32(1))
			}
		}
	})
}

func TestServeRefusesAtItsStart(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.work(t, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
		h := handler(func(*client.Delivery) error { return nil })
		consumer, err := s.connection(t, rabbitmqamqp.RecoveryConfiguration{}).NewConsumer(within(t), "orders", nil)
		require.NoError(t, err)
		bad := func(conn *client.Conn, c officialclient.Receiver, queue string, h client.Handler, cfg officialclient.Config) {
			t.Helper()
			var a *argument.Error
			require.ErrorAs(t, officialclient.Serve(within(t), conn, c, queue, h, cfg), &a)
		}
		bad(nil, consumer, "orders", h, officialclient.Config{})
		bad(s.conn, consumer, "", h, officialclient.Config{})
		bad(s.conn, consumer, "orders", nil, officialclient.Config{})
		bad(s.conn, consumer, "orders", client.HandlerFunc(nil), officialclient.Config{})
		bad(s.conn, consumer, "orders", h, officialclient.Config{Concurrency: -1})
		bad(s.conn, consumer, "orders", retry.With(retry.Policy{MaxRetries: -7})(h), officialclient.Config{})
		bad(s.conn, nil, "orders", h, officialclient.Config{})
		bad(s.conn, (*rabbitmqamqp.Consumer)(nil), "orders", h, officialclient.Config{})
	})
}

func TestServeOnAConsumerOfTheCallers(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100 * time.Millisecond)}
		s.work(t, policy, declare.QuorumQueue{Name: "orders"})
		conn := s.connection(t, rabbitmqamqp.RecoveryConfiguration{})
		consumer, err := conn.NewConsumer(within(t), "orders", nil)
		require.NoError(t, err)
		var tries times
		done := make(chan string, 10)
		serve := func(ctx context.Context) error {
			return officialclient.Serve(ctx, s.conn, consumer, "orders", retry.With(policy)(handler(func(d *client.Delivery) error {
				if tries.add(id(d)) < 3 {
					return errDown
				}
				done <- id(d)
				return nil
			})), officialclient.Config{})
		}
		stop := consumeWith(t, serve)
		s.publish(t, "orders", message("o-1"))
		assert.Equal(t, "o-1", next(t, done, "success"))
		stop()

		// The consumer is the caller's still, and can be served again; until its
		// link ends by itself, which nothing repairs.
		result := make(chan error, 1)
		go func() { result <- serve(context.Background()) }()
		s.publish(t, "orders", message("o-2"))
		assert.Equal(t, "o-2", next(t, done, "success"))
		s.http(t, "DELETE", "/queues/"+s.vhost+"/orders", nil)
		err = next(t, result, "Serve gives up")
		require.ErrorIs(t, err, client.ErrConnectionLost)
		require.IsType(t, &rabbitmqamqp.StateOpen{}, conn.State(), "State doesn't tell")
	})
}

func TestServeWaitsForRecovery(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		conn := s.connection(t, rabbitmqamqp.RecoveryConfiguration{ActiveRecovery: true, BackOffReconnectInterval: 1100 * time.Millisecond, MaxReconnectAttempts: 20})
		consumer, err := conn.NewConsumer(within(t), "orders", nil)
		require.NoError(t, err)
		counted := &countedReceiver{Receiver: consumer}
		got := make(chan string, 10)
		consumeWith(t, func(ctx context.Context) error {
			return officialclient.Serve(ctx, s.conn, counted, "orders", handler(func(d *client.Delivery) error {
				got <- id(d)
				return nil
			}), officialclient.Config{})
		})
		s.publish(t, "orders", message("before"))
		assert.Equal(t, "before", next(t, got, "a message"))
		require.Positive(t, s.cut())
		s.publish(t, "orders", message("after"))
		for next(t, got, "the message after recovery") != "after" {
			// The first one again: the cut may have come before its settlement.
		}
		assert.Less(t, counted.calls.Load(), int64(200), "Receive isn't called in a loop while it can only fail")
	})
}

type countedReceiver struct {
	officialclient.Receiver
	calls atomic.Int64
}

func (c *countedReceiver) Receive(ctx context.Context) (rabbitmqamqp.IDeliveryContext, error) {
	c.calls.Add(1)
	return c.Receiver.Receive(ctx)
}

func TestServeRefusesPreSettled(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.apply(t, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		conn := s.connection(t, rabbitmqamqp.RecoveryConfiguration{})
		consumer, err := conn.NewConsumer(within(t), "orders", &rabbitmqamqp.ConsumerOptions{SettleStrategy: rabbitmqamqp.PreSettled})
		require.NoError(t, err)
		s.publish(t, "orders", message("o-1"))
		err = officialclient.Serve(within(t), s.conn, consumer, "orders", handler(func(*client.Delivery) error { return nil }), officialclient.Config{})
		var a *argument.Error
		require.ErrorAs(t, err, &a)
	})
}
