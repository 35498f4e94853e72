package topology_test

import (
	"context"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/retry"
)

// What retry.Topology makes has nothing that Verify doesn't like, for every
// strategy, and neither have the exchanges and work queues around it.
func TestVerifyFindsNothingInOurOwnTopology(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		all := shopTopology(t)
		for name, policy := range map[string]retry.Policy{
			"republish": {}, "dead-letter": {Strategy: retry.StrategyDeadLetter}, "native": {Strategy: retry.StrategyNative},
			"auto": {Strategy: retry.StrategyAuto}, "any-delay": {AnyDelay: &retry.Ladder{}}, "replay-by-move": {ReplayByMove: true},
		} {
			policy.Names.Prefix = name + "."
			topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work-" + name, DeliveryLimit: 3})
			require.NoError(t, err)
			all, err = declare.Merge(all, topology)
			require.NoError(t, err)
		}
		suite.Apply(t, conn, all)
		v, err := suite.Verified(t.Context(), s.Sources(t, conn), all)
		require.NoError(t, err)
		assert.True(t, v.Clean(), "%s", v)

		// Over AMQP alone nothing is found either, and it says what it didn't see.
		v, err = suite.Verified(t.Context(), check.Sources{AMQP: conn.Management()}, all)
		require.NoError(t, err)
		assert.Empty(t, v.Findings)
		assert.NotEmpty(t, v.Skipped)
		assert.Contains(t, v.String(), "not checked: ")
		assert.Contains(t, v.String(), "use the HTTP API")

		// A user who may only look at the virtual host sees no policies and nodes.
		s.HTTP(t, http.MethodPut, "/users/"+s.VHost+"-look", map[string]string{"password": "look", "tags": "management"}, nil)
		t.Cleanup(func() { s.HTTP(t, http.MethodDelete, "/users/"+s.VHost+"-look", nil, nil) })
		s.HTTP(t, http.MethodPut, "/permissions/"+s.VHost+"/"+s.VHost+"-look", map[string]string{"configure": "^$", "write": "^$", "read": ".*"}, nil)
		peeking := s.API(t, func(u *url.URL) { u.User = url.UserPassword(s.VHost+"-look", "look") })
		v, err = suite.Verified(t.Context(), check.Sources{HTTP: peeking}, all)
		require.NoError(t, err)
		assert.Empty(t, v.Findings, "%s", v)
		assert.NotEmpty(t, v.Skipped)
		assert.Contains(t, v.String(), "policymaker")
	})
}

func unmake(t *testing.T, s *suite.Site, path string) {
	t.Helper()
	s.HTTP(t, http.MethodDelete, path, nil, nil)
}

// quorumArgs are those of a queue that loses nothing, with changes; nil removes.
func quorumArgs(changes map[string]any) map[string]any {
	args := map[string]any{
		"x-queue-type": "quorum", "x-delivery-limit": 5,
		"x-dead-letter-exchange": "dead_letter_exchange", "x-dead-letter-routing-key": "orders",
		"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
	}
	maps.Copy(args, changes)
	maps.DeleteFunc(args, func(_ string, v any) bool { return v == nil })
	return args
}

