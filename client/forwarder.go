package client

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/link"

	"github.com/hopback/hopback/internal/failure"
)

// maxForwardLinks is how many addresses a forwarder keeps links to. RabbitMQ ends
// the session at its 257th link.
const maxForwardLinks = 200

// forwarder carries out a consumer's Forward outcomes: a link for each address,
// since a link's own target leaves the message's To property as the sender set
// it, and all links on one session, apart from the consumer's, so that a fault in
// forwarding doesn't end the deliveries.
//
// An address that takes nothing stalls: its forwards wait, one of them at a time is
// tried, with growing pauses, and the first that is confirmed has the others follow.
// What waits is held apart from the consumer's window (see forwardOriginal.SetAside), so that
// deliveries that have no need of this address go on.
type forwarder struct {
	cfg      senderConfig // of its senders
	sessions link.Sessions

	mu      sync.Mutex
	closed  bool
	senders map[string]*forwardSender
	session *sharedSession
	// opening is the turn to open a session.
	opening chan struct{}
	// peeks counts the calls of look; looking says that another follows.
	peeks   int
	peeking bool
	timer   *time.Timer
	alarms  alarms
	// leaving are senders of idle addresses that aren't done yet.
	leaving map[*forwardSender]struct{}
}

// alarms is how much of a forwarder's time the broker has had a memory or disk alarm, as
// far as its looks have seen it.
type alarms struct {
	spent time.Duration
	asked time.Time
	now   bool // there was one when that was last asked
}

// note adds what has passed since the last call, and returns the sum.
func (a *alarms) note(blocked bool, now time.Time) time.Duration {
	if a.now {
		a.spent += now.Sub(a.asked)
	}
	a.asked, a.now = now, blocked
	return a.spent
}

// forwardSender is a link for one address. All but the sender is guarded by
// forwarder.mu.
type forwardSender struct {
	*sender
	sent []*pendingForward // not answered yet, in the order of sending
	// parked are those that wait for the address to take messages again.
	parked   []*pendingForward
	failures int       // since the last that was confirmed
	stalled  time.Time // since when it takes nothing; zero: it takes messages
	notified bool      // of that
	logged   bool      // that it takes nothing
	unlinked time.Time // when there was no link to it last
	why      error
	used     time.Time // when a forward was last sent
	next     time.Time // when the next of parked is tried
	// leap is how many of parked follow a confirmed one.
	leap int
}

// sharedSession is a session that several senders use. Once one of them has lost
// its link on it, it is retired: nobody knows whether only the link ended. Those
// whose links still work keep it until they give it back. A link that was closed,
// or that alone was refused, doesn't retire it, or else a rare or a bad address
// would cost a session each time.
type sharedSession struct {
	link.Session
	refs    int
	retired bool
}

// pendingForward is a Forward that is carried out.
type pendingForward struct {
	Target   string
	Msg      *amqp.Message
	Patience time.Duration
	// Abandoned is closed when the original can't be settled any more: the broker
	// will deliver it again, so a copy would only be a duplicate.
	Abandoned <-chan struct{}
	forwardOriginal

	// out is what the sender has of it. The sender has left it when it has answered.
	out  outgoing
	by   *forwarder
	link *forwardSender

	since    time.Time     // since when it waits
	alarms   time.Duration // the forwarder's until then
	failures int
	next     time.Time // not to be tried before
	why      error     // of the last failure
	aside    bool
	peek     int // the forwarder's looks when it was sent
}

// forwardOriginal is the delivery that a forward is a copy of.
type forwardOriginal interface {
	// Report is called for the first failure.
	Report(err error, again time.Duration)
	// SetAside is called when the forward has to wait. It says whether the delivery now
	// waits apart from the consumer's window, or has gone back to its queue, if it may:
	// the forward is dropped then. It is called again while it says neither.
	SetAside(mayReturn bool) (aside, returned bool)
	// Done is called at most once, with nil when the broker has the copy. It must
	// not block. It isn't called for an abandoned forward, or after close.
	Done(err error)
}

func newForwarder(from link.Sessions, cfg senderConfig) *forwarder {
	return &forwarder{cfg: cfg, sessions: from, senders: map[string]*forwardSender{}, opening: make(chan struct{}, 1)}
}

// Check opens a link to an address before there is a forward, within ctx, and closes it again.
// The error says why the broker refuses it, for good or for now.
func (w *forwarder) Check(ctx context.Context, target string) (err error) {
	s := newSender("forward", target, w.cfg, w)
	defer s.Cut()
	select {
	case err = <-s.First:
	case <-ctx.Done():
		return nil
	}
	s.halt()
	select {
	case <-s.done: // so that its session is free for the forwards to come
	case <-ctx.Done():
	}
	return err
}

