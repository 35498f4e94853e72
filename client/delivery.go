package client

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/outcome"
)

// Delivery is a message that a queue has delivered. Handlers can't settle it directly: the error
// that the handler returns decides what happens to it. So handlers and middleware work with any
// source of messages: this package's consumer, another client's consumer, or a test.
type Delivery struct {
	message  *Message
	queue    string
	received time.Time
	server   *string                   // for an Instrument
	decided  func(instrument.Decision) // nil: nobody has called OnReport
	lastWord error                     // see outcome.LastWord
	observed *observedDelivery         // nil: no Instrument follows it
	core     *delivery                 // the consumer's; nil outside of Consume
}

// NewDelivery returns a [Delivery] of m from queue. Use it to call a [Handler] outside of
// [Conn.Consume]: in a test, or from another client's consumer. m must not be nil.
func NewDelivery(queue string, m *Message) *Delivery {
	return &Delivery{message: m, queue: queue, received: time.Now()}
}

// Server returns the host:port of the endpoint that the Conn was last connected to. It is for
// instrumentation: it is empty if [Config.Instrument] is nil, and outside of Conn.Consume.
func (d *Delivery) Server() string {
	if d.server == nil {
		return ""
	}
	return *d.server
}

// Message returns the message as received. Don't change it or send it again; send a [Copy].
func (d *Delivery) Message() *Message {
	return d.message
}

// Queue returns the name of the queue that delivered the message, not percent-encoded.
func (d *Delivery) Queue() string { return d.queue }

// Received returns when this client received the message.
func (d *Delivery) Received() time.Time { return d.received }

// DeliveryCount returns how many earlier deliveries of the message failed, as the broker counts
// them. A copy, such as a retry by republishing, starts at 0. A dead letter keeps the count.
func (d *Delivery) DeliveryCount() uint32 {
	if d.message.Header == nil {
		return 0
	}
	return d.message.Header.DeliveryCount
}

// Property returns the application property with the given key. It returns nil if there is none.
func (d *Delivery) Property(key string) any { return d.message.ApplicationProperties[key] }

// Annotation returns the message annotation with the given key. It returns nil if there is none.
func (d *Delivery) Annotation(key string) any {
	return d.message.Annotations[key]
}

// Report reports a decision about the delivery to the Instrument and to the function set with
// [Delivery.OnReport]. It is for middleware, which calls it inside Handle.
func (d *Delivery) Report(x instrument.Decision) {
	if d.decided != nil {
		d.decided(x)
	}
	if d.observed != nil {
		d.observed.Decided(x)
	}
}

// OnReport makes [Delivery.Report] call f, in the goroutine that calls Report and before the
// decision is carried out. A handler can use it to learn what middleware around it, such as
// retry.With, decides about its result. Call it inside Handle. The last call counts.
func (d *Delivery) OnReport(f func(instrument.Decision)) { d.decided = f }

// follow starts the Instrument's observation of d, and returns the ctx for its handler.
func (d *Delivery) follow(ctx context.Context, h *instrumentHooks) context.Context {
	d.server = h.Server.Load()
	ctx, d.observed = h.Handle(ctx, d)
	return ctx
}

// deliveryKey finds the Delivery in a handler's ctx.
type deliveryKey struct{}

// WithDelivery returns a ctx that carries d. Use it when you call a [Handler] outside of
// [Conn.Consume], so that [DeliveryFrom] works.
func WithDelivery(ctx context.Context, d *Delivery) context.Context {
	with := &deliveryContext{Context: ctx, delivery: d}
	if d != nil && d.core != nil {
		with.Context, with.again = d.core.context(ctx), d.core.again
	}
	return with
}

// DeliveryFrom returns the delivery of a handler's ctx. Use it in handlers of [JSON] and [Typed]
// to read headers and properties. It returns false if ctx carries no delivery.
func DeliveryFrom(ctx context.Context) (*Delivery, bool) {
	d, ok := ctx.Value(deliveryKey{}).(*Delivery)
	return d, ok && d != nil
}

// ErrConsumerTimeout is the cause of a handler's ctx that ended because the broker revoked the
// delivery and delivers the message again. The handler held it for longer than the queue's
// consumer timeout (RabbitMQ 4.3 and later; 30 minutes by default). The handler's result is
// ignored.
var ErrConsumerTimeout = errors.New("the broker revoked the delivery after the consumer timeout")

// ErrConsumerTimeoutNear is the cause of a handler's ctx that ended shortly before the broker
// would revoke the delivery: a tenth of the consumer timeout before it, but at most a minute.
//
//   - The ctx has that time as its deadline, and its error is [context.DeadlineExceeded].
//   - The handler's result counts. So an error is a failed attempt like any other.
//   - If the handler hasn't returned after half of the remaining time, the consumer returns the
//     message to its queue as failed, provided that it knows the queue has a dead-letter
//     exchange. So the delivery limit ends the retries of a message whose handler always runs
//     too long. The broker itself doesn't count a delivery that it revokes.
//   - A handler that starts after half of the timeout, because its delivery had to wait, has no
//     such deadline.
//   - The consumer knows the timeout if [ConsumerConfig.ConsumerTimeout] or the queue's argument
//     sets it. Otherwise it learns it after the broker has revoked two deliveries.
var ErrConsumerTimeoutNear = errors.New("the consumer timeout is nearly over")

// Revoked reports whether the broker has revoked the delivery, because it was held for longer
// than the queue's consumer timeout. The broker delivers the message again, and the handler's
// result is ignored. Revoked is safe for concurrent use.
func (d *Delivery) Revoked() bool { return d.core != nil && d.core.back.Load() }

// deliveryContext is a ctx that carries a Delivery.
type deliveryContext struct {
	context.Context
	delivery *Delivery
	again    *inside.Again // nil: none
}

func (c *deliveryContext) Value(key any) any {
	switch key {
	case deliveryKey{}:
		return c.delivery
	case inside.AgainKey{}:
		if c.again != nil {
			return c.again
		}
		return nil
	case inside.PauseKey{}:
		if c.delivery != nil && c.delivery.core != nil {
			return c.delivery.core
		}
		return nil
	case outcome.LastWordKey{}:
		return &c.delivery.lastWord
	}
	return c.Context.Value(key)
}
