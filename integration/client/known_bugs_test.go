package client_test

import (
	"context"
	"fmt"
	"net/http"
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
)

func countIn(counts *sync.Map, d *client.Delivery) int64 {
	n, _ := counts.LoadOrStore(string(d.Message().GetData()), new(atomic.Int64))
	return n.(*atomic.Int64).Add(1)
}

// B1: what was refused is over, even if the connection changes later.
func TestRefusedConsumerIsNoGhostAfterAReconnect(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, _ := suite.ConnectTo(t, through, suite.Soon)
		var ghost atomic.Int64
		for range 3 {
			err := conn.Consume(t.Context(), "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
				ghost.Add(1)
				return nil
			}), client.ConsumerConfig{})
			require.ErrorIs(t, err, client.ErrNotFound)
		}
		_, err := client.NewPublisher[suite.Order](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.ErrorIs(t, err, client.ErrNotFound)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		for range 3 {
			require.Positive(t, wire.Cut())
			suite.Poll(t, "it is back", func() bool {
				_, err := declare.Inspect(t.Context(), conn.Management(), "orders")
				return err == nil
			})
			suite.AwaitConsumers(t, conn, "orders", 0)
		}
		got := make(chan int, 100)
		suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range 50 {
			suite.Publish(t, p, suite.Order{ID: i})
			assert.Equal(t, i, suite.Await(t, got, "a message"))
		}
		assert.Zero(t, ghost.Load())
	})
}

// B2: attempts to reconnect that end anywhere in the handshake leave no connection
// behind, and Close leaves no consumer.
func TestFailedOpensLeaveNothingBehind(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, log := suite.ConnectTo(t, through, suite.Soon, func(c *client.Config) { c.ConnectTimeout = 1500 * time.Millisecond })
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		got := make(chan int, 1000)
		for range 3 {
			suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		}
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range 10 {
			// Each attempt gets as far as the proxy is quick to fall silent.
			failed := len(log.With("reconnecting failed"))
			wire.Stall()
			wire.Cut()
			suite.Poll(t, "attempts have failed", func() bool { return len(log.With("reconnecting failed")) > failed+1 })
			wire.Resume()
			if i%2 == 0 {
				time.Sleep(time.Duration(i) * 3 * time.Millisecond)
				wire.Cut()
			}
			suite.Eventually(t, p, suite.Order{ID: i})
		}
		suite.AwaitConsumers(t, conn, "orders", 3)
		suite.Poll(t, "one connection is open", func() bool { return wire.Open() == 1 })
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		require.NoError(t, conn.Close(ctx))
		suite.Poll(t, "no connection is open", func() bool { return wire.Open() == 0 })
		accepted := wire.Accepted()
		other, _ := s.Connect(t)
		suite.AwaitConsumers(t, other, "orders", 0)
		assert.Equal(t, accepted, wire.Accepted(), "nobody tries again after Close")
	})
}