// forwardPause is the pause between attempts to forward to an address that takes
// nothing.
var forwardPause = backoff.Exponential{Min: 200 * time.Millisecond, Max: 5 * time.Second}

// refusedPause is the same if a queue refuses a message that was sent to an exchange, which may have routed it to others: these
// keep the message, so each attempt adds a copy.
var refusedPause = backoff.Exponential{Min: forwardPause.Min, Max: time.Minute}

const (
	// forwardPeek is how often the forwards in flight are checked. One that is
	// unanswered at the second check has to wait.
	forwardPeek = 500 * time.Millisecond
	// stalledAfter is after how many failures in a row an address is stalled: a message
	// that alone is refused shouldn't stall it.
	stalledAfter = 3
	// notifyStalled is how long an address is stalled before that is reported.
	notifyStalled = time.Second
	// logStalled is how long the link to an address must have been there. While the connection is lost,
	// that has a line for all addresses, and after it the broker may need a while.
	logStalled = 10 * time.Second
	// forwardIdle is how long a link is kept without a forward.
	forwardIdle = 15 * time.Second
)

// Send has f forwarded. It doesn't block.
func (w *forwarder) Send(f *pendingForward) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return
	}
	s := w.senders[f.Target]
	if s == nil {
		if !w.room() {
			w.later(f, &failure.Error{Op: "forward", Target: f.Target, Kind: failure.ErrNotSent, Text: "too many different forward addresses are in use"})
			return
		}
		s = &forwardSender{sender: newSender("forward", f.Target, w.cfg, w)}
		w.senders[f.Target] = s
	}
	if s.stalled.IsZero() && s.alarmed() {
		s.stall(&failure.Error{Op: "forward", Target: f.Target, Kind: failure.ErrNotSent, Text: "the broker accepts no messages, probably because of a memory or disk alarm"})
	}
	if s.stalled.IsZero() || len(s.sent) == 0 && !time.Now().Before(s.next) {
		if w.try(s, f) {
			return
		}
	}
	w.park(s, f, s.why)
}

// alarmed says whether the broker accepts nothing on the link's session.
func (s *forwardSender) alarmed() bool {
	_, blocked := s.Blocked()
	return blocked
}

// alarmed says whether the broker has an alarm, as far as any address shows it: all are on
// one connection.
func (w *forwarder) alarmed() bool {
	for _, s := range w.senders {
		if s.alarmed() {
			return true
		}
	}
	return false
}

// begin has f wait from now on, unless it does already.
func (w *forwarder) begin(f *pendingForward) {
	if f.since.IsZero() {
		f.since = time.Now()
		f.alarms = w.alarms.note(w.alarmed(), f.since)
	}
}

// impatient says whether f has waited for longer than its patience after a further pause.
// An alarm's time doesn't count, and nothing is given up while one lasts.
func (w *forwarder) impatient(f *pendingForward, now time.Time, pause time.Duration) bool {
	return !w.alarms.now && now.Sub(f.since)-(w.alarms.spent-f.alarms)+pause > f.Patience
}

// stall and what follows is called with forwarder.mu held.
func (s *forwardSender) stall(why error) {
	s.why = why
	if s.stalled.IsZero() {
		s.stalled, s.next, s.leap = time.Now(), time.Now().Add(forwardPause.Pause(0)), 0
	}
}

// try hands f to the sender, and says whether it took it.
func (w *forwarder) try(s *forwardSender, f *pendingForward) bool {
	f.by, f.link = w, s
	f.out = outgoing{msg: f.Msg, abandoned: f.Abandoned, to: f}
	select {
	case s.queue <- &f.out:
	default:
		s.why = &failure.Error{Op: "forward", Target: f.Target, Kind: failure.ErrNotSent, Text: "too many forwards wait for this address"}
		return false
	}
	f.peek = w.peeks
	s.sent, s.used = append(s.sent, f), time.Now()
	w.watch()
	return true
}

// park has f wait for its address, apart from the consumer's window if there is room.
func (w *forwarder) park(s *forwardSender, f *pendingForward, why error) {
	w.begin(f)
	if f.failures++; f.failures == 1 && s.stalled.IsZero() {
		f.Report(why, forwardPause.Min)
	}
	f.why = why
	if !f.wait(true) {
		s.parked = append(s.parked, f)
		w.watch()
	}
}

// wait sets f's delivery aside. It says whether f is over instead, since the delivery
// went back to its queue.
func (f *pendingForward) wait(mayReturn bool) (returned bool) {
	if !f.aside {
		f.aside, returned = f.SetAside(mayReturn)
	}
	return returned
}

