package integration

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
)

// What hopback takes for granted of RabbitMQ, each pinned by go-amqp alone: a
// release that changes one of these fails here, by name.

func quorum(name string, dead declare.DeadLetterTarget) declare.QuorumQueue {
	return declare.QuorumQueue{Name: name, DeliveryLimit: declare.Unlimited, DeadLetter: dead}
}

func TestReleasedIsTheAnswerToAnUnroutableMessage(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		assert.IsType(t, &amqp.StateReleased{}, s.peer(t).send(address.Exchange("amq.topic", "nowhere"), amqp.NewMessage([]byte("m"))))
	})
}

func TestUndeliverableHereDeadLettersAsRejectedAndMergesAnnotations(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, declare.Topology{Queues: []declare.Queue{quorum("work", declare.ToQueue("dead")), quorum("dead", declare.Drop())}})
		p := s.peer(t)
		m := amqp.NewMessage([]byte("m"))
		m.Annotations = amqp.Annotations{"x-opt-mine": "kept", "x-opt-both": "old"}
		p.put("work", m)
		r := p.receiver("work", 1)
		require.NoError(t, r.ModifyMessage(t.Context(), p.next(r), &amqp.ModifyMessageOptions{
			UndeliverableHere: true,
			Annotations: amqp.Annotations{
				"x-opt-both": "new", "x-opt-n": int64(7), "x-opt-b": true, "x-opt-l": []any{"a", int64(1)}, "x-opt-m": map[string]any{"k": "v"},
			},
		}))
		got := p.take("dead", 1)[0]
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
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		delay := quorum("delay", declare.DeadLetterTarget{Exchange: "back"})
		delay.MessageTTL = 50 * time.Millisecond
		apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "out", Type: declare.Topic}, {Name: "back", Type: declare.Topic}},
			Queues:    []declare.Queue{delay, quorum("work", declare.Drop())},
			Bindings:  []declare.Binding{{Source: "out", Queue: "delay", Key: "delay.50.#"}, {Source: "back", Queue: "work", Key: "*.*.work"}},
		})
		p := s.peer(t)
		require.IsType(t, &amqp.StateAccepted{}, p.send(address.Exchange("out", "delay.50.work"), amqp.NewMessage([]byte("m"))))
		m := p.take("work", 1)[0]
		assert.Equal(t, "delay.50.work", m.Annotations["x-routing-key"])
		assert.Equal(t, "back", m.Annotations["x-exchange"])
		assert.Equal(t, "expired", m.Annotations["x-last-death-reason"])
	})
}

// While there is nowhere to bring messages back to, at-least-once dead-lettering
// keeps them; an alternate exchange takes them at once.
func TestAtLeastOnceKeepsMessagesWithoutATargetAndTheAlternateExchangeTakesThem(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const n = 40 // more than the 32 that the broker has under way
		conn, _ := s.connect(t)
		delay := func(name, exchange string) declare.QuorumQueue {
			q := quorum(name, declare.DeadLetterTarget{Exchange: exchange})
			q.MessageTTL = 50 * time.Millisecond
			return q
		}
		apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{
				{Name: "parked-back", Type: declare.Topic, AlternateExchange: "parking"}, {Name: "parking", Type: declare.Fanout},
			},
			Queues:   []declare.Queue{delay("lost", "missing"), delay("parked", "parked-back"), quorum("parking", declare.Drop())},
			Bindings: []declare.Binding{{Source: "parking", Queue: "parking"}},
		})
		p := s.peer(t)
		for i := range n {
			p.put("lost", amqp.NewMessage(fmt.Appendf(nil, "%d", i)))
			p.put("parked", amqp.NewMessage(fmt.Appendf(nil, "%d", i)))
		}
		p.take("parking", n)
		// Those without an exchange wait in their queue, and can't be had from it.
		poll(t, "they have expired", func() bool { return ready(t, conn, "lost") == 0 })
		held := func() int {
			var q struct {
				Messages int `json:"messages"`
			}
			s.http(t, "GET", "/queues/"+s.vhost+"/lost", nil, &q)
			return q.Messages
		}
		poll(t, "the HTTP API has them all", func() bool { return held() == n })
	})
}

func TestDeliveryLimitOfNAllowsNPlusOneDeliveries(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const limit = 3
		conn, _ := s.connect(t)
		work := quorum("work", declare.ToQueue("dead"))
		work.DeliveryLimit = limit
		apply(t, conn, declare.Topology{Queues: []declare.Queue{work, quorum("dead", declare.Drop())}})
		p := s.peer(t)
		p.put("work", amqp.NewMessage([]byte("m")))
		r := p.receiver("work", 10)
		for i := range uint32(limit + 1) {
			m := p.next(r)
			assert.Equal(t, i, m.Header.DeliveryCount)
			require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		m := p.take("dead", 1)[0]
		assert.Equal(t, "delivery_limit", m.Annotations["x-last-death-reason"])
		assert.Nil(t, r.Prefetched())
	})
}