// B3: hopback declares nothing by itself. A queue that is deleted while it is
// consumed from stays so until its owner declares it, and has its arguments then.
func TestQueueThatIsDeletedAndDeclaredAgainKeepsItsArguments(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, log := suite.ConnectTo(t, through, suite.Soon)
		topology := declare.Topology{Queues: []declare.Queue{
			declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 3, MaxLength: 1000, DeadLetter: declare.ToQueue("dead")},
		}}
		suite.Apply(t, conn, topology)
		arguments := func() map[string]any {
			var q struct {
				Arguments map[string]any `json:"arguments"`
			}
			s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/orders", nil, &q)
			return q.Arguments
		}
		before := arguments()
		require.Contains(t, before, "x-dead-letter-exchange")
		var attempts sync.Map
		got := make(chan int, 100)
		suite.Consume(t, conn, "orders", client.JSON(func(ctx context.Context, o suite.Order) error {
			d, _ := client.DeliveryFrom(ctx)
			if n := countIn(&attempts, d); o.ID < 0 {
				return fmt.Errorf("attempt %d fails", n)
			}
			got <- o.ID
			return nil
		}), client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: 1})
		require.Equal(t, 1, suite.Await(t, got, "the first"))
		for round := range 3 {
			_, err := declare.DeleteQueue(t.Context(), conn.Management(), "orders")
			require.NoError(t, err)
			logged := len(log.With("consuming failed", "not found"))
			if round > 0 {
				wire.Cut()
			}
			suite.Poll(t, "the consumer says what is missing", func() bool { return len(log.With("consuming failed", "not found")) > logged+1 })
			status, _, err := s.HTTPStatus(http.MethodGet, "/queues/"+s.VHost+"/orders", nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusNotFound, status, "nobody declares it but its owner")
			suite.Poll(t, "its owner declares it", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
				defer cancel()
				_, err := declare.Apply(ctx, conn.Management(), topology)
				return err == nil
			})
			assert.Equal(t, before, arguments())
			suite.Eventually(t, p, suite.Order{ID: 10 + round})
			for suite.Await(t, got, "a message of the new queue") != 10+round {
			}
			// Its limits hold: a message that always fails is dead-lettered.
			suite.Eventually(t, p, suite.Order{ID: -1 - round})
			suite.Poll(t, "it is in the dead-letter queue", func() bool { return suite.Ready(t, conn, "dead") > round })
			suite.Poll(t, "delivery limit of 3", func() bool {
				var n int64
				attempts.Range(func(k, v any) bool {
					if strings.Contains(k.(string), fmt.Sprint(-1-round)) {
						n = v.(*atomic.Int64).Load()
					}
					return true
				})
				return n >= 4
			})
		}
	})
}

// B6: two bindings that differ only in their arguments are different bindings.
func TestBindingWithArgumentsIsDeleted(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		binding := func(tenant string) declare.Binding {
			return declare.Binding{Source: "amq.headers", Queue: "orders", Headers: map[string]any{"tenant": tenant, "n": int64(7)}}
		}
		topology := suite.QueueOf(declare.QuorumQueue{Name: "orders"})
		topology.Bindings = []declare.Binding{binding("a"), binding("b")}
		suite.Apply(t, conn, topology)
		p := suite.Publisher[suite.Order](t, conn, address.Exchange("amq.headers", ""))
		to := func(tenant string) error {
			return p.Publish(t.Context(), suite.Order{}, func(m *client.Message) {
				m.ApplicationProperties = map[string]any{"tenant": tenant, "n": int64(7)}
			})
		}
		require.NoError(t, to("a"))
		require.NoError(t, to("b"))
		require.NoError(t, declare.DeleteBinding(t.Context(), conn.Management(), binding("a")))
		require.ErrorIs(t, to("a"), client.ErrUnroutable)
		require.NoError(t, to("b"))
	})
}

// B12: a session has 256 links, and forwards to more addresses than that go out.
func TestForwardsToMoreAddressesThanASessionHasLinks(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const addresses = 300
		conn, log := s.Connect(t)
		topology := suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "sink", DeadLetter: declare.Drop()})
		topology.Bindings = []declare.Binding{{Source: "amq.topic", Queue: "sink", Key: "to.#"}}
		suite.Apply(t, conn, topology)
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var sent sync.WaitGroup
		for i := range addresses {
			sent.Go(func() { assert.NoError(t, p.Publish(t.Context(), suite.Order{ID: i})) })
		}
		sent.Wait()
		suite.Consume(t, conn, "orders", client.JSON(func(ctx context.Context, o suite.Order) error {
			d, _ := client.DeliveryFrom(ctx)
			return client.Forward{To: address.Exchange("amq.topic", fmt.Sprintf("to.%d", o.ID)), Message: client.Copy(d.Message())}
		}), client.ConsumerConfig{Concurrency: 16, Prefetch: addresses})
		seen := map[string]bool{}
		for _, m := range s.Peer(t).Take("sink", addresses) {
			seen[string(m.GetData())] = true
		}
		assert.Len(t, seen, addresses)
		suite.Poll(t, "all originals are accepted", func() bool { return suite.Ready(t, conn, "orders") == 0 })
		assert.Empty(t, log.With("lost"))
		assert.Zero(t, suite.Ready(t, conn, "sink"), "each once")
	})
}

