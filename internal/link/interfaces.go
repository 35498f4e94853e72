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

// The interfaces between this package's machinery and the engine. Consumers, senders and the
// management work on these, so that unit tests can put a link with faults in their place and
// run in virtual time.

// Session is one AMQP session: the unit that a fault takes down. Every consumer,
// publisher and forwarder has its own.
type Session interface {
	Receiver(ctx context.Context, source string, o ReceiverOptions) (ReceiverLink, error)
	Sender(ctx context.Context, target string) (SenderLink, error)
	// Broken is closed when the connection below has ended. The end of the
	// session alone shows only in the errors of its links.
	Broken() <-chan struct{}
	// Exhaust is how much of its deliveries a session has used up: from 1 on it should
	// be replaced by another, from 1.5 on it must be.
	Exhaust() float64
	// Intake reports whether the broker accepts messages on this session.
	Intake() *Intake
	// Heard counts the answers and deliveries that have come over the session's
	// connection: while it grows, the broker works.
	Heard() uint64
	// GiveUp ends the connection, since the broker doesn't answer, so that another
	// endpoint is tried.
	GiveUp()
	// Answering says whether the broker answers within limit. It is asked for it.
	Answering(ctx context.Context, limit time.Duration) bool
	// Quirks are those of the broker.
	Quirks() oldbroker.Quirks
	// Login is what is known of the connection's user.
	Login() *userid.Login
	Close(ctx context.Context)
}

// Sessions is where a consumer's and a sender's sessions come from.
type Sessions interface {
	Open(ctx context.Context) (Session, error)
	// Give returns a session that isn't wanted any more. intact says that the session
	// surely hasn't ended.
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
	// broker sends no more then, however much credit it has. A single larger delivery still arrives,
	// alone. 0: there is no bound, and nothing is to be released. The bound is that of the session, so
	// all of its links release.
	MaxBytes int64
}

// PrefetchBytes is the MaxBytes of links whose user can't set it, and the default of those whose user can.
const PrefetchBytes = 64 << 20

// ReceiverLink is a link with manual credit.
type ReceiverLink interface {
	Receive(ctx context.Context) (Arrival, error)
	// Prefetched returns a delivery that has come; false if none has.
	Prefetched() (Arrival, bool)
	IssueCredit(n uint32) error
	// Release says that so many bytes of deliveries, as Arrival.Kept counts them, aren't held any
	// more.
	Release(bytes int)
	// Full reports whether the broker may send nothing until deliveries are released. It answers
	// no drain either then, as long as it has messages for the link's credit.
	Full() bool
	// Drain returns when the broker has no credit left and all that it had sent
	// has arrived.
	Drain(ctx context.Context) error
	// Claims reports whether the queue gives out parked messages by token.
	Claims() bool
	// Claim is Drain with more credit. First of all, the broker delivers the messages that are
	// parked under the tokens. There are at most amqp.MaxClaims of them. came, if not nil, is called
	// when deliveries have come in the meantime: a broker that may send no more bytes answers no drain.
	Claim(ctx context.Context, credit uint32, tokens []string, came func()) error
	// Settle returns at once: the broker confirms nothing.
	Settle(id uint32, d Disposition) error
	Close(ctx context.Context) error
}

// Arrival is a delivery as it comes.
type Arrival struct {
	Msg *amqp.Message
	ID  uint32
	// Unreadable says that msg can't be decoded: all it has is its encoded bytes as Data.
	Unreadable bool
	// Size is how many bytes the encoded message has, and Kept how many of them were kept: fewer
	// if the message is larger than DialConfig.MaxMessageSize. Then it is unreadable, and Msg has
	// what is before the body.
	Size uint64
	Kept int
}

// SenderLink sends without waiting for the broker.
type SenderLink interface {
	// Send takes m, and returns at once. to gets the answer, which may come before send
	// returns. An error means that m isn't sent, and that there is no answer. lost says that it
	// is the link's end; otherwise the error is about m.
	Send(m *amqp.Message, to Receipt) (x Sending, lost bool, err error)
	Close(ctx context.Context) error
}

// Sending is a message that a link has taken. It isn't used once the answer has come.
type Sending interface {
	// Withdraw takes the message back if no part of it was sent, and reports whether none was, nor
	// ever will be. There is no answer then, unless the link has ended: that one may still come.
	Withdraw() bool
}

// Receipt gets the broker's answer to a message.
type Receipt interface {
	// Answer is called once, on the goroutine that reads from the connection, and must not
	// block. After an error there is no answer, and the broker may have the message, unless it
	// is a *neverSent.
	Answer(state amqp.DeliveryState, err error)
}

// NeverSent is the error of a message if the link has sent no part of it.
type NeverSent struct{ Err error }

func (e *NeverSent) Error() string { return e.Err.Error() }
func (e *NeverSent) Unwrap() error { return e.Err }

// ChanReceipt gets the error of an answer, or nil.
type ChanReceipt chan error

func (c ChanReceipt) Answer(_ amqp.DeliveryState, err error) { c <- err }

// Disposition is one of the four outcomes that AMQP has for a delivery.
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

// AttachKind is what kind of failure to open a link err is: the broker's refusal,
// or the loss of the link, session or connection.
func AttachKind(err error) error {
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil || errors.As(err, new(*amqp.ConnError)) {
		return failure.ErrConnectionLost
	}
	return condition.OfLink(string(remote.Condition), remote.Description)
}

// LinkRefused says whether err is the broker's refusal of one link, and of no
// more. RabbitMQ 4.3 refuses a missing target so, 4.0 ends the session.
func LinkRefused(err error) bool {
	var e *amqp.Error
	return errors.As(err, &e) && !errors.As(err, new(*amqp.SessionError)) && !errors.As(err, new(*amqp.ConnError))
}

// CloseSession ends a session, without waiting long for a broker that is gone.
func CloseSession(s Session) {
	ctx, cancel := context.WithTimeout(context.Background(), CloseTimeout)
	defer cancel()
	s.Close(ctx)
}
