package integration

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/temporary"
)

// A temporary queue outlives its connection, comes back when it is gone, and goes with its
// consumer.
func TestATemporaryQueueComesBack(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, declare.Topology{Exchanges: []declare.Exchange{{Name: "prices", Type: declare.Topic}}})
		publisher, err := client.NewPublisher[string](t.Context(), conn, address.Exchange("prices", "price.tea"), client.PublisherConfig{})
		require.NoError(t, err)
		through, url := s.through(t)
		own, err := client.Connect(t.Context(), url, client.Config{Logger: slog.New(slog.DiscardHandler), Reconnect: client.ReconnectBackoff{Max: 100 * time.Millisecond}})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, own.Close(context.Background())) })

		declared, lost, got, ended := make(chan string, 4), make(chan bool, 4), make(chan string, 4), make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go func() {
			ended <- temporary.Consume(ctx, own, temporary.Queue{
				Bindings: []declare.Binding{{Source: "prices", Key: "price.#"}},
				Declared: func(name string) { declared <- name },
				Lost:     func() { lost <- true },
				Logger:   slog.New(slog.DiscardHandler),
			}, client.JSON(func(_ context.Context, s string) error {
				got <- s
				return nil
			}), client.ConsumerConfig{})
		}()
		name := <-declared
		require.NoError(t, publisher.Publish(t.Context(), "a"))
		require.Equal(t, "a", <-got)
		through.Cut()
		require.NoError(t, publisher.Publish(t.Context(), "b"))
		for next := ""; next != "b"; next = <-got { // "a" may come twice
		}
		require.Empty(t, lost)

		_, err = declare.Delete(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: name, DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		<-lost
		require.Equal(t, name, <-declared)
		require.NoError(t, publisher.Publish(t.Context(), "c"))
		for next := ""; next != "c"; next = <-got {
		}
		stop()
		require.NoError(t, <-ended)
		_, err = declare.Inspect(t.Context(), conn.Management(), name)
		require.ErrorIs(t, err, declare.ErrMissing)
	})
}
