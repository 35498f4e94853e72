package client_test

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"sync"
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

// userOfTopics is a user who may do everything, except that it may publish to a topic exchange with,
// and bind to it by, only the routing keys that match.
func userOfTopics(t *testing.T, s *suite.Site, exchange, write, read string) string {
	t.Helper()
	own := s.User(t, suite.Everything, suite.Everything, suite.Everything)
	u, err := url.Parse(own)
	require.NoError(t, err)
	s.HTTP(t, http.MethodPut, "/topic-permissions/"+s.VHost+"/"+u.User.Username(), map[string]string{"exchange": exchange, "write": write, "read": read}, nil)
	return own
}

func shop(t *testing.T, s *suite.Site) *client.Conn {
	t.Helper()
	owner, _ := s.Connect(t)
	suite.Apply(t, owner, declare.Topology{
		Queues:    []declare.Queue{declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}},
		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}, {Name: "inner", Type: declare.ExchangeTopic, Internal: true}},
		Bindings:  []declare.Binding{{Source: "shop", Queue: "orders", Key: "#"}},
	})
	return owner
}

// RabbitMQ checks the permission for a routing key with each message, and ends the session without it.
func TestAPublishThatATopicPermissionForbids(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		owner := shop(t, s)
		conn, _ := suite.ConnectTo(t, userOfTopics(t, s, "shop", `^ok\.`, ".*"))
		publish := func(to, named address.Address, edit ...func(*client.Message)) error {
			p := suite.Publisher[suite.Order](t, conn, to)
			if to.IsZero() {
				edit = append(edit, client.PublishTo(named))
			}
			ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
			defer cancel()
			return p.Publish(ctx, suite.Order{ID: 1}, edit...)
		}
		require.NoError(t, publish(address.Exchange("shop", "ok.1"), address.Address{}))
		refusals := map[string]error{
			"the publisher's key":  publish(address.Exchange("shop", "no.1"), address.Address{}),
			"the message's key":    publish(address.Address{}, address.Exchange("shop", "no.it's' in exchange 'x'")),
			"no key":               publish(address.Exchange("shop", ""), address.Address{}),
			"a key beyond latin 1": publish(address.Exchange("shop", "nö.✓"), address.Address{}),
		}
		if s.AtLeast("4.1") {
			refusals["one key of two"] = publish(address.Exchange("shop", "ok.1"), address.Address{}, client.CC("no.2"))
		}
		for name, err := range refusals {
			require.ErrorIs(t, err, client.ErrUnauthorized, name)
			assert.NotErrorIs(t, err, client.ErrOutcomeUnknown, name)
			assert.True(t, client.SafeToRetry(err), name)
			require.ErrorContains(t, err, "write access to topic '", name)
			require.ErrorContains(t, err, "in exchange 'shop' in vhost '"+s.VHost+"' refused", name)
			require.ErrorContains(t, err, "rabbitmqctl set_topic_permissions", name)
		}
		err := publish(address.Address{}, address.Exchange("inner", "k"))
		require.ErrorIs(t, err, client.ErrUnauthorized)
		assert.NotErrorIs(t, err, client.ErrOutcomeUnknown)
		assert.NotContains(t, err.Error(), "set_permissions", "none helps")
		assert.EqualValues(t, 1, suite.Ready(t, owner, "orders"), "nothing of what was refused is stored")
	})
}

// A publisher without an address needs the permission for the exchange of each message.
func TestAPublishToAnExchangeThatTheUserMayNotWriteTo(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		shop(t, s)
		conn, _ := suite.ConnectTo(t, s.User(t, suite.Everything, "^none$", suite.Everything))
		p := suite.Publisher[suite.Order](t, conn, address.Address{})
		for to, name := range map[address.Address]string{address.Exchange("shop", "k"): "shop", address.Queue("orders"): "amq.default"} {
			err := p.Publish(t.Context(), suite.Order{ID: 1}, client.PublishTo(to))
			require.ErrorIs(t, err, client.ErrUnauthorized)
			assert.NotErrorIs(t, err, client.ErrOutcomeUnknown)
			require.ErrorContains(t, err, "write access to exchange '"+name+"'")
			require.ErrorContains(t, err, "rabbitmqctl set_permissions")
		}
	})
}

