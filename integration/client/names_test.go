package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/brokername"
	"github.com/hopback/hopback/retry"
)

// names that a queue may have, with what addresses, paths and topic bindings give
// a meaning to.
var names = []string{
	"orders", "a.b.c", ".", "..", "a..b", ".leading", "trailing.", "with space", " ", "a/b", "/", "a%b", "%2F", "%20", "a+b", "+",
	"tab\there", `"quoted"`, "'single'", "a*b", "a#b", "**", "x.a*.y", "größe-Ω-兎-🐇", "?&=;:@!$(),", "~_-", "delay.100.x", "\\back", "nul\x00here",
}

// unusable are those whose path the management can't carry.
var unusable = map[string]bool{".": true, "..": true}

// Every name goes the whole way: declared, published to, hopped, back, dead-lettered.
func TestQueueNamesWorkEndToEnd(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(50 * time.Millisecond)}
		conn, _ := s.Connect(t)
		other, _ := s.Connect(t) // a connection has 64 sessions
		peer := s.Peer(t)
		var work []declare.QuorumQueue
		var used []string
		for _, name := range names {
			if unusable[name] {
				continue
			}
			used = append(used, name)
			work = append(work, declare.QuorumQueue{Name: name, DeliveryLimit: 5})
		}
		suite.ApplyRetry(t, conn, policy, work...)
		suite.ApplyRetry(t, conn, policy, work...) // what is read back compares as equal
		p := suite.Publisher[string](t, conn, address.Address{})
		for i, name := range used {
			c := conn
			if i%2 == 1 {
				c = other
			}
			suite.Consume(t, c, name, retry.With(policy)(client.JSON(func(ctx context.Context, to string) error {
				d, _ := client.DeliveryFrom(ctx)
				switch {
				case to != d.Queue():
					return retry.Permanent(fmt.Errorf("message for %q came to %q", to, d.Queue()))
				case retry.Count(d.Message()) < 1:
					return errors.New("not yet")
				}
				return retry.Permanent(errors.New("enough"))
			})), client.ConsumerConfig{})
			suite.Publish(t, p, name, client.PublishTo(address.Queue(name)))
		}
		for _, name := range used {
			m := peer.Take(name+".dead", 1)[0]
			assert.Equal(t, "enough", m.Annotations[client.AnnotationError], name)
			assert.Equal(t, name, m.Annotations[annotation.Queue])
			assert.Equal(t, 1, retry.Count(m), name)
			assert.Zero(t, suite.Ready(t, conn, name+".dead"), name)
		}
		assert.Zero(t, suite.Ready(t, conn, "parking_queue"))
	})
}

// The word that would be a wildcard in the binding which brings messages back is
// refused before anything is sent: such a queue would take the others' messages.
func TestQueueNameWithAWildcardWordIsRefusedBeforeAnythingIsSent(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, through := s.Through(t)
		conn, _ := suite.ConnectTo(t, through)
		sent := wire.Sent()
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second)}
		handler := retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
		for _, name := range []string{"*", "#", "a.*", "a.#", "*.b", "#.b", "a.*.b", "a.#.b", "a..#"} {
			var bad *argument.Error
			_, err := retry.Topology(policy, declare.QuorumQueue{Name: name})
			assert.ErrorAs(t, err, &bad, name)
			_, err = retry.RoutingKey(time.Second, name)
			assert.ErrorAs(t, err, &bad, name)
			err = conn.Consume(t.Context(), name, handler, client.ConsumerConfig{})
			assert.ErrorAs(t, err, &bad, name)
		}
		for _, name := range []string{"", "line\nbreak", "\xff\xfe", strings.Repeat("q", 256)} {
			var bad *argument.Error
			assert.ErrorAs(t, conn.Consume(t.Context(), name, handler, client.ConsumerConfig{}), &bad, "%q", name)
			_, err := declare.Apply(t.Context(), conn.Management(), suite.QueueOf(declare.QuorumQueue{Name: name}))
			assert.ErrorAs(t, err, &bad, "%q", name)
			_, err = client.NewPublisher[suite.Order](t.Context(), conn, address.Queue(name), client.PublisherConfig{})
			assert.ErrorAs(t, err, &bad, "%q", name)
		}
		assert.Equal(t, sent, wire.Sent())
	})
}

