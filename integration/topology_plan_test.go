package integration

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/audit"
)

// Plan, apply, plan again: everything is created, then there is nothing to do.
func TestPlanThenApplyThenNothingToDo(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		topology := shopTopology(t)
		src := s.sources(t, conn)
		before := plan(t, src, topology)
		assert.Equal(t, len(before.Changes), before.Count("create"), "%s", before)

		apply(t, conn, topology)
		after := plan(t, src, topology)
		assert.True(t, after.Nothing(), "%s", after)

		// Over AMQP alone all but the exchanges can be told.
		blind := plan(t, audit.Sources{AMQP: conn.Management()}, topology)
		assert.Equal(t, len(topology.Exchanges), blind.Count("unknown"))
		assert.Equal(t, len(blind.Changes)-len(topology.Exchanges), blind.Count("keep"), "%s", blind)
		assert.Contains(t, blind.String(), `? exchange "shop"`+"\n      it is unknown whether it exists: AMQP can't list")

		text, err := json.Marshal(before)
		require.NoError(t, err)
		assert.Contains(t, string(text), `{"kind":"create","resource":{"kind":"exchange","name":"shop"}`)
	})
}

// What somebody has changed by hand is in the next plan, and nothing else is.
func TestPlanShowsExactlyWhatWasChangedByHand(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		topology := shopTopology(t)
		apply(t, conn, topology)
		s.http(t, http.MethodDelete, "/queues/"+s.vhost+"/orders", nil, nil) // and its bindings
		s.http(t, http.MethodPut, "/queues/"+s.vhost+"/orders", map[string]any{"durable": true, "arguments": map[string]any{
			"x-queue-type": "quorum", "x-delivery-limit": "5", "x-consumer-timeout": 60000,
			"x-dead-letter-exchange": "dead_letter_exchange", "x-dead-letter-routing-key": "orders",
			"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
		}}, nil)
		s.http(t, http.MethodDelete, "/exchanges/"+s.vhost+"/shop", nil, nil)
		s.http(t, http.MethodPut, "/exchanges/"+s.vhost+"/shop", map[string]any{"type": "topic", "durable": true, "arguments": map[string]any{"alternate-exchange": "elsewhere"}}, nil)

		d := plan(t, s.sources(t, conn), topology)
		var text strings.Builder
		for _, line := range strings.SplitAfter(d.String(), "\n") {
			if !strings.HasPrefix(line, "  ") || strings.HasPrefix(line, "   ") {
				text.WriteString(line)
			}
		}
		assert.Equal(t, `! exchange "shop"
-     alternate-exchange: "elsewhere"
+     alternate-exchange: "parking_exchange"
      way out: declare an exchange under another name, bind it, and move the publishers
      way out: delete it while nobody publishes to it, and run this again; its bindings are deleted with it
! queue "orders"
-     x-consumer-timeout: "60000" (integer)
+     x-consumer-timeout: none
-     x-delivery-limit: "5" (string)
+     x-delivery-limit: "5" (integer)
      way out: declare it as it exists
      way out: declare it under a new name and move the messages, as package declare/migrate does
      way out: delete it once it is empty and unused, and run this again
+ binding "requeue_exchange" to queue "orders", key "*.*.orders"
+ binding "return_exchange" to queue "orders", key "orders"
+ binding "shop" to queue "orders", key "order.*"
+ binding "shop" to exchange "shop.eu", key "#"
`, text.String()[:strings.LastIndex(strings.TrimSpace(text.String()), "\n")+1])

		// Over AMQP alone the queue is told in the same way.
		amqp := plan(t, audit.Sources{AMQP: conn.Management()}, topology)
		assert.Equal(t, 1, amqp.Count("refuse"), "%s", amqp)

		// Apply says no, in the same words.
		_, err := declare.Apply(t.Context(), conn.Management(), queueOf(topology.Queues[queueIndex(topology, "orders")].(declare.QuorumQueue)))
		var e *declare.Error
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, declare.ErrConflict)
		require.Len(t, e.Differences, 2, "%v", err)
		assert.Equal(t, "x-consumer-timeout", e.Differences[0].Argument)
		assert.Equal(t, "x-delivery-limit", e.Differences[1].Argument)
		assert.NotEmpty(t, e.WaysOut)
	})
}

func queueIndex(topology declare.Topology, name string) int {
	for i, q := range topology.Queues {
		if q.Address().QueueName() == name {
			return i
		}
	}
	return -1
}

