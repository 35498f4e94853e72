package temporary_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/temporary"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var prices = declare.Topology{Exchanges: []declare.Exchange{{Name: "prices", Type: declare.Topic}}}

func Example() {
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

	// Each instance of the service does this, and has all prices.
	queue := temporary.Queue{
		Bindings: []declare.Binding{{Source: "prices", Key: "price.#"}},
		Declared: func(string) {
			go func() { // somebody publishes
				publisher, err := client.NewPublisher[int](context.Background(), conn, address.Exchange("prices", "price.tea"), client.PublisherConfig{})
				if err != nil {
					log.Fatal(err)
				}
				if err := publisher.Publish(context.Background(), 42); err != nil {
					log.Fatal(err)
				}
			}()
		},
	}
	update := client.JSON(func(_ context.Context, price int) error {
		fmt.Println("tea is at", price)
		stop()
		return nil
	})
	if err := temporary.Consume(ctx, conn, queue, update, client.ConsumerConfig{}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// tea is at 42
}

// A queue that was declared again while its binding failed is bound once that can be. Its
// consumer alone doesn't show that anything is missing.
func TestAQueueIsBoundAgainWhenItsExchangeIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close(context.Background())) }()
		_, err = declare.Apply(t.Context(), conn.Management(), prices)
		require.NoError(t, err)
		declared, lost, got, ended := make(chan string, 4), make(chan bool, 4), make(chan string, 4), make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		go func() {
			ended <- temporary.Consume(ctx, conn, temporary.Queue{
				Bindings: []declare.Binding{{Source: "prices", Key: "price.#"}},
				Declared: func(name string) { declared <- name },
				Lost:     func() { lost <- true },
			}, client.JSON(func(_ context.Context, s string) error {
				got <- s
				return nil
			}), client.ConsumerConfig{})
		}()
		name := <-declared
		synctest.Wait()

		_, err = declare.Delete(t.Context(), conn.Management(), prices)
		require.NoError(t, err)
		_, err = declare.Delete(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: name, DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		time.Sleep(time.Minute) // the consumer has its queue again by then
		assert.True(t, conn.Stats().Consumers[0].Up)
		assert.Empty(t, lost, "it isn't bound yet")

		_, err = declare.Apply(t.Context(), conn.Management(), prices)
		require.NoError(t, err)
		time.Sleep(5 * time.Second)
		assert.Len(t, lost, 1)
		publisher, err := client.NewPublisher[string](t.Context(), conn, address.Exchange("prices", "price.tea"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, publisher.Publish(t.Context(), "a"))
		assert.Equal(t, "a", <-got)
		stop()
		require.NoError(t, <-ended)
	})
}

// A queue that is gone is declared and bound again, and its user is told.
func TestAQueueThatIsGoneComesBack(t *testing.T) {
	for _, version := range []string{"4.0.5", "4.3.6"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				broker := hopbacktest.Start(t, hopbacktest.Config{Version: version})
				conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
				require.NoError(t, err)
				defer func() { require.NoError(t, conn.Close(context.Background())) }()
				_, err = declare.Apply(t.Context(), conn.Management(), prices)
				require.NoError(t, err)
				publisher, err := client.NewPublisher[string](t.Context(), conn, address.Exchange("prices", "price.tea"), client.PublisherConfig{})
				require.NoError(t, err)

				declared, lost, got, ended := make(chan string, 4), make(chan bool, 4), make(chan string, 4), make(chan error, 1)
				ctx, stop := context.WithCancel(t.Context())
				go func() {
					ended <- temporary.Consume(ctx, conn, temporary.Queue{
						Bindings: []declare.Binding{{Source: "prices", Key: "price.#"}},
						Declared: func(name string) { declared <- name },
						Lost:     func() { lost <- true },
					}, client.JSON(func(_ context.Context, s string) error {
						got <- s
						return nil
					}), client.ConsumerConfig{})
				}()
				name := <-declared
				assert.True(t, strings.HasPrefix(name, "temporary-"), name)
				require.NoError(t, publisher.Publish(t.Context(), "a"))
				assert.Equal(t, "a", <-got)
				synctest.Wait()

				_, err = declare.Delete(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: name, DeadLetter: declare.Drop()}}})
				require.NoError(t, err)
				assert.ErrorIs(t, publisher.Publish(t.Context(), "nobody has it"), client.ErrUnroutable)
				assert.Equal(t, name, <-declared)
				<-lost
				require.NoError(t, publisher.Publish(t.Context(), "b"))
				assert.Equal(t, "b", <-got)

				synctest.Wait()

				// The loss of connections loses nothing.
				for _, c := range broker.Connections() {
					c.Cut()
				}
				require.NoError(t, publisher.Publish(t.Context(), "c"))
				assert.Equal(t, "c", <-got)
				assert.Empty(t, lost)

				stop()
				require.NoError(t, <-ended)
				_, err = declare.Inspect(t.Context(), conn.Management(), name)
				assert.ErrorIs(t, err, declare.ErrMissing)
			})
		})
	}
}

func TestBadInputIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
		require.NoError(t, err)
		h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		for where, q := range map[string]temporary.Queue{
			"Prefix":          {Prefix: strings.Repeat("x", 240)},
			"Linger":          {Linger: time.Millisecond},
			"MaxLength":       {MaxLength: -1},
			"Bindings[0]":     {Bindings: []declare.Binding{{Source: "prices", Queue: "orders"}}},
			"Bindings source": {Bindings: []declare.Binding{{Source: "a\nb"}}},
		} {
			err := temporary.Consume(t.Context(), conn, q, h, client.ConsumerConfig{})
			_, ok := errors.AsType[*argument.Error](err)
			assert.True(t, ok, "%s: %v", where, err)
		}
		_, ok := errors.AsType[*argument.Error](temporary.Consume(t.Context(), nil, temporary.Queue{}, h, client.ConsumerConfig{}))
		assert.True(t, ok)
		_, ok = errors.AsType[*argument.Error](temporary.Consume(t.Context(), conn, temporary.Queue{}, nil, client.ConsumerConfig{}))
		assert.True(t, ok)
		err = temporary.Consume(t.Context(), conn, temporary.Queue{Bindings: []declare.Binding{{Source: "missing"}}}, h, client.ConsumerConfig{})
		assert.ErrorIs(t, err, declare.ErrMissing)
		require.NoError(t, conn.Close(context.Background()))
		assert.ErrorIs(t, temporary.Consume(t.Context(), conn, temporary.Queue{}, h, client.ConsumerConfig{}), client.ErrClosed)
	})
}
