package consume_test

import (
	"context"
	"log/slog"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/inside"
)

// A consumer that gets nothing tells an empty queue from a link that the broker has
// forgotten by the queue's message_count: what is ready, without what is unacknowledged.
// On 4.0 everybody can read it, on 4.3 those who have read permission for the queue.
func TestMessageCountOfAQueueIsWhatIsReady(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := s.Peer(t)
		for range 5 {
			p.Put("orders", amqp.NewMessage([]byte("m")))
		}
		count := func(conn *client.Conn) (any, error) {
			status, body, err := conn.Management().Request(t.Context(), "GET", "/queues/orders", nil)
			if err != nil {
				return nil, err
			}
			require.Equal(t, 200, status)
			return body.(map[string]any)["message_count"], nil
		}
		reads := func(n int) func() bool {
			return func() bool {
				v, err := count(conn)
				require.NoError(t, err)
				return assert.ObjectsAreEqualValues(n, v)
			}
		}
		suite.Poll(t, "all are ready", reads(5))
		r := p.Receiver("orders", 2)
		first := p.Next(r)
		p.Next(r)
		suite.Poll(t, "two are unacknowledged", reads(3))
		require.NoError(t, r.ReleaseMessage(t.Context(), first))
		suite.Poll(t, "one is ready again", reads(4))

		reader, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^orders$"))
		v, err := count(reader)
		require.NoError(t, err)
		assert.EqualValues(t, 4, v)
		stranger, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^$"))
		_, err = count(stranger)
		if s.Newer() {
			require.ErrorIs(t, err, client.ErrUnauthorized)
		} else {
			require.NoError(t, err)
		}
	})
}

// The broker never hears of a consumer's credit, as after the fall of a queue's leader on
// RabbitMQ 4.0.5. Its session is replaced, and it gets what waits.
func TestConsumerThatTheBrokerForgotHasItsSessionReplaced(t *testing.T) {
	const flow = 0x13
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		var armed atomic.Bool
		var dropped atomic.Int64
		addr := suite.Dropping(t, s.Host(), func(code byte) bool {
			if code == flow && armed.Load() {
				dropped.Add(1)
				return true
			}
			return false
		})
		var mu sync.Mutex
		var starved []client.Event
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		cfg := client.Config{Logger: slog.New(suite.NewLogbook(t)), OnEvent: func(e client.Event) {
			if e.Kind == client.EventStarved {
				armed.Store(false)
				mu.Lock()
				defer mu.Unlock()
				starved = append(starved, e)
			}
		}}
		c, err := client.Connect(inside.WithTestSettings(ctx, inside.TestSettings{Starving: time.Second}), s.AMQPURLWith(func(u *url.URL) { u.Host = addr }), cfg)
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		got := make(chan uint32, 10)
		_, _, err = c.Management().Request(ctx, "GET", "/queues/orders", nil) // its links have their credit
		require.NoError(t, err)
		suite.Consume(t, c, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if string(d.Message().GetData()) == "first" {
				armed.Store(true)
			}
			got <- d.DeliveryCount()
			return nil
		}), client.ConsumerConfig{Prefetch: 1})
		p := s.Peer(t)
		p.Put("orders", amqp.NewMessage([]byte("first")))
		suite.Await(t, got, "the first message")
		suite.Poll(t, "a grant of credit is lost", func() bool { return dropped.Load() > 0 })
		began := time.Now()
		p.Put("orders", amqp.NewMessage([]byte("second")))
		assert.Zero(t, suite.Await(t, got, "the second message"))
		t.Logf("it came after %v; %d grants were lost", time.Since(began).Round(time.Millisecond), dropped.Load())
		mu.Lock()
		assert.NotEmpty(t, starved)
		mu.Unlock()
		p.Put("orders", amqp.NewMessage([]byte("third")))
		assert.Zero(t, suite.Await(t, got, "the third message"))
	})
}
