// Package instrument defines the interface for code that observes what a client.Conn sends and
// handles, such as package hopbackotel, and the counts of client.Conn.Stats.
//
// Use package hopbackotel for OpenTelemetry. Implement [Instrument] only for other systems.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package instrument

import (
	"context"

	"github.com/hopback/hopback/address"
)

// Instrument observes what a Conn sends and handles, for traces and metrics. Set it as
// client.Config.Instrument. Package hopbackotel has one for OpenTelemetry.
//
//   - Its methods, and those of the values they return, are called for every message, by the
//     goroutines that process it. They must be fast, must not block, must not call the Conn, and
//     must not end their goroutine (runtime.Goexit).
//   - They are called concurrently for different messages.
//   - A panic is logged and has no effect on the message.
//   - Embed [None] in your implementation, because later versions may add methods.
type Instrument interface {
	// Connect is called once, by client.Connect, when the Conn is created. stats returns the
	// Conn's counts at any time and from any goroutine, but must not be called during a call of
	// the Instrument. closed, unless it is nil, is called when the Conn is closed.
	Connect(stats func() Stats) (closed func())
	// Publish is called for a message of Publisher.Publish before it is checked and sent.
	// ctx is the caller's. The result may be nil.
	Publish(ctx context.Context, s Sending) Publication
	// PublishAll is called for each call of Publisher.PublishAll, with its n messages. to is the
	// publisher's address, or the zero Address if each message names its own. The result may be
	// nil.
	PublishAll(ctx context.Context, to address.Address, n int) Batch
	// Handle is called before a delivery's handler. The handler gets the returned ctx, which
	// must derive from ctx; nil means ctx. The Handling may be nil.
	Handle(ctx context.Context, d Delivery) (context.Context, Handling)
	// SettledRange is called for each settlement frame that is written, with the number of
	// deliveries that it settles. One frame settles consecutive deliveries with the same
	// outcome.
	SettledRange(n int)
}

// None is an [Instrument] that does nothing. Embed it in your own, so that you can leave methods
// out.
type None struct{}

// Connect does nothing.
func (None) Connect(func() Stats) func() { return nil }

// Publish does nothing.
func (None) Publish(context.Context, Sending) Publication { return nil }

// PublishAll does nothing.
func (None) PublishAll(context.Context, address.Address, int) Batch { return nil }

// Handle does nothing.
func (None) Handle(ctx context.Context, _ Delivery) (context.Context, Handling) {
	return ctx, nil
}

// SettledRange does nothing.
func (None) SettledRange(int) {}
