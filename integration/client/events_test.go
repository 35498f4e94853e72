package client_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

func TestObserveTellsWhatHappened(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, url := s.Through(t)
		seen := &suite.Events{}
		conn, _ := suite.ConnectTo(t, url, suite.Soon, func(c *client.Config) { c.OnEvent = seen.Observe })
		state := conn.State()
		assert.True(t, state.Connected)
		assert.False(t, state.Closed)
		assert.Equal(t, uint64(1), state.Generation)
		assert.Equal(t, s.FullVersion, state.Broker.Version)
		assert.NotContains(t, state.Endpoint, "guest:guest")

		queue := declare.QuorumQueue{Name: "q"}
		suite.Apply(t, conn, suite.QueueOf(queue))
		begun, finish := make(chan struct{}, 100), make(chan struct{})
		suite.Consume(t, conn, "q", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			begun <- struct{}{}
			<-finish
			return nil
		}), client.ConsumerConfig{Concurrency: 4})
		p := suite.PublisherOf(t, conn, address.Queue("q"))
		suite.Publish(t, p, "one")
		suite.Await(t, begun, "a delivery")

		// The connection is lost during a handler, and no new one is accepted for a while.
		wire.Refuse()
		wire.Cut()
		suite.Poll(t, "attempts fail", func() bool { return conn.State().Attempts >= 2 })
		state = conn.State()
		assert.False(t, state.Connected)
		require.ErrorIs(t, state.Err, client.ErrUnreachable)
		assert.Equal(t, client.Broker{}, state.Broker)
		require.NoError(t, wire.Admit())
		suite.Await(t, begun, "the delivery comes again")
		suite.Poll(t, "all are up again", func() bool {
			return len(seen.Of("consume", client.EventUp)) == 2 && len(seen.Of("publish", client.EventUp)) == 2
		})
		close(finish)
		suite.Poll(t, "the first handler's result comes too late", func() bool { return len(seen.Of("consume", client.EventLate)) == 1 })

		lost := seen.Of("connection", client.EventLost)
		require.Len(t, lost, 1)
		require.ErrorIs(t, lost[0].Err, client.ErrConnectionLost)
		assert.Equal(t, uint64(1), lost[0].Generation)
		up := seen.Of("connection", client.EventUp)
		require.Len(t, up, 2)
		assert.Equal(t, uint64(2), up[1].Generation)
		assert.GreaterOrEqual(t, up[1].Attempt, 3)
		assert.Positive(t, up[1].Down)
		assert.NotEmpty(t, up[1].Node)
		assert.GreaterOrEqual(t, len(seen.Of("connection", client.EventRefused)), 2)
		consumer := seen.Of("consume", client.EventLost)
		require.Len(t, consumer, 1)
		assert.Equal(t, 1, consumer[0].Unsettled)
		assert.Equal(t, "q", consumer[0].Target)
		require.Len(t, seen.Of("publish", client.EventLost), 1)

		// The queue is deleted, and declared again.
		_, err := declare.Delete(t.Context(), conn.Management(), suite.QueueOf(queue))
		require.NoError(t, err)
		suite.Poll(t, "the consumer is refused", func() bool {
			refused := seen.Of("consume", client.EventRefused)
			return len(refused) >= 2 && assert.ErrorIs(t, refused[1].Err, client.ErrNotFound)
		})
		suite.Apply(t, conn, suite.QueueOf(queue))
		suite.Poll(t, "the consumer is back", func() bool { return len(seen.Of("consume", client.EventUp)) == 3 })
		suite.Publish(t, p, "two")
		suite.Await(t, begun, "it works again")

		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		_ = conn.Close(ctx)
		assert.True(t, conn.State().Closed)
		assert.False(t, conn.State().Connected)
		suite.Poll(t, "the end is reported", func() bool { return len(seen.Of("connection", client.EventEnded)) == 1 })
		assert.Len(t, seen.Of("consume", client.EventEnded), 1)
		assert.Len(t, seen.Of("publish", client.EventEnded), 1)
	})
}

// A callback that never returns costs its events, and nothing else.
func TestObserverThatHangsHoldsNothingUp(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		wire, url := s.Through(t)
		hang := make(chan struct{})
		defer close(hang)
		conn, _ := suite.ConnectTo(t, url, suite.Soon, func(c *client.Config) { c.OnEvent = func(client.Event) { <-hang } })
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "q"}))
		got := make(chan string, 100)
		suite.Consume(t, conn, "q", client.JSON(func(_ context.Context, v string) error {
			got <- v
			return nil
		}), client.ConsumerConfig{})
		p := suite.Publisher[string](t, conn, address.Queue("q"))
		for n := range 5 {
			wire.Cut()
			suite.Poll(t, "reconnected", func() bool {
				st := conn.State()
				return st.Connected && st.Generation >= uint64(n)+2
			})
		}
		suite.Publish(t, p, "after all")
		suite.Await(t, got, "the message")
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		require.NoError(t, conn.Close(ctx))
		assert.Less(t, time.Since(start), suite.Patience)
	})
}
