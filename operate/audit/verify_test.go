package audit_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/retry"
)

// cycle is a work queue with a retry cycle that loses nothing.
func cycle() declare.Topology {
	return declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: "retry", Type: declare.ExchangeTopic},
			{Name: "requeue", Type: declare.ExchangeTopic, AlternateExchange: "parking"},
			{Name: "dlx", Type: declare.ExchangeDirect, AlternateExchange: "parking"},
			{Name: "parking", Type: declare.ExchangeFanout},
		},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.DeadLetterTarget{Exchange: "dlx", RoutingKey: "orders"}},
			declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "delay_10s", MessageTTL: 10 * time.Second, DeadLetter: declare.DeadLetterTarget{Exchange: "requeue"}},
			declare.QuorumQueue{Name: "parking", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "retry", Queue: "delay_10s", Key: "delay.10000.#"},
			{Source: "requeue", Queue: "orders", Key: "*.*.orders"},
			{Source: "dlx", Queue: "orders.dead", Key: "orders"},
			{Source: "parking", Queue: "parking"},
		},
	}
}

func live(t declare.Topology) check.Snapshot {
	s := check.FromTopology(t)
	s.Unread = nil
	s.Version, s.Nodes = "4.3.6", []string{"a", "b", "c"}
	for i := range s.Queues {
		q := &s.Queues[i]
		q.Replicas, q.Online, q.Leader, q.Counted = s.Nodes, s.Nodes, "a", true
	}
	return s
}

func queueNamed(s *check.Snapshot, name string) *declare.QueueInfo {
	for i := range s.Queues {
		if s.Queues[i].Name == name {
			return &s.Queues[i]
		}
	}
	panic(name)
}

func TestCheckFindsNothingInAGoodTopology(t *testing.T) {
	t.Parallel()
	v := check.Verify(live(cycle()), cycle())
	assert.True(t, v.Clean(), "%s", v)
	assert.Len(t, audit.Rules(), v.Checked)

	// A source that isn't live doesn't know nodes and counts, and says so.
	v = check.Verify(check.FromTopology(cycle()), cycle())
	assert.Empty(t, v.Findings)
	assert.Len(t, v.Skipped, 7)
	assert.Equal(t, 1, strings.Count(v.String(), "only a live broker shows it"), "each reason once: %s", v)
	assert.Contains(t, v.String(), "(needs the nodes)")
	assert.False(t, v.Clean())
}

// The faults that a single broker can't have; the rest is in the integration tests.
func TestCheckFindsClusterFaults(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		plant func(*check.Snapshot)
		rule  string
		says  string
	}{
		"too few replicas": {func(s *check.Snapshot) {
			q := queueNamed(s, "orders")
			q.Replicas, q.Online = []string{"a"}, []string{"a"}
		}, "replicas", "on 1 of the cluster's 3 nodes"},
		"replica down": {func(s *check.Snapshot) { queueNamed(s, "orders").Online = []string{"a", "c"} }, "replicas-down", "1 of its 3 replicas are down: b"},
		"no leader":    {func(s *check.Snapshot) { queueNamed(s, "orders").Leader = "" }, "replicas-down", "no leader"},
		"stalled":      {func(s *check.Snapshot) { queueNamed(s, "orders").MessagesDeadLettering = 32 }, "stuck-dead-letters", "block all others"},
		"operator policy": {func(s *check.Snapshot) {
			s.Policies = []declare.Policy{{Name: "p", Pattern: "^orders$", ApplyTo: "quorum_queues", Operator: true, Definition: map[string]any{"max-length": int64(9)}}}
		}, "max-length", "has x-max-length"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := live(cycle())
			tt.plant(&s)
			v := check.Verify(s, cycle())
			require.Len(t, v.Findings, 1, "%s", v)
			assert.Equal(t, tt.rule, v.Findings[0].Rule)
			assert.Equal(t, `queue "orders"`, v.Findings[0].Resource.String())
			assert.Contains(t, v.Findings[0].Problem, tt.says)
			assert.NotEmpty(t, v.Findings[0].Remedy)
			assert.Empty(t, check.Verify(s, cycle(), tt.rule).Findings)
			assert.Empty(t, check.Verify(s, cycle(), tt.rule+` queue "orders"`).Findings)
			assert.Len(t, check.Verify(s, cycle(), tt.rule+` queue "other"`).Findings, 1)
		})
	}
}

