package consume_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/retry"
)

// A pause reaches workers that may read and write their queue, and read the exchange. One that may not doesn't start,
// because it would never notice a pause. Nobody can publish to the exchange. verify has nothing to say about it.
func TestAQueueIsPausedForItsWorkers(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		operator, _ := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyRepublish}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
		require.NoError(t, err)
		suite.Apply(t, operator, topology)
		_, err = client.NewPublisher[string](t.Context(), operator, address.Exchange("hopback.pauses", "orders"), client.PublisherConfig{})
		require.ErrorIs(t, err, client.ErrNotFound, "there is none before the first pause")
		all, err := pause.All(t.Context(), operator, s.API(t))
		require.NoError(t, err)
		assert.Empty(t, all)
		require.NoError(t, pause.Pause(t.Context(), operator, "orders", pause.PauseConfig{By: "ada", Why: "the bank is down", For: time.Hour}))

		changes := make(chan *pause.State, 10)
		var handled atomic.Int64
		h := pause.With(pause.Config{OnChange: func(p *pause.State) { changes <- p }})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			handled.Add(1)
			return nil
		}))
		if s.Newer() { // RabbitMQ 4.0 shows bindings to everybody
			blind, _ := suite.ConnectTo(t, s.User(t, "^$", "^$", "^orders$"))
			require.ErrorIs(t, blind.Consume(t.Context(), "orders", h, client.ConsumerConfig{}), client.ErrUnauthorized)
		}
		worker, _ := suite.ConnectTo(t, s.User(t, "^$", "^orders$", `^(orders|hopback\.pauses)$`))
		suite.Consume(t, worker, "orders", h, client.ConsumerConfig{})
		shown := suite.Await(t, changes, "the pause")
		require.NotNil(t, shown)
		assert.Equal(t, []string{"ada", "the bank is down"}, []string{shown.By, shown.Why})
		assert.Equal(t, time.Hour, shown.Until.Sub(shown.Since))
		all, err = pause.All(t.Context(), operator, s.API(t))
		require.NoError(t, err)
		assert.Equal(t, []pause.State{*shown}, all)
		p, err := client.NewPublisher[string](t.Context(), operator, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		for range 20 {
			require.NoError(t, p.Publish(t.Context(), "an order"))
		}
		p, err = client.NewPublisher[string](t.Context(), operator, address.Exchange("hopback.pauses", "orders"), client.PublisherConfig{})
		if err == nil {
			err = p.Publish(t.Context(), "an order")
		}
		require.Error(t, err, "the exchange is internal")
		v, err := suite.Verified(t.Context(), s.Sources(t, operator), topology)
		require.NoError(t, err)
		assert.Empty(t, v.Findings)

		require.NoError(t, pause.Pause(t.Context(), operator, "orders", pause.PauseConfig{Why: "longer"}))
		shown = suite.Await(t, changes, "the other pause")
		require.NotNil(t, shown)
		assert.Equal(t, "longer", shown.Why)
		assert.Zero(t, shown.Until)
		assert.Zero(t, handled.Load())
		require.NoError(t, pause.Resume(t.Context(), operator, "orders"))
		require.Nil(t, suite.Await(t, changes, "the end of the pause"))
		suite.Poll(t, "all are handled", func() bool { return handled.Load() == 20 })
	})
}
