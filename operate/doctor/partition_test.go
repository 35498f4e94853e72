package doctor_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/partition"
)

// groups are the topologies of a partition group: as declared, while its partitions change, and after.
func groups(t *testing.T) map[string]declare.Topology {
	t.Helper()
	all := map[string]declare.Topology{}
	add := func(name string, generations ...int) {
		var whole declare.Topology
		for _, n := range generations {
			topology, err := partition.Group{Name: "orders", Partitions: 4, Generation: n}.Topology(declare.QuorumQueue{
				DeadLetter: declare.ToQueue("orders-dlq"), DeliveryLimit: 20,
			})
			require.NoError(t, err)
			whole.Exchanges = append(whole.Exchanges, topology.Exchanges...)
			whole.Queues = append(whole.Queues, topology.Queues...)
			whole.Bindings = append(whole.Bindings, topology.Bindings...)
		}
		whole.Queues = append(whole.Queues, declare.QuorumQueue{Name: "orders-dlq", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
		all[name] = whole
	}
	add("one generation", 1)
	add("two generations", 1, 2)
	return all
}

// A correct partition group has nothing to report.
func TestPartitionGroupsAreClean(t *testing.T) {
	t.Parallel()
	for name, topology := range groups(t) {
		d, err := audit.Export("/", topology)
		require.NoError(t, err)
		r, err := doctor.FromDefinitions(t.Context(), bytes.NewReader(d.Encode()), doctor.Options{})
		require.NoError(t, err)
		assert.Empty(t, found(r), name)
		s := check.FromTopology(topology)
		s.Version, s.Unread = "4.3.6", nil
		v := check.Verify(s, topology)
		assert.Empty(t, v.Findings, name)
	}
}
