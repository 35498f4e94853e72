package consume_test

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
	"github.com/hopback/hopback/integration/internal/suite"
)

// to sends its name for each message.
func to(c chan<- string, name string) client.Handler {
	return client.HandlerFunc(func(context.Context, *client.Delivery) error {
		c <- name
		return nil
	})
}

func TestTheConsumerOfTheHighestPriorityGetsAllThatItCanTake(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		got := make(chan string, 100)
		suite.Consume(t, conn, "orders", to(got, "plain"), client.ConsumerConfig{Prefetch: 100})
		suite.Consume(t, conn, "orders", to(got, "low"), client.ConsumerConfig{Priority: -1, Prefetch: 100})
		stop := suite.Consume(t, conn, "orders", to(got, "high"), client.ConsumerConfig{Priority: 10, Prefetch: 100})
		suite.AwaitConsumers(t, conn, "orders", 3)
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		for _, want := range []string{"high", "plain"} {
			// A link begins with one credit.
			inARow := 0
			suite.Poll(t, want+" has credit", func() bool {
				suite.Publish(t, p, "m")
				if inARow++; suite.Await(t, got, "a message") != want {
					inARow = 0
				}
				return inARow == 3
			})
			for range 20 { // one at a time: it always has credit
				suite.Publish(t, p, "m")
				assert.Equal(t, want, suite.Await(t, got, "a message"))
			}
			if want == "high" {
				require.NoError(t, stop())
				suite.AwaitConsumers(t, conn, "orders", 2)
			}
		}
	})
}

func TestASingleActiveConsumerIsToldThatItIsActive(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", SingleActiveConsumer: true}))
		notified := make(chan string, 10)
		notify := func(name string) func(bool) {
			return func(active bool) {
				if active {
					notified <- name + " active"
				} else {
					notified <- name + " not active"
				}
			}
		}
		got := make(chan string, 10)
		if !s.Newer() {
			err := conn.Consume(t.Context(), "orders", to(got, "first"), client.ConsumerConfig{OnActive: notify("first")})
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.3 or later, and the broker is 4.0")
			return
		}
		stop := suite.Consume(t, conn, "orders", to(got, "first"), client.ConsumerConfig{OnActive: notify("first")})
		assert.Equal(t, "first active", suite.Await(t, notified, "the first is notified"))
		second := suite.Consume(t, conn, "orders", to(got, "second"), client.ConsumerConfig{OnActive: notify("second")})
		standsBy := func() bool { return len(conn.Stats().Consumers) == 2 && conn.Stats().Consumers[1].Up }
		suite.Poll(t, "the second stands by", standsBy)
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		suite.Publish(t, p, "m")
		assert.Equal(t, "first", suite.Await(t, got, "a message"))
		require.NoError(t, stop())
		assert.ElementsMatch(t, []string{"first not active", "second active"}, []string{suite.Await(t, notified, "a change"), suite.Await(t, notified, "a change")})
		suite.Publish(t, p, "m")
		assert.Equal(t, "second", suite.Await(t, got, "a message"))
		require.NoError(t, second())
		assert.Equal(t, "second not active", suite.Await(t, notified, "a change"))
	})
}

func TestAConsumerHasATimeoutOfItsOwn(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
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
		if !s.Newer() {
			err := conn.Consume(t.Context(), "orders", h, cfg)
			require.ErrorAs(t, err, new(*argument.Error))
			assert.ErrorContains(t, err, "needs RabbitMQ 4.3 or later, and the broker is 4.0")
			return
		}
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "m")
		suite.Consume(t, conn, "orders", h, cfg)
		require.ErrorIs(t, suite.Await(t, ended, "its time is nearly over"), client.ErrConsumerTimeoutNear)
		suite.Await(t, again, "the broker takes it back")
	})
}

// A consumer of a queue with a single active consumer is stopped while its handler runs, which
// then fails. The next consumer gets that message before those that the first had only
// prefetched, and these without a failed delivery. RabbitMQ 4.0 would count one for each that
// goes back, so there the first consumer handles them while Grace lasts.
func TestADrainKeepsTheOrderForTheNextSingleActiveConsumer(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages = 20
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", SingleActiveConsumer: true}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range messages {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		began, fail := make(chan struct{}), make(chan struct{})
		handled := make(chan int, 2*messages)
		first, _ := s.Connect(t)
		stop := suite.Consume(t, first, "orders", client.JSON(func(ctx context.Context, o suite.Order) error {
			if o.ID == 0 {
				close(began)
				<-client.Draining(ctx)
				<-fail
				return errors.New("the process stops")
			}
			handled <- o.ID
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: messages})
		suite.Await(t, began, "the first handler")
		suite.Poll(t, "the first consumer has all", func() bool { return suite.Ready(t, conn, "orders") == 0 })
		second, _ := s.Connect(t)
		suite.Consume(t, second, "orders", client.JSON(func(ctx context.Context, o suite.Order) error {
			if d, _ := client.DeliveryFrom(ctx); o.ID > 0 {
				assert.Zero(t, d.DeliveryCount(), "%d", o.ID)
			}
			handled <- o.ID
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: messages})
		suite.Poll(t, "the second stands by", func() bool { c := second.Stats().Consumers; return len(c) == 1 && c[0].Up })

		stopped := make(chan error, 1)
		go func() { stopped <- stop() }()
		time.Sleep(100 * time.Millisecond) // what went back too early would be there by then
		close(fail)
		require.NoError(t, suite.Await(t, stopped, "the drain ends"))
		var want, got []int
		for i := range messages {
			want, got = append(want, i), append(got, suite.Await(t, handled, "a message"))
		}
		if !s.Newer() {
			want = append(want[1:], 0) // the first consumer handles what it has
		}
		assert.Equal(t, want, got)
	})
}

// Where consumers share a queue, the others have at once what a consumer that stops has only
// prefetched: they don't wait for its handlers. Below RabbitMQ 4.3 its own handlers get it.
func TestADrainLeavesWhatItHasNotBegunToOthersAtOnce(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		const messages = 20
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		p := suite.PublisherOf(t, conn, address.Queue("orders"))
		for range messages {
			suite.Publish(t, p, "m")
		}
		began, finish := make(chan struct{}, messages), make(chan struct{})
		first, _ := s.Connect(t)
		stop := suite.Consume(t, first, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			began <- struct{}{}
			<-finish
			return nil
		}), client.ConsumerConfig{Concurrency: 1, Prefetch: messages})
		suite.Await(t, began, "the first handler")
		suite.Poll(t, "the first consumer has all", func() bool { return suite.Ready(t, conn, "orders") == 0 })
		got := make(chan string, messages)
		suite.Consume(t, conn, "orders", to(got, "second"), client.ConsumerConfig{})
		stopped := make(chan error, 1)
		go func() { stopped <- stop() }()
		for range messages - 1 {
			suite.Await(t, got, "what the first hasn't begun")
		}
		assert.Empty(t, stopped)
		close(finish)
		require.NoError(t, suite.Await(t, stopped, "the drain ends"))
	})
}