// later tries f again where there is no link to wait for.
func (w *forwarder) later(f *pendingForward, err error) {
	w.begin(f)
	now := time.Now()
	w.alarms.note(w.alarmed(), now)
	pause := forwardPause.Pause(f.failures)
	if f.failures++; f.failures == 1 {
		f.Report(err, pause)
	}
	switch {
	case w.impatient(f, now, pause):
		f.Done(err)
	case !f.wait(true):
		time.AfterFunc(pause, func() {
			if !failure.IsClosed(f.Abandoned) {
				w.Send(f)
			}
		})
	}
}

// room makes room for one more link by closing an idle one.
func (w *forwarder) room() bool {
	if len(w.senders) < maxForwardLinks {
		return true
	}
	for target, s := range w.senders {
		if len(s.sent)+len(s.parked) == 0 {
			w.leave(target, s)
			return true
		}
	}
	return false
}

// leave closes an idle link.
func (w *forwarder) leave(target string, s *forwardSender) {
	delete(w.senders, target)
	if w.leaving == nil {
		w.leaving = map[*forwardSender]struct{}{}
	}
	w.leaving[s] = struct{}{}
	context.AfterFunc(s.ctx, func() { // it is about to be done
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.leaving, s)
	})
	s.halt()
}

// rest closes the links that have had no forward for a while, and the session with the last of them. It
// is called while none is in flight, and again when the next link is due.
func (w *forwarder) rest() {
	now := time.Now()
	var due time.Duration
	for target, s := range w.senders {
		left := s.used.Add(forwardIdle).Sub(now)
		switch {
		case !s.stalled.IsZero(): // it is remembered
		case left <= 0:
			w.leave(target, s)
		case due == 0 || left < due:
			due = left
		}
	}
	if due > 0 {
		w.timer.Reset(due)
	}
}

// Answered decides what follows on the broker's answer.
func (f *pendingForward) Answered(_ *outgoing, err error) {
	if f.by.settled(f.link, f, err) {
		f.Done(err)
	}
}

// settled says whether err is the last word on f.
func (w *forwarder) settled(s *forwardSender, f *pendingForward, err error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if i := slices.Index(s.sent, f); i >= 0 {
		s.sent = slices.Delete(s.sent, i, i+1)
	}
	switch {
	case err == nil:
		w.taken(s)
		return true
	case w.closed || failure.IsClosed(f.Abandoned):
		return false
	case errors.Is(err, failure.ErrTooLarge) || errors.As(err, new(*argument.Error)):
		return true
	}
	if s.failures++; s.failures >= stalledAfter {
		s.stall(err)
	}
	now, pause := time.Now(), forwardPause
	if to, _ := address.Parse(f.Target); errors.Is(err, failure.ErrRefused) && !to.IsQueue() {
		pause = refusedPause
	}
	f.next = now.Add(pause.Pause(f.failures))
	s.next = now.Add(pause.Pause(s.failures - 1))
	w.park(s, f, err)
	return false
}

// taken notes that the address takes messages, and has those that wait follow.
func (w *forwarder) taken(s *forwardSender) {
	s.failures = 0
	if s.notified {
		down := time.Since(s.stalled)
		s.event(w, Event{Kind: EventForwardResumed, Down: down})
		if s.logged {
			s.log.Info("hopback: the broker confirms copies to an address again", "to", s.target, "after", down.Round(time.Millisecond), "waiting", len(s.parked))
		}
	}
	s.stalled, s.notified, s.logged, s.why = time.Time{}, false, false, nil
	if len(s.parked) == 0 {
		return
	}
	s.leap = min(2*s.leap+2, w.cfg.Depth)
	w.retry(s, s.leap)
}

// retry sends up to n of those that wait and are due.
func (w *forwarder) retry(s *forwardSender, n int) {
	now := time.Now()
	s.parked = slices.DeleteFunc(s.parked, func(f *pendingForward) bool {
		if n == 0 || now.Before(f.next) {
			return false
		}
		if failure.IsClosed(f.Abandoned) {
			return true
		}
		if !w.try(s, f) {
			n = 0
			return false
		}
		n--
		return true
	})
}

func (s *forwardSender) event(w *forwarder, e Event) {
	if w.cfg.Notify != nil {
		e.Op, e.Target = "forward", s.target
		w.cfg.Notify(e)
	}
}

// Count adds how many forwards aren't confirmed, and how many of them are to an address
// that takes nothing.
func (w *forwarder) Count(c *instrument.ConsumerStats) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.senders {
		n := len(s.sent) + len(s.parked)
		c.Forwarding += n
		if s.stalled.IsZero() || n == 0 {
			continue
		}
		c.Stalled += n
		if c.StalledSince.IsZero() || s.stalled.Before(c.StalledSince) {
			c.StalledSince, c.StalledErr = s.stalled, s.why
		}
	}
}

