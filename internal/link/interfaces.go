package link

import (
	"context"
	"errors"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/userid"

	"github.com/hopback/hopback/internal/failure"
)

// Consumers, senders, and management requests use the interfaces below. Package linktest implements them for unit
// tests, with faults and in virtual time.

// Session is one AMQP session. RabbitMQ ends a whole session over many faults, so each consumer, publisher, and
// forwarder has a separate one. Its methods are safe for concurrent use.
type Session interface {
	Receiver(ctx context.Context, source string, o ReceiverOptions) (ReceiverLink, error)
	Sender(ctx context.Context, target string) (SenderLink, error)
	// Broken returns a channel that is closed when the connection has ended. If only the session has
	// ended, its links return errors, and this channel stays open.
	Broken() <-chan struct{}
	// Exhaust is how many deliveries the session has carried, as a fraction of what it should carry.
	// From 1 on it should be replaced, from 1.5 on it must be.
	Exhaust() float64
	// Intake reports whether the broker accepts messages on this session.
	Intake() *Intake
	// Heard counts the answers and deliveries that have come over the session's
	// connection: while it grows, the broker works.
	Heard() uint64
	// GiveUp closes the connection because the broker doesn't answer. The next endpoint is tried first.
	GiveUp()
	// Answering asks the broker for an answer, and reports whether one came within limit.
	Answering(ctx context.Context, limit time.Duration) bool
	Quirks() oldbroker.Quirks // the broker's
	// Login is what is known about the connection's user.
	Login() *userid.Login
	Close(ctx context.Context)
}

// Sessions opens and closes the sessions of a consumer or a sender.
type Sessions interface {
	Open(ctx context.Context) (Session, error)
	// Give closes a session that isn't needed any more. intact: it is certain that the session hasn't
	// ended.
	Give(s Session, intact bool)
}

// ReceiverEvents hears what the broker does on a receiver's link. Its methods are called on the
// goroutine that reads from the connection, and must not block.
type ReceiverEvents interface {
	// Revoked is called with the ids of deliveries, from first to last, that the broker has
	// revoked before they were settled. Some may be unknown to the link.
	Revoked(first, last uint32)
	// State is called with the link state of each flow that has one.
	State(state map[string]any)
}

// ReceiverOptions are the options of a receiver in addition to its source.
type ReceiverOptions struct {
	Events     ReceiverEvents // nil: nobody listens
	Properties map[string]any
	// MaxBytes bounds the encoded bytes of deliveries that were received and not released: the
	// broker sends no more then, however much credit it has. A larger delivery still arrives, but
	// alone. 0: there is no bound, and Release isn't needed. The bound is that of the session, so the
	// users of all its links must call Release.
	MaxBytes int64
}

// PrefetchBytes is the default of ReceiverOptions.MaxBytes, and the value for links whose user can't set it.
const PrefetchBytes = 64 << 20

// ReceiverLink receives deliveries, as many as it has credit for. Only one goroutine at a time may call Receive or
// Prefetched, and one Drain or Claim. The other methods are safe for concurrent use.
type ReceiverLink interface {
	Receive(ctx context.Context) (Arrival, error)
	// Prefetched returns a delivery that has arrived already; false if none has.
	Prefetched() (Arrival, bool)
	IssueCredit(n uint32) error
	// Release makes room for more deliveries: so many bytes, as Arrival.Kept counts them, aren't held
	// any more.
	Release(bytes int)
	// Full reports whether the broker may send nothing until deliveries are released. While it has
	// messages for the link's credit, it doesn't answer a drain either.
	Full() bool
	// Drain makes the broker use or drop the link's credit. It returns when all that the broker has sent
	// has arrived.
	Drain(ctx context.Context) error
	// Arrived counts the deliveries that have arrived, also those that nobody has received yet.
	Arrived() uint64
	// Claims reports whether the queue gives out parked messages by token.
	Claims() bool
	// Claim is Drain with more credit. The broker first delivers the messages that are parked under
	// the tokens, at most amqp.MaxClaims. came, if not nil, is called while Claim waits, when deliveries
	// have arrived. It has to release some: a broker that may send no more bytes doesn't answer a drain.
	// With came, Claim must not run at the same time as Receive.
	Claim(ctx context.Context, credit uint32, tokens []string, came func()) error
	// Settle doesn't wait: the broker doesn't confirm settlements.
	Settle(id uint32, d Disposition) error
	Close(ctx context.Context) error
}

