package integration

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// Settlements of neighbours that say the same leave as one where they gather, and the
// broker settles each of them: nothing stays behind, nothing is delivered twice, and
// each dead letter has its annotations.
func TestSettlementsInBulk(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const n, prefetch = 1500, 300
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()}))
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "work", DeadLetter: declare.ToQueue("dead")}))
		p := publisher[int](t, conn, address.Queue("work"))
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
			other, _ := s.connect(t)
			var mu sync.Mutex
			seen := map[int]int{}
			handled := make(chan struct{})
			stop := consume(t, other, "work", client.JSON(func(_ context.Context, i int) error {
				mu.Lock()
				defer mu.Unlock()
				if seen[i]++; len(seen) == n {
					close(handled)
				}
				return c.outcome
			}), client.ConsumerConfig{Prefetch: prefetch})
			await(t, handled, "all messages")
			require.NoError(t, stop())
			assert.Zero(t, ready(t, conn, "work"), c.name)
			for i, times := range seen {
				assert.Equal(t, 1, times, "%s: message %d", c.name, i)
			}
		}
		poll(t, "dead letters", func() bool { return ready(t, conn, "dead") == n })
		for _, m := range s.peer(t).take("dead", n) {
			require.Equal(t, "first", m.Annotations["x-opt-a"])
			require.Equal(t, int64(2), m.Annotations["x-opt-b"])
		}
	})
}
