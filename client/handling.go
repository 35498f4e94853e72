package client

import (
	"context"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
)

// Sending is a message that is about to be sent, for an Instrument. It is valid during
// the call that it is an argument of.
type Sending struct {
	to      address.Address // zero: the message names it
	message *Message
	added   *addedProperties // nil: SetProperty makes a map each time
	server  *string
}

// NewSending returns a Sending of m to an address, or to the one that m names if to is the
// zero Address. It serves to call an Instrument outside of a Conn: in a test, or from
// another client's publisher. m must not be nil, and the Instrument changes it.
func NewSending(to address.Address, m *Message) Sending { return Sending{to: to, message: m} }

// Message returns the message. It must not be changed: use SetProperty and SetAnnotation.
func (s Sending) Message() *Message { return s.message }

// To returns the address that the message is sent to. It is the zero Address if the
// message has no valid address.
func (s Sending) To() address.Address {
	if !s.to.IsZero() {
		return s.to
	}
	to, err := address.Parse(addressOf(s.message))
	if err != nil {
		return address.Address{}
	}
	return to
}

// Server returns the host:port of the endpoint that the Conn was last connected to. It is
// empty if the Sending is from NewSending.
func (s Sending) Server() string { return orEmpty(s.server) }

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// PerMessage reports whether the publisher has no address of its own, so that each
// message names one. The number of such addresses has no bound.
func (s Sending) PerMessage() bool { return s.to.IsZero() }

// SetProperty sets an application property of what is sent. The caller's message and its
// maps stay as they are. A key or value that isn't valid UTF-8 or is over 8 KiB is
// ignored.
func (s Sending) SetProperty(key, value string) {
	if !addable(key, value, maxAdded) {
		return
	}
	if s.added != nil {
		s.added.set(s.message, key, value)
		return
	}
	m := make(map[string]any, len(s.message.ApplicationProperties)+1)
	maps.Copy(m, s.message.ApplicationProperties)
	m[key] = value
	s.message.ApplicationProperties = m
}

// addedProperties is a message's properties with those of an Instrument. The map is used
// for one message after the other: a new one for each would be a third of what an
// Instrument makes the client allocate.
type addedProperties struct {
	all map[string]any
	in  *Message       // whose properties all is; nil: none's yet
	own map[string]any // what it had before
}

// maxKept bounds the maps that are kept, as a map never shrinks.
const maxKept = 16

var addedPool = sync.Pool{New: func() any { return &addedProperties{all: make(map[string]any, 4)} }}

func (a *addedProperties) set(m *Message, key, value string) {
	if a.in == nil {
		a.in, a.own = m, m.ApplicationProperties
		maps.Copy(a.all, a.own)
		m.ApplicationProperties = a.all
	}
	a.all[key] = value
}

// recycle takes the map back. Nobody may send the message any more.
func (a *addedProperties) recycle() {
	if len(a.all) > maxKept {
		return
	}
	if a.in != nil {
		a.in.ApplicationProperties = a.own
		clear(a.all)
		a.in, a.own = nil, nil
	}
	addedPool.Put(a)
}

// SetAnnotation sets a message annotation of what is sent, as SetProperty does. The key
// must begin with "x-".
func (s Sending) SetAnnotation(key, value string) {
	if !addable(key, value, maxAdded) || !strings.HasPrefix(key, "x-") {
		return
	}
	m := make(amqp.Annotations, len(s.message.Annotations)+1)
	maps.Copy(m, s.message.Annotations)
	m[keys.boxed(key)] = value
	s.message.Annotations = m
}

// maxAdded is how many bytes an Instrument's value may have. W3C baggage has 8,192.
const maxAdded = 8192

// addable says whether an Instrument's key and value can do no harm.
func addable(key, value string, limit int) bool {
	return key != "" && len(key) <= 255 && len(value) <= limit && utf8.ValidString(key) && utf8.ValidString(value)
}

// addressOf is where a message of a publisher without an address goes.
func addressOf(m *Message) string {
	if m.Properties == nil || m.Properties.To == nil {
		return ""
	}
	return *m.Properties.To
}

// Decision is what a middleware has decided about a delivery, for an Instrument. See
// Delivery.Report.
type Decision struct {
	Kind DecisionKind
	// Attempt is the number of the attempt that the decision is about, from 1.
	Attempt int
	// Lane is where the message goes: the strategy that it waits by, such as "republish",
	// or the Reason of its death. There is a bounded number of them.
	Lane string
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

// Settlement is what becomes of a delivery at the broker, for an Instrument.
type Settlement struct {
	Kind SettlementKind
	// Failed and DeadLetter are the fields delivery-failed and undeliverable-here of
	// SettlementModified.
	Failed, DeadLetter bool
	// Reason is the Reason of a DeadLetter; "" for others.
	Reason Reason
}

// SettlementKind is an AMQP outcome.
type SettlementKind string

// The outcomes that this package settles with.
const (
	SettlementAccepted SettlementKind = "accepted"
	SettlementReleased SettlementKind = "released"
	SettlementModified SettlementKind = "modified"
)

// Publication follows one message that is sent. An Instrument makes it.
type Publication interface {
	// Published is called once, with what Publish returns for the message: nil only if the
	// broker has accepted it.
	Published(err error)
}

// Batch follows the messages of one PublishAll. An Instrument makes it.
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
// The broker may take the delivery back while its handler runs (ErrConsumerTimeout). Then
// Settling and Settled come at any time, at the same time as other calls. If the link is
// lost, calls that are missing don't follow: the broker delivers the message again.
type Handling interface {
	// Decided is called during the handler's call, by a middleware such as retry.With.
	// The last call counts.
	Decided(d Decision)
	// Handled is called when the handler has returned err. A panic is a DeadLetter with
	// ReasonPanicked.
	Handled(err error)
	// Forwarding is called before a copy is sent, for a Forward. What it sets is in the
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

// maxSettling bounds what an Instrument adds to a settlement.
const maxSettling = 1024

// caught is deferred around each call of an Instrument.
func caught(log *slog.Logger, call string) {
	if p := recover(); p != nil {
		log.Error("hopback: Config.Instrument panicked", "call", call, "panic", p)
	}
}

// observed is a delivery's Handling. A nil *observed calls nothing.
type observed struct {
	Handling
	log    *slog.Logger
	ctx    context.Context // the handler's
	server *string
}

func (o *observed) decided(d Decision) {
	defer caught(o.log, "Handling.Decided")
	o.Decided(d)
}

func (o *observed) handled(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Handled")
		o.Handled(err)
	}
}

// forwarding returns the message to send: a copy of m, since whoever made m may use it
// again.
func (o *observed) forwarding(to address.Address, m *Message) (with *Message) {
	with = m // after a panic
	defer caught(o.log, "Handling.Forwarding")
	c := *m
	o.Forwarding(Sending{to: to, message: &c, server: o.server})
	return &c
}

func (o *observed) forwarded(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Forwarded")
		o.Forwarded(err)
	}
}

func (o *observed) settled(err error) {
	if o != nil {
		defer caught(o.log, "Handling.Settled")
		o.Settled(err)
	}
}
