package partition_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/partition"
)

// The number of partitions and the window are arguments of the queues, which RabbitMQ keeps
// although it doesn't know them. Another group on the same queues is refused.
func TestPartitionsAreArguments(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		group := func(window int) partition.Group { return partition.Group{Name: "g", Partitions: 2, Window: window} }
		queues := func(window int) declare.Topology {
			all, err := group(window).Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: declare.Unlimited})
			require.NoError(t, err)
			return declare.Topology{Queues: all.Queues}
		}
		_, err := declare.Apply(t.Context(), conn.Management(), queues(10))
		require.NoError(t, err)
		info, err := declare.Inspect(t.Context(), conn.Management(), group(10).Queues()[0])
		require.NoError(t, err)
		assert.EqualValues(t, 2, info.Arguments["x-hopback-partitions"])
		assert.EqualValues(t, 10, info.Arguments["x-hopback-window"])
		_, err = declare.Apply(t.Context(), conn.Management(), queues(20))
		require.ErrorIs(t, err, declare.ErrConflict)
	})
}
