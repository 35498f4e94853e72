package client

import (
	"context"
	"errors"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/userid"
)

// The interfaces between this package's machinery and the engine. Consumers, senders and the
// management work on these, so that unit tests can put a link with faults in their place and
// run in virtual time.

// session is one AMQP session: the unit that a fault takes down. Every consumer,
// publisher and forwarder has its own.
type session interface {
	receiver(ctx context.Context, source string, o receiverOptions) (receiverLink, error)
	sender(ctx context.Context, target string) (senderLink, error)
	// broken is closed when the connection below has ended. The end of the
	// session alone shows only in the errors of its links.
	broken() <-chan struct{}
	// wear is how much of its deliveries a session has used up: from 1 on it should
	// be replaced by another, from 1.5 on it must be.
	wear() float64
	// intake tells whether the broker takes messages on this session.
	intake() *intake
	// heard counts the answers and deliveries that have come over the session's
	// connection: while it grows, the broker works.
	heard() uint64
	// giveUp ends the connection, since the broker doesn't answer, so that another
	// endpoint is tried.
	giveUp()
	// answering says whether the broker answers within limit. It is asked for it.
	answering(ctx context.Context, limit time.Duration) bool
	// quirks are those of the broker.
	quirks() oldbroker.Quirks
	// login is what is known of the connection's user.
	login() *userid.Login
	close(ctx context.Context)
}

// sessions is where a consumer's and a sender's sessions come from.
type sessions interface {
	open(ctx context.Context) (session, error)
	// give returns a session that isn't wanted any more. intact says that the session
	// surely hasn't ended.
	give(s session, intact bool)
}

// receiverOptions is what a receiver has beside its source. Its functions are called on the
// goroutine that reads from the connection, and must not block.
type receiverOptions struct {
	// takenBack, if not nil, is called with the ids of deliveries, from first to last, that the
	// broker has taken back before they were settled. Some may be unknown to the link.
	takenBack func(first, last uint32)
	// state, if not nil, is called with the link state of each flow that has one.
	state      func(map[string]any)
	properties map[string]any
}

// receiverLink is a link with manual credit.
type receiverLink interface {
	receive(ctx context.Context) (arrival, error)
	// prefetched returns a delivery that has come; false if none has.
	prefetched() (arrival, bool)
	issueCredit(n uint32) error
	// drain returns when the broker has no credit left and all that it had sent
	// has arrived.
	drain(ctx context.Context) error
	// settle returns at once: the broker confirms nothing.
	settle(id uint32, d disposition) error
	close(ctx context.Context) error
}

// arrival is a delivery as it comes.
type arrival struct {
	msg *amqp.Message
	id  uint32
	// unreadable says that msg can't be decoded: all it has is its encoded bytes as Data.
	unreadable bool
}

// senderLink sends without waiting for the broker.
type senderLink interface {
	// send takes m, and returns at once. to gets the answer, which may come before send
	// returns. An error means that m isn't sent, and that there is no answer. lost says that it
	// is the link's end; otherwise the error is about m.
	send(m *amqp.Message, to receipt) (x sending, lost bool, err error)
	close(ctx context.Context) error
}

// sending is a message that a link has taken. It isn't used once the answer has come.
type sending interface {
	// withdraw takes the message back if nothing of it was sent, and says whether it could.
	// There is no answer then.
	withdraw() bool
}

// receipt gets the broker's answer to a message.
type receipt interface {
	// answer is called once, on the goroutine that reads from the connection, and must not
	// block. After an error there is no answer, and the broker may have the message, unless it
	// is a *neverSent.
	answer(state amqp.DeliveryState, err error)
}

// neverSent is the error of a message of which the link has sent nothing.
type neverSent struct{ err error }

func (e *neverSent) Error() string { return e.err.Error() }
func (e *neverSent) Unwrap() error { return e.err }

// chanReceipt gets the error of an answer, or nil.
type chanReceipt chan error

func (c chanReceipt) answer(_ amqp.DeliveryState, err error) { c <- err }

// disposition is one of the four outcomes that AMQP has for a delivery.
type disposition struct {
	kind        dispositionKind
	failed      bool             // modified: counts as a failed delivery
	dead        bool             // modified: undeliverable here, which RabbitMQ dead-letters
	annotations amqp.Annotations // modified: merged into the message
}

type dispositionKind uint8

const (
	accepted dispositionKind = iota
	released
	modified
)

// attachKind is what kind of failure to open a link err is: the broker's refusal,
// or the loss of the link, session or connection.
func attachKind(err error) error {
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil || errors.As(err, new(*amqp.ConnError)) {
		return ErrConnectionLost
	}
	return condition.OfLink(string(remote.Condition), remote.Description)
}

// linkRefused says whether err is the broker's refusal of one link, and of no
// more. RabbitMQ 4.3 refuses a missing target so, 4.0 ends the session.
func linkRefused(err error) bool {
	var e *amqp.Error
	return errors.As(err, &e) && !errors.As(err, new(*amqp.SessionError)) && !errors.As(err, new(*amqp.ConnError))
}

// closeSession ends a session, without waiting long for a broker that is gone.
func closeSession(s session) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	s.close(ctx)
}