// A transient queue keeps a node from starting with RabbitMQ 4.4. Verify names it on a broker that
// is to be upgraded, and in a topology before it is applied.
func TestCheckFindsTransientQueues(t *testing.T) {
	t.Parallel()
	for name, found := range map[string]struct {
		queue declare.RawQueue
		want  bool
	}{
		"durable":     {declare.RawQueue{Durable: true}, false},
		"exclusive":   {declare.RawQueue{Exclusive: true}, false},
		"transient":   {declare.RawQueue{}, true},
		"auto-delete": {declare.RawQueue{AutoDelete: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q := found.queue
			q.Name, q.Arguments = "replies", map[string]any{"x-queue-type": "classic"}
			with := cycle()
			with.Queues = append(with.Queues, q)
			for where, v := range map[string]check.Verification{
				"on the broker":   check.Verify(live(with), cycle()),
				"in the topology": check.Verify(live(cycle()), with, "missing"),
				"in both":         check.Verify(live(with), with),
				"in a file":       check.Verify(check.FromTopology(with), with),
			} {
				var rules []string
				for _, f := range v.Findings {
					if f.Resource.Name == "replies" && f.Rule != "not-replicated" && f.Rule != "dead-letter" {
						rules = append(rules, f.Rule)
						assert.Equal(t, "error", f.Severity)
						assert.Contains(t, f.Problem, "4.4")
					}
				}
				if found.want {
					assert.Equal(t, []string{"transient-queue"}, rules, where)
				} else {
					assert.Empty(t, rules, where)
				}
			}
		})
	}
}

// RabbitMQ before 4.0.6 doesn't send again what a deposed leader didn't take. It
// takes a cluster to depose one.
func TestCheckWarnsOfVersionsThatStallAfterAFreeze(t *testing.T) {
	t.Parallel()
	for version, warns := range map[string]bool{
		"4.0.0": true, "4.0.5": true, "4.0.6": false, "4.0.10": false, "4.1.0": false, "4.3.6": false, "": false, "4.0.5+beta.1": true, "4": false,
	} {
		s := live(cycle())
		s.Version = version
		v := check.Verify(s, cycle())
		if !warns {
			assert.Empty(t, v.Findings, version)
			continue
		}
		require.Len(t, v.Findings, 1, version)
		assert.Equal(t, "broker-version", v.Findings[0].Rule)
		assert.Equal(t, declare.Resource{Kind: "broker", Name: version}, v.Findings[0].Resource)
		s.Nodes = s.Nodes[:1]
		for i := range s.Queues {
			s.Queues[i].Replicas, s.Queues[i].Online = s.Nodes, s.Nodes
		}
		assert.Empty(t, check.Verify(s, cycle()).Findings, version)
	}
}

func TestPoliciesCount(t *testing.T) {
	t.Parallel()
	topology := cycle()
	topology.Queues[0] = declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.Drop()}
	s := live(topology)
	v := check.Verify(s, topology)
	require.Len(t, v.Findings, 1, "%s", v)
	assert.Equal(t, "dead-letter", v.Findings[0].Rule)
	definition := map[string]any{
		"dead-letter-exchange": "dlx", "dead-letter-routing-key": "orders", "dead-letter-strategy": "at-least-once", "overflow": "reject-publish",
	}
	s.Policies = []declare.Policy{
		{Name: "low", Pattern: "orders", Priority: 1, Definition: map[string]any{}},
		{Name: "high", Pattern: "^orders$", ApplyTo: "queues", Priority: 2, Definition: definition},
		{Name: "other", Pattern: "^orders$", ApplyTo: "streams", Priority: 3, Definition: map[string]any{}},
	}
	v = check.Verify(s, topology)
	assert.Empty(t, v.Findings, "%s", v)
}

func TestVerificationAsTextAndJSON(t *testing.T) {
	t.Parallel()
	s := live(cycle())
	queueNamed(&s, "orders").MessagesDeadLettering = 3
	v := check.Verify(s, declare.Topology{})
	assert.Equal(t, `error   queue "orders": 3 dead letters wait for their target (stuck-dead-letters)
        check that the dead-letter exchange, its binding, and the target queue exist, and that the queue isn't full; the broker tries again every three minutes
1 error, 0 warnings; 37 rules checked, 0 skipped.
`, v.String())
	text, err := json.Marshal(v)
	require.NoError(t, err)
	assert.Contains(t, string(text), `{"findings":[{"rule":"stuck-dead-letters","severity":"error","resource":{"kind":"queue","name":"orders"}`)
}

func TestRulesAreDocumented(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, r := range audit.Rules() {
		assert.False(t, seen[r.ID], r.ID)
		seen[r.ID] = true
		assert.NotEmpty(t, r.Summary, r.ID)
		assert.NotEmpty(t, r.Remedy, r.ID)
		assert.Contains(t, []string{"error", "warning"}, r.Severity, r.ID)
	}
	assert.GreaterOrEqual(t, len(seen), 25)
}

