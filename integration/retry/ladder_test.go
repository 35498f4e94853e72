package retry_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// Two teams, or two versions of one service, whose ladders have different levels or units
// under the default names: no message becomes several.
func TestLaddersOfDifferentLevelsKeepTheirMessagesApart(t *testing.T) {
	ladders := map[string]*retry.Ladder{
		"ten":    {Unit: 20 * time.Millisecond, Levels: 10},
		"eleven": {Unit: 20 * time.Millisecond, Levels: 11},
		"slower": {Unit: 25 * time.Millisecond, Levels: 10},
	}
	const messages, retries = 3, 2
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		var mu sync.Mutex
		handled := map[string]int{}
		policies := map[string]retry.Policy{}
		for queue, ladder := range ladders {
			policies[queue] = retry.Policy{MaxRetries: retries, Backoff: retry.Delays(200 * time.Millisecond), AnyDelay: ladder}
			suite.ApplyRetry(t, conn, policies[queue], declare.QuorumQueue{Name: queue})
		}
		for queue, policy := range policies {
			suite.Consume(t, conn, queue, retry.With(policy)(client.JSON(func(_ context.Context, o suite.Order) error {
				mu.Lock()
				defer mu.Unlock()
				handled[fmt.Sprint(queue, o.ID)]++
				return errors.New("down")
			})), client.ConsumerConfig{})
			p := suite.Publisher[suite.Order](t, conn, address.Queue(queue))
			for id := range messages {
				suite.Publish(t, p, suite.Order{ID: id})
			}
		}
		want := map[string]int{}
		for queue, policy := range policies {
			suite.Poll(t, "the dead of "+queue, func() bool { return suite.Ready(t, conn, queue+".dead") >= messages })
			assert.Equal(t, messages, suite.Ready(t, conn, queue+".dead"))
			for id := range messages {
				want[fmt.Sprint(queue, id)] = 1 + retries
			}
			topology, err := retry.Topology(policy)
			require.NoError(t, err)
			for _, q := range topology.Queues {
				assert.Zero(t, suite.Ready(t, conn, q.Address().QueueName()), "%s", q.Address())
			}
		}
		mu.Lock()
		defer mu.Unlock()
		assert.Equal(t, want, handled)
		suite.Poll(t, "verify finds nothing", func() bool { // for a moment the broker still counts dead letters on their way
			v, err := suite.Verified(t.Context(), s.Sources(t, conn), declare.Topology{})
			require.NoError(t, err)
			return len(v.Findings) == 0
		})
	})
}

// olderLadder is a topology from before the unit and the levels were in the names.
func olderLadder(t declare.Topology, ladder string) declare.Topology {
	old := func(name string) string { return strings.Replace(name, ladder, "retry_ladder_", 1) }
	for i := range t.Exchanges {
		t.Exchanges[i].Name = old(t.Exchanges[i].Name)
	}
	for i := range t.Queues {
		q := t.Queues[i].(declare.QuorumQueue)
		q.Name, q.DeadLetter.Exchange = old(q.Name), old(q.DeadLetter.Exchange)
		t.Queues[i] = q
	}
	for i := range t.Bindings {
		b := &t.Bindings[i]
		b.Source, b.Queue, b.Exchange = old(b.Source), old(b.Queue), old(b.Exchange)
	}
	return t
}

// The move from ladders under the old names: what waits there comes back, workers use the
// new ladder, and the old one can be deleted once it is empty. The guard finds ladders that
// share their exchanges.
func TestMoveFromALadderUnderTheOldNames(t *testing.T) {
	policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(300 * time.Millisecond), AnyDelay: &retry.Ladder{Levels: 3}}
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		current, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
		require.NoError(t, err)
		old, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
		require.NoError(t, err)
		old = olderLadder(old, "retry_ladder_100ms_3_")
		suite.Apply(t, conn, old)
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Exchange("retry_ladder_1", "0.1.1.orders")), suite.Order{ID: 7})
		suite.Apply(t, conn, current)
		attempts := make(chan suite.Order, 10)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			attempts <- o
			if retry.Attempt(ctx) < 3 {
				return errors.New("down")
			}
			return nil
		})), client.ConsumerConfig{})
		for range 3 {
			assert.Equal(t, 7, suite.Await(t, attempts, "an attempt").ID)
		}

		// Two ladders that share their exchanges, as before.
		shared := retry.Policy{MaxRetries: 1, Backoff: policy.Backoff, AnyDelay: policy.AnyDelay}
		shared.Names.LadderPrefix = "shared_"
		suite.ApplyRetry(t, conn, shared, declare.QuorumQueue{Name: "orders"})
		require.Empty(t, suite.Guarded(t, conn, "orders", shared))
		suite.Apply(t, conn, declare.Topology{Bindings: []declare.Binding{{Source: "shared_100ms_3_0", Queue: "shared_100ms_3_0", Key: "*.*.*.1.#"}}})
		found := suite.Guarded(t, conn, "orders", shared)
		require.Len(t, found, 1)
		assert.Equal(t, retry.GuardLadder, found[0].Guard)
		assert.Contains(t, found[0].Problem, "shared_100ms_3_0")
		shared.Waive = []retry.Guard{retry.GuardLadder}
		assert.Empty(t, suite.Guarded(t, conn, "orders", shared))

		// Everything that begins with the old prefix goes, and nothing else does.
		var rest declare.Topology
		for _, x := range old.Exchanges {
			if strings.HasPrefix(x.Name, "retry_ladder_") {
				rest.Exchanges = append(rest.Exchanges, x)
			}
		}
		for _, q := range old.Queues {
			if strings.HasPrefix(q.Address().QueueName(), "retry_ladder_") {
				assert.Zero(t, suite.Ready(t, conn, q.Address().QueueName()))
				rest.Queues = append(rest.Queues, q)
			}
		}
		require.Len(t, rest.Exchanges, 4)
		require.Len(t, rest.Queues, 3)
		_, err = declare.DeleteIdle(t.Context(), conn.Management(), rest)
		require.NoError(t, err)
		suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue("orders")), suite.Order{ID: 8})
		for range 3 {
			assert.Equal(t, 8, suite.Await(t, attempts, "an attempt without the old ladder").ID)
		}
	})
}
