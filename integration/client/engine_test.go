package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	gamqp "github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
)

// The engine of internal/amqp by itself, with each broker.

// engineConn opens a connection of the engine to the site.
func engineConn(t *testing.T, s *suite.Site) *amqp.Conn {
	t.Helper()
	u, err := url.Parse(s.AMQPURL())
	require.NoError(t, err)
	nc, err := net.Dial("tcp", u.Host)
	require.NoError(t, err)
	password, _ := u.User.Password()
	ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
	defer cancel()
	c, err := amqp.Open(ctx, nc, amqp.Config{
		ContainerID: "engine-test", Hostname: "vhost:" + s.VHost, Mechanism: "PLAIN",
		Response: []byte("\x00" + u.User.Username() + "\x00" + password),
	})
	require.NoError(t, err)
	if !s.Newer() {
		c.RestChannels(250 * time.Millisecond)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), suite.Patience)
		defer cancel()
		_ = c.Close(ctx)
	})
	return c
}

// inbox is where the deliveries and answers of a test go.
type inbox struct {
	amqp.NoReceiverEvents
	deliveries chan amqp.Delivery
	answers    chan amqp.Answer
	drained    chan struct{}
	ended      chan error
}

func newInbox() *inbox {
	return &inbox{amqp.NoReceiverEvents{}, make(chan amqp.Delivery, 100_000), make(chan amqp.Answer, 100_000), make(chan struct{}, 10), make(chan error, 10)}
}

func (i *inbox) Answered(_ *amqp.Sending, a amqp.Answer) { i.answers <- a }

func (i *inbox) receiver(queue string) amqp.ReceiverConfig {
	return amqp.ReceiverConfig{Source: &frames.Source{Address: "/queues/" + queue}, Events: i}
}

func (i *inbox) Delivered(d *amqp.Delivery) {
	whole := *d
	if !d.Owned {
		whole.Payload = slices.Clone(d.Payload)
	}
	i.deliveries <- whole
}

func (i *inbox) Drained(uint32)  { i.drained <- struct{}{} }
func (i *inbox) Ended(err error) { i.ended <- err }

func arrival[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	return suite.Await(t, c, "a frame of the engine")
}

func encoded(t *testing.T, body string) []byte {
	t.Helper()
	b, err := (&client.Message{Header: &gamqp.MessageHeader{Durable: true, Priority: 4}, Data: [][]byte{[]byte(body)}}).MarshalBinary()
	require.NoError(t, err)
	return b
}

func bodyOf(t *testing.T, d amqp.Delivery) string {
	t.Helper()
	var m client.Message
	require.NoError(t, m.UnmarshalBinary(d.Payload))
	return string(m.GetData())
}

func engineSession(t *testing.T, c *amqp.Conn) *amqp.Session {
	t.Helper()
	s, err := c.Begin(t.Context(), amqp.SessionConfig{})
	require.NoError(t, err)
	return s
}

func engineQueue(t *testing.T, s *suite.Site, q declare.QuorumQueue) {
	t.Helper()
	conn, _ := s.Connect(t)
	suite.Apply(t, conn, suite.QueueOf(q))
}