// A dead letter brings its delivery count along, so a limit on the dead-letter
// queue would end it there.
func TestUnlimitedDeadLetterQueueKeepsAMessageWithItsInheritedDeliveryCount(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		work := quorum("work", declare.ToQueue("dead"))
		work.DeliveryLimit = 1
		apply(t, conn, declare.Topology{Queues: []declare.Queue{work, quorum("dead", declare.Drop())}})
		p := s.peer(t)
		p.put("work", amqp.NewMessage([]byte("m")))
		r := p.receiver("work", 10)
		for range 2 {
			require.NoError(t, r.ModifyMessage(t.Context(), p.next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		r = p.receiver("dead", 100)
		first := p.next(r)
		assert.Positive(t, first.Header.DeliveryCount)
		require.NoError(t, r.ModifyMessage(t.Context(), first, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		for range 25 { // more often than the broker's default limit of 20
			require.NoError(t, r.ModifyMessage(t.Context(), p.next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		require.NoError(t, r.AcceptMessage(t.Context(), p.next(r)))
	})
}

// RabbitMQ 4.0 counts every delivery that comes back toward the delivery limit, 4.3
// only the failed ones; both count those that a connection took with it.
func TestReturnedDeliveriesCount(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		counts := func(giveBack func(p *peer, r *amqp.Receiver, m *amqp.Message)) bool {
			q := quorum("work", declare.ToQueue("dead"))
			q.DeliveryLimit = declare.NoRedelivery
			apply(t, conn, declare.Topology{Queues: []declare.Queue{q, quorum("dead", declare.Drop())}})
			p := s.peer(t)
			p.put("work", amqp.NewMessage([]byte("m")))
			r := p.receiver("work", 1)
			giveBack(p, r, p.next(r))
			dead := false
			poll(t, "it is in either queue", func() bool {
				dead = ready(t, conn, "dead") == 1
				return dead || ready(t, conn, "work") == 1
			})
			for _, name := range []string{"work", "dead"} {
				_, err := declare.DeleteQueue(t.Context(), conn.Management(), name)
				require.NoError(t, err)
			}
			return dead
		}
		old := !s.newer()
		assert.Equal(t, old, counts(func(_ *peer, r *amqp.Receiver, m *amqp.Message) {
			require.NoError(t, r.ReleaseMessage(t.Context(), m))
		}), "released")
		assert.Equal(t, old, counts(func(_ *peer, r *amqp.Receiver, m *amqp.Message) {
			require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{}))
		}), "modified, not failed")
		assert.Equal(t, old, counts(func(_ *peer, r *amqp.Receiver, _ *amqp.Message) {
			require.NoError(t, r.Close(t.Context()))
		}), "detached")
		assert.True(t, counts(func(_ *peer, r *amqp.Receiver, m *amqp.Message) {
			require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}), "modified, failed")
		assert.True(t, counts(func(p *peer, _ *amqp.Receiver, _ *amqp.Message) {
			require.NoError(t, p.s.Close(t.Context()))
		}), "session ended")
		assert.True(t, counts(func(p *peer, _ *amqp.Receiver, _ *amqp.Message) {
			require.NoError(t, p.conn.Close())
		}), "connection closed")
	})
}

// A ttl that the sender set shortens the delay of a queue that holds the message:
// so a copy leaves it out.
func TestTTLOfAMessageShortensADelay(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const delay, ttl = 2 * time.Second, 100 * time.Millisecond
		conn, _ := s.connect(t)
		q := quorum("delay", declare.ToQueue("work"))
		q.MessageTTL = delay
		apply(t, conn, declare.Topology{Queues: []declare.Queue{q, quorum("work", declare.Drop())}})
		p := s.peer(t)
		m := amqp.NewMessage([]byte("m"))
		m.Header = &amqp.MessageHeader{Durable: true, Priority: 4, TTL: ttl}
		took := func(m *amqp.Message) time.Duration {
			began := time.Now()
			p.put("delay", m)
			p.take("work", 1)
			return time.Since(began)
		}
		with, without := took(m), took(client.Copy(m))
		assert.Less(t, with, delay)
		assert.GreaterOrEqual(t, without, delay-2*time.Millisecond)
		report(t, s, "a ttl of %v in a queue of %v: back after %v; a copy of ours: %v", ttl, delay, with.Round(time.Millisecond), without.Round(time.Millisecond))
	})
}

