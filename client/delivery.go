package client

import (
	"context"
	"sync/atomic"
	"time"
)

// Delivery is one message as one queue delivered it, on its way to a Handler.
//
// It holds what is known of the message and nothing that could settle it: what
// becomes of it is the handler's result. So handlers and decorators run on any
// source of messages: this package's consumer, another client's, or a test.
type Delivery struct {
	message  *Message
	queue    string
	received time.Time
	link     deliveryLink
	suspect  bool // see quarantine
	passed   bool // see quarantine.pass
	// uncounted: it doesn't count toward the window any more.
	uncounted atomic.Bool
	lane      *string // see lanes; nil if it has none
	// settling is set when what becomes of it is on its way to the broker.
	settling atomic.Bool
	lease    lease
	lastWord error // see package lastword
	// ctx is the one that its consumer calls the handler with, here so that it needn't
	// be allocated.
	ctx deliveryContext
}

// NewDelivery makes a Delivery out of a message from queue, for calling a Handler
// outside of Consume: in a test, or from another client's consumer. m must not
// be nil.
func NewDelivery(queue string, m *Message) *Delivery {
	return &Delivery{message: m, queue: queue, received: time.Now()}
}

// Message is what was received. It must not be changed, nor sent again: Copy
// makes one that may be.
func (d *Delivery) Message() *Message { return d.message }

// Queue is the name of the queue that it was delivered from, unencoded.
func (d *Delivery) Queue() string { return d.queue }

// Received is when this client received it.
func (d *Delivery) Received() time.Time { return d.received }

// DeliveryCount is how many earlier deliveries of the message from this queue
// have failed, by the broker's count. A copy, such as a retry by republishing,
// starts again at zero; a dead letter inherits the count.
func (d *Delivery) DeliveryCount() uint32 {
	if d.message.Header == nil {
		return 0
	}
	return d.message.Header.DeliveryCount
}

// Property returns the application property key, or nil.
func (d *Delivery) Property(key string) any { return d.message.ApplicationProperties[key] }

// Annotation returns the message annotation key, or nil.
func (d *Delivery) Annotation(key string) any { return d.message.Annotations[key] }

// deliveryKey finds the Delivery in a handler's ctx.
type deliveryKey struct{}

// WithDelivery returns a context from which DeliveryFrom finds d. Consumers do
// this; so should whoever calls a Handler elsewhere.
func WithDelivery(ctx context.Context, d *Delivery) context.Context {
	return &deliveryContext{Context: ctx, delivery: d}
}

// DeliveryFrom returns the delivery that a handler was called for.
func DeliveryFrom(ctx context.Context) (*Delivery, bool) {
	d, ok := ctx.Value(deliveryKey{}).(*Delivery)
	return d, ok && d != nil
}
