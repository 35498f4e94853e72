package hopbacktest_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

type order struct {
	ID string `json:"id"`
}

// Start a broker outside of a test. In a test, use Start, which also closes the broker.
func ExampleNew() {
	broker, err := hopbacktest.New(hopbacktest.Config{Version: "4.0.5"})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()

	ctx := context.Background()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)
	fmt.Println(conn.Broker().Version)
	// Output: 4.0.5
}

// Test code that publishes without a broker: it accepts a Publisher, and the test passes a
// Recorder.
func ExampleRecorder() {
	buy := func(ctx context.Context, orders hopbacktest.Publisher[order], id string) error {
		return orders.Publish(ctx, order{ID: id})
	}

	recorder := &hopbacktest.Recorder[order]{Fail: func(o order) error {
		if o.ID == "o-2" {
			return client.ErrUnroutable
		}
		return nil
	}}
	fmt.Println(buy(context.Background(), recorder, "o-1"))
	fmt.Println(errors.Is(buy(context.Background(), recorder, "o-2"), client.ErrUnroutable))
	fmt.Println(recorder.Values())
	// Output:
	// <nil>
	// true
	// [{o-1}]
}
