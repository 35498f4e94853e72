package instrument

import (
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/message"
)

// Sending is a message that is about to be sent. It is valid only during the call that it is
// passed to. Only package client and [NewSending] create one, so later versions may add methods.
type Sending interface {
	// Message returns the message. Don't change it: use SetProperty and SetAnnotation.
	Message() *amqp.Message
	// To returns the address that the message is sent to. It is the zero Address if the
	// message has no valid address.
	To() address.Address
	// Server returns the host:port of the endpoint that the Conn was last connected to. It is
	// empty if the Sending is from NewSending.
	Server() string
	// PerMessage reports whether each message of the publisher names its own address. Then the
	// number of addresses is unbounded, so don't use them as metric labels.
	PerMessage() bool
	// SetProperty sets an application property of the message that is sent. The caller's message
	// and its maps stay unchanged. A key or value that isn't valid UTF-8 or is longer than 8 KiB
	// is ignored.
	SetProperty(key, value string)
	// SetAnnotation sets a message annotation of the message that is sent, like SetProperty. The
	// key must begin with "x-".
	SetAnnotation(key, value string)
}

// NewSending returns a [Sending] of m to the address to, or to the address in m if to is the
// zero Address. Use it to call an [Instrument] outside of a Conn: in a test, or from another
// client's publisher. m must not be nil. The Instrument changes m.
func NewSending(to address.Address, m *amqp.Message) Sending { return message.NewSending(to, m, nil) }

// Delivery is a message that a queue has delivered: a *client.Delivery. An [Instrument] may read
// it until it is settled.
type Delivery interface {
	// Message returns the message as received. Don't change it.
	Message() *amqp.Message
	// Queue returns the name of the queue that delivered the message, not percent-encoded.
	Queue() string
	// Received returns when this client received the message.
	Received() time.Time
	// Server returns the host:port of the endpoint that the Conn was last connected to. It is
	// empty outside of client.Conn.Consume.
	Server() string
}

// Decision is what a middleware, such as retry.With, decided about a delivery. See
// client.Delivery.Report.
type Decision struct {
	Kind DecisionKind
	// Attempt is the number of the attempt that the decision is about, from 1.
	Attempt int
	// Reason is the retry strategy that the message waits with, such as "republish", or the
	// client.Reason why it was dead-lettered. The number of reasons is bounded.
	Reason string
	// Delay is the delay that the policy or handler requested. Wait is the delay that the
	// message gets, such as that of its delay queue. Both are zero unless the message waits.
	Delay, Wait time.Duration
	// Err is the handler's error; nil if there is none.
	Err error
}

// DecisionKind is the kind of a Decision.
type DecisionKind string

// The kinds of decisions.
const (
	// DecisionRetry: the message waits for another attempt.
	DecisionRetry DecisionKind = "retry"
	// DecisionWait: the message waits although nothing has failed. It was snoozed, or came too
	// early.
	DecisionWait DecisionKind = "wait"
	// DecisionDeadLetter: the message is dead-lettered.
	DecisionDeadLetter DecisionKind = "dead-letter"
	// DecisionDiscard: the message is acknowledged in spite of an error.
	DecisionDiscard DecisionKind = "discard"
)

// Settlement is how a delivery is settled at the broker.
type Settlement struct {
	Kind SettlementKind
	// Failed and DeadLetter are the fields delivery-failed and undeliverable-here of
	// SettlementModified.
	Failed, DeadLetter bool
	// Reason is the client.Reason of a dead letter; "" for all others.
	Reason string
}

// SettlementKind is an AMQP outcome.
type SettlementKind string

// The outcomes that package client settles with.
const (
	SettlementAccepted SettlementKind = "accepted"
	SettlementReleased SettlementKind = "released"
	SettlementModified SettlementKind = "modified"
)

// Publication observes one message that is sent. An [Instrument] returns it.
type Publication interface {
	// Published is called once, with the result of client.Publisher.Publish for the message: nil
	// only if the broker has accepted it.
	Published(err error)
}

// Batch observes the messages of one client.Publisher.PublishAll. An [Instrument] returns it.
type Batch interface {
	// Publish is called for each encoded message, in order, before it is sent. The result may be
	// nil.
	Publish(s Sending) Publication
	// Published is called at the end, with the result of PublishAll.
	Published(err error)
}

// Handling observes one delivery from its handler to its settlement. An [Instrument] returns it.
//
// Calls come in this order, one after the other, but from several goroutines. Those in brackets
// are optional:
//
//		[Decided] Handled [Forwarding [Forwarded]]... [Settling [Settled]]
//
//	  - If the broker revokes the delivery while its handler runs (client.ErrConsumerTimeout),
//	    Settling and Settled come at any time, concurrently with other calls.
//	  - If the link is lost, the missing calls never come. The broker delivers the message again.
type Handling interface {
	// Decided is called during the handler's call, by a middleware such as retry.With. The last
	// call counts.
	Decided(d Decision)
	// Handled is called when the handler has returned err. A panic is a client.DeadLetter with
	// client.ReasonPanicked.
	Handled(err error)
	// Forwarding is called before a copy is sent for a client.Forward. Properties and
	// annotations that it sets are part of the copy.
	Forwarding(s Sending)
	// Forwarded is called with the result: nil if the broker has accepted the copy.
	Forwarded(err error)
	// Settling is called when the settlement of the delivery is decided. If s.Kind is
	// SettlementModified, the result is merged into the message's annotations; otherwise it is
	// ignored. Keys must begin with "x-". The total size may be up to 1,024 bytes.
	Settling(s Settlement) map[string]string
	// Settled is called when the settlement was written to the connection. AMQP doesn't confirm
	// it. If it couldn't be written, err is the reason, and the broker delivers the message
	// again.
	Settled(err error)
}
