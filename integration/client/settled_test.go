package client_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// Settlements of neighbours that say the same leave as one where they gather, and the
// broker settles each of them: nothing stays behind, nothing is delivered twice, and
// each dead letter has its annotations.
func TestSettlementsInBulk(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n, prefetch = 1500, 300
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()}))
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "work", DeadLetter: declare.ToQueue("dead")}))
		p := suite.Publisher[int](t, conn, address.Queue("work"))
		all := make([]int, n)
		for i := range all {
			all[i] = i
		}
		for _, c := range []struct {
			name    string
			outcome error
		}{
			{"accepted", nil},
			{"dead-lettered", client.Modify{DeadLetter: true, Annotations: map[string]any{"x-opt-a": "first", "x-opt-b": int64(2)}}},
		} {
			require.NoError(t, p.PublishAll(t.Context(), all))
			other, _ := s.Connect(t)
			var mu sync.Mutex
			seen := map[int]int{}
			handled := make(chan struct{})
			stop := suite.Consume(t, other, "work", client.JSON(func(_ context.Context, i int) error {
				mu.Lock()
				defer mu.Unlock()
				if seen[i]++; len(seen) == n {
					close(handled)
				}
				return c.outcome
			}), client.ConsumerConfig{Prefetch: prefetch})
			suite.Await(t, handled, "all messages")
			require.NoError(t, stop())
			assert.Zero(t, suite.Ready(t, conn, "work"), c.name)
			for i, times := range seen {
				assert.Equal(t, 1, times, "%s: message %d", c.name, i)
			}
		}
		suite.Poll(t, "dead letters", func() bool { return suite.Ready(t, conn, "dead") == n })
		for _, m := range s.Peer(t).Take("dead", n) {
			require.Equal(t, "first", m.Annotations["x-opt-a"])
			require.Equal(t, int64(2), m.Annotations["x-opt-b"])
		}
	})
}
