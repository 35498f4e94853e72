// Package adapter lets consumers of other AMQP clients run hopback's handlers and middleware.
// Use it to write an adapter for another client. Package adapter/officialclient is one.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package adapter

import (
	"context"
	"log/slog"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/internal/refusal"
)

// Context returns the ctx of one consumer, for its Prepare and its handlers. With it, middleware
// knows which consumer a delivery belongs to, and retry.With can stop the consumer with an
// error. The ctx ends with parent, or when a handler stops the consumer.
//
// Call end with the consumer's result. It ends the ctx, and returns the error with which a
// handler stopped the consumer, or else the result.
func Context(parent context.Context) (ctx context.Context, end func(result error) error) {
	return refusal.Context(parent)
}

// Logger returns a logger for one consumer that limits lines about single messages, as
// client's own consumer does: those with the attribute message_id. It writes the first of each kind,
// and then one line every 10 seconds with how many more there were. Use it for client.Start.Log
// and for the adapter's own lines. Call flush when the consumer has ended: it writes the last
// counts.
func Logger(log *slog.Logger) (limited *slog.Logger, flush func()) {
	lines := loglines.NewRepeats(log.Handler())
	return slog.New(lines), lines.Flush
}

// Call calls h with d, and then calls done once with the handler's error. Pass that error to
// client.Resolve. A panic is reported as client's own consumer does: as a client.DeadLetter with
// client.ReasonPanicked, or as retry.With decides.
//
// If exits is true, the handler ends its goroutine with runtime.Goexit, which nothing can stop,
// and Call doesn't return. Then done must start another goroutine for the remaining work of this
// one.
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
