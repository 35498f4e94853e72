package client

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

func newSender(op, target string, cfg senderConfig, from link.Sessions) *sender {
	s := &sender{
		op: op, target: target, sessions: from, pause: cfg.Pause, notify: cfg.Notify, outage: cfg.Outage, resend: cfg.Resend, copies: cfg.Copies, budget: newBudget(cfg.Bytes),
		queue: make(chan *outgoing, cfg.Depth),
		stop:  make(chan struct{}), done: make(chan struct{}), First: make(chan error, 1),
		idle: make(chan struct{}, 1), overdue: cmp.Or(cfg.Overdue, overdueAfter), log: cfg.Log,
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.ctx, s.Cut = context.WithCancel(context.Background())
	s.wanted, s.unwant = context.WithCancel(s.ctx)
	go (&linkKeeper{s: s, try: &backoff.Try{}, lost: time.Now()}).run()
	return s
}

// linkKeeper keeps a sender's link: it opens one, has a flight on it, and opens the next
// when that has ended, with pauses where it is of no use.
type linkKeeper struct {
	s        *sender
	notified bool // whether the first link could be opened
	try      *backoff.Try
	lost     time.Time
	renewed  bool // the link was replaced in order: nobody needs to hear of it
	// lastOverdue is when a link was last given up over an unanswered message.
	lastOverdue time.Time
}

// run returns when the sender has ended.
func (k *linkKeeper) run() {
	s := k.s
	defer close(s.done)
	defer s.Cut()
	defer func() {
		s.fail(&failure.Error{Op: s.op, Target: s.target, Kind: failure.ErrNotSent, Err: failure.ErrClosed})
	}()
	defer func() {
		select {
		case s.First <- failure.ErrClosed: // cut off before an attempt decided
		default:
		}
	}()
	defer func() { k.event(Event{Kind: EventEnded}) }()
	for k.try = range backoff.Tries(s.wanted, s.pause) {
		sess, link, err := s.attach()
		// A connection that is lost during that time decides nothing.
		if !k.notified && !errors.Is(err, failure.ErrConnectionLost) {
			k.notified = true
			s.First <- err
		}
		if errors.Is(err, failure.ErrClosed) || err == nil && !k.fly(sess, newFlightLink(link)) {
			return
		}
		if err != nil {
			k.refused(err)
		}
	}
}

// event reports an event of the link.
func (k *linkKeeper) event(e Event) {
	if k.s.notify != nil {
		e.Op, e.Target, e.Attempt = k.s.op, k.s.target, k.try.Attempt()
		k.s.notify(e)
	}
}

// refused is called when a link can't be opened.
func (k *linkKeeper) refused(err error) {
	k.renewed = false
	// While there is no connection, messages wait. When the broker has refused the link, they fail with its reason.
	if refusal, ok := errors.AsType[*failure.Error](err); ok && !errors.Is(err, failure.ErrConnectionLost) {
		k.event(Event{Kind: EventRefused, Err: err})
		k.s.refusal.Store(refusal)
		k.s.fail(refusal)
	}
}

// fly has a flight on a link, and says whether there is to be another.
func (k *linkKeeper) fly(sess link.Session, link *flightLink) (again bool) {
	s := k.s
	k.try.Up()
	if !k.renewed {
		k.event(Event{Kind: EventUp, Down: time.Since(k.lost)})
	}
	s.refusal.Store(nil)
	s.intake.Store(sess.Intake())
	f := newFlight(s, sess, link)
	s.flight.Store(f)
	end := f.run()
	s.flight.Store(nil)
	s.intake.Store(nil)
	if end.overdue {
		k.overdue(sess, end)
	}
	link.end()
	s.sessions.Give(sess, !end.lost && link.err == nil)
	k.lost, k.renewed = time.Now(), !end.lost
	if end.lost {
		k.event(Event{Kind: EventLost, Unsettled: end.unanswered, Err: failure.NewError(s.op, s.target, failure.ErrConnectionLost, end.why)})
		return true
	}
	k.try.Worked()
	return end.exhausted // on another session
}

// overdue is called when a link was given up over an unanswered message: the first
// time its session is replaced, since the broker may only have lost its way there; a
// link of the same session would find it so again. If the next session gets no answer
// either, and nothing else on the connection gives a sign of life, the connection is
// given up, so that another endpoint is tried.
func (k *linkKeeper) overdue(sess link.Session, end landing) {
	s := k.s
	now := time.Now()
	if now.Sub(k.lastOverdue) > s.overdue<<(maxOverdue+1) {
		s.overdues.Store(0)
	}
	k.lastOverdue = now
	again := s.overdues.Add(1) > 1
	what := "its session is replaced"
	if again && end.silent {
		what = "the connection is given up, as it gives no other sign of life"
		sess.GiveUp()
	}
	s.log.Warn("hopback: the broker doesn't answer a message: "+what, "op", s.op, "target", s.target, "after", s.overdue, "unanswered", end.unanswered)
}

func (s *sender) attach() (link.Session, link.SenderLink, error) {
	sess, err := s.sessions.Open(s.wanted)
	if err != nil {
		return nil, nil, s.refused(err)
	}
	l, err := sess.Sender(s.wanted, s.target)
	if err != nil {
		s.sessions.Give(sess, link.LinkRefused(err))
		return nil, nil, s.refused(err)
	}
	return sess, l, nil
}

// refused is the error for a link that couldn't be opened. A connection without room for a
// session isn't lost: waiting for it might never end.
func (s *sender) refused(err error) error {
	switch {
	case s.wanted.Err() != nil:
		return failure.ErrClosed
	case errors.Is(err, failure.ErrSessionLimit):
		return failure.NewError(s.op, s.target, failure.ErrSessionLimit, err)
	}
	return failure.MarkUnsent(failure.NewError(s.op, s.target, link.AttachKind(err), err))
}

// access is what a link may have sent against a missing permission. RabbitMQ checks the permission for
// a topic, and for the exchange of a message that names its own, with each message, and ends the
// session over the first that lacks it. It has read none of the messages behind that one.
type access struct {
	known bool
	text  string // the broker's; empty: the link ended for another reason
	seq   int64  // of the first message that it names; 0: none
}

// learn is called with the first message of a link that gets no answer, before that one is taken out
// of the unanswered ones, with mu held.
func (a *answers) learn(err error) {
	if a.access.known {
		return
	}
	a.access.known = true
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil || remote.Condition != amqp.ErrCondUnauthorizedAccess {
		return
	}
	a.access.text = remote.Description
	for x := a.oldest; x != nil; x = x.next {
		if names(remote.Description, a.s.target, x.msg) {
			a.access.seq = x.out.seq
			return
		}
	}
}

// forbidden reports whether the link ended since the user may not publish this message, or one with
// the same address.
func (a *answers) forbidden(x *sent) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.access.seq > 0 && x.out.seq >= a.access.seq && names(a.access.text, a.s.target, x.msg)
}

