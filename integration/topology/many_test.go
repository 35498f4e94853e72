package topology_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// Two processes that declare the same hundred queues at the same time, each on several sessions, both succeed.
// On 4.0 a queue that two sessions create at once ends a session, and what it carried is sent again.
func TestTwoProcessesDeclareManyQueues(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		var work []declare.QuorumQueue
		for i := range 25 {
			work = append(work, declare.QuorumQueue{Name: fmt.Sprintf("work-%d", i), DeliveryLimit: 20})
		}
		topology, err := retry.Topology(retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second)}, work...)
		require.NoError(t, err)
		var conns []*client.Conn
		for range 2 {
			conn, _ := s.Connect(t)
			conns = append(conns, conn)
		}
		var wg sync.WaitGroup
		for _, conn := range conns {
			wg.Go(func() {
				report, err := declare.Apply(t.Context(), conn.Management(), topology)
				assert.NoError(t, err)
				assert.Len(t, report.Steps, len(topology.Exchanges)+len(topology.Queues)+len(topology.Bindings))
			})
		}
		wg.Wait()
		report, err := declare.Apply(t.Context(), conns[0].Management(), topology)
		require.NoError(t, err)
		assert.Equal(t, len(topology.Queues), report.Count("existed"))
	})
}