// faults are planted one at a time into a topology that has none. Each is found by
// its rule, at its thing, and nothing else is.
var faults = map[string]struct {
	plant   func(t *testing.T, s *suite.Site)
	finds   map[string]string // thing: rule
	old     bool              // only with 4.0
	newer   bool              // only with 4.3
	drops   bool              // with 4.4 it is "delayed-drop-head", too
	counted bool              // by a count of the HTTP API
	upTo3   bool              // only with 4.0 to 4.3
}{
	"queue deleted": {
		plant: func(t *testing.T, s *suite.Site) { unmake(t, s, "/queues/"+s.VHost+"/delay_2s") },
		finds: map[string]string{`queue "delay_2s"`: "missing", `binding "retry_exchange" to queue "delay_2s", key "delay.2000.#"`: "missing"},
	},
	"binding deleted": {
		plant: func(t *testing.T, s *suite.Site) {
			unmake(t, s, "/bindings/"+s.VHost+"/e/requeue_exchange/q/orders/%2A.%2A.orders")
		},
		finds: map[string]string{`binding "requeue_exchange" to queue "orders", key "*.*.orders"`: "missing"},
	},
	"exchange deleted": {
		plant: func(t *testing.T, s *suite.Site) { unmake(t, s, "/exchanges/"+s.VHost+"/shop.eu") },
		finds: map[string]string{
			`exchange "shop.eu"`: "missing", `binding "shop" to exchange "shop.eu", key "#"`: "missing",
			`binding "shop.eu" to queue "invoices", key "", 2 headers`: "missing",
		},
	},
	"argument changed": {
		plant: func(t *testing.T, s *suite.Site) {
			unmake(t, s, "/exchanges/"+s.VHost+"/shop.eu")
			s.DeclareExchange(t, "shop.eu", "headers", true, nil) // not internal
			s.HTTP(t, http.MethodPost, "/bindings/"+s.VHost+"/e/shop/e/shop.eu", map[string]any{"routing_key": "#"}, nil)
			s.HTTP(t, http.MethodPost, "/bindings/"+s.VHost+"/e/shop.eu/q/invoices", map[string]any{"arguments": map[string]any{"x-match": "all", "country": "DE", "vat": 19}}, nil)
		},
		finds: map[string]string{`exchange "shop.eu"`: "different"},
	},
	"delivery limit as text": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-delivery-limit": "2"}))
		},
		finds: map[string]string{`queue "new"`: "ill-typed-argument"},
	},
	"argument misspelt": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-mesage-ttl": 1000}))
		},
		finds: map[string]string{`queue "new"`: "unknown-argument"},
	},
	"no dead-letter exchange": {
		plant: func(t *testing.T, s *suite.Site) { s.DeclareQueue(t, "new", map[string]any{"x-queue-type": "quorum"}) },
		finds: map[string]string{`queue "new"`: "dead-letter"},
	},
	"expiry into nothing": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1, "x-message-ttl": 1000})
		},
		finds: map[string]string{`queue "new"`: "dead-letter"},
	},
	"dead-letters at most once": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-dead-letter-strategy": nil}))
		},
		finds: map[string]string{`queue "new"`: "at-most-once"},
	},
	"falls back to at most once": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-overflow": nil}))
		},
		finds: map[string]string{`queue "new"`: "at-most-once"},
	},
	"dead-letter exchange missing": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-dead-letter-exchange": "nowhere"}))
		},
		finds: map[string]string{`queue "new"`: "dead-letter-exchange"},
	},
	"dead-letter exchange unbound": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareExchange(t, "dlx", "direct", true, nil)
			s.Bind(t, "dlx", "orders.dead", "another-key")
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-dead-letter-exchange": "dlx"}))
		},
		finds: map[string]string{`queue "new"`: "dead-letter-route", `exchange "dlx"`: "alternate-exchange"},
	},
	"no alternate exchange": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareExchange(t, "dlx", "topic", true, nil)
			s.Bind(t, "dlx", "orders.dead", "known.*")
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": nil}))
		},
		finds: map[string]string{`exchange "dlx"`: "alternate-exchange"},
	},
	"alternate exchange missing": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareExchange(t, "new", "topic", true, map[string]any{"alternate-exchange": "nowhere"})
		},
		finds: map[string]string{`exchange "new"`: "alternate-exchange-missing"},
	},
	"alternate exchange unbound": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareExchange(t, "parking2", "fanout", true, nil)
			s.DeclareExchange(t, "new", "topic", true, map[string]any{"alternate-exchange": "parking2"})
		},
		finds: map[string]string{`exchange "new"`: "alternate-exchange-route"},
	},
	"delivery limit at the end of the line": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new.dead", quorumArgs(map[string]any{"x-dead-letter-exchange": "parking_exchange"}))
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "new.dead"}))
		},
		finds: map[string]string{`queue "new.dead"`: "delivery-limit"},
	},
	"max-length on the way back": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-max-length": 10}))
			s.Bind(t, "requeue_exchange", "new", "*.*.new")
		},
		finds: map[string]string{`queue "new"`: "max-length"},
	},
	"max-length by a policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/limit", map[string]any{"pattern": "^orders$", "apply-to": "quorum_queues", "definition": map[string]any{"max-length": 10}}, nil)
		},
		finds: map[string]string{`queue "orders"`: "max-length"},
	},
	"overflow by a policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.Policy(t, "policies", "orders", map[string]any{"overflow": "drop-head"})
		},
		finds: map[string]string{`queue "orders"`: "at-most-once"},
	},
	"hold queue deleted by a policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.Policy(t, "policies", "hold_2s", map[string]any{"expires": 3_600_000})
		},
		finds: map[string]string{`queue "hold_2s"`: "expires"},
	},
	"hold queue too fast by a policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.Policy(t, "policies", "hold_2s", map[string]any{"message-ttl": 100})
		},
		finds: map[string]string{`queue "hold_2s"`: "delay-mismatch"},
	},
	"delay queue too fast by an operator's policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.Policy(t, "operator-policies", "delay_2s", map[string]any{"message-ttl": 100})
		},
		finds: map[string]string{`queue "delay_2s"`: "delay-mismatch"},
	},
	"hold queue limited by a policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.Policy(t, "policies", "hold_2s", map[string]any{"max-length": 10})
		},
		finds: map[string]string{`queue "hold_2s"`: "max-length"},
	},
	"delay queue limited by a policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.Policy(t, "policies", "delay_2s", map[string]any{"max-length-bytes": 1000})
		},
		finds: map[string]string{`queue "delay_2s"`: "max-length"},
	},
	"work queue's messages expire by a policy": {
		plant: func(t *testing.T, s *suite.Site) {
			s.Policy(t, "policies", "orders", map[string]any{"message-ttl": 100})
		},
		finds: map[string]string{`queue "orders"`: "work-queue-ttl"}, newer: true,
	},
	"overflow drops": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1, "x-max-length": 10})
		},
		finds: map[string]string{`queue "new"`: "overflow"}, drops: true,
	},
	"delay queue expires": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-message-ttl": 3000, "x-expires": 3600000, "x-dead-letter-exchange": "requeue_exchange", "x-dead-letter-routing-key": nil}))
			s.Bind(t, "retry_exchange", "new", "delay.3000.#")
		},
		finds: map[string]string{`queue "new"`: "expires"},
	},
	"cycle of expiries": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "a", quorumArgs(map[string]any{"x-message-ttl": 3000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "b"}))
			s.DeclareQueue(t, "b", quorumArgs(map[string]any{"x-message-ttl": 3000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "a"}))
		},
		finds: map[string]string{`queue "a"`: "expiry-cycle", `queue "b"`: "expiry-cycle"},
	},
	"orphan delay queue": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "delay_9s", quorumArgs(map[string]any{"x-message-ttl": 9000, "x-dead-letter-exchange": "requeue_exchange", "x-dead-letter-routing-key": nil}))
		},
		finds: map[string]string{`queue "delay_9s"`: "orphan-delay-queue"},
	},
	"bound for another delay": {
		plant: func(t *testing.T, s *suite.Site) { s.Bind(t, "retry_exchange", "delay_1s", "delay.3000.#") },
		finds: map[string]string{`queue "delay_1s"`: "delay-mismatch"},
	},
	"comes back twice": {
		plant: func(t *testing.T, s *suite.Site) { s.Bind(t, "requeue_exchange", "parking_queue", "#") },
		finds: map[string]string{`queue "delay_1s"`: "several-ways-back", `queue "delay_2s"`: "several-ways-back", `exchange "requeue_exchange"`: "foreign-binding"},
	},
	"audit queue where dead letters are sorted": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "audit", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1})
			s.Bind(t, "dead_letter_exchange.sort", "audit", "")
		},
		finds: map[string]string{`exchange "dead_letter_exchange.sort"`: "foreign-binding"},
	},
	"audit queue that only gets copies": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "audit", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1})
			s.Bind(t, "dead_letter_exchange", "audit", "")
		},
		finds: map[string]string{},
	},
	"two ladders on one": {
		plant: func(t *testing.T, s *suite.Site) {
			conn, _ := s.Connect(t)
			suite.ApplyRetry(t, conn, retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second), AnyDelay: &retry.Ladder{Unit: time.Second, Levels: 2}})
			s.Bind(t, "retry_ladder_1s_2_0", "retry_ladder_1s_2_0", "*.*.1.#")
		},
		finds: map[string]string{`exchange "retry_ladder_1s_2_0"`: "shared-ladder"},
	},
	"name with a wildcard": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new.*", quorumArgs(nil))
			s.Bind(t, "requeue_exchange", "new.*", "*.*.new.*")
		},
		finds: map[string]string{`queue "new.*"`: "wildcard-name"},
	},
	"exchange not durable": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareExchange(t, "new", "topic", false, nil)
			s.Bind(t, "new", "orders", "#")
		},
		finds: map[string]string{`exchange "new"`: "transient-exchange"},
	},
	"queue neither durable nor exclusive": {
		plant: func(t *testing.T, s *suite.Site) {
			s.HTTP(t, http.MethodPut, "/queues/"+s.VHost+"/new", map[string]any{"durable": false, "arguments": map[string]any{"x-queue-type": "classic"}}, nil)
		},
		finds: map[string]string{`queue "new"`: "transient-queue"}, upTo3: true, // 4.4 refuses it
	},
	"classic queue": {
		plant: func(t *testing.T, s *suite.Site) { s.DeclareQueue(t, "new", map[string]any{"x-queue-type": "classic"}) },
		finds: map[string]string{`queue "new"`: "dead-letter not-replicated"},
	},
	"delayed retries before 4.3": {
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-delayed-retry-type": "all"}))
		},
		finds: map[string]string{`queue "new"`: "delayed-retry"}, old: true,
	},
	"dead letters stuck": {
		counted: true,
		plant: func(t *testing.T, s *suite.Site) {
			s.DeclareQueue(t, "new", quorumArgs(map[string]any{"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "gone"}))
			s.Peer(t).Put("new", amqp.NewMessage([]byte("stuck")))
			suite.Poll(t, "the dead letter is counted", func() bool {
				var q struct {
					DLX int `json:"messages_dlx"`
				}
				s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/new", nil, &q)
				return q.DLX == 1
			})
		},
		finds: map[string]string{`queue "new"`: "dead-letter-route orphan-delay-queue stuck-dead-letters"},
	},
}

// Every rule has a fault that shows it at work; the others need a cluster, or a user
// who may not look, or are about definitions files alone: see TestDoctorNamesWhatDoesHarm.
func TestEveryRuleHasAPlantedFault(t *testing.T) {
	t.Parallel()
	planted := map[string]bool{"delayed-drop-head": true, "modulus-hash-binding": true, "exchange-type": true, "replicas": true, "replicas-down": true, "broker-version": true, "unseen": true, "policy-pattern": true, "impossible-queue": true}
	for _, fault := range faults {
		for _, rules := range fault.finds {
			for rule := range strings.SplitSeq(rules, " ") {
				planted[rule] = true
			}
		}
	}
	for _, rule := range audit.Rules() {
		assert.True(t, planted[rule.ID], rule.ID)
	}
	assert.GreaterOrEqual(t, len(faults), 15)
}

// A modulus-hash exchange is planned, applied, and verified as any other. Before RabbitMQ 4.3 the
// finding and the refusal name the version.
func TestModulusHashExchangesArePlannedAppliedAndVerified(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		topology := declare.Topology{Exchanges: []declare.Exchange{{Name: "group", Type: declare.ExchangeModulusHash}}}
		for _, name := range []string{"group.0", "group.1"} {
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop(), SingleActiveConsumer: true})
			topology.Bindings = append(topology.Bindings, declare.Binding{Source: "group", Queue: name})
		}
		conn, _ := s.Connect(t)
		verify := func() check.Verification {
			v, err := suite.Verified(t.Context(), check.Sources{HTTP: s.API(t)}, topology)
			require.NoError(t, err)
			return v
		}
		if !s.Newer() {
			assert.Contains(t, verify().String(), "its type x-modulus-hash needs RabbitMQ 4.3 or later, and this is 4.0.5")
			_, err := declare.Apply(t.Context(), conn.Management(), topology)
			require.ErrorIs(t, err, declare.ErrInvalid)
			assert.ErrorContains(t, err, "unknown exchange type 'x-modulus-hash'")
			assert.ErrorContains(t, err, "remedies: upgrade to RabbitMQ 4.3 or later")
			_, err = declare.Inspect(t.Context(), conn.Management(), "group.0")
			assert.ErrorIs(t, err, declare.ErrNotFound, "queues come after exchanges")
			return
		}
		suite.Apply(t, conn, topology)
		suite.Apply(t, conn, topology)
		assert.True(t, verify().Clean(), "%s", verify())
		s.DeclareQueue(t, "tap", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1})
		s.Bind(t, "group", "tap", "")
		v := verify()
		require.Len(t, v.Findings, 1, "%s", v)
		assert.Equal(t, "modulus-hash-binding", v.Findings[0].Rule)
		// Another type on a live exchange is refused, with both types.
		topology.Exchanges[0].Type = declare.ExchangeDirect
		_, err := declare.Apply(t.Context(), conn.Management(), topology)
		require.ErrorIs(t, err, declare.ErrConflict)
		assert.ErrorContains(t, err, `type: the broker has "x-modulus-hash", declared is "direct"`)
	})
}

