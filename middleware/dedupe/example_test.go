package dedupe_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/dedupe"
)

func ExampleWith() {
	calls := 0
	h := dedupe.With(dedupe.Config{})(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		calls++
		fmt.Println("call", calls)
		if calls == 1 {
			return errors.New("bank timed out")
		}
		return nil
	}))

	message := client.NewMessage([]byte(`{"id": "o-1"}`))
	message.Properties.MessageID = "o-1"
	for range 3 {
		fmt.Println(h.Handle(context.Background(), client.NewDelivery("orders", message)))
	}
	// Output:
	// call 1
	// bank timed out
	// call 2
	// <nil>
	// <nil>
}

// Orders have a number of their own, which is known even to publishers that send
// the same order under another message-id.
func ExampleConfig_key() {
	once := dedupe.With(dedupe.Config{
		Key: func(d *client.Delivery) (string, bool) {
			number, ok := d.Property("order-number").(string)
			return d.Queue() + "/" + number, ok
		},
		OnDuplicate: func(d *client.Delivery) { fmt.Println("duplicate of", d.Property("order-number")) },
	})
	h := once(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error { return nil }))
	for range 2 {
		message := client.NewMessage(nil)
		message.ApplicationProperties = map[string]any{"order-number": "17"}
		fmt.Println(h.Handle(context.Background(), client.NewDelivery("orders", message)))
	}
	// Output:
	// <nil>
	// duplicate of 17
	// <nil>
}
