package integration

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// What client.Copy relies on: RabbitMQ accepts a user-id only from that user, or from a user
// with the tag impersonator. For any other 4.3 ends the link, and 4.0 the session. It dead-letters a message
// with its user-id, and accepts any user-id in an annotation.
func TestWhoMaySignMessages(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(quorum("q", declare.Drop())))
		login := s.user(t, "^$", everything, everything)
		u, err := url.Parse(login)
		require.NoError(t, err)
		name := u.User.Username()
		signed := func(by string, annotation any) *amqp.Message {
			m := amqp.NewMessage([]byte("m"))
			if by != "" {
				m.Properties = &amqp.MessageProperties{UserID: []byte(by)}
			}
			if annotation != nil {
				m.Annotations = amqp.Annotations{"x-opt-hopback-user-id": annotation}
			}
			return m
		}
		p := s.peerAt(t, login)
		p.put("q", signed(name, nil))
		p.put("q", signed("", "guest"))
		p.put("q", signed("", []byte("guest")))
		p.put("q", signed(name, "guest"))
		got := p.take("q", 4)
		assert.Equal(t, name, string(got[0].Properties.UserID))
		assert.Equal(t, "guest", got[1].Annotations["x-opt-hopback-user-id"])
		assert.Equal(t, []byte("guest"), got[2].Annotations["x-opt-hopback-user-id"])
		assert.Equal(t, name, string(got[3].Properties.UserID))

		target, err := address.Queue("q").Build()
		require.NoError(t, err)
		l, err := p.s.NewSender(t.Context(), target, nil)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		sent, err := l.SendWithReceipt(ctx, signed("guest", nil), nil)
		require.NoError(t, err)
		_, err = sent.Wait(ctx)
		if s.newer() {
			require.ErrorAs(t, err, new(*amqp.LinkError))
		} else {
			require.ErrorAs(t, err, new(*amqp.SessionError))
		}
		var remote *amqp.Error
		require.ErrorAs(t, err, &remote)
		assert.Equal(t, amqp.ErrCondUnauthorizedAccess, remote.Condition)
		assert.Equal(t, "user_id property set to 'guest' but authenticated user was '"+name+"'", remote.Description)

		s.http(t, http.MethodPut, "/users/"+name, map[string]string{"password": "secret-" + name, "tags": "impersonator"}, nil)
		p = s.peerAt(t, login)
		p.put("q", signed("guest", nil))
		assert.Equal(t, "guest", string(p.take("q", 1)[0].Properties.UserID))
	})
}

// A message with another's user-id fails alone, with ErrUserID. All others are accepted, and
// once the broker has refused one, no further one costs a link.
func TestWrongUserIDFailsAlone(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		owner, _ := s.connect(t)
		apply(t, owner, queueOf(quorum("q", declare.Drop())))
		conn, log := connectTo(t, s.user(t, "^$", everything, "^$"))
		p := publisherOf(t, conn, address.Queue("q"))
		const n = 100
		texts := make([]string, n)
		for i := range texts {
			texts[i] = strconv.Itoa(i)
		}
		for round := range 2 {
			var refused *client.BatchError
			err := p.PublishAll(within(t), texts, func(v string, m *client.Message) {
				if i, _ := strconv.Atoi(v); i%10 == 3 {
					m.Properties.UserID = []byte("guest")
				}
			})
			require.ErrorAs(t, err, &refused)
			require.Len(t, refused.Failed, n/10, "%v", err)
			for _, f := range refused.Failed {
				assert.Equal(t, 3, f.Index%10)
				require.ErrorIs(t, f.Err, client.ErrUserID)
				assert.True(t, client.SafeToRetry(f.Err))
			}
			poll(t, "all others are stored", func() bool { return ready(t, owner, "q") >= n*9/10*(round+1) })
		}
		lost := 0
		for _, line := range log.all() {
			if strings.Contains(line, "lost") {
				lost++
			}
		}
		assert.LessOrEqual(t, lost, 2)
		require.NoError(t, p.Publish(within(t), "last"))
	})
}

// An impersonator's copies keep the user-id. If the broker's user isn't one after all, the
// copies have it in the annotation, after one refusal.
func TestCopiesOfAnImpersonator(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		owner, _ := s.connect(t)
		apply(t, owner, declare.Topology{Queues: []declare.Queue{quorum("in", declare.Drop()), quorum("out", declare.Drop())}})
		p := publisherOf(t, owner, address.Queue("in"))
		for _, tags := range []string{"impersonator", ""} {
			login := s.user(t, "^$", everything, everything)
			u, err := url.Parse(login)
			require.NoError(t, err)
			name := u.User.Username()
			s.http(t, http.MethodPut, "/users/"+name, map[string]string{"password": "secret-" + name, "tags": tags}, nil)
			conn, _ := connectTo(t, login, func(c *client.Config) { c.Impersonator = true })
			stop := consume(t, conn, "in", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				return client.Forward{To: address.Queue("out"), Message: client.Copy(d.Message())}
			}), client.ConsumerConfig{})
			for range 3 {
				publish(t, p, "x", func(m *client.Message) { m.Properties.UserID = []byte("guest") })
			}
			for _, m := range s.peer(t).take("out", 3) {
				user, checked := client.UserID(m)
				assert.Equal(t, "guest", user)
				assert.Equal(t, tags != "", checked, "%v", m.Annotations)
			}
			require.NoError(t, stop())
		}
	})
}