// Anyone who may publish to a queue that drops its oldest message when it is full can make it hang:
// RabbitMQ looks for one that it may drop, and finds only messages whose time is to come.
func TestPublishersForLaterHangAQueueThatDropsItsHead(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.HoldsPublished() {
			t.Skip("it takes RabbitMQ 4.4")
		}
		for overflow, hangs := range map[string]bool{"drop-head": true, "reject-publish": false} {
			t.Run(overflow, func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				conn, _ := s.Connect(t)
				s.DeclareQueue(t, "q", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1, "x-max-length": 2, "x-overflow": overflow})
				p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("q"), client.PublisherConfig{NoResend: true})
				require.NoError(t, err)
				later := func(m *client.Message) {
					m.Annotations = amqp.Annotations{"x-opt-delivery-time": time.Now().Add(time.Hour)}
				}
				for range 2 {
					require.NoError(t, p.Publish(suite.Within(t), "later", later))
				}
				if hangs {
					for _, edit := range []func(*client.Message){later, func(*client.Message) {}} {
						ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
						err = p.Publish(ctx, "more", edit)
						cancel()
					}
					assert.ErrorIs(t, err, context.DeadlineExceeded)
				} else {
					// A quorum queue refuses once it holds more than its limit.
					if err := p.Publish(suite.Within(t), "later", later); err != nil {
						assert.ErrorIs(t, err, client.ErrRefused)
					}
					assert.ErrorIs(t, p.Publish(suite.Within(t), "now"), client.ErrRefused)
				}
				v, err := suite.Verified(t.Context(), check.Sources{HTTP: s.API(t)}, declare.Topology{})
				require.NoError(t, err)
				found := ""
				for _, f := range v.Findings {
					found += f.Rule + " "
				}
				assert.Equal(t, hangs, strings.Contains(found, "delayed-drop-head"), "%s", v)
				assert.Equal(t, hangs, slices.Contains(suite.Found(examined(t, s)), `error delayed-drop-head queue "q"`))
				closing, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer stop()
				_ = p.Close(closing)
			})
		}
	})
}

