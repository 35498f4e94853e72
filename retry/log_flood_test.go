package retry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
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

// 5,000 messages that fail within a second, and are dead-lettered at their second failure, write the first
// line of each kind, and counts. The counts add up, the last ones when the consumer ends.
func TestAFloodOfFailuresIsCounted(t *testing.T) {
	t.Parallel()
	const messages = 5000
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.NewJSONHandler(&out, nil))})
		require.NoError(t, err)
		defer conn.Close(context.Background())
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(25 * time.Second)}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		pub, err := client.NewPublisher[int](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		all := make([]int, messages)
		require.NoError(t, pub.PublishAll(t.Context(), all))

		ctx, stop := context.WithCancel(t.Context())
		var handled atomic.Int32
		ended := make(chan error)
		go func() {
			ended <- conn.Consume(ctx, "work", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
				time.Sleep(time.Millisecond)
				return fmt.Errorf("charge %d: the bank timed out", handled.Add(1))
			})), client.ConsumerConfig{Concurrency: 5})
		}()
		time.Sleep(24 * time.Second)
		assert.EqualValues(t, messages, handled.Load())
		time.Sleep(4 * time.Second)
		assert.EqualValues(t, 2*messages, handled.Load())
		stop()
		require.NoError(t, <-ended)

		count := map[string][]int{}
		for line := range strings.Lines(out.String()) {
			var l struct {
				Msg, Queue, Reason, Error string
				More                      int
			}
			require.NoError(t, json.Unmarshal([]byte(line), &l))
			assert.Equal(t, "work", l.Queue, "%s", line)
			assert.Contains(t, l.Error, "the bank timed out")
			count[l.Msg] = append(count[l.Msg], max(l.More, 1))
		}
		assert.Equal(t, map[string][]int{
			"hopback: an attempt failed; the message will be retried": {1, messages - 1},
			"hopback: a message is dead-lettered":                     {1, messages - 1},
		}, count)
		assert.Equal(t, messages, broker.Queue("work.dead").Counts().Messages)
	})
}
