// Package adapter is for consumers that receive by another AMQP client and run hopback's
// handlers and middleware. Package adapter/officialclient is one.
package adapter

import (
	"context"

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
