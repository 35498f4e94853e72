package client_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

var prices = declare.Topology{Exchanges: []declare.Exchange{{Name: "prices", Type: declare.ExchangeTopic}}}

// own is a queue of the consumer's own, with all prices.
func own(name string) declare.Topology {
	return declare.Topology{
		Queues:   []declare.Queue{declare.ClassicQueue{Name: name, Expires: 5 * time.Minute, DeadLetter: declare.Drop()}},
		Bindings: []declare.Binding{{Source: "prices", Key: "price.#", Queue: name}},
	}
}

// Each instance of a service has its own queue, with all prices. The queue outlives a
// reconnect, since it expires only after five minutes without a consumer. Where it has gone
// after all, such as with its node, OnGone declares it again.
func ExampleConsumerConfig_temporaryQueue() {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx, stop := context.WithCancel(context.Background())
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := declare.Apply(ctx, conn.Management(), prices); err != nil {
		log.Fatal(err)
	}

	name := "prices-" + rand.Text()
	mine := declare.Topology{
		Queues:   []declare.Queue{declare.ClassicQueue{Name: name, Expires: 5 * time.Minute, DeadLetter: declare.Drop()}},
		Bindings: []declare.Binding{{Source: "prices", Key: "price.#", Queue: name}},
	}
	again := func(ctx context.Context) error {
		_, err := declare.Apply(ctx, conn.Management(), mine)
		return err
	}
	if err := again(ctx); err != nil {
		log.Fatal(err)
	}
	publisher, err := client.NewPublisher[int](ctx, conn, address.Exchange("prices", "price.tea"), client.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := publisher.Publish(ctx, 42); err != nil {
		log.Fatal(err)
	}
	update := client.JSON(func(_ context.Context, price int) error {
		fmt.Println("tea is at", price)
		stop()
		return nil
	})
	if err := conn.Consume(ctx, name, update, client.ConsumerConfig{OnGone: again}); err != nil {
		log.Fatal(err)
	}
	if _, err := declare.DeleteQueue(context.Background(), conn.Management(), name); err != nil {
		log.Fatal(err)
	}
	// Output:
	// tea is at 42
}

// pricesOf consumes prices from its own queue, which OnGone declares again.
type pricesOf struct {
	conn   *client.Conn
	name   string
	tried  atomic.Int64 // calls of OnGone
	lost   chan bool
	got    chan string
	ended  chan error
	failed func() error // of OnGone; nil: never
}

func consumePrices(t *testing.T, ctx context.Context, conn *client.Conn) *pricesOf {
	p := &pricesOf{conn: conn, name: "prices-" + rand.Text(), lost: make(chan bool, 4), got: make(chan string, 4), ended: make(chan error, 1)}
	for _, topology := range []declare.Topology{prices, own(p.name)} {
		_, err := declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
	}
	go func() {
		p.ended <- conn.Consume(ctx, p.name, client.JSON(func(_ context.Context, s string) error {
			p.got <- s
			return nil
		}), client.ConsumerConfig{OnGone: p.again})
	}()
	return p
}

func (p *pricesOf) again(ctx context.Context) error {
	p.tried.Add(1)
	if p.failed != nil {
		if err := p.failed(); err != nil {
			return err
		}
	}
	_, err := declare.Apply(ctx, p.conn.Management(), own(p.name))
	if err == nil {
		p.lost <- true
	}
	return err
}

func (p *pricesOf) delete(t *testing.T) {
	_, err := declare.DeleteQueue(t.Context(), p.conn.Management(), p.name)
	require.NoError(t, err)
}

func pricePublisher(t *testing.T, conn *client.Conn) *client.Publisher[string] {
	publisher, err := client.NewPublisher[string](t.Context(), conn, address.Exchange("prices", "price.tea"), client.PublisherConfig{})
	require.NoError(t, err)
	return publisher
}

func connectTo(t *testing.T, broker *hopbacktest.Broker) *client.Conn {
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
	require.NoError(t, err)
	return conn
}

// A queue is declared again while its binding fails: its consumer has it only once it is bound.
func TestAQueueIsBoundAgainWhenItsExchangeIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn := connectTo(t, broker)
		defer func() { require.NoError(t, conn.Close(context.Background())) }()
		ctx, stop := context.WithCancel(t.Context())
		p := consumePrices(t, ctx, conn)
		synctest.Wait()

		_, err := declare.Delete(t.Context(), conn.Management(), prices)
		require.NoError(t, err)
		p.delete(t)
		time.Sleep(time.Minute)
		assert.Empty(t, p.lost, "it isn't bound yet")
		stats := conn.Stats().Consumers[0]
		assert.False(t, stats.Up)
		assert.ErrorIs(t, stats.Err, client.ErrNotFound)
		assert.ErrorIs(t, stats.Err, declare.ErrNotFound, "what OnGone has returned")

		_, err = declare.Apply(t.Context(), conn.Management(), prices)
		require.NoError(t, err)
		time.Sleep(time.Minute)
		assert.Len(t, p.lost, 1)
		require.NoError(t, pricePublisher(t, conn).Publish(t.Context(), "a"))
		assert.Equal(t, "a", <-p.got)
		stop()
		require.NoError(t, <-p.ended)
	})
}