// B17: while there is no broker nothing spins, a callback for the connection's state can't
// block its recovery, and what runs continues afterwards.
func TestOutageIsWaitedForWithoutSpinning(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		stuck := make(chan struct{})
		conn, log := suite.ConnectTo(t, through, func(c *client.Config) {
			c.Reconnect = client.ReconnectBackoff{Min: 50 * time.Millisecond, Max: 200 * time.Millisecond}
			c.OnEvent = func(client.Event) { <-stuck }
		})
		t.Cleanup(func() { close(stuck) })
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		got := make(chan int, 1000)
		for range 4 {
			suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		}
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: 1})
		require.Equal(t, 1, suite.Await(t, got, "the first"))

		wire.Refuse()
		wire.Cut()
		suite.Poll(t, "it has noticed", func() bool { return len(log.With("connection lost")) > 0 })
		began := time.Now()
		lines := len(log.All())
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		err := p.Publish(ctx, suite.Order{ID: 2})
		cancel()
		require.ErrorIs(t, err, client.ErrNotSent)
		took := time.Since(began)
		// A pause is 100 ms on average, and each attempt makes a line.
		assert.Less(t, len(log.All())-lines, 20+int(took/(10*time.Millisecond)), "attempts, and nothing else, make lines")
		require.NoError(t, wire.Admit())
		suite.Eventually(t, p, suite.Order{ID: 3})
		for suite.Await(t, got, "a message") != 3 {
		}
	})
}

// B19: what is missing or nil is an error.
func TestNilAndMissingAreErrorsAndNoPanics(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t)
		ctx := t.Context()
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		m := conn.Management()
		raw := suite.Publisher[*client.Message](t, conn, address.Queue("orders"))
		var nobody *declare.QuorumQueue
		for what, call := range map[string]func() error{
			"purge of a missing queue": func() error { _, err := declare.Purge(ctx, m, "missing"); return err },
			"look at a missing queue":  func() error { _, err := declare.Inspect(ctx, m, "missing"); return err },
			"a typed nil queue": func() error {
				_, err := declare.Apply(ctx, m, declare.Topology{Queues: []declare.Queue{nobody}})
				return err
			},
			"a nil queue": func() error {
				_, err := declare.Apply(ctx, m, declare.Topology{Queues: []declare.Queue{nil}})
				return err
			},
			"a nil requester": func() error {
				_, err := declare.Apply(ctx, nil, suite.QueueOf(declare.QuorumQueue{Name: "x"}))
				return err
			},
			"a typed nil requester": func() error {
				_, err := declare.Apply(ctx, (*client.Management)(nil), suite.QueueOf(declare.QuorumQueue{Name: "x"}))
				return err
			},
			"a nil connection": func() error {
				_, err := client.NewPublisher[suite.Order](ctx, nil, address.Queue("orders"), client.PublisherConfig{})
				return err
			},
			"a nil connection to consume from": func() error {
				return (*client.Conn)(nil).Consume(ctx, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
			},
			"a nil message":    func() error { return raw.Publish(ctx, nil) },
			"an empty message": func() error { return raw.Publish(ctx, &client.Message{}) },
			"a nil handler":    func() error { return conn.Consume(ctx, "orders", nil, client.ConsumerConfig{}) },
			"a nil func":       func() error { return conn.Consume(ctx, "orders", client.HandlerFunc(nil), client.ConsumerConfig{}) },
			"no queue": func() error {
				return conn.Consume(ctx, "", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
			},
			"a bind to the missing": func() error {
				_, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{{Source: "missing", Queue: "orders", Key: "k"}}})
				return err
			},
		} {
			assert.NotPanics(t, func() { assert.Error(t, call(), what) }, what)
		}
		n, err := declare.DeleteQueue(ctx, m, "missing")
		assert.NoError(t, err)
		assert.Zero(t, n)
		suite.Publish(t, raw, client.NewMessage([]byte("lives")), nil)
		assert.Empty(t, log.With("connection lost"))
	})
}
