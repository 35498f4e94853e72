// Package instrument is for code that follows what a client.Conn sends and handles, such as
// package hopbackotel, and has the numbers of client.Conn.Stats.
package instrument

import (
	"context"

	"github.com/hopback/hopback/address"
)

// Instrument follows what a Conn sends and handles, for traces and metrics. Package
// hopbackotel has one for OpenTelemetry. Set it as client.Config.Instrument.
//
// Its methods, and those of what they return, are called for every message, by the
// goroutines that carry it. They must be quick, must not block, must not call the Conn
// and must not end their goroutine (runtime.Goexit). They are called concurrently for
// different messages. A panic is logged and has no effect on the message.
//
// An Instrument should embed None. Later versions may add methods.
type Instrument interface {
	// Connect is called once, by client.Connect, when the Conn is made. stats
	// returns its numbers at any time, and may be called from any goroutine, but not during
	// a call of the Instrument. The result, unless it is nil, is called when the Conn is
	// closed.
	Connect(stats func() Stats) (closed func())
	// Publish is called for a message of Publisher.Publish before it is checked and sent.
	// ctx is the caller's. The result may be nil.
	Publish(ctx context.Context, s Sending) Publication
	// PublishAll is called for a call of Publisher.PublishAll with n messages. to is the
	// publisher's address, or the zero Address if each message names its own. The result
	// may be nil.
	PublishAll(ctx context.Context, to address.Address, n int) Batch
	// Handle is called before a delivery's handler. The handler gets the ctx that is
	// returned, which must be made of ctx; a nil one counts as ctx. The Handling may be
	// nil.
	Handle(ctx context.Context, d Delivery) (context.Context, Handling)
	// SettledRange is called for each settlement frame that is written, with the number of
	// deliveries that it settles. Settlements of neighbours with the same outcome are one
	// frame.
	SettledRange(n int)
}

// None is an Instrument that does nothing. Embed it in your own, to leave methods
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
