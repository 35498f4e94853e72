package publish_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

func TestReleasedIsTheAnswerToAnUnroutableMessage(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		assert.IsType(t, &amqp.StateReleased{}, s.Peer(t).Send(address.Exchange("amq.topic", "nowhere"), amqp.NewMessage([]byte("m"))))
	})
}

func TestUndeliverableHereDeadLettersAsRejectedAndMergesAnnotations(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{suite.Quorum("work", declare.ToQueue("dead")), suite.Quorum("dead", declare.Drop())}})
		p := s.Peer(t)
		m := amqp.NewMessage([]byte("m"))
		m.Annotations = amqp.Annotations{"x-opt-mine": "kept", "x-opt-both": "old"}
		p.Put("work", m)
		r := p.Receiver("work", 1)
		require.NoError(t, r.ModifyMessage(t.Context(), p.Next(r), &amqp.ModifyMessageOptions{
			UndeliverableHere: true,
			Annotations: amqp.Annotations{
				"x-opt-both": "new", "x-opt-n": int64(7), "x-opt-b": true, "x-opt-l": []any{"a", int64(1)}, "x-opt-m": map[string]any{"k": "v"},
			},
		}))
		got := p.Take("dead", 1)[0]
		assert.Equal(t, "rejected", got.Annotations["x-last-death-reason"])
		assert.Equal(t, "work", got.Annotations["x-last-death-queue"])
		assert.Equal(t, "kept", got.Annotations["x-opt-mine"])
		assert.Equal(t, "new", got.Annotations["x-opt-both"])
		assert.Equal(t, int64(7), got.Annotations["x-opt-n"])
		assert.Equal(t, true, got.Annotations["x-opt-b"])
		assert.Equal(t, []any{"a", int64(1)}, got.Annotations["x-opt-l"])
		assert.NotNil(t, got.Annotations["x-opt-m"])
		assert.Zero(t, got.Header.DeliveryCount, "with delivery-failed false it doesn't add up")
	})
}

func TestExpiredMessageKeepsItsRoutingKey(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		delay := suite.Quorum("delay", declare.DeadLetterTarget{Exchange: "back"})
		delay.MessageTTL = 50 * time.Millisecond
		suite.Apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "out", Type: declare.ExchangeTopic}, {Name: "back", Type: declare.ExchangeTopic}},
			Queues:    []declare.Queue{delay, suite.Quorum("work", declare.Drop())},
			Bindings:  []declare.Binding{{Source: "out", Queue: "delay", Key: "delay.50.#"}, {Source: "back", Queue: "work", Key: "*.*.work"}},
		})
		p := s.Peer(t)
		require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Exchange("out", "delay.50.work"), amqp.NewMessage([]byte("m"))))
		m := p.Take("work", 1)[0]
		assert.Equal(t, "delay.50.work", m.Annotations["x-routing-key"])
		assert.Equal(t, "back", m.Annotations["x-exchange"])
		assert.Equal(t, "expired", m.Annotations["x-last-death-reason"])
	})
}

// While there is nowhere to bring messages back to, at-least-once dead-lettering
// keeps them; an alternate exchange takes them at once.
func TestAtLeastOnceKeepsMessagesWithoutATargetAndTheAlternateExchangeTakesThem(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 40 // more than the 32 that the broker has in flight
		conn, _ := s.Connect(t)
		delay := func(name, exchange string) declare.QuorumQueue {
			q := suite.Quorum(name, declare.DeadLetterTarget{Exchange: exchange})
			q.MessageTTL = 50 * time.Millisecond
			return q
		}
		suite.Apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{
				{Name: "parked-back", Type: declare.ExchangeTopic, AlternateExchange: "parking"}, {Name: "parking", Type: declare.ExchangeFanout},
			},
			Queues:   []declare.Queue{delay("lost", "missing"), delay("parked", "parked-back"), suite.Quorum("parking", declare.Drop())},
			Bindings: []declare.Binding{{Source: "parking", Queue: "parking"}},
		})
		p := s.Peer(t)
		for i := range n {
			p.Put("lost", amqp.NewMessage(fmt.Appendf(nil, "%d", i)))
			p.Put("parked", amqp.NewMessage(fmt.Appendf(nil, "%d", i)))
		}
		p.Take("parking", n)
		// Those without an exchange wait in their queue, and can't be had from it.
		suite.Poll(t, "they have expired", func() bool { return suite.Ready(t, conn, "lost") == 0 })
		held := func() int {
			var q struct {
				Messages int `json:"messages"`
			}
			s.HTTP(t, "GET", "/queues/"+s.VHost+"/lost", nil, &q)
			return q.Messages
		}
		suite.Poll(t, "the HTTP API has them all", func() bool { return held() == n })
	})
}