// What the engine sends is stored and comes back, in order, messages of many frames among it.
// Each outcome does what it says, and what was settled before a detach stays settled.
func TestEngineSendsReceivesAndSettles(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		engineQueue(t, s, declare.QuorumQueue{Name: "q"})
		c := engineConn(t, s)
		box := newInbox()
		l, err := engineSession(t, c).Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "/queues/q"}})
		require.NoError(t, err)
		const n = 600
		bodies := make([]string, n)
		for i := range bodies {
			bodies[i] = fmt.Sprint("message ", i)
			if i%100 == 50 {
				bodies[i] += strings.Repeat(" long", 100_000)
			}
			require.NoError(t, l.Send(&amqp.Sending{Payload: encoded(t, bodies[i]), To: box}))
		}
		for range n {
			a := arrival(t, box.answers)
			require.NoError(t, a.Err)
			require.IsType(t, &frames.Accepted{}, a.State)
		}
		session := engineSession(t, c)
		r, err := session.Receiver(t.Context(), box.receiver("q"))
		require.NoError(t, err)
		require.NoError(t, r.AddCredit(n))
		// By tens, the first half accepted in a shuffled order, and the rest released.
		for i := range n {
			d := arrival(t, box.deliveries)
			require.Equal(t, bodies[i], bodyOf(t, d))
			if i < n/2 && i%10 == 9 {
				for j := range uint32(10) {
					id := d.ID - j*7%10
					require.NoError(t, r.Settle(id, id, amqp.Accepted))
				}
			}
		}
		require.NoError(t, r.Settle(n/2, n-1, amqp.Modified(false, false, nil)))
		require.NoError(t, r.Detach(t.Context()))
		require.NoError(t, session.End(t.Context()))

		// The accepted ones are gone, and the others are all there.
		session = engineSession(t, c)
		r, err = session.Receiver(t.Context(), box.receiver("q"))
		require.NoError(t, err)
		_, err = r.Drain(n)
		require.NoError(t, err)
		arrival(t, box.drained)
		assert.Len(t, box.deliveries, n/2)
		for i := range n / 2 {
			require.Equal(t, bodies[n/2+i], bodyOf(t, arrival(t, box.deliveries)))
		}
		require.NoError(t, r.Settle(0, n/2-1, amqp.Accepted))
		require.NoError(t, r.Detach(t.Context()))
		require.NoError(t, c.Close(t.Context()))
		assert.Empty(t, box.ended, "what this end closes isn't reported")
	})
}

// A queue answers a drain that brings no credit after the settlements before it: once the answer is there,
// no end of the connection undoes them. Package partition waits for it before another message may crash
// the worker.
func TestEngineSettlementsBeforeTheAnswerToADrainAreNeverLost(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		engineQueue(t, s, declare.QuorumQueue{Name: "q", DeliveryLimit: declare.Unlimited})
		const rounds = 10
		peer := s.Peer(t)
		for n := range rounds {
			peer.SendPlain(address.Queue("q"), fmt.Sprint(n))
		}
		for n := range rounds {
			box := newInbox()
			c := engineConn(t, s)
			r, err := engineSession(t, c).Receiver(t.Context(), box.receiver("q"))
			require.NoError(t, err)
			require.NoError(t, r.AddCredit(1))
			d := arrival(t, box.deliveries)
			require.Equal(t, fmt.Sprint(n), bodyOf(t, d))
			require.NoError(t, r.Settle(d.ID, d.ID, amqp.Accepted))
			_, err = r.Drain(0)
			require.NoError(t, err)
			arrival(t, box.drained)
			c.Fail(errors.New("cut"))
		}
		conn, _ := s.Connect(t)
		suite.AwaitConsumers(t, conn, "q", 0) // all that their ends return is back
		assert.Zero(t, suite.Ready(t, conn, "q"))
	})
}

// Settlements that are written before a detach are never lost: what was accepted isn't delivered
// again, round after round, while the link ends right behind.
func TestEngineSettlementsBeforeADetachAreNeverLost(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		engineQueue(t, s, declare.QuorumQueue{Name: "q", DeliveryLimit: declare.Unlimited})
		c := engineConn(t, s)
		box := newInbox()
		l, err := engineSession(t, c).Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "/queues/q"}})
		require.NoError(t, err)
		const rounds, each = 20, 50
		for i := range rounds * each {
			require.NoError(t, l.Send(&amqp.Sending{Payload: encoded(t, fmt.Sprint(i)), To: box}))
		}
		for range rounds * each {
			require.IsType(t, &frames.Accepted{}, arrival(t, box.answers).State)
		}
		next := 0
		for range rounds {
			session := engineSession(t, c)
			r, err := session.Receiver(t.Context(), box.receiver("q"))
			require.NoError(t, err)
			require.NoError(t, r.AddCredit(each))
			var ids []uint32
			for range each {
				d := arrival(t, box.deliveries)
				require.Equal(t, fmt.Sprint(next), bodyOf(t, d), "an accepted message came again, or one is missing")
				next++
				ids = append(ids, d.ID)
			}
			for _, i := range []int{1, 0, 2} { // every third, so that ranges don't join at once
				for j := i; j < len(ids); j += 3 {
					require.NoError(t, r.Settle(ids[j], ids[j], amqp.Accepted))
				}
			}
			require.NoError(t, r.Detach(t.Context()))
			require.NoError(t, session.End(t.Context()))
		}
	})
}

