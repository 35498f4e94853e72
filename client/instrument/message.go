package instrument

import (
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/sendview"
)

// Sending is a message that is about to be sent. It is valid during the call that it is an
// argument of. Only package client and NewSending make one, so later versions may add methods.
type Sending interface {
	// Message returns the message. It must not be changed: use SetProperty and SetAnnotation.
	Message() *amqp.Message
	// To returns the address that the message is sent to. It is the zero Address if the
	// message has no valid address.
	To() address.Address
	// Server returns the host:port of the endpoint that the Conn was last connected to. It is
	// empty if the Sending is from NewSending.
	Server() string
	// PerMessage reports whether the publisher has no address of its own, so that each
	// message names one. The number of such addresses has no bound.
	PerMessage() bool
	// SetProperty sets an application property of what is sent. The caller's message and its
	// maps stay unchanged. A key or value that isn't valid UTF-8 or is over 8 KiB is ignored.
	SetProperty(key, value string)
	// SetAnnotation sets a message annotation of what is sent, like SetProperty. The key must
	// begin with "x-".
	SetAnnotation(key, value string)
}

// NewSending returns a Sending of m to an address, or to the one that m names if to is the
// zero Address. It serves to call an Instrument outside of a Conn: in a test, or from
// another client's publisher. m must not be nil, and the Instrument changes it.
func NewSending(to address.Address, m *amqp.Message) Sending { return sendview.New(to, m, nil) }

// Delivery is a message that a queue has delivered: a *client.Delivery. An Instrument may
// read it until it is settled.
type Delivery interface {
	// Message returns the message as received. It must not be changed.
	Message() *amqp.Message
	// Queue returns the name of the queue that delivered the message, unencoded.
	Queue() string
	// Received returns when this client received the message.
	Received() time.Time
	// Server returns the host:port of the endpoint that the Conn was last connected to. It is
	// empty outside of client.Conn.Consume.
	Server() string
}

// Decision is what a middleware has decided about a delivery. See
// client.Delivery.Report.
type Decision struct {
	Kind DecisionKind
	// Attempt is the number of the attempt that the decision is about, from 1.
	Attempt int
	// Reason is where the message goes: the strategy that it waits by, such as "republish",
	// or the client.Reason of its death. There is a bounded number of them.
	Reason string
	// Delay is the delay that was asked for, and Wait the one that the message gets, such
	// as that of its delay queue. Both are zero unless the message waits.
	Delay, Wait time.Duration
	// Err is the error that was decided about; nil if there is none.
	Err error
}

// DecisionKind is the kind of a Decision.
type DecisionKind string

// The kinds of decisions.
const (
	// DecisionRetry: the message waits for another attempt.
	DecisionRetry DecisionKind = "retry"
	// DecisionWait: the message waits, and nothing has failed. It was snoozed, or came
	// before its time.
	DecisionWait DecisionKind = "wait"
	// DecisionDeadLetter: the message is given up.
	DecisionDeadLetter DecisionKind = "dead-letter"
	// DecisionDiscard: the message is accepted in spite of an error.
	DecisionDiscard DecisionKind = "discard"
)

// Settlement is what becomes of a delivery at the broker.
type Settlement struct {
	Kind SettlementKind
	// Failed and DeadLetter are the fields delivery-failed and undeliverable-here of
	// SettlementModified.
	Failed, DeadLetter bool
	// Reason is the client.Reason of a dead letter; "" for others.
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

// Publication follows one message that is sent. An Instrument makes it.
type Publication interface {
	// Published is called once, with what client.Publisher.Publish returns for the message: nil only if the
	// broker has accepted it.
	Published(err error)
}

// Batch follows the messages of one client.Publisher.PublishAll. An Instrument makes it.
type Batch interface {
	// Publish is called for each message that was encoded, in order, before it is sent. The
	// result may be nil.
	Publish(s Sending) Publication
	// Published is called at the end, with what PublishAll returns.
	Published(err error)
}

// Handling follows one delivery from its handler to its settlement. An Instrument makes
// it.
//
// Calls come in this order, one after the other, but from several goroutines. Those in
// brackets may be missing:
//
//	[Decided] Handled [Forwarding [Forwarded]]... [Settling [Settled]]
//
// The broker may take the delivery back while its handler runs (client.ErrConsumerTimeout). Then
// Settling and Settled come at any time, at the same time as other calls. If the link is
// lost, calls that are missing don't follow: the broker delivers the message again.
type Handling interface {
	// Decided is called during the handler's call, by a middleware such as retry.With.
	// The last call counts.
	Decided(d Decision)
	// Handled is called when the handler has returned err. A panic is a client.DeadLetter
	// with client.ReasonPanicked.
	Handled(err error)
	// Forwarding is called before a copy is sent, for a client.Forward. What it sets is in the
	// copy.
	Forwarding(s Sending)
	// Forwarded is called with the outcome: nil if the broker has accepted the copy.
	Forwarded(err error)
	// Settling is called when it is decided what becomes of the delivery. The result is
	// merged into the message's annotations if s.Kind is SettlementModified, and ignored
	// otherwise. Keys must begin with "x-". All of it together may have 1,024 bytes.
	Settling(s Settlement) map[string]string
	// Settled is called when the settlement was written to the connection. AMQP doesn't
	// confirm it. err is why it couldn't be written: the broker delivers the message again.
	Settled(err error)
}