// watch calls look as long as forwards are in flight.
func (w *forwarder) watch() {
	if w.peeking {
		return
	}
	w.peeking = true
	if w.timer == nil {
		w.timer = time.AfterFunc(forwardPeek, w.peek)
	} else {
		w.timer.Reset(forwardPeek)
	}
}

// peek finds the forwards that aren't answered, those whose patience is over, and the
// addresses to try again.
func (w *forwarder) peek() {
	var over []*pendingForward
	defer func() {
		for _, f := range over {
			f.Done(f.why)
		}
	}()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.peeking = false
	if w.closed {
		return
	}
	w.peeks++
	w.alarms.note(w.alarmed(), time.Now())
	under := false
	for _, s := range w.senders {
		over = append(over, w.peekAt(s)...)
		under = under || len(s.sent)+len(s.parked) > 0
	}
	if under {
		w.watch()
	} else {
		w.rest()
	}
}

// peekAt returns those whose patience is over.
func (w *forwarder) peekAt(s *forwardSender) (over []*pendingForward) {
	now := time.Now()
	for _, f := range s.sent {
		if w.peeks-f.peek < 2 {
			break
		}
		if s.stalled.IsZero() {
			why := error(&failure.Error{Op: "forward", Target: s.target, Kind: failure.ErrOutcomeUnknown, Text: "the broker has not answered yet"})
			if refusal := s.refusal.Load(); refusal != nil {
				why = refusal
			}
			s.stall(why)
		}
		f.wait(false) // the copy may be with the broker: its original can't go back
	}
	s.parked = slices.DeleteFunc(s.parked, func(f *pendingForward) bool {
		switch {
		case failure.IsClosed(f.Abandoned):
		case w.impatient(f, now, 0):
			if s.why != nil {
				f.why = s.why
			}
			over = append(over, f)
		default:
			return f.wait(true)
		}
		return true
	})
	if !s.stalled.IsZero() && !s.notified && now.Sub(s.stalled) >= notifyStalled {
		s.notified = true
		s.event(w, Event{Kind: EventForwardStalled, Err: s.why, Unsettled: len(s.sent) + len(s.parked)})
	}
	if s.flight.Load() == nil && s.refusal.Load() == nil {
		s.unlinked = now
	}
	if s.notified && !s.logged && now.Sub(s.unlinked) >= logStalled {
		s.logged = true
		s.log.Warn("hopback: the broker doesn't confirm copies to an address; the original messages are kept", "to", s.target, "error", s.why, "waiting", len(s.sent)+len(s.parked))
	}
	switch {
	case s.stalled.IsZero():
		w.retry(s, w.cfg.Depth)
	case len(s.sent) == 0 && !now.Before(s.next):
		w.probe(s)
	}
	return over
}

// probe tries one of those that wait, each in its turn.
func (w *forwarder) probe(s *forwardSender) {
	if len(s.parked) > 0 && w.try(s, s.parked[0]) {
		s.parked = slices.Delete(s.parked, 0, 1)
	}
}

// Open returns the shared session, opening one if there is none to use.
func (w *forwarder) Open(ctx context.Context) (link.Session, error) {
	select {
	case w.opening <- struct{}{}:
		defer func() { <-w.opening }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	w.mu.Lock()
	s := w.session
	if s != nil && !s.retired && s.Exhaust() < 1 && !failure.IsClosed(s.Broken()) {
		s.refs++
		w.mu.Unlock()
		return s, nil
	}
	w.mu.Unlock()
	fresh, err := w.sessions.Open(ctx)
	if err != nil {
		return nil, err
	}
	s = &sharedSession{Session: fresh, refs: 1}
	w.mu.Lock()
	w.session = s
	w.mu.Unlock()
	return s, nil
}

// Give returns a session after the link on it has ended.
func (w *forwarder) Give(given link.Session, intact bool) {
	s := given.(*sharedSession)
	w.mu.Lock()
	if !intact {
		s.retired = true
	}
	s.refs--
	last := s.refs == 0
	if w.session == s && (s.retired || last) {
		w.session = nil
	}
	w.mu.Unlock()
	if last {
		w.sessions.Give(s.Session, false)
	}
}

// Close aborts everything. Forwards in flight have no outcome then: the broker delivers their
// originals again.
func (w *forwarder) Close() {
	for _, s := range w.End() {
		<-s.done
	}
}

// End is close without the wait for links and sessions to close.
func (w *forwarder) End() []*forwardSender {
	w.mu.Lock()
	w.closed = true
	senders := slices.AppendSeq(slices.Collect(maps.Values(w.senders)), maps.Keys(w.leaving))
	w.senders, w.leaving = map[string]*forwardSender{}, nil
	if w.timer != nil {
		w.timer.Stop()
	}
	w.mu.Unlock()
	for _, s := range senders {
		s.Cut()
	}
	return senders
}
