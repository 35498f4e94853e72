package topology_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
)

// Plan, apply, plan again: everything is created, then there is nothing to do.
func TestPlanThenApplyThenNothingToDo(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology := shopTopology(t)
		src := s.Sources(t, conn)
		before := plan(t, src, topology)
		assert.Equal(t, len(before.Changes), before.Count("create"), "%s", before)

		suite.Apply(t, conn, topology)
		after := plan(t, src, topology)
		assert.True(t, after.Nothing(), "%s", after)

		// Over AMQP alone all but the exchanges can be told.
		blind := plan(t, check.Sources{AMQP: conn.Management()}, topology)
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
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology := shopTopology(t)
		suite.Apply(t, conn, topology)
		s.HTTP(t, http.MethodDelete, "/queues/"+s.VHost+"/orders", nil, nil) // and its bindings
		s.HTTP(t, http.MethodPut, "/queues/"+s.VHost+"/orders", map[string]any{"durable": true, "arguments": map[string]any{
			"x-queue-type": "quorum", "x-delivery-limit": "5", "x-consumer-timeout": 60000,
			"x-dead-letter-exchange": "dead_letter_exchange", "x-dead-letter-routing-key": "orders",
			"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
		}}, nil)
		s.HTTP(t, http.MethodDelete, "/exchanges/"+s.VHost+"/shop", nil, nil)
		s.HTTP(t, http.MethodPut, "/exchanges/"+s.VHost+"/shop", map[string]any{"type": "topic", "durable": true, "arguments": map[string]any{"alternate-exchange": "elsewhere"}}, nil)

		d := plan(t, s.Sources(t, conn), topology)
		var text strings.Builder
		for _, line := range strings.SplitAfter(d.String(), "\n") {
			if !strings.HasPrefix(line, "  ") || strings.HasPrefix(line, "   ") {
				text.WriteString(line)
			}
		}
		assert.Equal(t, `! exchange "shop"
-     alternate-exchange: "elsewhere"
+     alternate-exchange: "parking_exchange"
      remedy: declare an exchange under another name, bind it, and move the publishers
      remedy: delete it while nobody publishes to it, and run this again; its bindings are deleted with it
! queue "orders"
-     x-consumer-timeout: "60000" (integer)
+     x-consumer-timeout: none
-     x-delivery-limit: "5" (string)
+     x-delivery-limit: "5" (integer)
      remedy: declare it as it exists
      remedy: declare it under a new name and move the messages, as package operate/migrate does
      remedy: delete it once it is empty and unused, and run this again
+ binding "requeue_exchange" to queue "orders", key "*.*.orders"
+ binding "return_exchange" to queue "orders", key "orders"
+ binding "shop" to queue "orders", key "order.*"
+ binding "shop" to exchange "shop.eu", key "#"
`, text.String()[:strings.LastIndex(strings.TrimSpace(text.String()), "\n")+1])

		// Over AMQP alone the queue is reported in the same way.
		amqp := plan(t, check.Sources{AMQP: conn.Management()}, topology)
		assert.Equal(t, 1, amqp.Count("refuse"), "%s", amqp)

		// Apply says no, in the same words.
		_, err := declare.Apply(t.Context(), conn.Management(), suite.QueueOf(topology.Queues[queueIndex(topology, "orders")].(declare.QuorumQueue)))
		var e *declare.Error
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, declare.ErrConflict)
		require.Len(t, e.Differences, 2, "%v", err)
		assert.Equal(t, "x-consumer-timeout", e.Differences[0].Argument)
		assert.Equal(t, "x-delivery-limit", e.Differences[1].Argument)
		assert.NotEmpty(t, e.Remedies)
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
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		wanted := suite.QueueOf(declare.QuorumQueue{Name: "orders", TargetGroupSize: 3})
		_, err := declare.Apply(t.Context(), conn.Management(), wanted)
		require.ErrorIs(t, err, declare.ErrConflict)
		assert.ErrorContains(t, err, `x-quorum-target-group-size: the broker has none, declared is "3"`)
		assert.ErrorContains(t, err, "set quorum-target-group-size with a policy")
	})
}