// Many share a publisher: each gets the answer for its own message, and no message is stored twice.
func TestAForbiddenTopicHarmsNoOtherMessage(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		owner := shop(t, s)
		conn, _ := suite.ConnectTo(t, userOfTopics(t, s, "shop", `^ok\.`, ".*"))
		for _, resend := range []bool{true, false} {
			p, err := client.NewPublisher[suite.Order](t.Context(), conn, address.Address{}, client.PublisherConfig{NoResend: !resend})
			require.NoError(t, err)
			var wg sync.WaitGroup
			var mu sync.Mutex
			stored, unknown := 0, 0
			for i := range 100 {
				wg.Go(func() {
					key := "ok.1"
					if i%20 == 10 {
						key = "no.1"
					}
					err := p.Publish(t.Context(), suite.Order{ID: i}, client.PublishTo(address.Exchange("shop", key)))
					mu.Lock()
					defer mu.Unlock()
					switch {
					case key == "no.1":
						assert.ErrorIs(t, err, client.ErrUnauthorized)
						assert.NotErrorIs(t, err, client.ErrOutcomeUnknown)
					case !resend && errors.Is(err, client.ErrOutcomeUnknown):
						unknown++ // it came before the refused one, and nobody knows
					default:
						assert.NoError(t, err)
						stored++
					}
				})
			}
			wg.Wait()
			there := suite.Ready(t, owner, "orders")
			assert.GreaterOrEqual(t, int(there), stored)
			if !resend {
				assert.LessOrEqual(t, int(there), stored+unknown)
			}
			s.HTTP(t, http.MethodDelete, "/queues/"+s.VHost+"/orders/contents", nil, nil)
			suite.Report(t, s, "resend %v: 95 permitted messages of 100: %d stored, %d unknown, %d in the queue", resend, stored, unknown, there)
		}
	})
}

// A permission for the topic of retry copies is known to be missing at the first copy. The worker
// says so, and keeps the message until the permission is there.
func TestAWorkerWhoseCopiesATopicPermissionForbids(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		owner, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond)}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
		require.NoError(t, err)
		suite.Apply(t, owner, topology)
		own := userOfTopics(t, s, "retry_exchange", "^other$", ".*")
		conn, log := suite.ConnectTo(t, own)
		again := make(chan struct{}, 100)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			if retry.Attempt(ctx) == 1 {
				return errors.New("not yet")
			}
			again <- struct{}{}
			return nil
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.Publisher[suite.Order](t, owner, address.Queue("orders")), suite.Order{ID: 1})
		suite.Poll(t, "the worker says what it lacks", func() bool {
			lines := log.With("may not publish retry copies")
			return len(lines) > 0 && strings.Contains(lines[0], "ERROR") && strings.Contains(lines[0], "set_topic_permissions")
		})
		u, err := url.Parse(own)
		require.NoError(t, err)
		s.HTTP(t, http.MethodPut, "/topic-permissions/"+s.VHost+"/"+u.User.Username(), map[string]string{"exchange": "retry_exchange", "write": `\.orders$`, "read": ".*"}, nil)
		suite.Await(t, again, "the retry")
	})
}

// Who binds a queue needs the permission to read the topic.
func TestABindingThatATopicPermissionForbids(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		shop(t, s)
		conn, _ := suite.ConnectTo(t, userOfTopics(t, s, "shop", ".*", `^ok\.`))
		bind := func(key string) error {
			_, err := declare.Apply(t.Context(), conn.Management(), declare.Topology{Bindings: []declare.Binding{{Source: "shop", Queue: "orders", Key: key}}})
			return err
		}
		require.NoError(t, bind("ok.*"))
		err := bind("no.*")
		require.ErrorIs(t, err, client.ErrUnauthorized)
		require.ErrorContains(t, err, "read access to topic 'no.*' in exchange 'shop'")
		require.ErrorContains(t, err, "set_topic_permissions")
	})
}
