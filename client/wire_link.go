package client

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/userid"
)

// The interfaces between this package's machinery and go-amqp. Consumers,
// senders and the management work on these, so that unit tests can put a link
// with faults in their place and run in virtual time.

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
	intake() *frames.Intake
	// heard counts the answers and deliveries that have come over the session's
	// connection: while it grows, the broker works.
	heard() uint64
	// giveUp ends the connection, since the broker doesn't answer, so that another
	// endpoint is tried.
	giveUp()
	// answering says whether the broker answers within limit. It is asked for it.
	answering(ctx context.Context, limit time.Duration) bool
	broker() Broker
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
// link's own goroutine and must not block.
type receiverOptions struct {
	// takenBack, if not nil, is called with the delivery tag of a delivery that the
	// broker has taken back from this link before it was settled.
	takenBack func(tag []byte)
	// state, if not nil, is called with the link state of each flow that has one.
	state      func(map[string]any)
	properties map[string]any
}

// receiverLink is a link with manual credit.
type receiverLink interface {
	receive(ctx context.Context) (*Message, error)
	prefetched() *Message
	issueCredit(n uint32) error
	// drain returns when the broker has no credit left and all that it had sent
	// has arrived.
	drain(ctx context.Context) error
	settle(m *Message, d disposition) error
	close(ctx context.Context) error
}

// senderLink sends without waiting for the broker's answer. One goroutine owns it.
type senderLink interface {
	// send returns when the message is written. sent is false if it certainly
	// never left.
	send(ctx context.Context, m *Message) (r receipt, sent bool, err error)
	close(ctx context.Context) error
}

// receipt is the broker's answer to come.
type receipt interface {
	wait(ctx context.Context) (amqp.DeliveryState, error)
}

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

// openSession opens a session for the machinery itself, of those that are spared for it,
// and waits for one. The session should carry after deliveries.
func (w *wire) openSession(ctx context.Context, after uint64) (session, error) {
	select {
	case w.spare <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-w.amqp.Done():
		return nil, w.over()
	}
	return w.session(ctx, after, func() { <-w.spare })
}

// session opens a session on a place that the caller has. ended is called once: when the
// session has ended, or can't begin any more.
func (w *wire) session(ctx context.Context, after uint64, ended func()) (session, error) {
	var decided atomic.Bool // the session will begin, or it won't
	s, err := bounded(ctx, w,
		func(ctx context.Context) (*amqpSession, error) {
			if !decided.CompareAndSwap(false, true) {
				return nil, context.Canceled
			}
			s, err := w.amqp.NewSession(ctx, nil)
			if err != nil {
				ended()
				return nil, err
			}
			w.sessions.Add(1)
			// Sessions begin one at a time, see bounded.
			return &amqpSession{w: w, s: s, in: w.frames.Intake(), after: after, ended: ended}, nil
		},
		func(s *amqpSession) { s.close(w.ctx) })
	if err != nil {
		if decided.CompareAndSwap(false, true) {
			ended()
		}
		return nil, err
	}
	return s, nil
}

type amqpSession struct {
	w  *wire
	s  *amqp.Session
	in *frames.Intake
	// used counts the deliveries that went over the session, in either direction;
	// after is how many it should carry.
	used  atomic.Uint64
	after uint64
	// attaching says that a receiver waits for its queue: until that has answered,
	// RabbitMQ doesn't look at the end of the session either.
	attaching atomic.Bool
	// unheard says that the end of a link had no answer in time: RabbitMQ waits for a
	// queue there, too, and looks at the end of the session after that.
	unheard atomic.Bool
	ended   func() // see wire.session
}

func (s *amqpSession) broken() <-chan struct{} { return s.w.amqp.Done() }
func (s *amqpSession) intake() *frames.Intake  { return s.in }
func (s *amqpSession) broker() Broker          { return s.w.broker }
func (s *amqpSession) login() *userid.Login    { return s.w.login }
func (s *amqpSession) heard() uint64           { return s.w.heard.Load() }
func (s *amqpSession) giveUp()                 { s.w.giveUp(errOverdue) }
func (s *amqpSession) answering(ctx context.Context, limit time.Duration) bool {
	return s.w.answering(ctx, limit)
}

// errOverdue is why a connection is given up whose queues take messages and don't answer.
var errOverdue = errors.New("the broker leaves messages unanswered")

func (s *amqpSession) wear() float64 { return float64(s.used.Load()) / float64(s.after) }

// close waits for the end of the session within ctx; it is closed in any case, when
// its turn comes, or else the connection would hold it for ever.
func (s *amqpSession) close(ctx context.Context) {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		end := bounded[struct{}]
		if s.attaching.Load() || s.unheard.Load() {
			end = patient[struct{}]
		}
		_, _ = end(s.w.ctx, s.w, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, s.s.Close(ctx)
		}, func(struct{}) {})
		s.w.sessions.Add(-1)
		s.ended()
	}()
	select {
	case <-closed:
	case <-ctx.Done():
	}
}

func (s *amqpSession) receiver(ctx context.Context, source string, o receiverOptions) (receiverLink, error) {
	options := &amqp.ReceiverOptions{
		Credit:                    -1, // manual: draining works only so
		SettlementMode:            amqp.ReceiverSettleModeFirst.Ptr(),
		RequestedSenderSettleMode: amqp.SenderSettleModeUnsettled.Ptr(),
		Properties:                o.properties,
		OnLinkStateProperties:     o.state,
	}
	if o.takenBack != nil {
		options.OnDeliveryStateChanged = func(m *Message, _ amqp.DeliveryState) { o.takenBack(m.DeliveryTag) }
	}
	s.attaching.Store(true)
	return patient(ctx, s.w,
		func(ctx context.Context) (receiverLink, error) {
			defer s.attaching.Store(false)
			r, err := s.s.NewReceiver(ctx, source, options)
			if err != nil {
				return nil, err
			}
			return &amqpReceiver{r, s, &s.w.heard}, nil
		},
		func(r receiverLink) { _ = r.close(s.w.ctx) })
}

