package broker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
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

// Every consumer has a session for its forwards from the start, however many consumers
// one Conn serves: each message fails once, all handlers fail at the same moment, and
// none dies for want of a session.
func TestEveryConsumerHasRoomForItsForwards(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		consumers, queues, messages := 40, 4, 400
		if !s.Newer() {
			consumers, messages = 60, 600
		}
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(500 * time.Millisecond)}
		conn, log := s.Connect(t)
		var work []declare.QuorumQueue
		for n := range queues {
			work = append(work, declare.QuorumQueue{Name: fmt.Sprintf("work-%d", n), DeliveryLimit: 3})
		}
		suite.ApplyRetry(t, conn, policy, work...)

		// No handler fails before every consumer holds a message.
		all := make(chan struct{})
		var holding atomic.Int64
		done := make(chan int, messages)
		running, stop := context.WithCancel(context.Background())
		ended := make(chan error, consumers)
		for n := range consumers {
			first := sync.OnceFunc(func() {
				if holding.Add(1) == int64(consumers) {
					close(all)
				}
			})
			h := retry.With(policy)(client.JSON(func(ctx context.Context, id int) error {
				if retry.Attempt(ctx) > 1 {
					done <- id
					return nil
				}
				first()
				select {
				case <-all:
				case <-running.Done():
				}
				return errors.New("not yet")
			}))
			go func() {
				ended <- conn.Consume(running, work[n%queues].Name, h, client.ConsumerConfig{Prefetch: messages / consumers / 2})
			}()
		}
		t.Cleanup(func() {
			stop()
			for range consumers {
				assert.NoError(t, <-ended)
			}
		})
		for n := range queues {
			suite.AwaitConsumers(t, conn, work[n].Name, consumers/queues)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*suite.Patience)
		defer cancel()
		for n := range queues {
			p := suite.Publisher[int](t, conn, address.Queue(work[n].Name))
			ids := make([]int, messages/queues)
			for i := range ids {
				ids[i] = n*len(ids) + i
			}
			require.NoError(t, p.PublishAll(ctx, ids))
		}
		seen := map[int]bool{}
		for len(seen) < messages {
			select {
			case id := <-done:
				seen[id] = true
			case <-ctx.Done():
				t.Fatalf("%d of %d messages came back", len(seen), messages)
			}
		}
		for _, q := range work {
			assert.Zero(t, suite.Ready(t, conn, q.Name+".dead"), "%s", q.Name)
		}
		assert.Empty(t, log.With("no session left"))
	})
}