// Every queue type and every argument comes back as declared.
func TestEveryQueueTypeAndArgumentComesBackAsDeclared(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		placement := ""
		if s.AtLeast("4.4") {
			placement = "zone"
		}
		topology := declare.Topology{
			Exchanges: []declare.Exchange{
				{Name: "random", Type: "x-local-random"},
				{Name: "alternate", Type: declare.ExchangeFanout, AutoDelete: true},
			},
			Queues: []declare.Queue{
				declare.QuorumQueue{
					Name: "quorum", DeliveryLimit: 7, DeadLetter: declare.DeadLetterTarget{Exchange: "random", RoutingKey: "k"},
					MessageTTL: time.Minute, Expires: time.Hour, MaxLength: 10, MaxLengthBytes: 1 << 20, SingleActiveConsumer: true,
					InitialGroupSize: 1, TargetGroupSize: 3, PlacementTag: placement, LeaderLocator: declare.LeaderBalanced, ConsumerTimeout: time.Minute,
					ConsumerDisconnectedTimeout: time.Minute,
					DelayedRetry:                declare.DelayedRetry{Kind: declare.RetryAll, Min: time.Second, Max: time.Minute},
					Arguments:                   map[string]any{"x-max-in-memory-length": 5},
				},
				declare.ClassicQueue{
					Name: "classic", DeadLetter: declare.DeadLetterTarget{Exchange: "random", AtMostOnce: true},
					MessageTTL: time.Minute, Expires: time.Hour, MaxLength: 10, MaxLengthBytes: 1 << 20,
					Overflow: declare.OverflowRejectPublishDLX, MaxPriority: 5, SingleActiveConsumer: true, LeaderLocator: declare.LeaderClientLocal,
					Version: 2, Arguments: map[string]any{"x-queue-mode": "lazy"},
				},
				declare.ClassicQueue{Name: "short-lived", DeadLetter: declare.Drop(), AutoDelete: true},
				declare.Stream{
					Name: "stream", MaxAge: time.Hour, MaxLengthBytes: 1 << 30, MaxSegmentSize: 1 << 20, FilterSize: 32,
					InitialClusterSize: 1, LeaderLocator: declare.LeaderBalanced,
				},
				declare.RawQueue{Name: "raw", Durable: true, Arguments: map[string]any{"x-queue-type": "quorum", "x-of-a-plugin": 1.5}},
			},
			Bindings: []declare.Binding{{Source: "random", Queue: "classic"}, {Source: "amq.topic", Exchange: "alternate", Key: "k", Arguments: map[string]any{"x-note": "n"}}},
		}
		suite.Apply(t, conn, topology)
		for name, src := range map[string]check.Sources{"HTTP": {HTTP: s.API(t)}, "AMQP": {AMQP: conn.Management()}} {
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
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		topology := shopTopology(t)
		ctx, cancel := context.WithTimeout(t.Context(), 4*suite.Patience)
		defer cancel()
		conns := make([]*client.Conn, 5)
		for i := range conns {
			conns[i], _ = s.Connect(t)
		}
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				_, err := declare.Apply(ctx, conns[i%len(conns)].Management(), topology)
				assert.NoError(t, err)
			})
		}
		wg.Wait()
		d := plan(t, s.Sources(t, conns[0]), topology)
		assert.True(t, d.Nothing(), "%s", d)
	})
}

// The process ends at any request, before or after the broker got it: the next run
// makes the rest.
func TestApplyCutAtEveryRequestConvergesWhenRunAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology := declare.Topology{
			Exchanges: []declare.Exchange{{Name: "x", Type: declare.ExchangeTopic, AlternateExchange: "y"}, {Name: "y", Type: declare.ExchangeFanout}},
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
				d := plan(t, s.Sources(t, conn), topology)
				require.True(t, d.Nothing(), "cut at request %d: %s", n+1, d)
			}
		}
	})
}

