package retry_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
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

// Another team's queue on the retry exchange gets copies of all retries. If the delay queue is missing, RabbitMQ
// confirms these copies, and the message is in no other queue. Nothing else has to fail for that to be reported.
func TestARetryThatOnlyAnotherTeamsQueueHasIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelError}))})
		require.NoError(t, err)
		defer conn.Close(context.Background())
		policy := retry.Policy{Strategy: retry.StrategyRepublish, MaxRetries: 1, Backoff: retry.Delays(5 * time.Second)}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
		require.NoError(t, err)
		foreign := declare.Topology{
			Queues:   []declare.Queue{declare.QuorumQueue{Name: "audit", DeadLetter: declare.Drop()}},
			Bindings: []declare.Binding{{Source: "retry_exchange", Queue: "audit", Key: "#"}},
		}
		for _, each := range []declare.Topology{topology, foreign} {
			_, err = declare.Apply(t.Context(), conn.Management(), each)
			require.NoError(t, err)
		}
		pub, err := client.NewPublisher[int](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			ended <- conn.Consume(ctx, "work", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
				return errors.New("the bank timed out")
			})), client.ConsumerConfig{})
		}()
		time.Sleep(time.Second)
		_, err = declare.DeleteQueue(t.Context(), conn.Management(), "delay_5s")
		require.NoError(t, err)
		require.NoError(t, pub.Publish(t.Context(), 1))
		time.Sleep(2 * time.Minute)
		stop()
		require.NoError(t, <-ended)
		assert.Equal(t, 1, broker.Queue("audit").Counts().Messages)
		assert.Contains(t, out.String(), "delay_5s")
		assert.Contains(t, out.String(), "failures_since_last_check=1")
	})
}
