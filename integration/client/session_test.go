package client_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// RabbitMQ closes a connection over its 65th session (B12): hopback opens a further one,
// and refuses what Config.MaxConnections leaves no room for.
func TestSessionTooManyIsErrSessionLimit(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t, func(c *client.Config) { c.MaxConnections = 2 })
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"})) // takes the management's session
		var open []*client.Publisher[suite.Order]
		for {
			p, err := client.NewPublisher[suite.Order](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
			if err != nil {
				require.ErrorIs(t, err, client.ErrSessionLimit)
				assert.True(t, client.SafeToRetry(err))
				break
			}
			open = append(open, p)
			require.Less(t, len(open), 200)
		}
		assert.Len(t, open, 120, "of 64 on each connection four are kept for the management")
		nothing := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		err := conn.Consume(t.Context(), "orders", nothing, client.ConsumerConfig{})
		require.ErrorIs(t, err, client.ErrSessionLimit)
		assert.NotErrorIs(t, err, client.ErrConnectionLost)
		assert.True(t, client.SafeToRetry(err))
		assert.ErrorContains(t, err, "MaxConnections", "it says what to do")
		for _, i := range []int{0, 59, 60, 119} {
			suite.Publish(t, open[i], suite.Order{ID: i})
		}
		require.NoError(t, open[0].Close(t.Context()))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		suite.Publish(t, p, suite.Order{ID: 199})
		assert.Equal(t, 2, conn.State().Connections)
		assert.Empty(t, log.All())
	})
}

// RabbitMQ 4.0 ends a session over an attach to something missing (B5), and doesn't
// answer a session that begins on its channel right then. Others who open and close
// sessions at the same time neither hang nor lose theirs.
func TestAttachingToWhatIsMissingHarmsNobodyElse(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const each, rounds = 3, 6
		conn, log := s.Connect(t)
		node := conn.Broker()
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		steady := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var got atomic.Int64
		suite.Consume(t, conn, "orders", client.JSON(func(context.Context, suite.Order) error { got.Add(1); return nil }), client.ConsumerConfig{})
		nothing := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })

		var mu sync.Mutex
		var took []time.Duration
		timed := func(what string, f func(ctx context.Context) error, want error) {
			ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
			defer cancel()
			began := time.Now()
			err := f(ctx)
			if want == nil {
				assert.NoError(t, err, what)
			} else {
				assert.ErrorIs(t, err, want, what)
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, time.Since(began))
		}
		var wg sync.WaitGroup
		for i := range each {
			wg.Go(func() {
				for range rounds {
					timed("consume from a missing queue", func(ctx context.Context) error {
						return conn.Consume(ctx, fmt.Sprintf("missing-%d", i), nothing, client.ConsumerConfig{})
					}, client.ErrNotFound)
					timed("publish to a missing exchange", func(ctx context.Context) error {
						_, err := client.NewPublisher[suite.Order](ctx, conn, address.Exchange("missing", ""), client.PublisherConfig{})
						return err
					}, client.ErrNotFound)
				}
			})
			wg.Go(func() {
				for n := range rounds {
					timed("open, use and close a publisher", func(ctx context.Context) error {
						p, err := client.NewPublisher[suite.Order](ctx, conn, address.Queue("orders"), client.PublisherConfig{})
						if err != nil {
							return err
						}
						if err := p.Publish(ctx, suite.Order{ID: n}); err != nil {
							return err
						}
						return p.Close(ctx)
					}, nil)
				}
			})
			wg.Go(func() {
				for range rounds {
					timed("consume and stop", func(ctx context.Context) error {
						ctx, stop := context.WithCancel(ctx)
						defer stop()
						return conn.Consume(ctx, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
							stop()
							return nil
						}), client.ConsumerConfig{})
					}, nil)
				}
			})
		}
		stop, fed := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(fed)
			for {
				select {
				case <-stop:
					return
				default:
					assert.NoError(t, steady.Publish(context.Background(), suite.Order{}))
				}
			}
		}()
		wg.Wait()
		close(stop)
		<-fed
		assert.Empty(t, log.With("lost"))
		assert.Equal(t, node, conn.Broker())
		assert.Positive(t, got.Load())
		suite.Report(t, s, "%d openings at the same time, each took %s", len(took), suite.Spread(took))
	})
}
