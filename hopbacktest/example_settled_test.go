package hopbacktest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
)

// A test publishes a few orders, and waits until all of them are handled or dead-lettered,
// however long their delays are.
func ordersAreSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The deadline is later than the last retry. In a bubble, it takes no real time.
		ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
		defer cancel()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := hopback.Connect(ctx, broker.URL(), hopback.Config{Dial: broker.Dial})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		orders := &hopback.Queue[string]{Conn: conn, Name: "orders", Retry: hopback.Policy{
			MaxRetries: 2, Backoff: hopback.Delays(time.Minute, time.Hour),
		}}
		if err := orders.Declare(ctx); err != nil {
			t.Fatal(err)
		}
		working, stop := context.WithCancel(ctx)
		done := make(chan error)
		go func() {
			done <- orders.Consume(working, func(_ context.Context, order string) error {
				if order == "order 2" {
					return errors.New("the bank timed out")
				}
				return nil
			}, hopback.ConsumerConfig{})
		}()
		for _, order := range []string{"order 1", "order 2", "order 3"} {
			if err := orders.Publish(ctx, order); err != nil {
				t.Fatal(err)
			}
		}

		if err := broker.AwaitSettled(ctx); err != nil {
			t.Fatal(err)
		}

		if n := broker.Queue("orders.dead").Counts().Messages; n != 1 {
			t.Errorf("the number of dead letters is %d, want 1", n)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func ExampleBroker_AwaitSettled() {
	// In your project, this is a test: func TestOrdersAreSettled(t *testing.T).
	_ = ordersAreSettled
}

// A test sends the same message twice, to a handler that dedupe wraps.
func duplicatesAreDropped(t *testing.T) {
	charge := func() *client.Message {
		m := client.NewMessage([]byte(`{"id":"o-1"}`))
		m.Properties = &amqp.MessageProperties{MessageID: "charge-o-1"}
		return m
	}
	charged := 0
	handler := client.JSON(func(ctx context.Context, o order) error {
		if retry.Attempt(ctx) == 1 {
			return errors.New("the bank timed out")
		}
		charged++
		return nil
	})
	policy := retry.Policy{Backoff: retry.Delays(time.Minute)}
	result := hopbacktest.Run(t, policy, dedupe.With(dedupe.Config{})(handler), charge(), charge())
	result.Message(0).WantHandled()
	result.Message(1).WantHandled() // dedupe has acknowledged it, or it was the one that was charged
	if charged != 1 {
		t.Errorf("the customer was charged %d times", charged)
	}
}

func ExampleRun_duplicates() {
	// In your project, this is a test: func TestDuplicatesAreDropped(t *testing.T).
	_ = duplicatesAreDropped
}
