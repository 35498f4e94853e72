package retry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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

// withoutSort is the topology of versions without the exchange that sorts dead letters.
func withoutSort(t declare.Topology) declare.Topology {
	ours := func(name string) bool { return strings.HasSuffix(name, ".sort") }
	t.Exchanges = slices.DeleteFunc(t.Exchanges, func(x declare.Exchange) bool { return ours(x.Name) })
	t.Bindings = slices.DeleteFunc(t.Bindings, func(b declare.Binding) bool { return ours(b.Source) || ours(b.Exchange) })
	return t
}

// failAll consumes from a queue, and fails every message.
func failAll(t *testing.T, conn *client.Conn, p retry.Policy, queue string) {
	suite.Consume(t, conn, queue, retry.With(p)(client.HandlerFunc(func(context.Context, *client.Delivery) error { return errors.New("never") })), client.ConsumerConfig{})
}

func eventuallyHolds(t *testing.T, conn *client.Conn, queue string, n int) {
	t.Helper()
	var last uint64
	assert.Eventually(t, func() bool {
		info, err := declare.Inspect(t.Context(), conn.Management(), queue)
		last = info.Messages
		return err == nil && int(last) >= n
	}, 2*time.Minute, 50*time.Millisecond)
	assert.EqualValues(t, n, last, queue)
}

// Another team binds a queue to the dead-letter exchange, before the workers start or while they run.
// It gets copies. Each work queue's dead letters still reach its dead-letter queue, once each.
func TestAForeignBindingTakesNoDeadLetters(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
			conn, _ := s.Connect(t)
			prefix := string(strategy) + "."
			p := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond), Strategy: strategy, Names: retry.Names{Prefix: prefix}}
			queues := []string{prefix + "orders", prefix + "bills"}
			suite.ApplyRetry(t, conn, p, declare.QuorumQueue{Name: queues[0]}, declare.QuorumQueue{Name: queues[1]})
			bind := func(name string) {
				suite.Apply(t, conn, declare.Topology{
					Queues:   []declare.Queue{declare.QuorumQueue{Name: prefix + name, DeadLetter: declare.Drop()}},
					Bindings: []declare.Binding{{Source: prefix + "dead_letter_exchange", Queue: prefix + name}},
				})
			}
			bind("early")
			publisher := suite.Publisher[string](t, conn, address.Address{})
			publish := func() {
				for i := range 10 {
					for _, q := range queues {
						require.NoError(t, publisher.Publish(t.Context(), fmt.Sprint(i), client.PublishTo(address.Queue(q))))
					}
				}
			}
			for _, q := range queues {
				failAll(t, conn, p, q)
			}
			publish()
			for _, q := range queues {
				eventuallyHolds(t, conn, q+".dead", 10)
			}
			bind("late")
			publish()
			for _, q := range queues {
				eventuallyHolds(t, conn, q+".dead", 20)
			}
			copies := map[retry.Strategy]int{retry.StrategyRepublish: 20, retry.StrategyDeadLetter: 40}[strategy] // with each retry
			eventuallyHolds(t, conn, prefix+"late", copies)
			eventuallyHolds(t, conn, prefix+"early", 2*copies)
		}
	})
}

// Workers start on a topology that an older version has declared, and say what is missing. A team that
// still has it shares the exchanges with one that has not, and no retry leaves a copy behind.
func TestAnOlderTopologyOfDeadLettersWorks(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, logs := s.Connect(t)
		p := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(100 * time.Millisecond), Strategy: retry.StrategyDeadLetter}
		p.Backoff = retry.Delays(100*time.Millisecond, 200*time.Millisecond)
		old, err := retry.Topology(p, declare.QuorumQueue{Name: "old"})
		require.NoError(t, err)
		suite.Apply(t, conn, withoutSort(old))
		other := p
		other.Backoff = retry.Delays(300 * time.Millisecond) // another delay queue
		suite.ApplyRetry(t, conn, other, declare.QuorumQueue{Name: "new"})
		failAll(t, conn, p, "old")
		failAll(t, conn, other, "new")
		publisher := suite.Publisher[string](t, conn, address.Address{})
		for range 20 {
			for _, q := range []string{"old", "new"} {
				require.NoError(t, publisher.Publish(t.Context(), "x", client.PublishTo(address.Queue(q))))
			}
		}
		eventuallyHolds(t, conn, "old.dead", 20)
		eventuallyHolds(t, conn, "new.dead", 20)
		assert.Equal(t, 1, strings.Count(strings.Join(logs.All(), "\n"), "the topology is older than this version"))
	})
}
