package cluster

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/stream"
)

// The node dies that leads a stream, and that its publisher and its consumer are connected
// to. Both go on with another replica: nothing that was confirmed is missing, and the
// consumer handles each offset once, in order. Then each node is restarted.
func TestAStreamGoesOnAfterANodeIsKilled(t *testing.T) {
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		log := declare.Stream{Name: "log"}
		setup := connect(t, c, c.Nodes[0])
		_, err := declare.Apply(t.Context(), setup.Management(), declare.Topology{Queues: []declare.Queue{log}})
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = declare.DeleteQueue(context.Background(), setup.Management(), log.Name) })
		var first string
		poll(t, "the stream has a leader", func() bool { first = leader(t, c.Nodes[0], log.Name); return first != "" })
		led := nodeNamed(t, c, first)
		conn := connect(t, c, led, func(cfg *client.Config) { cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil)) })
		require.Equal(t, led.Name, conn.Broker().Node)

		var mu sync.Mutex
		handled, next, last := map[int]int{}, uint64(0), time.Time{}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		consumed := make(chan error, 1)
		go func() {
			consumed <- stream.Consume(ctx, conn, log.Name, client.JSON(func(ctx context.Context, n int) error {
				d, _ := client.DeliveryFrom(ctx)
				offset, _ := stream.OffsetOf(d)
				mu.Lock()
				defer mu.Unlock()
				assert.Equal(t, next, offset, "in order, and each once")
				next, last = offset+1, time.Now()
				handled[n]++
				return nil
			}), stream.Config{Consumer: "all", Offsets: &stream.MemoryStore{}})
		}()
		publisher, err := client.NewPublisher[int](t.Context(), conn, log.Address(), client.PublisherConfig{})
		require.NoError(t, err)
		accepted, unknown := map[int]bool{}, 0
		stop, published := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(published)
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond): // paces the flow
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				if publisher.Publish(ctx, n) == nil {
					accepted[n] = true
				} else {
					unknown++
				}
				cancel()
			}
		}()
		resumes := func() time.Duration {
			t.Helper()
			since := time.Now()
			// A message that the broker leaves unanswered is sent again after half a minute, and the
			// cluster needs time to elect a leader.
			require.Eventually(t, func() bool {
				mu.Lock()
				defer mu.Unlock()
				return last.After(since)
			}, 3*patience, 20*time.Millisecond, "messages are handled")
			return time.Since(since)
		}
		resumes()

		require.NoError(t, led.Kill(t.Context()))
		killed := time.Now()
		poll(t, "another leader", func() bool { l := leader(t, other(c, led), log.Name); return l != "" && l != led.Name })
		elected := time.Since(killed)
		took := resumes()
		assert.NotEqual(t, led.Name, conn.Broker().Node)
		require.NoError(t, led.Start(t.Context()))
		require.NoError(t, c.AwaitAll(t.Context()))
		if long {
			for _, n := range c.Nodes {
				require.NoError(t, n.Kill(t.Context()))
				require.NoError(t, n.Start(t.Context()))
				require.NoError(t, c.AwaitAll(t.Context()))
				resumes()
			}
		}
		close(stop)
		<-published
		poll(t, "all that was confirmed is handled", func() bool {
			mu.Lock()
			defer mu.Unlock()
			for n := range accepted {
				if handled[n] == 0 {
					return false
				}
			}
			return true
		})
		cancel()
		require.NoError(t, <-consumed)
		t.Logf("REPORT cluster %s, stream: %d confirmed, %d unknown, offset %d; a leader %.1f s after the kill, consuming %.2f s after that",
			c.Version, len(accepted), unknown, next, elected.Seconds(), took.Seconds())
	})
}
