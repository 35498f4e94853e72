package client

import (
	"context"
	"sync/atomic"
	"time"
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
	link     deliveryLink
	standing standing // see quarantine
	// uncounted: it doesn't count toward the window any more.
	uncounted atomic.Bool
	// aside is the size of its copy, if it is uncounted since its forward waits.
	aside int64
	lane  *string // see lanes; nil if it has none
	// settling is set when what becomes of it is on its way to the broker.
	settling atomic.Bool
	lease    lease
	lastWord error // see package lastword
	// ctx is the one that its consumer calls the handler with, here so that it needn't
	// be allocated.
	ctx deliveryContext
}

// NewDelivery returns a Delivery of m from queue. It serves to call a Handler outside of
// Consume: in a test, or from another client's consumer. m must not be nil.
func NewDelivery(queue string, m *Message) *Delivery {
	return &Delivery{message: m, queue: queue, received: time.Now()}
}

// Message returns the message as received. It must not be changed or sent again: use
// Copy.
func (d *Delivery) Message() *Message { return d.message }

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
func (d *Delivery) Annotation(key string) any { return d.message.Annotations[key] }

// deliveryKey finds the Delivery in a handler's ctx.
type deliveryKey struct{}

// WithDelivery returns a ctx that carries d. Code that calls a Handler outside of
// Consume should call it with such a ctx.
func WithDelivery(ctx context.Context, d *Delivery) context.Context {
	return &deliveryContext{Context: ctx, delivery: d}
}

// DeliveryFrom returns the delivery of a handler's ctx. It returns false if ctx carries
// none.
func DeliveryFrom(ctx context.Context) (*Delivery, bool) {
	d, ok := ctx.Value(deliveryKey{}).(*Delivery)
	return d, ok && d != nil
}
