package integration

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
)

// to sends its name for each message.
func to(c chan<- string, name string) client.Handler {
	return client.HandlerFunc(func(context.Context, *client.Delivery) error {
		c <- name
		return nil
	})
}

func TestTheConsumerOfTheHighestPriorityGetsAllThatItCanTake(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		got := make(chan string, 100)
		consume(t, conn, "orders", to(got, "plain"), client.ConsumerConfig{Prefetch: 100})
		consume(t, conn, "orders", to(got, "low"), client.ConsumerConfig{Priority: -1, Prefetch: 100})
		stop := consume(t, conn, "orders", to(got, "high"), client.ConsumerConfig{Priority: 10, Prefetch: 100})
		awaitConsumers(t, conn, "orders", 3)
		p := publisherOf(t, conn, address.Queue("orders"))
		for _, want := range []string{"high", "plain"} {
			// A link begins with one credit.
			inARow := 0
			poll(t, want+" has credit", func() bool {
				publish(t, p, "m")
				if inARow++; await(t, got, "a message") != want {
					inARow = 0
				}
				return inARow == 3
			})
			for range 20 { // one at a time: it always has credit
				publish(t, p, "m")
				assert.Equal(t, want, await(t, got, "a message"))
			}
			if want == "high" {
				require.NoError(t, stop())
				awaitConsumers(t, conn, "orders", 2)
			}
		}
	})
}

func TestASingleActiveConsumerIsToldThatItIsActive(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders", SingleActiveConsumer: true}))
		told := make(chan string, 10)
		tell := func(name string) func(bool) {
			return func(active bool) {
				if active {
					told <- name + " active"
				} else {
					told <- name + " not active"
				}
			}
		}
		got := make(chan string, 10)
		if !s.newer() {
			err := conn.Consume(t.Context(), "orders", to(got, "first"), client.ConsumerConfig{OnActive: tell("first")})
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.3 or later, and the broker is 4.0")
			return
		}
		stop := consume(t, conn, "orders", to(got, "first"), client.ConsumerConfig{OnActive: tell("first")})
		assert.Equal(t, "first active", await(t, told, "the first is told"))
		second := consume(t, conn, "orders", to(got, "second"), client.ConsumerConfig{OnActive: tell("second")})
		standsBy := func() bool { return len(conn.Stats().Consumers) == 2 && conn.Stats().Consumers[1].Up }
		poll(t, "the second stands by", standsBy)
		p := publisherOf(t, conn, address.Queue("orders"))
		publish(t, p, "m")
		assert.Equal(t, "first", await(t, got, "a message"))
		require.NoError(t, stop())
		assert.ElementsMatch(t, []string{"first not active", "second active"}, []string{await(t, told, "a change"), await(t, told, "a change")})
		publish(t, p, "m")
		assert.Equal(t, "second", await(t, got, "a message"))
		require.NoError(t, second())
		assert.Equal(t, "second not active", await(t, told, "a change"))
	})
}

func TestAConsumerHasATimeoutOfItsOwn(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		ended := make(chan error, 10)
		first := true
		h := client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			if first {
				first = false
				<-ctx.Done()
			}
			ended <- context.Cause(ctx)
			return nil
		})
		cfg := client.ConsumerConfig{ConsumerTimeout: time.Second}
		if !s.newer() {
			err := conn.Consume(t.Context(), "orders", h, cfg)
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.3 or later, and the broker is 4.0")
			return
		}
		publish(t, publisherOf(t, conn, address.Queue("orders")), "m")
		consume(t, conn, "orders", h, cfg)
		require.ErrorIs(t, await(t, ended, "the broker takes it back"), client.ErrConsumerTimeout)
		require.NoError(t, await(t, ended, "it comes again"))
	})
}