// A missing permission is reported in plain words, and nothing is half done.
func TestPlanAndApplyWithoutPermission(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		topology := shopTopology(t)
		owner, _ := s.Connect(t)
		reading, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", ".*"))
		none, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^$"))

		// Read-only: it may look, and not apply.
		ctx, cancel := context.WithTimeout(t.Context(), 4*suite.Patience)
		defer cancel()
		for _, conn := range []*client.Conn{reading, none} {
			_, err := declare.Apply(ctx, conn.Management(), topology)
			require.ErrorIs(t, err, client.ErrUnauthorized)
			assert.ErrorContains(t, err, "configure access")
		}
		d := plan(t, s.Sources(t, owner), topology)
		assert.Equal(t, len(d.Changes), d.Count("create"), "nothing is there: %s", d)

		suite.Apply(t, owner, topology)
		d = plan(t, check.Sources{AMQP: reading.Management()}, topology)
		assert.Zero(t, d.Count("create")+d.Count("refuse"), "%s", d)
		assert.Equal(t, len(topology.Queues), countKept(d, "queue"))
		if s.Newer() {
			// To list a queue's bindings takes the permission to write to it.
			assert.Zero(t, countKept(d, "binding"))
			assert.Contains(t, d.String(), "write access to queue 'orders'")
			v, err := suite.Verified(ctx, check.Sources{AMQP: reading.Management()}, topology)
			require.NoError(t, err)
			require.Len(t, v.Findings, len(topology.Bindings), "%s", v)
			assert.Equal(t, "unseen", v.Findings[0].Rule)
			_, err = planned(ctx, check.Sources{AMQP: none.Management()}, topology)
			require.ErrorContains(t, err, "has no permission to read any resource")
			assert.ErrorContains(t, err, "refused for user")
		} else {
			// 4.0 asks for no permission at all.
			assert.Equal(t, len(topology.Bindings), countKept(d, "binding"))
			d = plan(t, check.Sources{AMQP: none.Management()}, topology)
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
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology := shopTopology(t)
		suite.Apply(t, conn, topology)
		off := s.API(t, func(u *url.URL) { u.Host = "127.0.0.1:1" })
		wrong := s.API(t, func(u *url.URL) { u.User = url.UserPassword("guest", "not-the-password") })
		for reader, says := range map[check.Reader]string{off: "check that the management plugin is enabled", wrong: "status 401"} {
			d := plan(t, check.Sources{AMQP: conn.Management(), HTTP: reader}, topology)
			assert.Equal(t, len(topology.Exchanges), d.Count("unknown"))
			assert.Contains(t, d.String(), says)
			_, err := planned(t.Context(), check.Sources{HTTP: reader}, topology)
			require.ErrorContains(t, err, says)
			assert.NotContains(t, err.Error(), "not-the-password")
		}
		missing := &suite.Site{Broker: s.Broker, VHost: "no-such-vhost"}
		_, err := planned(t.Context(), check.Sources{HTTP: missing.API(t)}, topology)
		require.ErrorIs(t, err, declare.ErrNotFound)
		assert.ErrorContains(t, err, `the virtual host "no-such-vhost" doesn't exist`)
	})
}

// RabbitMQ 4.4 spreads replicas over the values of a node tag. It refuses an empty key. Earlier versions would ignore the
// argument, so Apply refuses it there, with the version, and declares nothing.
func TestPlacementTagsNeedRabbitMQ44(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology := declare.Topology{
			Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeFanout}},
			Queues:    []declare.Queue{declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop(), PlacementTag: "zone"}},
		}
		report, err := declare.Apply(t.Context(), conn.Management(), topology)
		verify := func() check.Verification {
			v, err := suite.Verified(t.Context(), check.Sources{HTTP: s.API(t)}, topology)
			require.NoError(t, err)
			return v
		}
		if !s.AtLeast("4.4") {
			var refused *argument.Error
			require.ErrorAs(t, err, &refused)
			assert.EqualError(t, refused, fmt.Sprintf(`hopback: QuorumQueue("orders").PlacementTag = "zone" needs RabbitMQ 4.4 or later, and the broker is %s, which would ignore it; leave it out, or upgrade the broker`, conn.Broker().Version))
			assert.Empty(t, report.Steps)
			_, err = declare.Inspect(t.Context(), conn.Management(), "orders")
			require.ErrorIs(t, err, declare.ErrNotFound)
			// Somebody else has declared it. The broker keeps what it ignores.
			s.DeclareQueue(t, "orders", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1, "x-member-placement-tag": "zone"})
			assert.Contains(t, verify().String(), fmt.Sprintf("x-member-placement-tag has no effect before RabbitMQ 4.4, and this is %s", conn.Broker().Version))
			return
		}
		require.NoError(t, err)
		assert.True(t, verify().Clean(), "%s", verify())
		topology.Queues[0] = declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop(), PlacementTag: "rack"}
		v := verify()
		require.Len(t, v.Findings, 1, "%s", v)
		assert.Equal(t, "different", v.Findings[0].Rule)
		assert.Equal(t, "x-member-placement-tag", v.Findings[0].Argument)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.ErrorIs(t, err, declare.ErrConflict)
		status, reply, err := s.HTTPStatus(http.MethodPut, "/queues/"+s.VHost+"/nowhere", map[string]any{"durable": true, "arguments": map[string]any{"x-queue-type": "quorum", "x-member-placement-tag": ""}})
		require.NoError(t, err)
		assert.Equal(t, http.StatusBadRequest, status)
		assert.Contains(t, string(reply), "invalid_member_placement_tag_arg")
		s.Policy(t, "policies", "orders", map[string]any{"member-placement-tag": "rack"})
	})
}