func TestDeliveryLimitOfNAllowsNPlusOneDeliveries(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const limit = 3
		conn, _ := s.Connect(t)
		work := suite.Quorum("work", declare.ToQueue("dead"))
		work.DeliveryLimit = limit
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{work, suite.Quorum("dead", declare.Drop())}})
		p := s.Peer(t)
		p.Put("work", amqp.NewMessage([]byte("m")))
		r := p.Receiver("work", 10)
		for i := range uint32(limit + 1) {
			m := p.Next(r)
			assert.Equal(t, i, m.Header.DeliveryCount)
			require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		m := p.Take("dead", 1)[0]
		assert.Equal(t, "delivery_limit", m.Annotations["x-last-death-reason"])
		assert.Nil(t, r.Prefetched())
	})
}

// A dead letter brings its delivery count along, so a limit on the dead-letter
// queue would end it there.
func TestUnlimitedDeadLetterQueueKeepsAMessageWithItsInheritedDeliveryCount(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		work := suite.Quorum("work", declare.ToQueue("dead"))
		work.DeliveryLimit = 1
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{work, suite.Quorum("dead", declare.Drop())}})
		p := s.Peer(t)
		p.Put("work", amqp.NewMessage([]byte("m")))
		r := p.Receiver("work", 10)
		for range 2 {
			require.NoError(t, r.ModifyMessage(t.Context(), p.Next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		r = p.Receiver("dead", 100)
		first := p.Next(r)
		assert.Positive(t, first.Header.DeliveryCount)
		require.NoError(t, r.ModifyMessage(t.Context(), first, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		for range 25 { // more often than the broker's default limit of 20
			require.NoError(t, r.ModifyMessage(t.Context(), p.Next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		require.NoError(t, r.AcceptMessage(t.Context(), p.Next(r)))
	})
}

// RabbitMQ 4.0 counts every delivery that comes back toward the delivery limit, 4.3
// only the failed ones; both count those that a connection took with it.
func TestReturnedDeliveriesCount(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		counts := func(requeue func(p *suite.Peer, r *amqp.Receiver, m *amqp.Message)) bool {
			q := suite.Quorum("work", declare.ToQueue("dead"))
			q.DeliveryLimit = declare.NoRedelivery
			suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{q, suite.Quorum("dead", declare.Drop())}})
			p := s.Peer(t)
			p.Put("work", amqp.NewMessage([]byte("m")))
			r := p.Receiver("work", 1)
			requeue(p, r, p.Next(r))
			dead := false
			suite.Poll(t, "it is in either queue", func() bool {
				dead = suite.Ready(t, conn, "dead") == 1
				return dead || suite.Ready(t, conn, "work") == 1
			})
			for _, name := range []string{"work", "dead"} {
				_, err := declare.DeleteQueue(t.Context(), conn.Management(), name)
				require.NoError(t, err)
			}
			return dead
		}
		old := !s.Newer()
		assert.Equal(t, old, counts(func(_ *suite.Peer, r *amqp.Receiver, m *amqp.Message) {
			require.NoError(t, r.ReleaseMessage(t.Context(), m))
		}), "released")
		assert.Equal(t, old, counts(func(_ *suite.Peer, r *amqp.Receiver, m *amqp.Message) {
			require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{}))
		}), "modified, not failed")
		assert.Equal(t, old, counts(func(_ *suite.Peer, r *amqp.Receiver, _ *amqp.Message) {
			require.NoError(t, r.Close(t.Context()))
		}), "detached")
		assert.True(t, counts(func(_ *suite.Peer, r *amqp.Receiver, m *amqp.Message) {
			require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}), "modified, failed")
		assert.True(t, counts(func(p *suite.Peer, _ *amqp.Receiver, _ *amqp.Message) {
			require.NoError(t, p.Site.Close(t.Context()))
		}), "session ended")
		assert.True(t, counts(func(p *suite.Peer, _ *amqp.Receiver, _ *amqp.Message) {
			require.NoError(t, p.Conn.Close())
		}), "connection closed")
	})
}

// A ttl that the sender set shortens the delay of a queue that holds the message:
// so a copy leaves it out.
func TestTTLOfAMessageShortensADelay(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const short, long, ttl = 2 * time.Second, time.Hour, 100 * time.Millisecond
		conn, _ := s.Connect(t)
		topology := suite.QueueOf(suite.Quorum("work", declare.Drop()))
		for name, delay := range map[string]time.Duration{"short": short, "long": long} {
			q := suite.Quorum(name, declare.ToQueue("work"))
			q.MessageTTL = delay
			topology.Queues = append(topology.Queues, q)
		}
		suite.Apply(t, conn, topology)
		p := s.Peer(t)
		m := amqp.NewMessage([]byte("m"))
		m.Header = &amqp.MessageHeader{Durable: true, Priority: 4, TTL: ttl}
		took := func(queue string, m *amqp.Message) time.Duration {
			began := time.Now()
			p.Put(queue, m)
			p.Take("work", 1)
			return time.Since(began)
		}
		with, without := took("long", m), took("short", client.Copy(m))
		assert.GreaterOrEqual(t, without, short-2*time.Millisecond)
		suite.Report(t, s, "a ttl of %v in a queue of %v: back after %v; a copy of ours in a queue of %v: %v", ttl, long, with.Round(time.Millisecond), short, without.Round(time.Millisecond))
	})
}

