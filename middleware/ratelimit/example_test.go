package ratelimit_test

import (
	"context"
	"fmt"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/ratelimit"
)

// Three calls at ten a second take a fifth of a second.
func ExampleWith() {
	limit := ratelimit.With(ratelimit.Config{PerSecond: 10})
	h := limit(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		fmt.Println("call", string(d.Message().GetData()))
		return nil
	}))

	began := time.Now()
	for _, body := range []string{"1", "2", "3"} {
		_ = h.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage([]byte(body))))
	}
	fmt.Println(time.Since(began) >= 200*time.Millisecond)
	// Output:
	// call 1
	// call 2
	// call 3
	// true
}

// A limit for each tenant, whose name is in an application property.
func ExampleConfig_key() {
	limit := ratelimit.With(ratelimit.Config{
		PerSecond: 5,
		Burst:     10,
		Key: func(d *client.Delivery) (string, bool) {
			tenant, ok := d.Property("tenant").(string)
			return tenant, ok
		},
	})
	_ = limit
}