// Arrival is a received delivery.
type Arrival struct {
	Msg *amqp.Message
	ID  uint32
	// Unreadable: Msg couldn't be decoded, and has the encoded bytes as Data.
	Unreadable bool
	// Size is how many bytes the encoded message has, and Kept how many of them were kept: fewer
	// if the message is larger than DialConfig.MaxMessageSize. Then it is unreadable too, and Msg has
	// the sections before the body.
	Size uint64
	Kept int
}

// SenderLink sends without waiting for the broker. Its methods are safe for concurrent use.
type SenderLink interface {
	// Send queues m and returns at once. to gets the broker's answer, which may come before Send
	// returns. An error means that m isn't sent, and that there is no answer. If lost, the error is
	// the end of the link; otherwise it is about m.
	Send(m *amqp.Message, to Receipt) (x Sending, lost bool, err error)
	Close(ctx context.Context) error
}

// Sending is a message that Send has queued. Don't use it after its answer.
type Sending interface {
	// Withdraw removes the message if no part of it was sent, and reports whether none was or ever
	// will be. Then it gets no answer, unless the link has ended: an answer about that may still come.
	Withdraw() bool
}

// Receipt gets the broker's answer to a message.
type Receipt interface {
	// Answer is called once, on the goroutine that reads from the connection, and must not
	// block. If err isn't nil, the broker hasn't answered, and may have the message, unless err is a
	// *NeverSent.
	Answer(state amqp.DeliveryState, err error)
}

// NeverSent is the error of a message if the link has sent no part of it.
type NeverSent struct{ Err error }

func (e *NeverSent) Error() string { return e.Err.Error() }
func (e *NeverSent) Unwrap() error { return e.Err }

// ChanReceipt is a Receipt that sends the answer's error, or nil, to a channel. The channel needs room for it.
type ChanReceipt chan error

func (c ChanReceipt) Answer(_ amqp.DeliveryState, err error) { c <- err }

// Disposition is how a delivery is settled. hopback doesn't use rejected, AMQP's fourth outcome.
type Disposition struct {
	Kind        DispositionKind
	Failed      bool             // modified: counts as a failed delivery
	Dead        bool             // modified: undeliverable here, which RabbitMQ dead-letters
	Annotations amqp.Annotations // modified: merged into the message
}

type DispositionKind uint8

const (
	DispositionAccepted DispositionKind = iota
	DispositionReleased
	DispositionModified
)

// AttachKind returns the kind of an error to attach a link: one for the broker's refusal, or
// failure.ErrConnectionLost.
func AttachKind(err error) error {
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil || errors.As(err, new(*amqp.ConnError)) {
		return failure.ErrConnectionLost
	}
	return condition.OfLink(string(remote.Condition), remote.Description)
}

// LinkRefused reports whether the broker has refused one link, and the session lives on. RabbitMQ 4.3 does so if
// the target is missing. RabbitMQ 4.0 ends the session.
func LinkRefused(err error) bool {
	var e *amqp.Error
	return errors.As(err, &e) && !errors.As(err, new(*amqp.SessionError)) && !errors.As(err, new(*amqp.ConnError))
}

// CloseSession closes a session. It waits for CloseTimeout at most.
func CloseSession(s Session) {
	ctx, cancel := context.WithTimeout(context.Background(), CloseTimeout)
	defer cancel()
	s.Close(ctx)
}
