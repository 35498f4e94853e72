package topology_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/doctor"
)

const frameworkFiles = "../../operate/internal/frameworks/testdata"

// imported imports a framework's definitions into the site's virtual host.
func imported(t *testing.T, s *suite.Site, file string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(frameworkFiles, file+".json"))
	require.NoError(t, err)
	text = bytes.ReplaceAll(text, []byte(`"vhost": "app"`), []byte(`"vhost": "`+s.VHost+`"`))
	text = bytes.ReplaceAll(text, []byte(`"vhosts": [
  {"name": "app"}
 ]`), []byte(`"vhosts": []`))
	require.NotContains(t, string(text), `"app"`)
	s.HTTP(t, http.MethodPost, "/definitions", json.RawMessage(text), nil)
}

// examined is what the doctor says of the site's virtual host.
func examined(t *testing.T, s *suite.Site) doctor.Report {
	t.Helper()
	r, err := doctor.From(t.Context(), s.API(t), doctor.Options{VHost: s.VHost})
	require.NoError(t, err)
	return r
}

// The doctor reads lists page by page, and takes a page that is refused for the end of a list that has
// fewer pages by now.
func TestPagesOfTheHTTPAPI(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, name := range []string{"a", "b", "c"} {
			s.DeclareQueue(t, name, map[string]any{})
		}
		for query, want := range map[string]int{
			"page=1&page_size=2": http.StatusOK, "page=2&page_size=2": http.StatusOK, "page=3&page_size=2": http.StatusBadRequest,
			"page=1&page_size=500": http.StatusOK, "page=1&page_size=501": http.StatusBadRequest, "page=0": http.StatusBadRequest,
		} {
			status, text, err := s.HTTPStatus(http.MethodGet, "/queues/"+s.VHost+"?columns=name&"+query, nil)
			require.NoError(t, err)
			assert.Equal(t, want, status, "%s: %s", query, text)
		}
		var p struct {
			Items []map[string]string `json:"items"`
			Pages int                 `json:"page_count"`
		}
		s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"?columns=name&page=2&page_size=2", nil, &p)
		assert.Equal(t, []map[string]string{{"name": "c"}}, p.Items)
		assert.Equal(t, 2, p.Pages)
	})
}

// A broker takes the documents as they are, and the topology that it then has is recognized as
// the same framework's as the document.
func TestTopologiesOfFrameworksAreRecognizedOnABroker(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		files, err := filepath.Glob(frameworkFiles + "/*.json")
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, path := range files {
			file := strings.TrimSuffix(filepath.Base(path), ".json")
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			if bytes.Contains(text, []byte("x-delayed-message")) {
				continue // the brokers here don't have the plugin
			}
			if s.AtLeast("4.4") && hasTransientQueue(t, text) {
				continue // RabbitMQ 4.4 denies it by default
			}
			t.Run(file, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				imported(t, s, file)
				live := examined(t, s)
				document, err := doctor.FromDefinitions(t.Context(), bytes.NewReader(text), doctor.Options{})
				require.NoError(t, err)
				require.Len(t, document.Frameworks, 1)
				want := document.Frameworks[0]
				want.VHost = s.VHost
				assert.Equal(t, []doctor.Framework{want}, live.Frameworks)
			})
		}
	})
}

// hasten makes messages wait for half a second in a delay queue: of a policy's time to live and
// the queue's own, the shorter counts.
func hasten(t *testing.T, s *suite.Site, queue string) {
	t.Helper()
	s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/hasten", map[string]any{"pattern": "^" + queue + "$", "apply-to": "queues", "definition": map[string]any{"message-ttl": 500}}, nil)
}

// rejectedAt sends a message to a queue and rejects it there, as a worker does.
func rejectedAt(t *testing.T, p *suite.Peer, queue string) {
	t.Helper()
	p.Put(queue, amqp.NewMessage([]byte("task")))
	r := p.Receiver(queue, 1)
	require.NoError(t, r.RejectMessage(t.Context(), p.Next(r), nil))
	require.NoError(t, r.Close(t.Context()))
}