func (s *amqpSession) sender(ctx context.Context, target string) (senderLink, error) {
	return bounded(ctx, s.w,
		func(ctx context.Context) (senderLink, error) {
			l, err := s.s.NewSender(ctx, target, &amqp.SenderOptions{
				SettlementMode:              amqp.SenderSettleModeUnsettled.Ptr(),
				RequestedReceiverSettleMode: amqp.ReceiverSettleModeFirst.Ptr(),
			})
			if err != nil {
				return nil, err
			}
			return &amqpSender{l, s}, nil
		},
		func(l senderLink) { _ = l.close(s.w.ctx) })
}

// endOfLink notes whether the end of a link was answered within ctx.
func (s *amqpSession) endOfLink(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		s.unheard.Store(true)
	}
	return err
}

type amqpReceiver struct {
	r     *amqp.Receiver
	of    *amqpSession
	heard *atomic.Uint64 // the connection's, unless what comes tells nothing of queues
}

func (l *amqpReceiver) receive(ctx context.Context) (*Message, error) {
	m, err := l.r.Receive(ctx, nil)
	if err == nil {
		l.of.used.Add(1)
		l.heard.Add(1)
	}
	return m, err
}

func (l *amqpReceiver) prefetched() *Message {
	m := l.r.Prefetched()
	if m != nil {
		l.of.used.Add(1)
	}
	return m
}

func (l *amqpReceiver) issueCredit(n uint32) error      { return l.r.IssueCredit(n) }
func (l *amqpReceiver) drain(ctx context.Context) error { return l.r.DrainCredit(ctx, nil) }
func (l *amqpReceiver) close(ctx context.Context) error { return l.of.endOfLink(ctx, l.r.Close(ctx)) }

// settle returns when the disposition is written; the broker never confirms one.
// Its ctx has no deadline on purpose, see wire.ctx; the link's end ends it.
func (l *amqpReceiver) settle(m *Message, d disposition) error {
	ctx := context.Background()
	switch d.kind {
	case accepted:
		return l.r.AcceptMessage(ctx, m)
	case released:
		return l.r.ReleaseMessage(ctx, m)
	default:
		opts := &amqp.ModifyMessageOptions{DeliveryFailed: d.failed, UndeliverableHere: d.dead}
		if len(d.annotations) > 0 {
			opts.Annotations = d.annotations
		}
		return l.r.ModifyMessage(ctx, m, opts)
	}
}

type amqpSender struct {
	s  *amqp.Sender
	of *amqpSession
}

func (l *amqpSender) send(ctx context.Context, m *Message) (receipt, bool, error) {
	// Sizes are compared before anything is written; so are values that can't be
	// encoded. Both come as errors that are not about the link.
	r, err := l.s.SendWithReceipt(ctx, m, nil)
	if err != nil {
		return nil, !localSendError(err), err
	}
	l.of.used.Add(1)
	return &amqpReceipt{r, &l.of.w.heard}, true, nil
}

func (l *amqpSender) close(ctx context.Context) error { return l.of.endOfLink(ctx, l.s.Close(ctx)) }

type amqpReceipt struct {
	r     amqp.SendReceipt
	heard *atomic.Uint64 // the connection's
}

func (r *amqpReceipt) wait(ctx context.Context) (state amqp.DeliveryState, err error) {
	// If the answer has come and the link has ended, go-amqp tells one of the two at
	// random: it is asked again, since the answer is worth more.
	for range 8 {
		if state, err = r.r.Wait(ctx); err == nil || ctx.Err() != nil {
			break
		}
	}
	if err == nil {
		r.heard.Add(1)
	}
	return state, err
}

// attachKind is what kind of failure to open a link err is: the broker's refusal,
// or the loss of the link, session or connection.
func attachKind(err error) error {
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil || errors.As(err, new(*amqp.ConnError)) {
		return ErrConnectionLost
	}
	if credentialExpired(remote) {
		return ErrConnectionLost
	}
	switch remote.Condition {
	case amqp.ErrCondDetachForced, amqp.ErrCondConnectionForced, amqp.ErrCondInternalError:
		return ErrConnectionLost // that passes
	}
	return ErrRefused
}

// linkRefused says whether err is the broker's refusal of one link, and of no
// more. RabbitMQ 4.3 refuses a missing target so, 4.0 ends the session.
func linkRefused(err error) bool {
	var e *amqp.Error
	return errors.As(err, &e) && !errors.As(err, new(*amqp.SessionError)) && !errors.As(err, new(*amqp.ConnError))
}

// localSendError says whether go-amqp refused a message before writing any of it:
// too large, or not encodable. Errors of the link, session and connection have
// types of their own, and may come amid a write.
func localSendError(err error) bool {
	var link *amqp.LinkError
	var sess *amqp.SessionError
	var conn *amqp.ConnError
	if errors.As(err, &link) || errors.As(err, &sess) || errors.As(err, &conn) {
		return false
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	var e *amqp.Error
	if errors.As(err, &e) {
		return e.Condition == amqp.ErrCondMessageSizeExceeded
	}
	return true
}

// closeSession ends a session, without waiting long for a broker that is gone.
func closeSession(s session) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	s.close(ctx)
}
