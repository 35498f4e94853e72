package partition_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/partition"
)

// A worker that stops loses its connection while a handler runs. RabbitMQ gives the partition to another worker, which
// handles the same message, so the handler's ctx ends at once, and not with the grace time.
func TestAHandlerEndsWithTheConnectionOfAWorkerThatStops(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		g := partition.Group{Name: "orders", Partitions: 2}
		var mu sync.Mutex
		var conns []net.Conn
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Logger: quiet, Dial: func(ctx context.Context, network, to string) (net.Conn, error) {
			c, err := broker.Dial(ctx, network, to)
			mu.Lock()
			defer mu.Unlock()
			conns = append(conns, c)
			return c, err
		}})
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
		topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")})
		require.NoError(t, err)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()})
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		p, err := client.NewPublisher[string](t.Context(), conn, g.Address("key"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), "an order"))
		began, ended := make(chan struct{}), make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- partition.Consume(ctx, conn, g, client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
				close(began)
				<-ctx.Done()
				ended <- context.Cause(ctx)
				return ctx.Err()
			}), partition.Config{})
		}()
		<-began
		stop()
		time.Sleep(3 * time.Second)
		assert.Empty(t, ended, "it has the grace time")
		lost := time.Now()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		assert.ErrorIs(t, <-ended, client.ErrConnectionLost)
		assert.Less(t, time.Since(lost), time.Second)
		require.NoError(t, <-done)
		require.NoError(t, conn.Close(context.Background()))
	})
}