// What the broker refuses costs a link, or a session where the broker ends that, with its reason.
// The connection lives on.
func TestEngineLearnsWhatIsRefused(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		engineQueue(t, s, declare.QuorumQueue{Name: "q", MaxLength: 1, Overflow: declare.OverflowRejectPublish})
		c := engineConn(t, s)
		box := newInbox()
		var remote *frames.Error
		_, err := engineSession(t, c).Receiver(t.Context(), box.receiver("missing"))
		require.ErrorAs(t, err, &remote)
		assert.Equal(t, frames.Symbol("amqp:not-found"), remote.Condition)
		var e *amqp.Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, map[bool]amqp.Scope{true: amqp.ScopeLink, false: amqp.ScopeSession}[s.Newer()], e.Scope)
		_, err = engineSession(t, c).Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "/exchanges/missing/k"}})
		require.ErrorAs(t, err, &remote)
		assert.Equal(t, frames.Symbol("amqp:not-found"), remote.Condition)

		l, err := engineSession(t, c).Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "/exchanges/amq.direct/nowhere"}})
		require.NoError(t, err)
		require.NoError(t, l.Send(&amqp.Sending{Payload: encoded(t, "unroutable"), To: box}))
		assert.IsType(t, &frames.Released{}, arrival(t, box.answers).State)
		l, err = engineSession(t, c).Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "/queues/q"}})
		require.NoError(t, err)
		rejected := false
		for i := 0; i < 50 && !rejected; i++ {
			require.NoError(t, l.Send(&amqp.Sending{Payload: encoded(t, "too many"), To: box}))
			_, rejected = arrival(t, box.answers).State.(*frames.Rejected)
		}
		assert.True(t, rejected)
		require.NoError(t, c.Err())
	})
}

// A connection that is lost answers all messages, and says which may be stored.
func TestEngineConnectionIsCut(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		engineQueue(t, s, declare.QuorumQueue{Name: "q"})
		c := engineConn(t, s)
		box := newInbox()
		session := engineSession(t, c)
		l, err := session.Sender(t.Context(), amqp.SenderConfig{Target: &frames.Target{Address: "/queues/q"}})
		require.NoError(t, err)
		r, err := session.Receiver(t.Context(), box.receiver("q"))
		require.NoError(t, err)
		require.NoError(t, r.AddCredit(10))
		cut := errors.New("cut")
		const n = 5000
		var sending sync.WaitGroup
		sending.Go(func() {
			for i := range n {
				if err := l.Send(&amqp.Sending{Payload: encoded(t, "m"), To: box}); err != nil {
					box.answers <- amqp.Answer{Err: err}
				}
				if i == n/2 {
					c.Fail(cut)
				}
			}
		})
		certain := 0
		for range n {
			a := arrival(t, box.answers)
			if a.Err != nil {
				require.ErrorIs(t, a.Err, cut)
			}
			if a.Err == nil || !a.Sent {
				certain++
			}
		}
		sending.Wait()
		<-c.Done()
		require.ErrorIs(t, arrival(t, box.ended), cut)
		assert.Positive(t, certain)
		require.ErrorIs(t, r.Settle(0, 0, amqp.Accepted), cut)
	})
}