// The rules work in a time that a person waits for, on thousands of queues.
func TestCheckOfManyQueues(t *testing.T) {
	t.Parallel()
	topology := cycle()
	for i := range 3000 {
		name := fmt.Sprintf("work-%d", i)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.DeadLetterTarget{Exchange: "dlx", RoutingKey: name}})
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "requeue", Queue: name, Key: "*.*." + name})
	}
	began := time.Now()
	assert.Empty(t, check.Verify(check.FromTopology(topology), declare.Topology{}).Findings)
	t.Log(time.Since(began))
}

// A policy's message-ttl on a work queue ends waits there, if messages can wait there for
// longer. It is no fault where they only wait in delay queues.
func TestAPolicysTTLOnAWorkQueue(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		policy  retry.Policy
		ttl     int64
		version string
		found   bool
	}{
		"republish":          {retry.Policy{}, 1000, "4.3.6", false},
		"native":             {retry.Policy{Strategy: retry.StrategyNative}, 1000, "4.3.6", true},
		"auto":               {retry.Policy{Strategy: retry.StrategyAuto}, 1000, "4.3.6", true},
		"auto, before 4.3":   {retry.Policy{Strategy: retry.StrategyAuto}, 1000, "4.0.5", false},
		"auto, a longer one": {retry.Policy{Strategy: retry.StrategyAuto}, 86_400_000, "4.3.6", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topology, err := retry.Topology(tt.policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
			require.NoError(t, err)
			s := live(topology)
			s.Version = tt.version
			s.Policies = []declare.Policy{{Name: "theirs", Pattern: "^orders$", Definition: map[string]any{"message-ttl": tt.ttl}}}
			found := slices.ContainsFunc(check.Verify(s, topology).Findings, func(f check.Finding) bool { return f.Rule == "work-queue-ttl" })
			assert.Equal(t, tt.found, found)
			// The queue's own TTL is for the worker to see.
			s.Policies = nil
			queueNamed(&s, "orders").Arguments["x-message-ttl"] = tt.ttl
			found = slices.ContainsFunc(check.Verify(s, declare.Topology{}).Findings, func(f check.Finding) bool { return f.Rule == "work-queue-ttl" })
			assert.False(t, found)
		})
	}
}

// One team's findings are those at its own resources.
func TestCheckOwn(t *testing.T) {
	t.Parallel()
	s := live(cycle())
	queueNamed(&s, "orders").MessagesDeadLettering = 3
	v := check.VerifyOwn(s, declare.Topology{})
	assert.Len(t, v.Findings, 1, "everything counts without a topology")
	assert.Empty(t, v.Elsewhere)
	v = check.VerifyOwn(s, cycle())
	assert.Len(t, v.Findings, 1)
	other := declare.Topology{Exchanges: []declare.Exchange{{Name: "amq.fanout", Type: declare.ExchangeFanout}}}
	v = check.VerifyOwn(s, other)
	assert.Empty(t, v.Findings, "%s", v)
	assert.Len(t, v.Elsewhere, 1)
	assert.Contains(t, v.String(), "findings outside the topology, not counted: 1")
}