// serveMany runs n consumers and as many messages for each on one Conn.
func serveMany(t *testing.T, s *suite.Site, n, queues int) {
	const each = 5
	before := heldBy()
	seen := &suite.Events{}
	conn, log := s.Connect(t, func(c *client.Config) { c.OnEvent = seen.Observe })
	topology := declare.Topology{}
	for q := range queues {
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: fmt.Sprintf("q%d", q), DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
	}
	suite.Apply(t, conn, topology)

	limit := 4 * suite.Patience
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	running, stop := context.WithCancel(context.Background())
	defer stop()
	began := time.Now()
	var handled atomic.Int64
	ended := make(chan error, n)
	for i := range n {
		go func() {
			ended <- conn.Consume(running, fmt.Sprintf("q%d", i%queues), client.HandlerFunc(func(context.Context, *client.Delivery) error {
				handled.Add(1)
				return nil
			}), client.ConsumerConfig{})
		}()
	}
	wait := func(what string, yes func() bool) {
		for !yes() {
			select {
			case err := <-ended:
				require.FailNow(t, "a consumer ended", "%v", err)
			case <-ctx.Done():
				require.FailNow(t, "not so within "+limit.String(), what)
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	wait("all consume", func() bool { return len(seen.Of("consume", client.EventUp)) == n })
	started := time.Since(began)
	held := heldBy()
	for q := range queues {
		p := suite.Publisher[int](t, conn, address.Queue(fmt.Sprintf("q%d", q)))
		require.NoError(t, p.PublishAll(ctx, make([]int, n*each/queues)))
	}
	wait("all messages are handled", func() bool { return handled.Load() == int64(n*each) })
	connections := conn.State().Connections
	suite.Poll(t, "the broker knows of all connections", func() bool { return len(s.Connections(t)) == connections })
	// Two sessions for each consumer, of the 60 that a connection has for them.
	assert.Equal(t, (2*n+queues+59)/60, connections)
	assert.Empty(t, log.With("lost"))

	began = time.Now()
	stop()
	for range n {
		assert.NoError(t, <-ended)
	}
	stopped := time.Since(began)
	require.NoError(t, conn.Close(ctx))
	suite.Poll(t, "all connections are closed", func() bool { return len(s.Connections(t)) == 0 })
	suite.Report(t, s, "%d consumers on %d connections: started in %v, stopped in %v, %.1f goroutines and %.0f KiB each", n, connections,
		started.Round(time.Millisecond), stopped.Round(time.Millisecond),
		float64(held.Goroutines-before.Goroutines)/float64(n), float64(held.Heap-before.Heap)/float64(n)/1024)
}

// heldBy is what the process holds: the figures of one broker's run, if nothing else runs.
func heldBy() suite.HeldNow {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return suite.HeldNow{Goroutines: runtime.NumGoroutine(), Heap: m.HeapAlloc + m.StackInuse}
}

// One call of Connect serves more consumers than a connection has sessions.
func TestOneConnServesHundredsOfConsumers(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) { serveMany(t, s, 200, 5) })
}

// The figures are those of one broker at a time.
func TestOneConnServesAThousandConsumers(t *testing.T) {
	if os.Getenv("HOPBACK_LONG") == "" {
		t.Skip("it takes a minute: set HOPBACK_LONG=1")
	}
	for _, b := range suite.Brokers {
		t.Run(b.Version, func(t *testing.T) { serveMany(t, suite.NewSite(t, b), 1000, 10) })
	}
}

// Where the virtual host may have no further connection, those who need one get an error,
// and the others don't notice. RabbitMQ closes the socket without a reason.
func TestARefusedFurtherConnectionHurtsNobodyElse(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		limit := "/vhost-limits/" + s.VHost + "/max-connections"
		suite.Poll(t, "the broker counts the connection", func() bool { return len(s.Connections(t)) == 1 })
		s.HTTP(t, "PUT", limit, map[string]int{"value": 1}, nil)
		var open []*client.Publisher[suite.Order]
		for range 60 {
			open = append(open, suite.Publisher[suite.Order](t, conn, address.Queue("orders")))
		}
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		_, err := client.NewPublisher[suite.Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
		require.ErrorIs(t, err, client.ErrSessionLimit)
		assert.True(t, client.SafeToRetry(err))
		assert.ErrorContains(t, err, "refuses another connection")
		for _, i := range []int{0, 59} {
			suite.Publish(t, open[i], suite.Order{ID: i})
		}
		state := conn.State()
		assert.True(t, state.Connected)
		assert.Equal(t, 1, state.Connections)
		assert.EqualValues(t, 1, state.Generation)

		s.HTTP(t, "DELETE", limit, nil, nil)
		// A refusal holds for a moment.
		suite.Poll(t, "a further connection is taken", func() bool {
			p, err := client.NewPublisher[suite.Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
			if err != nil {
				require.ErrorIs(t, err, client.ErrSessionLimit)
				return false
			}
			suite.Publish(t, p, suite.Order{ID: 60})
			return true
		})
		assert.Equal(t, 2, conn.State().Connections)
	})
}

// How many sessions a connection may have is in the broker's open frame. So a lower
// session_max_per_connection takes more connections, and ends none.
func TestBrokerSaysHowManySessionsAConnectionHas(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		set := func(n int) {
			s.EvalOK(t, fmt.Sprintf("application:set_env(rabbit, session_max_per_connection, %d).", n))
		}
		set(10)
		defer set(64)
		conn, log := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		for i := range 13 { // of ten sessions four are kept for the management
			suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{ID: i})
		}
		assert.Equal(t, 3, conn.State().Connections)
		assert.Empty(t, log.With("lost"))
	})
}

// A broker whose settings leave no room for publishers is named as the cause, with these settings.
func TestABrokerThatAllowsOneSessionOnAConnection(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		s.EvalOK(t, "application:set_env(rabbit, session_max_per_connection, 1).")
		defer s.EvalOK(t, "application:set_env(rabbit, session_max_per_connection, 64).")
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		_, err := client.NewPublisher[suite.Order](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.ErrorIs(t, err, client.ErrSessionLimit)
		require.ErrorContains(t, err, "session_max_per_connection")
		assert.NotContains(t, err.Error(), "MaxConnections")
		assert.False(t, client.WorthRetrying(err))
	})
}

// frame_max 0 means no limit for AMQP 0-9-1 only: in AMQP 1.0, the broker refuses every frame of an open
// connection. So the connection isn't opened, and the error names the setting.
func TestABrokerThatAcceptsNoFrames(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		old := strings.TrimSpace(s.EvalOK(t, "{ok, N} = application:get_env(rabbit, frame_max), N."))
		s.EvalOK(t, "application:set_env(rabbit, frame_max, 0).")
		defer s.EvalOK(t, "application:set_env(rabbit, frame_max, "+old+").")
		_, err := client.Connect(t.Context(), s.AMQPURL(), client.Config{})
		require.ErrorIs(t, err, client.ErrUnreachable)
		require.ErrorContains(t, err, "frame_max")
		assert.False(t, client.WorthRetrying(err))
	})
}