// A null or a float in a modified outcome makes a message that ends the session, or
// the connection, of each consumer that it is delivered to.
func TestModifiedAnnotations(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		for name, v := range map[string]any{"null": amqp.Null{}, "float": 1.5} {
			apply(t, conn, queueOf(quorum(name, declare.Drop())))
			p := s.peer(t)
			p.put(name, amqp.NewMessage([]byte("m")))
			r := p.receiver(name, 1)
			// Settled on a session of its own: the redelivery may end it.
			_ = r.ModifyMessage(t.Context(), p.next(r), &amqp.ModifyMessageOptions{Annotations: amqp.Annotations{"x-opt-a": v}})
			p = s.peer(t)
			poll(t, "it is back", func() bool { return ready(t, conn, name) > 0 })
			r = p.receiver(name, 1)
			_, err := r.Receive(t.Context(), nil)
			assert.Error(t, err, name)
		}
	})
}

// So does a null annotation that the sender itself set: the broker accepts it.
func TestNullAnnotationOfASenderEndsItsConsumers(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(quorum("work", declare.Drop())))
		m := amqp.NewMessage([]byte("m"))
		m.Annotations = amqp.Annotations{"x-opt-a": nil}
		s.peer(t).put("work", m)
		_, err := s.peer(t).receiver("work", 1).Receive(t.Context(), nil)
		assert.Error(t, err)
		assert.Error(t, client.Validate(m), "so it is refused here")
	})
}

// A message without a header is durable to 4.0, and not to 4.3: so ours have one.
func TestMessageWithoutAHeader(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(quorum("work", declare.Drop())))
		p := s.peer(t)
		p.put("work", amqp.NewMessage([]byte("m")))
		assert.Equal(t, !s.newer(), p.take("work", 1)[0].Header.Durable)
		publish(t, publisher[order](t, conn, address.Queue("work")), order{})
		got := p.take("work", 1)[0].Header
		assert.True(t, got.Durable)
		assert.EqualValues(t, 4, got.Priority)
	})
}

// RabbitMQ has no request for its time. It writes it, in milliseconds, into a message
// that is rejected into a queue that dead-letters to itself, which a connection may
// have for itself alone.
func TestBrokerTellsItsTimeByADeath(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		admin, _ := s.connect(t)
		apply(t, admin, queueOf(quorum("work", declare.Drop())))
		ask := func(url string) (before, broker, after time.Time, err error) {
			conn, _ := connectTo(t, url)
			consume(t, conn, "work", onStart{nop, func(ctx context.Context, start client.Start) {
				before = time.Now()
				broker, err = start.BrokerTime(ctx)
				after = time.Now()
				again, errAgain := start.BrokerTime(ctx)
				assert.Equal(t, err, errAgain)
				assert.WithinDuration(t, broker, again, time.Second)
			}}, client.ConsumerConfig{})
			awaitConsumers(t, admin, "work", 1)
			return before, broker, after, err
		}
		before, broker, after, err := ask(s.url())
		require.NoError(t, err)
		report(t, s, "the broker's time is %v ahead of ours, and took %v", broker.Sub(after).Round(time.Millisecond), after.Sub(before).Round(time.Millisecond))
		assert.False(t, broker.Before(before.Truncate(time.Millisecond)), "never behind: this host's clock is the broker's")
		assert.WithinDuration(t, after, broker, time.Second)
		poll(t, "the queue that it took is gone", func() bool {
			var queues []struct{ Name string }
			s.http(t, "GET", "/queues/"+s.vhost+"?disable_stats=true", nil, &queues)
			return len(queues) == 1
		})
	})
}

// Who may not ask can consume all the same.
func TestBrokerTimeNeedsPermissions(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		admin, _ := s.connect(t)
		apply(t, admin, queueOf(quorum("work", declare.Drop())))
		conn, log := connectTo(t, s.user(t, "", "", "work"))
		failed := make(chan error, 1)
		consume(t, conn, "work", onStart{nop, func(ctx context.Context, start client.Start) {
			_, err := start.BrokerTime(ctx)
			failed <- err
		}}, client.ConsumerConfig{})
		assert.ErrorIs(t, await(t, failed, "an answer"), client.ErrUnauthorized)
		awaitConsumers(t, admin, "work", 1)
		assert.Len(t, log.with("the broker's time can't be read"), 1)
	})
}

// onStart looks at what a Preparer is told.
type onStart struct {
	client.HandlerFunc
	look func(context.Context, client.Start)
}

func (h onStart) Prepare(ctx context.Context, s client.Start) error {
	h.look(ctx, s)
	return nil
}