// partitioned is a modulus-hash exchange with two queues.
func partitioned() declare.Topology {
	t := declare.Topology{Exchanges: []declare.Exchange{{Name: "group", Type: declare.ExchangeModulusHash}}}
	for _, name := range []string{"group.0", "group.1"} {
		t.Queues = append(t.Queues, declare.QuorumQueue{Name: name, DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
		t.Bindings = append(t.Bindings, declare.Binding{Source: "group", Queue: name})
	}
	return t
}

func TestCheckFindsForeignBindingsOfAModulusHashExchange(t *testing.T) {
	t.Parallel()
	assert.Empty(t, check.Verify(live(partitioned()), partitioned()).Findings)
	more := partitioned()
	more.Queues = append(more.Queues, declare.QuorumQueue{Name: "tap", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
	more.Bindings = append(more.Bindings, declare.Binding{Source: "group", Queue: "tap"}, declare.Binding{Source: "group", Queue: "group.0", Key: "again"})
	for _, v := range []check.Verification{check.Verify(live(more), partitioned()), check.VerifyOwn(live(more), partitioned())} {
		require.Len(t, v.Findings, 1, "%s", v)
		assert.Equal(t, `exchange "group"`, v.Findings[0].Resource.String())
		assert.Equal(t, "modulus-hash-binding", v.Findings[0].Rule)
		assert.Contains(t, v.Findings[0].Problem, `2 of its 4 bindings aren't in the topology`)
		assert.Contains(t, v.Findings[0].Problem, `"group.0", "tap"`)
	}
	assert.Empty(t, check.Verify(live(more), declare.Topology{}).Findings, "nobody says what belongs to it")
}

func TestCheckFindsExchangeTypesThatTheBrokerLacks(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]bool{"4.0.5": true, "4.2.9": true, "4.3.0": false, "5.0.0": false, "": false} {
		s := live(declare.Topology{})
		s.Version = version
		found := ""
		for _, f := range check.Verify(s, partitioned()).Findings {
			if f.Rule == "exchange-type" {
				found = f.Problem
			}
		}
		assert.Equal(t, want, found != "", version)
		if want {
			assert.Equal(t, "its type x-modulus-hash needs RabbitMQ 4.3 or later, and this is "+version, found)
		}
	}
	// A plugin can have it.
	s := live(partitioned())
	s.Version = "4.2.9"
	assert.Empty(t, check.Verify(s, partitioned()).Findings)
}

// Each message reaches one of the bindings, regardless of its key.
func TestAModulusHashExchangeForDeadLettersLosesNone(t *testing.T) {
	t.Parallel()
	top := partitioned()
	work := declare.QuorumQueue{Name: "work", DeadLetter: declare.DeadLetterTarget{Exchange: "group"}}
	top.Queues = append(top.Queues, work)
	assert.Empty(t, check.Verify(live(top), top).Findings)
	top.Exchanges = append(top.Exchanges, declare.Exchange{Name: "topic", Type: declare.ExchangeTopic})
	top.Bindings = append(top.Bindings, declare.Binding{Source: "group", Exchange: "topic"})
	v := check.Verify(live(top), top)
	require.Len(t, v.Findings, 1, "%s", v)
	assert.Equal(t, "alternate-exchange", v.Findings[0].Rule)
	top.Bindings = nil
	v = check.Verify(live(top), top)
	assert.Contains(t, v.String(), "dead-letter-route")
}

// A queue that is bound to one of the exchanges of a group takes its share of the messages. verify
// doesn't need the topology to see that.
func TestAForeignBindingOfAGroupIsFound(t *testing.T) {
	t.Parallel()
	group := declare.Topology{
		Exchanges: []declare.Exchange{{Name: "g.now", Type: declare.ExchangeModulusHash}, {Name: "g.1", Type: declare.ExchangeModulusHash}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "g.1.000", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop(), Arguments: map[string]any{"x-hopback-partitions": int64(1)}},
			declare.QuorumQueue{Name: "audit", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{{Source: "g.now", Exchange: "g.1"}, {Source: "g.1", Queue: "g.1.000"}},
	}
	found := func() (rules []string) {
		for _, f := range check.Verify(live(group), declare.Topology{}).Findings {
			if f.Severity == "error" {
				rules = append(rules, f.Rule+" "+f.Resource.Name)
			}
		}
		return rules
	}
	assert.Empty(t, found())
	group.Bindings = append(group.Bindings, declare.Binding{Source: "g.now", Queue: "audit"})
	assert.Equal(t, []string{"foreign-binding g.now"}, found())
}

// A queue that is bound to an exchange of a fair queue that routes tenants to lanes takes a tenant's
// messages. One that is bound to the exchange in front gets copies, and the bindings of noisy tenants to
// their lanes are in order.
func TestAForeignBindingOfAFairQueueIsFound(t *testing.T) {
	t.Parallel()
	lane := func(i int) declare.QuorumQueue {
		return declare.QuorumQueue{Name: fmt.Sprint("orders.bulk.", i), DeadLetter: declare.ToQueue("dead"), Arguments: map[string]any{"x-hopback-lanes": int64(2)}}
	}
	top := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: "orders.in", Type: declare.ExchangeFanout}, {Name: "orders.rest", Type: declare.ExchangeFanout},
			{Name: "orders.sort.0", Type: declare.ExchangeDirect, AlternateExchange: "orders.sort.1"}, {Name: "orders.sort.1", Type: declare.ExchangeDirect, AlternateExchange: "orders.rest"},
		},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "orders", DeadLetter: declare.ToQueue("dead")}, lane(0), lane(1),
			declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
			declare.QuorumQueue{Name: "audit", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "orders.in", Exchange: "orders.sort.0"}, {Source: "orders.rest", Queue: "orders"},
			{Source: "orders.sort.0", Queue: "orders.bulk.0", Key: "noisy"}, {Source: "orders.in", Queue: "audit"},
		},
	}
	found := func() (rules []string) {
		for _, f := range check.Verify(live(top), declare.Topology{}).Findings {
			if f.Severity == "error" {
				rules = append(rules, f.Rule+" "+f.Resource.Name)
			}
		}
		return rules
	}
	assert.Empty(t, found())
	top.Bindings = append(top.Bindings, declare.Binding{Source: "orders.sort.1", Queue: "audit", Key: "acme"})
	assert.Equal(t, []string{"foreign-binding orders.sort.1"}, found())
}