// An argument that differs is refused also where RabbitMQ itself wouldn't mind.
func TestApplyRefusesWhatTheBrokerDoesNotCompare(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		wanted := queueOf(declare.QuorumQueue{Name: "orders", TargetGroupSize: 3})
		_, err := declare.Apply(t.Context(), conn.Management(), wanted)
		require.ErrorIs(t, err, declare.ErrConflict)
		assert.ErrorContains(t, err, `x-quorum-target-group-size: the broker has none, declared is "3"`)
		assert.ErrorContains(t, err, "set quorum-target-group-size by a policy")
	})
}

// Every queue type and every argument comes back as it was declared.
func TestEveryQueueTypeAndArgumentComesBackAsDeclared(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		topology := declare.Topology{
			Exchanges: []declare.Exchange{
				{Name: "random", Type: "x-local-random"},
				{Name: "alternate", Type: declare.Fanout, AutoDelete: true},
			},
			Queues: []declare.Queue{
				declare.QuorumQueue{
					Name: "quorum", DeliveryLimit: 7, DeadLetter: declare.DeadLetterTarget{Exchange: "random", RoutingKey: "k"},
					MessageTTL: time.Minute, Expires: time.Hour, MaxLength: 10, MaxLengthBytes: 1 << 20, SingleActiveConsumer: true,
					InitialGroupSize: 1, TargetGroupSize: 3, LeaderLocator: declare.Balanced, ConsumerTimeout: time.Minute,
					ConsumerDisconnectedTimeout: time.Minute,
					DelayedRetry:                declare.DelayedRetry{Kind: declare.RetryAll, Min: time.Second, Max: time.Minute},
					Arguments:                   map[string]any{"x-max-in-memory-length": 5},
				},
				declare.ClassicQueue{
					Name: "classic", DeadLetter: declare.DeadLetterTarget{Exchange: "random", AtMostOnce: true},
					MessageTTL: time.Minute, Expires: time.Hour, MaxLength: 10, MaxLengthBytes: 1 << 20,
					Overflow: declare.RejectPublishDLX, MaxPriority: 5, SingleActiveConsumer: true, LeaderLocator: declare.ClientLocal,
					Version: 2, Arguments: map[string]any{"x-queue-mode": "lazy"},
				},
				declare.ClassicQueue{Name: "short-lived", DeadLetter: declare.Drop(), AutoDelete: true},
				declare.Stream{
					Name: "stream", MaxAge: time.Hour, MaxLengthBytes: 1 << 30, MaxSegmentSize: 1 << 20, FilterSize: 32,
					InitialClusterSize: 1, LeaderLocator: declare.Balanced,
				},
				declare.RawQueue{Name: "raw", Durable: true, Arguments: map[string]any{"x-queue-type": "quorum", "x-of-a-plugin": 1.5}},
			},
			Bindings: []declare.Binding{{Source: "random", Queue: "classic"}, {Source: "amq.topic", Exchange: "alternate", Key: "k", Arguments: map[string]any{"x-note": "n"}}},
		}
		apply(t, conn, topology)
		for name, src := range map[string]audit.Sources{"HTTP": {HTTP: s.api(t)}, "AMQP": {AMQP: conn.Management()}} {
			d := plan(t, src, topology)
			assert.Zero(t, d.Count("create")+d.Count("refuse"), "%s: %s", name, d)
		}
		report, err := declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		assert.Equal(t, len(topology.Queues), report.Count("existed"), "%s", report)
		info, err := declare.Inspect(t.Context(), conn.Management(), "stream")
		require.NoError(t, err)
		assert.Equal(t, "stream", info.Type)
		assert.NotEmpty(t, info.Leader)
		assert.Len(t, info.Replicas, 1)
	})
}

// 20 workers start at once and declare the same.
func TestConcurrentAppliesOfTheSameTopologyAllSucceed(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		topology := shopTopology(t)
		ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
		defer cancel()
		conns := make([]*client.Conn, 5)
		for i := range conns {
			conns[i], _ = s.connect(t)
		}
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				_, err := declare.Apply(ctx, conns[i%len(conns)].Management(), topology)
				assert.NoError(t, err)
			})
		}
		wg.Wait()
		d := plan(t, s.sources(t, conns[0]), topology)
		assert.True(t, d.Nothing(), "%s", d)
	})
}

