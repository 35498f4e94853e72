package retry_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// scene is a queue whose messages always fail, with the queue "audit" of another team on the retry exchange.
type scene struct {
	broker *hopbacktest.Broker
	conn   *client.Conn
	pub    *client.Publisher[int]
	log    bytes.Buffer
	calls  atomic.Int64
}

func newScene(t *testing.T, version string, audit declare.QuorumQueue) (s *scene, stop func()) {
	s = &scene{broker: hopbacktest.Start(t, hopbacktest.Config{Version: version})}
	var err error
	s.conn, err = client.Connect(t.Context(), s.broker.URL(), client.Config{Dial: s.broker.Dial, Logger: slog.New(slog.NewTextHandler(&s.log, &slog.HandlerOptions{Level: slog.LevelError}))})
	require.NoError(t, err)
	policy := retry.Policy{Strategy: retry.StrategyRepublish, MaxRetries: 1, Backoff: retry.Delays(5 * time.Second)}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
	require.NoError(t, err)
	audit.Name, audit.DeadLetter = "audit", declare.Drop()
	topology.Queues = append(topology.Queues, audit)
	topology.Bindings = append(topology.Bindings, declare.Binding{Source: "retry_exchange", Queue: "audit", Key: "#"})
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	s.pub, err = client.NewPublisher[int](t.Context(), s.conn, address.Address{}, client.PublisherConfig{})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		ended <- s.conn.Consume(ctx, "work", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			s.calls.Add(1)
			return errors.New("the bank timed out")
		})), client.ConsumerConfig{})
	}()
	time.Sleep(time.Second)
	return s, func() {
		cancel()
		require.NoError(t, <-ended)
		require.NoError(t, s.conn.Close(context.Background()))
	}
}

// RabbitMQ refuses a retry copy if the other team's queue is full, and leaves it in the delay queue. So each attempt adds
// a copy; it is not made more often than once a minute. When that queue has room again, nothing is left behind.
func TestAForeignQueueThatIsFullMultipliesFewRetries(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			s, stop := newScene(t, version, declare.QuorumQueue{MaxLength: 1, Overflow: declare.OverflowRejectPublish})
			for range 5 {
				_ = s.pub.Publish(t.Context(), 1, client.PublishTo(address.Queue("audit")))
			}
			require.NoError(t, s.pub.Publish(t.Context(), 1, client.PublishTo(address.Queue("work"))))
			time.Sleep(10 * time.Minute)
			calls, dead := s.calls.Load(), s.broker.Queue("work.dead").Counts().Messages
			t.Logf("%s: %d calls, %d dead letters in 10 minutes", version, calls, dead)
			assert.Less(t, calls, int64(100))
			assert.Less(t, dead, 40)
			require.NoError(t, declare.DeleteBinding(t.Context(), s.conn.Management(), declare.Binding{Source: "retry_exchange", Queue: "audit", Key: "#"}))
			time.Sleep(3 * time.Minute)
			assert.Zero(t, s.broker.Queue("work").Counts().Messages)
			assert.Zero(t, s.broker.Queue("delay_5s").Counts().Messages)
			stop()
		})
	}
}

// Another team's queue on the retry exchange gets copies of all retries. If the delay queue is missing, RabbitMQ
// confirms these copies, and the message is in no other queue. Nothing else has to fail for that to be reported.
func TestARetryThatOnlyAnotherTeamsQueueHasIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, stop := newScene(t, "4.3.6", declare.QuorumQueue{})
		_, err := declare.DeleteQueue(t.Context(), s.conn.Management(), "delay_5s")
		require.NoError(t, err)
		require.NoError(t, s.pub.Publish(t.Context(), 1, client.PublishTo(address.Queue("work"))))
		time.Sleep(2 * time.Minute)
		stop()
		assert.Equal(t, 1, s.broker.Queue("audit").Counts().Messages)
		assert.Contains(t, s.log.String(), "delay_5s")
		assert.Contains(t, s.log.String(), "failures_since_last_check=1")
	})
}
