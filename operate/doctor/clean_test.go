package doctor_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

// topologies are hopback's own, in every form.
func topologies(t *testing.T) map[string]declare.Topology {
	t.Helper()
	all := map[string]declare.Topology{}
	orders := declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}
	add := func(name string, topology declare.Topology, err error) {
		require.NoError(t, err, name)
		all[name] = topology
	}
	for name, strategy := range map[string]retry.Strategy{
		"republish": retry.StrategyRepublish, "dead-letter": retry.StrategyDeadLetter, "native": retry.StrategyNative, "auto": retry.StrategyAuto,
	} {
		for kind, policy := range map[string]retry.Policy{"": {}, " replayed by move": {ReplayByMove: true}} {
			policy.Strategy = strategy
			topology, err := retry.Topology(policy, orders)
			add(name+kind, topology, err)
		}
	}
	ladder, err := retry.Topology(retry.Policy{AnyDelay: &retry.Ladder{}}, orders)
	add("ladder", ladder, err)
	central, err := retry.CentralTopology(retry.Policy{}, retry.CentralConfig{}, orders)
	add("central", central, err)
	scheduled, err := schedule.Topology(schedule.Names{}, "orders")
	scheduled.Queues = append(scheduled.Queues, declare.QuorumQueue{Name: "orders", DeadLetter: declare.DeadLetterTarget{Exchange: "dead"}})
	scheduled.Exchanges = append(scheduled.Exchanges, declare.Exchange{Name: "dead", Type: declare.ExchangeFanout})
	scheduled.Queues = append(scheduled.Queues, declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
	scheduled.Bindings = append(scheduled.Bindings, declare.Binding{Source: "dead", Queue: "orders.dead"})
	add("schedule", scheduled, err)
	group, err := schedule.GroupTopology(schedule.Names{}, "orders")
	add("recurring", group, err)
	return all
}

// A topology of hopback's has nothing to report: no error, no warning, and no note.
func TestHopbacksOwnTopologiesAreClean(t *testing.T) {
	t.Parallel()
	for name, topology := range topologies(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, err := audit.Export("/", topology)
			require.NoError(t, err)
			r, err := doctor.FromDefinitions(t.Context(), bytes.NewReader(d.Encode()), doctor.Options{})
			require.NoError(t, err)
			assert.Empty(t, r.Groups, "%s", r)
			assert.Positive(t, r.Queues)
			assert.True(t, strings.HasSuffix(r.String(), "partly checked.\n"), "%s", r)
		})
	}
}