// What is known to be wrong with a framework's topology loses the message that a worker failed
// at, and the same steps with the sound one don't.
func TestFaultsOfFrameworksLoseMessages(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, test := range map[string]struct {
			sound, faulty string
			hasten        string // a queue where messages wait too long for a test
			fail          func(t *testing.T, s *suite.Site, p *suite.Peer)
			safe          string // where the message is afterwards, if the topology is sound
			empty         []string
		}{
			"Laravel's failed jobs": {
				sound: "", faulty: "laravel-reroute-failed",
				fail: func(t *testing.T, _ *suite.Site, p *suite.Peer) { rejectedAt(t, p, "default") }, empty: []string{"default", "default.delay.10000"},
			},
			"Rascal's retry exchange without bindings": {
				sound: "rascal", faulty: "rascal-no-way-back", hasten: "delay:1m",
				fail: func(t *testing.T, s *suite.Site, _ *suite.Peer) {
					// Rascal publishes over AMQP 0-9-1, with the name of the queue as a further key.
					var sent struct{ Routed bool }
					s.HTTP(t, http.MethodPost, "/exchanges/"+s.VHost+"/delay/publish", map[string]any{
						"routing_key": "delay.1m", "payload": "task", "payload_encoding": "string",
						"properties": map[string]any{"headers": map[string]any{"CC": []string{"registration_service:user:save"}}},
					}, &sent)
					require.True(t, sent.Routed)
				},
				safe: "registration_service:user:save", empty: []string{"registration_service:user:save", "delay:1m", "dead_letters:registration_service"},
			},
			"Spring's retry through an exchange that isn't there": {
				sound: "spring-cloud-stream-retry", faulty: "spring-cloud-stream-retry-lost", hasten: "orders.billing.dlq",
				fail: func(t *testing.T, _ *suite.Site, p *suite.Peer) { rejectedAt(t, p, "orders.billing") },
				safe: "orders.billing", empty: []string{"orders.billing", "orders.billing.dlq"},
			},
			"Sneakers without a dead-letter exchange": {
				sound: "sneakers-maxretry", faulty: "sneakers-maxretry-no-dead-letter", hasten: "downloads-retry",
				fail: func(t *testing.T, _ *suite.Site, p *suite.Peer) { rejectedAt(t, p, "downloads") },
				safe: "downloads", empty: []string{"downloads", "downloads-retry", "downloads-error"},
			},
			"MassTransit's endpoint with a delivery limit": {
				sound: "masstransit", faulty: "masstransit-delivery-limit",
				fail: func(t *testing.T, _ *suite.Site, p *suite.Peer) { cameBack(t, p, "shipping-label", 6) },
				safe: "shipping-label", empty: []string{"shipping-label", "shipping-label_error", "shipping-label_skipped"},
			},
			"a work queue with a delivery limit": {
				sound: "", faulty: "topic-delay-queues",
				fail: func(t *testing.T, _ *suite.Site, p *suite.Peer) { cameBack(t, p, "my_work_queue", 6) }, empty: []string{"my_work_queue", "delay_10s", "delay_60s"},
			},
		} {
			if strings.HasPrefix(name, "Rascal") && suite.InMemory(s) {
				continue // the HTTP API in memory can't publish
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				for _, file := range []string{test.sound, test.faulty} {
					if file == "" {
						continue
					}
					s := suite.NewSite(t, s.Broker)
					imported(t, s, file)
					if test.hasten != "" {
						hasten(t, s, test.hasten)
					}
					conn, _ := s.Connect(t)
					test.fail(t, s, s.Peer(t))
					if file == test.sound {
						suite.Poll(t, "the message is back", func() bool { return suite.Ready(t, conn, test.safe) == 1 })
						continue
					}
					suite.Poll(t, "the message is gone", func() bool {
						for _, queue := range test.empty {
							if suite.Ready(t, conn, queue) > 0 {
								return false
							}
						}
						return true
					})
				}
			})
		}
	})
}

// put sends a message to an exchange.
func put(t *testing.T, p *suite.Peer, exchange, key, text string) {
	t.Helper()
	require.IsType(t, &amqp.StateAccepted{}, p.Send(address.Exchange(exchange, key), amqp.NewMessage([]byte(text))))
}

// cameBack sends a message to a queue and returns it so many times, as if its workers crashed.
func cameBack(t *testing.T, p *suite.Peer, queue string, times int) {
	t.Helper()
	p.Put(queue, amqp.NewMessage([]byte("poison")))
	r := p.Receiver(queue, 100)
	for range times {
		require.NoError(t, r.ModifyMessage(t.Context(), p.Next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
	}
	require.NoError(t, r.Close(t.Context()))
}

// Symfony and Laravel declare a delay queue again before each message, which renews its lease, if
// it is a classic queue. A quorum queue is deleted when its first lease ends, with the messages
// that came later.
func TestDeclaringAQuorumQueueAgainDoesNotRenewItsLease(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, kind := range []string{"classic", "quorum"} {
			t.Run(kind, func(t *testing.T) {
				t.Parallel()
				for expires := 24 * time.Second; !renewed(t, suite.NewSite(t, s.Broker), kind, expires); expires *= 2 {
					require.Less(t, expires, suite.Patience)
				}
			})
		}
	})
}