// A queue that is gone is declared and bound again by OnGone.
func TestAQueueThatIsGoneComesBack(t *testing.T) {
	for _, version := range []string{"4.0.5", "4.3.6"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				broker := hopbacktest.Start(t, hopbacktest.Config{Version: version})
				conn := connectTo(t, broker)
				defer func() { require.NoError(t, conn.Close(context.Background())) }()
				ctx, stop := context.WithCancel(t.Context())
				p := consumePrices(t, ctx, conn)
				publisher := pricePublisher(t, conn)
				require.NoError(t, publisher.Publish(t.Context(), "a"))
				assert.Equal(t, "a", <-p.got)
				synctest.Wait()

				p.delete(t)
				assert.ErrorIs(t, publisher.Publish(t.Context(), "nobody has it"), client.ErrUnroutable)
				<-p.lost
				require.NoError(t, publisher.Publish(t.Context(), "b"))
				assert.Equal(t, "b", <-p.got)
				synctest.Wait()

				// The loss of connections loses nothing.
				for _, c := range broker.Connections() {
					c.Cut()
				}
				require.NoError(t, publisher.Publish(t.Context(), "c"))
				assert.Equal(t, "c", <-p.got)
				assert.Empty(t, p.lost)
				assert.EqualValues(t, 1, p.tried.Load())

				stop()
				require.NoError(t, <-p.ended)
			})
		})
	}
}

// An OnGone that fails or panics is called again, and Consume ends while it fails.
func TestOnGoneThatFailsIsCalledAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn := connectTo(t, broker)
		defer func() { require.NoError(t, conn.Close(context.Background())) }()
		ctx, stop := context.WithCancel(t.Context())
		p := consumePrices(t, ctx, conn)
		synctest.Wait()
		p.failed = func() error {
			switch p.tried.Load() {
			case 1:
				panic("a bug")
			case 2:
				return errors.New("not yet")
			}
			return nil
		}
		p.delete(t)
		<-p.lost
		assert.EqualValues(t, 3, p.tried.Load())
		require.NoError(t, pricePublisher(t, conn).Publish(t.Context(), "a"))
		assert.Equal(t, "a", <-p.got)

		p.failed = func() error { return errors.New("never") }
		p.delete(t)
		time.Sleep(time.Minute)
		assert.Greater(t, p.tried.Load(), int64(5))
		assert.ErrorIs(t, conn.Stats().Consumers[0].Err, client.ErrNotFound)
		stop()
		require.NoError(t, <-p.ended)
	})
}

// A queue that has never been there is an error of Consume, as without OnGone.
func TestOnGoneIsNotCalledBeforeThereWasALink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn := connectTo(t, broker)
		defer func() { require.NoError(t, conn.Close(context.Background())) }()
		h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		err := conn.Consume(t.Context(), "missing", h, client.ConsumerConfig{OnGone: func(context.Context) error {
			t.Error("called")
			return nil
		}})
		assert.ErrorIs(t, err, client.ErrNotFound)
	})
}