// Where we refuse what the broker would take: names of more than 255 bytes, which
// AMQP 0-9-1, definitions and the HTTP API can't carry, and routing keys of more
// than 4,096 bytes, so that an address fits into a frame.
func TestLengthsOfNamesAndRoutingKeys(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		peer := s.Peer(t)
		for _, n := range []int{255, 256, 1000} {
			name := strings.Repeat("ü", n/2) + strings.Repeat("q", n%2)
			require.Len(t, name, n)
			_, err := declare.Apply(t.Context(), conn.Management(), suite.QueueOf(declare.QuorumQueue{Name: name}))
			status, _, raw := conn.Management().Request(t.Context(), "PUT", "/queues/"+address.Escape(name), map[string]any{
				"durable": true, "exclusive": false, "auto_delete": false, "arguments": map[string]any{"x-queue-type": "quorum"},
			})
			suite.Report(t, s, "queue name of %d bytes: hopback %v; the broker itself: status %d, %v", n, verdict(err), status, raw)
			if n <= brokername.Max {
				require.NoError(t, err)
				suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue(name)), suite.Order{ID: n})
				assert.JSONEq(t, fmt.Sprintf(`{"id":%d}`, n), string(peer.Take(name, 1)[0].GetData()))
				continue
			}
			assert.ErrorAs(t, err, new(*argument.Error))
			if status/100 == 2 {
				_, _, err := conn.Management().Request(t.Context(), "DELETE", "/queues/"+address.Escape(name), nil)
				require.NoError(t, err)
			}
		}

		suite.Apply(t, conn, declare.Topology{
			Exchanges: []declare.Exchange{{Name: "x", Type: declare.ExchangeTopic}},
			Queues:    []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}},
			Bindings:  []declare.Binding{{Source: "x", Queue: "q", Key: "k.#"}},
		})
		for _, n := range []int{255, 1000, 4096, 4097} {
			key := "k." + strings.Repeat("y", n-2)
			_, err := address.Exchange("x", key).Build()
			if n > brokername.MaxKey {
				assert.ErrorAs(t, err, new(*argument.Error))
				suite.Report(t, s, "routing key of %d bytes: hopback %v", n, verdict(err))
				continue
			}
			require.NoError(t, err)
			suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Exchange("x", key)), suite.Order{ID: n})
			m := peer.Take("q", 1)[0]
			assert.Equal(t, key, m.Annotations["x-routing-key"])
			suite.Report(t, s, "routing key of %d bytes: sent, and received unchanged", n)
		}
	})
}

// Routing keys and exchange names with what an address gives a meaning to.
func TestExchangeNamesAndRoutingKeysArriveUnchanged(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		peer := s.Peer(t)
		topology := suite.QueueOf(declare.QuorumQueue{Name: "q"})
		for _, name := range names {
			if unusable[name] {
				continue
			}
			topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: name, Type: declare.ExchangeFanout})
			topology.Bindings = append(topology.Bindings, declare.Binding{Source: name, Queue: "q", Key: name})
		}
		suite.Apply(t, conn, topology)
		p := suite.Publisher[suite.Order](t, conn, address.Address{})
		for i, name := range names {
			if unusable[name] {
				continue
			}
			for _, key := range []string{name, names[len(names)-1-i], ""} {
				suite.Publish(t, p, suite.Order{ID: i}, client.PublishTo(address.Exchange(name, key)))
				m := peer.Take("q", 1)[0]
				assert.Equal(t, name, m.Annotations["x-exchange"])
				assert.Equal(t, key, m.Annotations["x-routing-key"], "exchange %q", name)
			}
		}
	})
}

func verdict(err error) string {
	if err == nil {
		return "takes it"
	}
	if bad, ok := errors.AsType[*argument.Error](err); ok {
		return "refuses it (" + bad.Problem + ")"
	}
	return err.Error()
}
