// Package adapter is for consumers that receive by another AMQP client and run hopback's
// handlers and middleware. Package adapter/officialclient is one.
package adapter

import (
	"context"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/internal/refusal"
)

// Context returns the ctx of one consumer, for Prepare and for its handlers. By it middleware
// knows which consumer a delivery belongs to, and retry.With stops the consumer with an error
// if it can't work. The ctx ends with parent, or when a handler stops the consumer. Call end
// with the consumer's result: it ends the ctx, and returns the error that a handler stopped
// the consumer with, or else the result.
func Context(parent context.Context) (ctx context.Context, end func(result error) error) {
	return refusal.Context(parent)
}

// Call calls h with d, and then done with the result, once. Resolve it with client.Resolve. A
// handler that panics is reported as client's own consumer does: as a client.DeadLetter with
// client.ReasonPanicked, or as what retry.With makes of it.
//
// exits says that the handler ends its goroutine with runtime.Goexit, which nothing can stop:
// Call doesn't return. done must start another goroutine for what this one was to do next.
func Call(ctx context.Context, h client.Handler, d *client.Delivery, done func(err error, exits bool)) {
	if own, ok := client.DeliveryFrom(ctx); !ok || own != d {
		ctx = client.WithDelivery(ctx, d)
	}
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		var err error = client.DeadLetter{Reason: client.ReasonPanicked, Err: &client.PanicError{Value: value, Stack: stack}}
		if word := outcome.LastWord(ctx); value == nil && word != nil {
			err = word
		}
		done(err, value == nil)
	})
	err := h.Handle(ctx, d)
	returned = true
	done(err, false)
}
