package rpc_test

import (
	"context"
	"crypto/rand"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// A queue of the consumer's own outlives its connection, and comes back by OnGone when it is gone.
func TestATemporaryQueueComesBack(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Exchanges: []declare.Exchange{{Name: "prices", Type: declare.ExchangeTopic}}})
		publisher, err := client.NewPublisher[string](t.Context(), conn, address.Exchange("prices", "price.tea"), client.PublisherConfig{})
		require.NoError(t, err)
		through, url := s.Through(t)
		own, err := client.Connect(t.Context(), url, client.Config{Logger: slog.New(slog.DiscardHandler), Reconnect: client.ReconnectBackoff{Max: 100 * time.Millisecond}})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, own.Close(context.Background())) })

		lost, got, ended := make(chan bool, 4), make(chan string, 4), make(chan error, 1)
		name := "prices-" + rand.Text()
		mine := declare.Topology{
			Queues:   []declare.Queue{declare.ClassicQueue{Name: name, Expires: 5 * time.Minute, DeadLetter: declare.Drop()}},
			Bindings: []declare.Binding{{Source: "prices", Key: "price.#", Queue: name}},
		}
		suite.Apply(t, own, mine)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go func() {
			ended <- own.Consume(ctx, name, client.JSON(func(_ context.Context, s string) error {
				got <- s
				return nil
			}), client.ConsumerConfig{OnGone: func(ctx context.Context) error {
				_, err := declare.Apply(ctx, own.Management(), mine)
				if err == nil {
					lost <- true
				}
				return err
			}})
		}()
		require.NoError(t, publisher.Publish(t.Context(), "a"))
		require.Equal(t, "a", <-got)
		through.Cut()
		require.NoError(t, publisher.Publish(t.Context(), "b"))
		for next := ""; next != "b"; next = <-got { // "a" may come twice
		}
		require.Empty(t, lost)

		_, err = declare.DeleteQueue(t.Context(), conn.Management(), name)
		require.NoError(t, err)
		<-lost
		require.NoError(t, publisher.Publish(t.Context(), "c"))
		for next := ""; next != "c"; next = <-got {
		}
		stop()
		require.NoError(t, <-ended)
	})
}
