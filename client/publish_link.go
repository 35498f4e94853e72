package client

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/hopback/hopback/internal/link"
)

func newSender(op, target string, cfg senderConfig, from sessions) *sender {
	s := &sender{
		op: op, target: target, sessions: from, backoff: cfg.backoff, tell: cfg.tell, outage: cfg.outage, resend: cfg.resend, copies: cfg.copies, budget: newBudget(cfg.bytes),
		queue: make(chan *outgoing, cfg.depth),
		stop:  make(chan struct{}), done: make(chan struct{}), first: make(chan error, 1),
		idle: make(chan struct{}, 1), overdue: cmp.Or(cfg.overdue, overdueAfter), log: cfg.log,
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.ctx, s.cut = context.WithCancel(context.Background())
	go (&linkKeeper{s: s, lost: time.Now()}).run()
	return s
}

// linkKeeper keeps a sender's link: it opens one, has a flight on it, and opens the next
// when that has ended, with pauses where it is of no use.
type linkKeeper struct {
	s        *sender
	told     bool // whether the first link could be opened
	failures int  // in a row
	lost     time.Time
	renewed  bool // the link was replaced in order: nobody needs to hear of it
	// lastOverdue is when a link was last given up over an unanswered message.
	lastOverdue time.Time
}

// run returns when the sender has ended.
func (k *linkKeeper) run() {
	s := k.s
	defer close(s.done)
	defer s.cut()
	defer func() { s.fail(&Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrClosed}) }()
	defer func() {
		select {
		case s.first <- ErrClosed: // cut off before an attempt decided
		default:
		}
	}()
	defer func() { k.event(Event{Kind: EventEnded}) }()
	for again := true; again && s.ctx.Err() == nil; {
		sess, link, err := s.attach()
		// A connection that is lost meanwhile decides nothing.
		if !k.told && !errors.Is(err, ErrConnectionLost) {
			k.told = true
			s.first <- err
		}
		if err != nil {
			again = k.refused(err)
		} else {
			again = k.fly(sess, newFlightLink(link))
		}
	}
}

// event tells of the link.
func (k *linkKeeper) event(e Event) {
	if k.s.tell != nil {
		e.Op, e.Target, e.Attempt = k.s.op, k.s.target, k.failures+1
		k.s.tell(e)
	}
}

// refused is called when a link can't be opened, and says whether to try again.
func (k *linkKeeper) refused(err error) (again bool) {
	if errors.Is(err, ErrClosed) {
		return false
	}
	k.renewed = false
	// While there is no connection, messages wait. When the broker has refused the link
	// they are told why.
	if refusal, ok := errors.AsType[*Error](err); ok && !errors.Is(err, ErrConnectionLost) {
		k.event(Event{Kind: EventRefused, Err: err})
		k.s.refusal.Store(refusal)
		k.s.fail(refusal)
	}
	return k.rest()
}

// rest waits before the next attempt, and says whether there should be one.
func (k *linkKeeper) rest() bool {
	if !k.s.rest(k.s.backoff.pause(k.failures)) {
		return false
	}
	k.failures++
	return true
}

// fly has a flight on a link, and says whether there is to be another.
func (k *linkKeeper) fly(sess session, link *flightLink) (again bool) {
	s := k.s
	began := time.Now()
	if !k.renewed {
		k.event(Event{Kind: EventUp, Down: began.Sub(k.lost)})
	}
	k.renewed = false
	s.refusal.Store(nil)
	s.intake.Store(sess.intake())
	f := newFlight(s, sess, link)
	s.flight.Store(f)
	end := f.run()
	s.flight.Store(nil)
	s.intake.Store(nil)
	if end.overdue {
		k.overdue(sess, end)
	}
	link.end()
	s.sessions.give(sess, !end.lost && link.err == nil)
	if !end.lost {
		if !end.worn || s.ctx.Err() != nil || isClosed(s.stop) && s.callers.Load() == 0 {
			return false
		}
		k.failures, k.renewed, k.lost = 0, true, time.Now()
		return true // on another session
	}
	k.lost = time.Now()
	if k.lost.Sub(began) > s.backoff.Max {
		k.failures = 0
	}
	k.event(Event{Kind: EventLost, Unsettled: end.unanswered, Err: newError(s.op, s.target, ErrConnectionLost, end.why)})
	if end.overdue || isClosed(sess.broken()) && k.lost.Sub(began) >= provenAfter {
		k.failures = 0
		return true // the next session, or the next connection, owes nothing to this one
	}
	return k.rest()
}

// provenAfter is how long a link has lived whose loss with its connection says nothing
// against the next: it is opened without a pause. One that lived shorter may be what the
// broker ends its connections for.
const provenAfter = time.Second

// overdue is called when a link was given up over an unanswered message: the first
// time its session is replaced, since the broker may only have lost its way there; a
// link of the same session would find it so again. If the next session gets no answer
// either, and nothing else on the connection gives a sign of life, the connection is
// given up, so that another endpoint is tried.
func (k *linkKeeper) overdue(sess session, end landing) {
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
		sess.giveUp()
	}
	s.log.Warn("hopback: the broker doesn't answer a message: "+what, "op", s.op, "target", s.target, "after", s.overdue, "unanswered", end.unanswered)
}

// rest waits before the next attempt, and says whether there should be one: not
// when the sender was stopped and nobody waits for it to send.
func (s *sender) rest(d time.Duration) bool {
	ctx, cancel := s.wanted()
	defer cancel()
	return link.Pause(ctx, d)
}

// wanted returns a ctx that ends when the sender is cut off, or was stopped and
// nobody waits for it to send.
func (s *sender) wanted() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(s.ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		defer cancel()
		select {
		case <-s.stop:
		case <-ctx.Done():
			return
		}
		for s.callers.Load() > 0 {
			select {
			case <-s.idle:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() {
		cancel()
		<-watched // two at once would take each other's signal
	}
}

func (s *sender) attach() (session, senderLink, error) {
	ctx, cancel := s.wanted()
	defer cancel()
	sess, err := s.sessions.open(ctx)
	if err != nil {
		return nil, nil, s.refused(ctx, err)
	}
	link, err := sess.sender(ctx, s.target)
	if err != nil {
		s.sessions.give(sess, linkRefused(err))
		return nil, nil, s.refused(ctx, err)
	}
	return sess, link, nil
}

// refused is the error for a link that couldn't be opened. A connection without
// room for a session isn't lost: to wait for it could take for ever.
func (s *sender) refused(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return ErrClosed
	case errors.Is(err, ErrSessionLimit):
		return newError(s.op, s.target, ErrSessionLimit, err)
	}
	e := newError(s.op, s.target, attachKind(err), err)
	e.unsent = true
	return e
}
