package hopbacktest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/hopbacktest"
)

// A test starts a broker in a bubble of virtual time, publishes an order, and lets an hour
// pass. The handler fails the first time, so the order must have been handled twice.
func orderIsRetriedAfterAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// Start the broker.
		ctx := t.Context()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := hopback.Connect(ctx, broker.URL(), hopback.Config{Dial: broker.Dial})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())

		// Publish an order.
		orders := &hopback.Queue[string]{Conn: conn, Name: "orders", Retry: hopback.Policy{Backoff: hopback.Delays(time.Hour)}}
		if err := orders.Declare(ctx); err != nil {
			t.Fatal(err)
		}
		if err := orders.Publish(ctx, "order 1"); err != nil {
			t.Fatal(err)
		}

		// Start the worker.
		attempts := 0
		working, stop := context.WithCancel(ctx)
		done := make(chan error)
		go func() {
			done <- orders.Consume(working, func(ctx context.Context, order string) error {
				attempts++
				if hopback.Attempt(ctx) == 1 {
					return errors.New("the bank timed out")
				}
				return nil
			}, hopback.ConsumerConfig{})
		}()

		// Let an hour and a second pass. In the bubble, that takes no real time.
		time.Sleep(time.Hour + time.Second)

		// Stop the worker, and check what has happened.
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if attempts != 2 {
			t.Errorf("the order had %d attempts, want 2", attempts)
		}
		if n := broker.Queue("orders.dead").Counts().Messages; n != 0 {
			t.Errorf("the number of dead letters is %d, want 0", n)
		}
	})
}

func ExampleStart() {
	// In your project, this is a test: func TestOrderIsRetried(t *testing.T).
	_ = orderIsRetriedAfterAnHour
}