// renewed declares a delay queue, and again shortly before its lease ends. It returns false, and has checked nothing,
// if that was too late.
func renewed(t *testing.T, s *suite.Site, kind string, expires time.Duration) bool {
	// The second message comes before the first lease ends, and is due more than 5 s after that: a
	// quorum queue looks at its lease every 5 s.
	ttl := expires/2 + 2*time.Second
	second := expires + 5500*time.Millisecond - ttl
	conn, _ := s.Connect(t)
	s.DeclareQueue(t, "messages", map[string]any{})
	lease := func() {
		s.DeclareQueue(t, "delay", map[string]any{
			"x-queue-type": kind, "x-message-ttl": ttl.Milliseconds(), "x-expires": expires.Milliseconds(),
			"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "messages",
		})
	}
	p := s.Peer(t)
	declared := time.Now()
	lease()
	p.Put("delay", amqp.NewMessage([]byte("first")))
	time.Sleep(time.Until(declared.Add(second)))
	lease()
	p.Put("delay", amqp.NewMessage([]byte("second")))
	if took := time.Since(declared); took >= expires {
		t.Logf("the second message came after %v: too late for a lease of %v", took, expires)
		return false
	}
	if kind == "classic" {
		suite.Poll(t, "both messages came", func() bool { return suite.Ready(t, conn, "messages") == 2 })
		return true
	}
	suite.Poll(t, "the delay queue is gone", func() bool {
		status, _, err := s.HTTPStatus(http.MethodGet, "/queues/"+s.VHost+"/delay", nil)
		require.NoError(t, err)
		return status == http.StatusNotFound
	})
	assert.Equal(t, 1, suite.Ready(t, conn, "messages"), "the second message is lost")
	return true
}

// A level of a ladder that can't deliver 32 messages blocks all others, for any endpoint.
func TestALadderOfAFrameworkIsBlockedByWhatItCantDeliver(t *testing.T) {
	second := strings.Repeat("0.", 27) + "1." // a delay of 1 s waits at level 0
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, test := range map[string]struct {
			file, level, gone, other string
		}{
			"an NServiceBus endpoint whose queue was deleted": {"nservicebus-endpoint-removed", "nsb.v2.delay-level-00", "Billing", "Sales"},
			"a Celery queue that isn't bound":                 {"celery-quorum-delayed-unbound", "celery_delayed_0", "tasks", ""},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				imported(t, s, test.file)
				p := s.Peer(t)
				if test.other != "" { // as long as nothing is stuck, it gets its messages
					put(t, p, test.level, second+test.other, "before")
					p.Take(test.other, 1)
				}
				for range 32 {
					put(t, p, test.level, second+test.gone, "stuck")
				}
				awaitStuck(t, s, test.level, 32)
				if test.other != "" {
					put(t, p, test.level, second+test.other, "behind")
					awaitStuck(t, s, test.level, 33)
				}
				found := false
				for _, g := range examined(t, s).Groups {
					found = found || g.Rule.ID == "stuck-dead-letters" && g.Severity == "error"
				}
				assert.True(t, found, "the doctor says that dead letters are stuck")
			})
		}
	})
}

// awaitStuck waits until n messages of a queue wait to be dead-lettered.
func awaitStuck(t *testing.T, s *suite.Site, queue string, n uint64) {
	t.Helper()
	suite.Poll(t, "messages are stuck", func() bool {
		snapshot, err := check.Read(t.Context(), check.Sources{HTTP: s.API(t)}, declare.Topology{})
		require.NoError(t, err)
		for _, q := range snapshot.Queues {
			if q.Name == queue {
				return q.MessagesDeadLettering == n
			}
		}
		return false
	})
}

// NServiceBus 10 sets the delivery limit of its queues to -1 by a policy. RabbitMQ's documentation
// says that only an argument can lift the limit. A policy lifts the default, and not an argument's.
func TestAPolicyLiftsOnlyTheDefaultDeliveryLimit(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, test := range map[string]struct {
			args  map[string]any
			times int
			left  int
		}{
			"default limit": {map[string]any{"x-queue-type": "quorum"}, 30, 1},
			"limit of 3":    {map[string]any{"x-queue-type": "quorum", "x-delivery-limit": 3}, 4, 0},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				conn, _ := s.Connect(t)
				s.DeclareQueue(t, "Sales", test.args)
				s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/nsb.Sales.delivery-limit", map[string]any{"pattern": "^Sales$", "apply-to": "quorum_queues", "definition": map[string]any{"delivery-limit": -1}}, nil)
				suite.Poll(t, "the policy applies", func() bool {
					var q struct{ Policy string }
					s.HTTP(t, http.MethodGet, "/queues/"+s.VHost+"/Sales", nil, &q)
					return q.Policy != ""
				})
				cameBack(t, s.Peer(t), "Sales", test.times)
				suite.Poll(t, "the message is kept, or gone", func() bool { return suite.Ready(t, conn, "Sales") == test.left })
			})
		}
	})
}

// hasTransientQueue reports whether definitions have a queue that isn't durable.
func hasTransientQueue(t *testing.T, definitions []byte) bool {
	t.Helper()
	var d struct{ Queues []struct{ Durable bool } }
	require.NoError(t, json.Unmarshal(definitions, &d))
	return slices.ContainsFunc(d.Queues, func(q struct{ Durable bool }) bool { return !q.Durable })
}
