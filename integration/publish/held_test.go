package publish_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
)

// later is a message with a body and a priority that comes at a time, or at once if that is zero.
func later(body string, priority uint8, at time.Time) *amqp.Message {
	m := amqp.NewMessage([]byte(body))
	m.Header = &amqp.MessageHeader{Durable: true, Priority: priority}
	if !at.IsZero() {
		m.Annotations = amqp.Annotations{annotation.DeliveryTime: at}
	}
	return m
}

func bodiesOf(messages []*amqp.Message) (all []string) {
	for _, m := range messages {
		all = append(all, string(m.GetData()))
	}
	return all
}

// On RabbitMQ 4.4 a message whose time has come is delivered before all that were ready, regardless of priority. It is the
// same with messages that a consumer has returned until a time (4.3), so native retries don't wait behind messages of a
// higher priority.
func TestDueMessagesComeBeforeAnyPriority(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			t.Skip("4.0 holds no messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{suite.Quorum("returned", declare.Drop()), suite.Quorum("held", declare.Drop())}})
		p := s.Peer(t)
		until := time.Now().Add(time.Second)

		p.Put("returned", later("low", 1, time.Time{}))
		r := p.Receiver("returned", 1)
		m := p.Next(r)
		require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{Annotations: amqp.Annotations{annotation.DeliveryTime: until.UnixMilli()}}))
		require.NoError(t, r.Close(t.Context()))
		p.Put("returned", later("high", 9, time.Time{}))
		suite.Poll(t, "the returned message is ready again", func() bool { return suite.Ready(t, conn, "returned") == 2 })
		assert.Equal(t, []string{"low", "high"}, bodiesOf(p.Take("returned", 2)))

		if !s.HoldsPublished() {
			return
		}
		until = time.Now().Add(time.Second)
		p.Put("held", later("second", 1, until.Add(100*time.Millisecond)))
		p.Put("held", later("first", 1, until))
		p.Put("held", later("high", 9, time.Time{}))
		suite.Poll(t, "the held messages are ready", func() bool { return suite.Ready(t, conn, "held") == 3 })
		assert.Equal(t, []string{"first", "second", "high"}, bodiesOf(p.Take("held", 3)))
	})
}

// On RabbitMQ 4.4 a message's ttl counts from its publishing, and takes effect when its time has come: with a ttl that is over
// by then, nobody gets it. So package schedule sends such messages another way.
func TestATTLIsOverBeforeTheDeliveryTime(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 holds published messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{suite.Quorum("orders", declare.ToQueue("expired")), suite.Quorum("expired", declare.Drop())}})
		p := s.Peer(t)
		until := time.Now().Add(1500 * time.Millisecond)
		for body, ttl := range map[string]time.Duration{"over": 200 * time.Millisecond, "not over": time.Hour} {
			m := later(body, 4, until)
			m.Header.TTL = ttl
			p.Put("orders", m)
		}
		got := p.Take("orders", 1)
		assert.Equal(t, []string{"not over"}, bodiesOf(got))
		assert.False(t, time.Now().Before(until.Truncate(time.Millisecond)))
		dead := p.Take("expired", 1)
		assert.Equal(t, []string{"over"}, bodiesOf(dead), "the dead letter is visible")
		assert.Zero(t, suite.Ready(t, conn, "orders"))
	})
}

// Being held counts as no delivery. The HTTP API counts such messages in messages and in messages_delayed, AMQP counts none.
func TestHeldMessagesCountAsNotDelivered(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("RabbitMQ 4.4 holds published messages")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{suite.Quorum("orders", declare.Drop()), suite.Quorum("soon", declare.Drop())}})
		p := s.Peer(t)
		until := time.Now().Add(time.Hour)
		p.Put("orders", later("later", 4, until))
		suite.Poll(t, "it is counted", func() bool {
			var q struct {
				Messages int
				Ready    int   `json:"messages_ready"`
				Delayed  int   `json:"messages_delayed"`
				Next     int64 `json:"next_delayed_at"`
			}
			s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/orders", nil, &q)
			return q.Messages == 1 && q.Ready == 0 && q.Delayed == 1 && q.Next == until.UnixMilli()
		})
		assert.Zero(t, suite.Ready(t, conn, "orders"))

		p.Put("soon", later("soon", 4, time.Now().Add(500*time.Millisecond)))
		r := p.Receiver("soon", 10)
		m := p.Next(r)
		assert.Zero(t, m.Header.DeliveryCount)
		assert.True(t, m.Header.FirstAcquirer)
		assert.NotContains(t, m.Annotations, "x-acquired-count")
		require.NoError(t, r.ModifyMessage(t.Context(), m, &amqp.ModifyMessageOptions{Annotations: amqp.Annotations{annotation.DeliveryTime: time.Now().Add(500 * time.Millisecond).UnixMilli()}}))
		m = p.Next(r)
		assert.Zero(t, m.Header.DeliveryCount, "a return until a time is no failure")
		assert.EqualValues(t, 1, m.Annotations["x-acquired-count"])
		require.NoError(t, r.AcceptMessage(t.Context(), m))
	})
}