// A null or a float in a modified outcome makes a message that ends the session, or
// the connection, of each consumer that it is delivered to.
func TestModifiedAnnotations(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for name, v := range map[string]any{"null": amqp.Null{}, "float": 1.5} {
			suite.Apply(t, conn, suite.QueueOf(suite.Quorum(name, declare.Drop())))
			p := s.Peer(t)
			p.Put(name, amqp.NewMessage([]byte("m")))
			r := p.Receiver(name, 1)
			// Settled on a separate session: the redelivery may end it.
			_ = r.ModifyMessage(t.Context(), p.Next(r), &amqp.ModifyMessageOptions{Annotations: amqp.Annotations{"x-opt-a": v}})
			p = s.Peer(t)
			suite.Poll(t, "it is back", func() bool { return suite.Ready(t, conn, name) > 0 })
			r = p.Receiver(name, 1)
			_, err := r.Receive(t.Context(), nil)
			assert.Error(t, err, name)
		}
	})
}

// So does a null annotation that the sender itself set: the broker accepts it.
func TestNullAnnotationOfASenderEndsItsConsumers(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("work", declare.Drop())))
		m := amqp.NewMessage([]byte("m"))
		m.Annotations = amqp.Annotations{"x-opt-a": nil}
		s.Peer(t).Put("work", m)
		_, err := s.Peer(t).Receiver("work", 1).Receive(t.Context(), nil)
		assert.Error(t, err)
		assert.Error(t, client.Validate(m), "so it is refused here")
	})
}

// A message without a header is durable to 4.0, and not to 4.3: so ours have one.
func TestMessageWithoutAHeader(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("work", declare.Drop())))
		p := s.Peer(t)
		p.Put("work", amqp.NewMessage([]byte("m")))
		assert.Equal(t, !s.Newer(), p.Take("work", 1)[0].Header.Durable)
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("work")), suite.Order{})
		got := p.Take("work", 1)[0].Header
		assert.True(t, got.Durable)
		assert.EqualValues(t, 4, got.Priority)
	})
}

// RabbitMQ has no request for its time. It writes it, in milliseconds, into a message
// that is rejected into a queue that dead-letters to itself, which a connection may
// have for itself alone.
func TestBrokerTellsItsTimeByADeath(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		suite.Apply(t, admin, suite.QueueOf(suite.Quorum("work", declare.Drop())))
		ask := func(url string) (before, broker, after time.Time, err error) {
			conn, _ := suite.ConnectTo(t, url)
			suite.Consume(t, conn, "work", onStart{suite.Nop, func(ctx context.Context, start client.Start) {
				before = time.Now()
				broker, err = start.BrokerTime(ctx)
				after = time.Now()
				again, errAgain := start.BrokerTime(ctx)
				assert.Equal(t, err, errAgain)
				assert.WithinDuration(t, broker, again, suite.LateLimit)
			}}, client.ConsumerConfig{})
			suite.AwaitConsumers(t, admin, "work", 1)
			return before, broker, after, err
		}
		before, broker, after, err := ask(s.AMQPURL())
		require.NoError(t, err)
		suite.Report(t, s, "the broker's time is %v ahead of ours, and took %v", broker.Sub(after).Round(time.Millisecond), after.Sub(before).Round(time.Millisecond))
		assert.False(t, broker.Before(before.Truncate(time.Millisecond)), "never behind: this host's clock is the broker's")
		assert.WithinDuration(t, after, broker, suite.LateLimit)
		suite.Poll(t, "the queue that it took is gone", func() bool {
			var queues []struct{ Name string }
			s.HTTP(t, "GET", "/queues/"+s.VHost+"?disable_stats=true", nil, &queues)
			return len(queues) == 1
		})
	})
}

// Who may not ask can consume all the same.
func TestBrokerTimeNeedsPermissions(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		suite.Apply(t, admin, suite.QueueOf(suite.Quorum("work", declare.Drop())))
		conn, log := suite.ConnectTo(t, s.User(t, "", "", "work"))
		failed := make(chan error, 1)
		suite.Consume(t, conn, "work", onStart{suite.Nop, func(ctx context.Context, start client.Start) {
			_, err := start.BrokerTime(ctx)
			failed <- err
		}}, client.ConsumerConfig{})
		assert.ErrorIs(t, suite.Await(t, failed, "an answer"), client.ErrUnauthorized)
		suite.AwaitConsumers(t, admin, "work", 1)
		assert.Len(t, log.With("the broker's time can't be read"), 1)
	})
}

// onStart checks what a Preparer gets.
type onStart struct {
	client.HandlerFunc
	peek func(context.Context, client.Start)
}

func (h onStart) Prepare(ctx context.Context, s client.Start) error {
	h.peek(ctx, s)
	return nil
}
