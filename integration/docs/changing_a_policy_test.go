package docs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/migrate"
	"github.com/hopback/hopback/retry"
)

// shop is a queue whose handler fails until its policy gives up, and what happened when.
type shop struct {
	t     *testing.T
	conn  *hopback.Conn
	began time.Time
	log   []string
}

// inShop runs f with a broker in memory, in virtual time.
func inShop(t *testing.T, f func(*shop, *hopbacktest.Broker)) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := hopback.Connect(t.Context(), b.URL(), hopback.Config{Dial: b.Dial, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer func() { assert.NoError(t, conn.Close(context.Background())) }()
		f(&shop{t: t, conn: conn, began: time.Now()}, b)
	})
}

// work handles the messages of a queue for a time, by a policy.
func (s *shop) work(name string, p hopback.Policy, during time.Duration) {
	ctx, stop := context.WithTimeout(s.t.Context(), during)
	defer stop()
	queue := hopback.Queue[string]{Conn: s.conn, Name: name, Retry: p}
	require.NoError(s.t, queue.Consume(ctx, func(ctx context.Context, _ string) error {
		s.log = append(s.log, fmt.Sprintf("%s: attempt %d after %v", name, hopback.Attempt(ctx), time.Since(s.began).Round(time.Second)))
		return errors.New("never")
	}, hopback.ConsumerConfig{}))
}

func (s *shop) declare(name string, p hopback.Policy) {
	queue := hopback.Queue[string]{Conn: s.conn, Name: name, Retry: p}
	require.NoError(s.t, queue.Declare(s.t.Context()))
}

func (s *shop) publish(name string) {
	queue := hopback.Queue[string]{Conn: s.conn, Name: name}
	require.NoError(s.t, queue.Publish(s.t.Context(), "x"))
	s.began = time.Now()
}

// A message that waits keeps its delay and its count, and is then retried by the new policy.
func TestAWaitingMessageComesBackToTheNewPolicy(t *testing.T) {
	inShop(t, func(s *shop, b *hopbacktest.Broker) {
		before := hopback.Policy{MaxRetries: 5, Backoff: hopback.Delays(time.Hour)}
		after := hopback.Policy{MaxRetries: 2, Backoff: hopback.Delays(time.Minute, 10*time.Minute)}
		s.declare("orders", before)
		s.publish("orders")
		s.work("orders", before, time.Minute)
		s.declare("orders", after)
		s.work("orders", after, 2*time.Hour)
		assert.Equal(t, []string{
			"orders: attempt 1 after 0s", "orders: attempt 2 after 1h0m0s", "orders: attempt 3 after 1h10m0s",
		}, s.log)
		assert.Equal(t, 1, b.Queue("orders.dead").Counts().Ready)
	})
}

// With fewer retries than a message has had, its next failure is its last.
func TestFewerRetriesThanAMessageHasHad(t *testing.T) {
	inShop(t, func(s *shop, b *hopbacktest.Broker) {
		before := hopback.Policy{MaxRetries: 5, Backoff: hopback.Delays(time.Minute)}
		after := hopback.Policy{MaxRetries: 1, Backoff: hopback.Delays(time.Minute)}
		s.declare("orders", before)
		s.publish("orders")
		s.work("orders", before, 3*time.Minute+time.Second)
		s.work("orders", after, time.Hour)
		assert.Len(t, s.log, 5)
		assert.Equal(t, 1, b.Queue("orders.dead").Counts().Ready)
	})
}

// A worker whose delay queues don't exist yet doesn't start.
func TestAWorkerAheadOfItsTopologyDoesNotStart(t *testing.T) {
	inShop(t, func(s *shop, _ *hopbacktest.Broker) {
		s.declare("orders", hopback.Policy{Backoff: hopback.Delays(time.Hour)})
		queue := hopback.Queue[string]{Conn: s.conn, Name: "orders", Retry: hopback.Policy{Backoff: hopback.Delays(time.Minute)}}
		err := queue.Consume(s.t.Context(), func(context.Context, string) error { return nil }, hopback.ConsumerConfig{})
		refused, is := errors.AsType[*retry.GuardError](err)
		require.True(t, is, "%v", err)
		assert.Equal(t, retry.GuardDelayQueue, refused.Guard)
	})
}

// A message that waits while its queue moves comes back to the new queue.
func TestAWaitingMessageFollowsItsQueue(t *testing.T) {
	inShop(t, func(s *shop, b *hopbacktest.Broker) {
		policy := hopback.Policy{MaxRetries: 1, Backoff: hopback.Delays(time.Hour)}
		s.declare("orders", policy)
		s.publish("orders")
		s.work("orders", policy, time.Minute)
		s.declare("orders.v2", policy)
		report, err := migrate.Run(s.t.Context(), s.conn, nil, migrate.Config{
			Old: "orders",
			New: declare.QuorumQueue{Name: "orders.v2", DeadLetter: declare.DeadLetterTarget{Exchange: "dead_letter_exchange", RoutingKey: "orders.v2"}},
			Bindings: []declare.Binding{
				{Source: "requeue_exchange", Queue: "orders", Key: "*.*.orders"},
			},
		})
		require.NoError(t, err)
		assert.True(t, report.Deleted)
		s.work("orders.v2", policy, 2*time.Hour)
		assert.Equal(t, []string{"orders: attempt 1 after 0s", "orders.v2: attempt 2 after 1h0m0s"}, s.log)
		assert.Equal(t, 1, b.Queue("orders.v2.dead").Counts().Ready)
		assert.False(t, b.Queue("orders").Exists())
	})
}

// With another suffix, a dead letter goes to both dead-letter queues until the old binding is gone.
func TestAnotherDeadSuffixLeavesABinding(t *testing.T) {
	inShop(t, func(s *shop, b *hopbacktest.Broker) {
		before := hopback.Policy{MaxRetries: retry.NoRetries}
		after := hopback.Policy{MaxRetries: retry.NoRetries, Names: retry.Names{DeadSuffix: ".failed"}}
		s.declare("orders", before)
		s.declare("orders", after)
		s.publish("orders")
		s.work("orders", after, time.Minute)
		assert.Equal(t, 1, b.Queue("orders.dead").Counts().Ready)
		assert.Equal(t, 1, b.Queue("orders.failed").Counts().Ready)
	})
}
