package integration

import (
	"context"
	"errors"
	"sync/atomic"
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
		ended, again := make(chan error, 1), make(chan struct{})
		var calls atomic.Int64
		h := client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			if calls.Add(1) > 1 {
				close(again)
				return nil
			}
			<-ctx.Done()
			ended <- context.Cause(ctx)
			<-again
			return nil
		})
		cfg := client.ConsumerConfig{ConsumerTimeout: time.Second, Concurrency: 2}
		if !s.newer() {
			err := conn.Consume(t.Context(), "orders", h, cfg)
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.3 or later, and the broker is 4.0")
			return
		}
		publish(t, publisherOf(t, conn, address.Queue("orders")), "m")
		consume(t, conn, "orders", h, cfg)
		require.ErrorIs(t, await(t, ended, "its time is nearly over"), client.ErrConsumerTimeoutNear)
		await(t, again, "the broker takes it back")
	})
}

// A consumer of a queue with a single active consumer is stopped while its handler runs, which
// then fails. The next consumer gets that message before those that the first had only
// prefetched, and these without a failed delivery. RabbitMQ 4.0 would count one for each that
// goes back, so there the first consumer handles them while Grace lasts.
func TestADrainKeepsTheOrderForTheNextSingleActiveConsumer(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const messages = 20
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders", SingleActiveConsumer: true}))
		p := publisher[order](t, conn, address.Queue("orders"))
		for i := range messages {
			publish(t, p, order{ID: i})
		}
		began, fail := make(chan struct{}), make(chan struct{})
		handled := make(chan int, 2*messages)
		first, _ := s.connect(t)
		stop := consume(t, first, "orders", client.JSON(func(ctx context.Context, o order) error {
			if o.ID == 0 {
				close(began)
				<-client.Draining(ctx)
				<-fail
				return errors.New("the process stops")
			}
			handled <- o.ID
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: messages})
		await(t, began, "the first handler")
		poll(t, "the first consumer has all", func() bool { return ready(t, conn, "orders") == 0 })
		second, _ := s.connect(t)
		consume(t, second, "orders", client.JSON(func(ctx context.Context, o order) error {
			if d, _ := client.DeliveryFrom(ctx); o.ID > 0 {
				assert.Zero(t, d.DeliveryCount(), "%d", o.ID)
			}
			handled <- o.ID
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: messages})
		poll(t, "the second stands by", func() bool { c := second.Stats().Consumers; return len(c) == 1 && c[0].Up })

		stopped := make(chan error, 1)
		go func() { stopped <- stop() }()
		time.Sleep(100 * time.Millisecond) // what went back too early would be there by then
		close(fail)
		require.NoError(t, await(t, stopped, "the drain ends"))
		var want, got []int
		for i := range messages {
			want, got = append(want, i), append(got, await(t, handled, "a message"))
		}
		if !s.newer() {
			want = append(want[1:], 0) // the first consumer handles what it has
		}
		assert.Equal(t, want, got)
	})
}

// Where consumers share a queue, the others have at once what a consumer that stops has only
// prefetched: they don't wait for its handlers. Below RabbitMQ 4.3 its own handlers get it.
func TestADrainLeavesWhatItHasNotBegunToOthersAtOnce(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		if !s.newer() {
			return
		}
		const messages = 20
		conn, _ := s.connect(t)
		apply(t, conn, queueOf(declare.QuorumQueue{Name: "orders"}))
		p := publisherOf(t, conn, address.Queue("orders"))
		for range messages {
			publish(t, p, "m")
		}
		began, finish := make(chan struct{}, messages), make(chan struct{})
		first, _ := s.connect(t)
		stop := consume(t, first, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			began <- struct{}{}
			<-finish
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: messages})
		await(t, began, "the first handler")
		poll(t, "the first consumer has all", func() bool { return ready(t, conn, "orders") == 0 })
		got := make(chan string, messages)
		consume(t, conn, "orders", to(got, "second"), client.ConsumerConfig{})
		stopped := make(chan error, 1)
		go func() { stopped <- stop() }()
		for range messages - 1 {
			await(t, got, "what the first hasn't begun")
		}
		assert.Empty(t, stopped)
		close(finish)
		require.NoError(t, await(t, stopped, "the drain ends"))
	})
}
