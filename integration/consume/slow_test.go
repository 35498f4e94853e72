package consume_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// Handlers that take long, in every slot of a consumer, block neither the signs of
// life to the broker, nor other consumers' settlements, nor the recovery.
func TestSlowHandlersStarveNothing(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		// least is what the client takes. With that, a broker has a second to answer, which is too little on a busy machine.
		const least, idle, slots = 2 * time.Second, 6 * time.Second, 8
		wire, url := s.Through(t)
		seen := &suite.Events{}
		conn, log := suite.ConnectTo(t, url, suite.Soon, func(c *client.Config) {
			c.IdleTimeout = idle
			c.OnEvent = seen.Observe
		})
		_, err := client.Connect(t.Context(), url, client.Config{IdleTimeout: least - 1})
		require.ErrorAs(t, err, new(*argument.Error), "RabbitMQ would close the connection, and not say why")
		for _, name := range []string{"slow", "fast"} {
			suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: name}))
		}
		begun, release, done := make(chan int, 100), make(chan struct{}), make(chan int, 100)
		suite.Consume(t, conn, "slow", client.JSON(func(_ context.Context, n int) error {
			begun <- n
			<-release
			done <- n
			return nil
		}), client.ConsumerConfig{Concurrency: slots})
		fast := make(chan int, 100)
		suite.Consume(t, conn, "fast", client.JSON(func(_ context.Context, n int) error {
			fast <- n
			return nil
		}), client.ConsumerConfig{})
		toSlow, toFast := suite.Publisher[int](t, conn, address.Queue("slow")), suite.Publisher[int](t, conn, address.Queue("fast"))
		for n := range slots {
			suite.Publish(t, toSlow, n)
		}
		for range slots {
			suite.Await(t, begun, "a slow handler")
		}
		// The broker, too, would end a connection that is silent for so long.
		for until, n := time.Now().Add(2*idle), 0; time.Now().Before(until); n++ {
			suite.Publish(t, toFast, n)
			require.Equal(t, n, suite.Await(t, fast, "a message of the other consumer"))
		}
		assert.Empty(t, log.With("connection lost; reconnecting"))
		silent := time.Now()
		for time.Since(silent) < 2*idle { // nothing is published or settled during this time
			require.True(t, conn.State().Connected)
			time.Sleep(idle / 10)
		}
		assert.Empty(t, log.With("connection lost; reconnecting"))
		assert.Zero(t, suite.Ready(t, conn, "fast"), "what was settled has reached the broker")

		wire.Cut()
		suite.Poll(t, "both consumers come back while the slow handlers go on", func() bool { return len(seen.Of("consume", client.EventUp)) == 4 })
		suite.Publish(t, toFast, -1)
		require.Equal(t, -1, suite.Await(t, fast, "a message after the cut"))
		assert.Empty(t, done)
		close(release)
		// Each comes twice: its first handler's result came too late.
		for range 2 * slots {
			suite.Await(t, done, "a slow handler's end")
		}
		suite.Poll(t, "the slow queue is empty", func() bool { return suite.Ready(t, conn, "slow") == 0 })
		// Events come on another goroutine, after the log.
		suite.Poll(t, "each late result is reported", func() bool { return len(seen.Of("consume", client.EventLate)) >= slots })
		assert.Len(t, seen.Of("consume", client.EventLate), slots)
	})
}