func TestVerifyFindsPlantedFaults(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		topology := shopTopology(t)
		for name, fault := range faults {
			if fault.old && s.Newer() || fault.newer && !s.Newer() || fault.upTo3 && s.HoldsPublished() {
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				conn, _ := s.Connect(t)
				suite.Apply(t, conn, topology)
				fault.plant(t, s)
				finds := maps.Clone(fault.finds)
				for thing, rules := range finds {
					if fault.drops && s.HoldsPublished() {
						finds[thing] = "delayed-drop-head " + rules
					}
				}
				v, found := rulesFound(t, s, topology)
				// The HTTP API's counts are some seconds old, and not all of one moment.
				for tries := 0; fault.counted && !maps.Equal(finds, found) && tries < 10; tries++ {
					time.Sleep(time.Second)
					v, found = rulesFound(t, s, topology)
				}
				assert.Equal(t, finds, found, "%s", v)
				assert.Empty(t, v.Skipped)
			})
		}
	})
}

// rulesFound verifies a topology, and returns the rules of the findings for each resource.
func rulesFound(t *testing.T, s *suite.Site, topology declare.Topology) (check.Verification, map[string]string) {
	v, err := suite.Verified(t.Context(), check.Sources{HTTP: s.API(t)}, topology)
	require.NoError(t, err)
	all := map[string][]string{}
	for _, f := range v.Findings {
		assert.NotEmpty(t, f.Problem)
		assert.NotEmpty(t, f.Remedy)
		all[f.Resource.String()] = append(all[f.Resource.String()], f.Rule)
	}
	found := map[string]string{}
	for thing, rules := range all {
		found[thing] = strings.Join(slices.Sorted(slices.Values(rules)), " ")
	}
	return v, found
}
