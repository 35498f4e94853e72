package ordered_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/ordered"
)

// A failure is tried again in place, so that it keeps its turn.
func ExampleWith() {
	inTurn := ordered.With(ordered.Config{Attempts: 3, Pause: time.Millisecond})
	calls := 0
	h := inTurn(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		if calls++; calls < 3 {
			return errors.New("bank timed out")
		}
		return nil
	}))

	message := client.NewMessage([]byte(`{"id": "o-1"}`))
	message.Properties.GroupID = new("customer-17")
	fmt.Println(h.Handle(context.Background(), client.NewDelivery("orders", message)))
	fmt.Println(calls, "calls")
	// Output:
	// <nil>
	// 3 calls
}

// Messages of one tenant, whose name is in an application property.
func ExampleConfig_key() {
	_ = ordered.With(ordered.Config{
		Key: func(d *client.Delivery) (string, bool) {
			tenant, ok := d.Property("tenant").(string)
			return tenant, ok
		},
	})
}