// unread reports whether the broker has certainly not read the message, since it ended the session
// over an earlier one.
func (a *answers) unread(x *sent) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.access.seq > 0 && x.out.seq > a.access.seq
}

// names reports whether RabbitMQ's text about a missing permission names what m was published to
// (TestAPublishThatATopicPermissionForbids). The names in it are the sender's, and not escaped.
func names(text, target string, m *amqp.Message) bool {
	if target == "" {
		target = addressOf(m)
	}
	to, err := address.Parse(target)
	if err != nil {
		return false
	}
	exchange := to.ExchangeName()
	if to.IsQueue() {
		exchange = "amq.default"
	}
	in := "exchange '" + exchange + "' in vhost '"
	if strings.HasPrefix(text, "write access to "+in) || strings.HasPrefix(text, "forbidden to publish to internal "+in) {
		return true
	}
	for _, key := range append(ccOf(m), to.RoutingKey()) {
		if strings.HasPrefix(text, "write access to topic '"+key+"' in "+in) {
			return true
		}
	}
	return false
}

// ccOf are the message's additional routing keys.
func ccOf(m *amqp.Message) []string {
	const cc = "x-cc"
	list, ok := m.Annotations[cc].([]any)
	if !ok {
		list, _ = m.Annotations[amqp.Symbol(cc)].([]any)
	}
	keys := make([]string, 0, len(list)+1)
	for _, key := range list {
		if text, ok := key.(string); ok {
			keys = append(keys, text)
		}
	}
	return keys
}
