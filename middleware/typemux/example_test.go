package typemux_test

import (
	"context"
	"fmt"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/typemux"
)

// OrderPlaced and OrderCanceled are two types of message in one queue. Their publishers set the
// property subject.
type (
	OrderPlaced   struct{ ID int }
	OrderCanceled struct{ Why string }
)

// Each type has its handler. A message of any other type is dead-lettered.
func ExampleNew() {
	mux := typemux.New(typemux.Config{Handlers: map[string]client.Handler{
		"order.placed": client.JSON(func(_ context.Context, e OrderPlaced) error {
			fmt.Println("placed", e.ID)
			return nil
		}),
		"order.canceled": client.JSON(func(_ context.Context, e OrderCanceled) error {
			fmt.Println("canceled:", e.Why)
			return nil
		}),
	}})
	for subject, body := range map[string]string{
		"order.placed":   `{"ID": 17}`,
		"order.canceled": `{"Why": "too late"}`,
		"order.lost":     `{}`,
	} {
		message := client.NewMessage([]byte(body))
		message.Properties.Subject = &subject
		if err := mux.Handle(context.Background(), client.NewDelivery("orders", message)); err != nil {
			fmt.Println(err)
		}
	}
	// Unordered output:
	// placed 17
	// canceled: too late
	// dead-letter (unknown-type): no handler is registered for the type "order.lost"
}

// The type can be in an application property instead.
func ExampleProperty() {
	mux := typemux.New(typemux.Config{
		Type:     typemux.Property("type"),
		Handlers: map[string]client.Handler{"order.placed": client.JSON(func(context.Context, OrderPlaced) error { return nil })},
		Fallback: client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			fmt.Println("ignored", d.Property("type"))
			return nil
		}),
	})
	message := client.NewMessage([]byte(`{}`))
	message.ApplicationProperties = map[string]any{"type": "order.viewed"}
	fmt.Println(mux.Handle(context.Background(), client.NewDelivery("orders", message)))
	// Output:
	// ignored order.viewed
	// <nil>
}
