package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/outcome"

	"github.com/hopback/hopback/internal/consume"
	"github.com/hopback/hopback/internal/instrumented"
)

// Delivery is a message that a queue has delivered.
//
// It can't be settled directly: the handler's result decides what becomes of it. So
// handlers and middleware run on any source of messages: this package's consumer,
// another client's, or a test.
type Delivery struct {
	message  *Message
	queue    string
	received time.Time
	server   *string                   // for an Instrument
	decided  func(instrument.Decision) // nil: nobody has called OnReport
	lastWord error                     // see outcome.LastWord
	observed *instrumented.Observed    // nil: no Instrument follows it
	state    *consume.Delivery         // the consumer's; nil outside of Consume
}

// NewDelivery returns a Delivery of m from queue. It serves to call a Handler outside of
// Consume: in a test, or from another client's consumer. m must not be nil.
func NewDelivery(queue string, m *Message) *Delivery {
	return &Delivery{message: m, queue: queue, received: time.Now()}
}

// Server returns the host:port of the endpoint that the Conn was last connected to, for an
// Instrument. It is empty without one, and outside of Conn.Consume.
func (d *Delivery) Server() string {
	if d.server == nil {
		return ""
	}
	return *d.server
}

// Message returns the message as received. It must not be changed or sent again: use
// Copy.
func (d *Delivery) Message() *Message {
	return d.message
}

// Queue returns the name of the queue that delivered the message, unencoded.
func (d *Delivery) Queue() string { return d.queue }

// Received returns when this client received the message.
func (d *Delivery) Received() time.Time { return d.received }

// DeliveryCount returns how many earlier deliveries of the message have failed, by the
// broker's count. A copy, such as a retry by republishing, starts at 0. A dead letter
// inherits the count.
func (d *Delivery) DeliveryCount() uint32 {
	if d.message.Header == nil {
		return 0
	}
	return d.message.Header.DeliveryCount
}

// Property returns the application property key, or nil.
func (d *Delivery) Property(key string) any { return d.message.ApplicationProperties[key] }

// Annotation returns the message annotation key, or nil.
func (d *Delivery) Annotation(key string) any {
	return d.message.Annotations[key]
}

// Report tells the consumer's Instrument what has been decided about the delivery, and
// calls the function of OnReport. It is for middleware, which calls it within Handle.
func (d *Delivery) Report(x instrument.Decision) {
	if d.decided != nil {
		d.decided(x)
	}
	if d.observed != nil {
		d.observed.Decided(x)
	}
}

// OnReport makes Report call f, in its caller's goroutine and before the decision is
// carried out. A handler thereby learns what the middleware around it makes of its
// result, such as retry.With. It calls OnReport within Handle. The last call counts.
func (d *Delivery) OnReport(f func(instrument.Decision)) { d.decided = f }

// follow has an Instrument follow d, and returns the ctx for its handler.
func (d *Delivery) follow(ctx context.Context, h *instrumented.Hooks) context.Context {
	d.server = h.Server.Load()
	ctx, d.observed = h.Handle(ctx, d)
	return ctx
}

// deliveryKey finds the Delivery in a handler's ctx.
type deliveryKey struct{}

// WithDelivery returns a ctx that carries d. Code that calls a Handler outside of
// Consume should call it with such a ctx.
func WithDelivery(ctx context.Context, d *Delivery) context.Context {
	if d != nil && d.state != nil {
		ctx = d.state.Context(ctx)
	}
	return &deliveryContext{Context: ctx, delivery: d}
}

// DeliveryFrom returns the delivery of a handler's ctx. It returns false if ctx carries
// none.
func DeliveryFrom(ctx context.Context) (*Delivery, bool) {
	d, ok := ctx.Value(deliveryKey{}).(*Delivery)
	return d, ok && d != nil
}

// ErrConsumerTimeout is the cause of a handler's ctx that ended because the broker took the
// delivery back and delivers it to another consumer. The handler held it for longer than
// the queue's consumer timeout (RabbitMQ 4.3 and later; 30 minutes by default). The
// handler's result is ignored.
var ErrConsumerTimeout = consume.ErrRevoked

// ErrConsumerTimeoutNear is the cause of a handler's ctx that ended shortly before the broker
// would take the delivery back: a tenth of the consumer timeout before, at most a minute. The
// ctx has that time as its deadline, and its error is context.DeadlineExceeded. The handler's
// result counts, so an error is a failed attempt like any other. A handler that begins when
// half of the timeout is over, because its delivery had to wait, has no such deadline.
//
// If the handler hasn't returned after half of that time, the delivery goes back to its queue
// as failed, provided the queue is known to have a dead-letter exchange. So the queue's
// delivery limit ends a message whose handler never returns in time. The broker itself
// doesn't count a delivery that it takes back.
//
// The consumer knows the timeout if ConsumerConfig.ConsumerTimeout or the queue's argument
// sets it. Otherwise it knows it after the broker has taken two deliveries back.
var ErrConsumerTimeoutNear = consume.ErrTimeoutNear

// Revoked reports whether the broker has taken the delivery back, because it was held for
// longer than the queue's consumer timeout, and delivers it again. The handler's result is then
// ignored. It may be called concurrently.
func (d *Delivery) Revoked() bool { return d.state != nil && d.state.Revoked() }

// deliveryContext is a ctx that carries a Delivery.
type deliveryContext struct {
	context.Context
	delivery *Delivery
}

func (c *deliveryContext) Value(key any) any {
	switch key {
	case deliveryKey{}:
		return c.delivery
	case outcome.LastWordKey{}:
		return &c.delivery.lastWord
	}
	return c.Context.Value(key)
}
