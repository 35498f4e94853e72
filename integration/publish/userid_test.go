package publish_test

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
	"github.com/hopback/hopback/integration/internal/suite"
)

// What client.Copy relies on: RabbitMQ accepts a user-id only from that user, or from a user
// with the tag impersonator. For any other 4.3 ends the link, and 4.0 the session. It dead-letters a message
// with its user-id, and accepts any user-id in an annotation.
func TestWhoMaySignMessages(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(suite.Quorum("q", declare.Drop())))
		login := s.User(t, "^$", suite.Everything, suite.Everything)
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
		p := s.PeerAt(t, login)
		p.Put("q", signed(name, nil))
		p.Put("q", signed("", "guest"))
		p.Put("q", signed("", []byte("guest")))
		p.Put("q", signed(name, "guest"))
		got := p.Take("q", 4)
		assert.Equal(t, name, string(got[0].Properties.UserID))
		assert.Equal(t, "guest", got[1].Annotations["x-opt-hopback-user-id"])
		assert.Equal(t, []byte("guest"), got[2].Annotations["x-opt-hopback-user-id"])
		assert.Equal(t, name, string(got[3].Properties.UserID))

		target, err := address.Queue("q").Build()
		require.NoError(t, err)
		l, err := p.Site.NewSender(t.Context(), target, nil)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		sent, err := l.SendWithReceipt(ctx, signed("guest", nil), nil)
		require.NoError(t, err)
		_, err = sent.Wait(ctx)
		if s.Newer() {
			require.ErrorAs(t, err, new(*amqp.LinkError))
		} else {
			require.ErrorAs(t, err, new(*amqp.SessionError))
		}
		var remote *amqp.Error
		require.ErrorAs(t, err, &remote)
		assert.Equal(t, amqp.ErrCondUnauthorizedAccess, remote.Condition)
		assert.Equal(t, "user_id property set to 'guest' but authenticated user was '"+name+"'", remote.Description)

		s.HTTP(t, http.MethodPut, "/users/"+name, map[string]string{"password": "secret-" + name, "tags": "impersonator"}, nil)
		p = s.PeerAt(t, login)
		p.Put("q", signed("guest", nil))
		assert.Equal(t, "guest", string(p.Take("q", 1)[0].Properties.UserID))
	})
}

// A message with another's user-id fails alone, with ErrUserID. All others are accepted, and
// once the broker has refused one, no further one costs a link.
func TestWrongUserIDFailsAlone(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		owner, _ := s.Connect(t)
		suite.Apply(t, owner, suite.QueueOf(suite.Quorum("q", declare.Drop())))
		conn, log := suite.ConnectTo(t, s.User(t, "^$", suite.Everything, "^$"))
		p := suite.PublisherOf(t, conn, address.Queue("q"))
		const n = 100
		texts := make([]string, n)
		for i := range texts {
			texts[i] = strconv.Itoa(i)
		}
		for round := range 2 {
			var refused *client.BatchError
			err := p.PublishAll(suite.Within(t), texts, func(v string, m *client.Message) {
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
			suite.Poll(t, "all others are stored", func() bool { return suite.Ready(t, owner, "q") >= n*9/10*(round+1) })
		}
		lost := 0
		for _, line := range log.All() {
			if strings.Contains(line, "lost") {
				lost++
			}
		}
		assert.LessOrEqual(t, lost, 2)
		require.NoError(t, p.Publish(suite.Within(t), "last"))
	})
}

// An impersonator's copies keep the user-id. If the broker's user isn't one after all, the
// copies have it in the annotation, after one refusal.
func TestCopiesOfAnImpersonator(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		owner, _ := s.Connect(t)
		suite.Apply(t, owner, declare.Topology{Queues: []declare.Queue{suite.Quorum("in", declare.Drop()), suite.Quorum("out", declare.Drop())}})
		p := suite.PublisherOf(t, owner, address.Queue("in"))
		for _, tags := range []string{"impersonator", ""} {
			login := s.User(t, "^$", suite.Everything, suite.Everything)
			u, err := url.Parse(login)
			require.NoError(t, err)
			name := u.User.Username()
			s.HTTP(t, http.MethodPut, "/users/"+name, map[string]string{"password": "secret-" + name, "tags": tags}, nil)
			conn, _ := suite.ConnectTo(t, login, func(c *client.Config) { c.Impersonator = true })
			stop := suite.Consume(t, conn, "in", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				return client.Forward{To: address.Queue("out"), Message: client.Copy(d.Message())}
			}), client.ConsumerConfig{})
			for range 3 {
				suite.Publish(t, p, "x", func(m *client.Message) { m.Properties.UserID = []byte("guest") })
			}
			for _, m := range s.Peer(t).Take("out", 3) {
				user, checked := client.UserID(m)
				assert.Equal(t, "guest", user)
				assert.Equal(t, tags != "", checked, "%v", m.Annotations)
			}
			require.NoError(t, stop())
		}
	})
}