// The process ends at any request, before or after the broker got it: the next run
// makes the rest.
func TestApplyCutAtEveryRequestConvergesWhenRunAgain(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		topology := declare.Topology{
			Exchanges: []declare.Exchange{{Name: "x", Type: declare.Topic, AlternateExchange: "y"}, {Name: "y", Type: declare.Fanout}},
			Queues: []declare.Queue{
				declare.QuorumQueue{Name: "a", DeadLetter: declare.ToQueue("b")},
				declare.QuorumQueue{Name: "b", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			},
			Bindings: []declare.Binding{{Source: "x", Queue: "a", Key: "#"}, {Source: "x", Exchange: "y", Key: "z"}, {Source: "y", Queue: "b"}},
		}
		count := &cutAt{Requester: conn.Management(), n: 1 << 30}
		_, err := declare.Apply(t.Context(), count, topology)
		require.NoError(t, err)
		requests := count.seen.Load()
		require.Equal(t, int64(9), requests, "it inspects both queues first")
		for _, sent := range []bool{false, true} {
			for n := range requests {
				_, err := declare.Delete(t.Context(), conn.Management(), topology)
				require.NoError(t, err)
				_, err = declare.Apply(t.Context(), &cutAt{Requester: conn.Management(), n: n + 1, sent: sent}, topology)
				require.ErrorIs(t, err, declare.ErrNoReply)
				require.ErrorIs(t, err, errCut)
				_, err = declare.Apply(t.Context(), conn.Management(), topology)
				require.NoError(t, err)
				d := plan(t, s.sources(t, conn), topology)
				require.True(t, d.Nothing(), "cut at request %d: %s", n+1, d)
			}
		}
	})
}

// Who may not is told so in plain words, and nothing is half done.
func TestPlanAndApplyWithoutPermission(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		topology := shopTopology(t)
		owner, _ := s.connect(t)
		reading, _ := connectTo(t, s.user(t, "^$", "^$", ".*"))
		none, _ := connectTo(t, s.user(t, "^$", "^$", "^$"))

		// Read-only: it may look, and not apply.
		ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
		defer cancel()
		for _, conn := range []*client.Conn{reading, none} {
			_, err := declare.Apply(ctx, conn.Management(), topology)
			require.ErrorIs(t, err, client.ErrUnauthorized)
			assert.ErrorContains(t, err, "configure access")
		}
		d := plan(t, s.sources(t, owner), topology)
		assert.Equal(t, len(d.Changes), d.Count("create"), "nothing is there: %s", d)

		apply(t, owner, topology)
		d = plan(t, audit.Sources{AMQP: reading.Management()}, topology)
		assert.Zero(t, d.Count("create")+d.Count("refuse"), "%s", d)
		assert.Equal(t, len(topology.Queues), countKept(d, "queue"))
		if s.newer() {
			// To list a queue's bindings takes the permission to write to it.
			assert.Zero(t, countKept(d, "binding"))
			assert.Contains(t, d.String(), "write access to queue 'orders'")
			v, err := verified(ctx, audit.Sources{AMQP: reading.Management()}, topology)
			require.NoError(t, err)
			require.Len(t, v.Findings, len(topology.Bindings), "%s", v)
			assert.Equal(t, "unseen", v.Findings[0].Rule)
			_, err = planned(ctx, audit.Sources{AMQP: none.Management()}, topology)
			require.ErrorContains(t, err, "may read nothing")
			assert.ErrorContains(t, err, "refused for user")
		} else {
			// 4.0 asks for no permission at all.
			assert.Equal(t, len(topology.Bindings), countKept(d, "binding"))
			d = plan(t, audit.Sources{AMQP: none.Management()}, topology)
			assert.Zero(t, d.Count("create")+d.Count("refuse"), "%s", d)
		}
	})
}

func countKept(d audit.Diff, kind string) int {
	n := 0
	for _, c := range d.Changes {
		if c.Kind == "keep" && c.Resource.Kind == kind {
			n++
		}
	}
	return n
}

// Without the HTTP API a plan says what it can't tell, and why; with nothing else to
// ask, it says what is wrong with the API.
func TestPlanWithoutTheHTTPAPI(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		topology := shopTopology(t)
		apply(t, conn, topology)
		off := s.api(t, func(u *url.URL) { u.Host = "127.0.0.1:1" })
		wrong := s.api(t, func(u *url.URL) { u.User = url.UserPassword("guest", "not-the-password") })
		for reader, says := range map[audit.Reader]string{off: "is the management plugin on", wrong: "status 401"} {
			d := plan(t, audit.Sources{AMQP: conn.Management(), HTTP: reader}, topology)
			assert.Equal(t, len(topology.Exchanges), d.Count("unknown"))
			assert.Contains(t, d.String(), says)
			_, err := planned(t.Context(), audit.Sources{HTTP: reader}, topology)
			require.ErrorContains(t, err, says)
			assert.NotContains(t, err.Error(), "not-the-password")
		}
		missing := &site{Broker: s.Broker, vhost: "no-such-vhost"}
		_, err := planned(t.Context(), audit.Sources{HTTP: missing.api(t)}, topology)
		require.ErrorIs(t, err, declare.ErrMissing)
		assert.ErrorContains(t, err, `there is no vhost "no-such-vhost"`)
	})
}
