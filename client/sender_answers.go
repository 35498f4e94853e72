package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/userid"

	"github.com/hopback/hopback/internal/link"
)

// answers has the messages that one flight has sent until the broker has answered them, in the
// order of sending.
//
// Answers come on the goroutine that reads from the connection. A caller who waits for one
// gets it there. A goroutine notifies the others, since a user's code, such as an Instrument's,
// may take its time over them. It runs while there are some.
type answers struct {
	s    *sender
	sess link.Session
	ctx  context.Context // ends with finish
	end  context.CancelFunc
	link *flightLink
	// more is signalled when a message that was sent alone has its answer, or when there is
	// room for another.
	more chan struct{}
	// lost is closed when the link is gone, or given up.
	lost     chan struct{}
	lostOnce sync.Once
	working  sync.WaitGroup // the goroutines that tell and probe

	// overdue says that the broker has left a message unanswered for too long: nothing
	// more is sent on this link.
	overdue atomic.Bool
	clock   atomic.Int64 // nanoseconds; what messages are stamped with

	mu        sync.Mutex
	oldest    *sent // unanswered; the others follow
	newest    *sent
	open      int           // how many are unanswered
	full      bool          // the flight waits for room
	answered  []*sent       // to be told
	notified  []*sent       // the memory of those before
	notifying bool          // the goroutine that tells runs
	empty     chan struct{} // closed when none is unanswered or to be told; nil: nobody waits
	timer     *time.Timer
	watched   bool // the timer runs
	finished  bool
	peeked    time.Time // when the clock was advanced
	// heard is the connection's signs of life as of the last look, heardAt the clock
	// when they last changed.
	heard   uint64
	heardAt int64
	rest    rest

	// progress is the sender's settled as of the last look, progressAt the clock when it
	// last changed.
	progress, progressAt int64
	probing              bool  // a probe is running
	proven               bool  // a probe was answered
	probedAt             int64 // the clock when the last probe had no answer

	seq      int64       // of the newest message
	kept     []*outgoing // without an answer, to be sent again
	without  int         // messages without an answer
	noAnswer error       // of the first of them
	poison   bool
	access   access
}

// sent is a message that awaits its answer. It is the receipt that the link gives that to.
type sent struct {
	of    *answers
	out   *outgoing
	msg   *amqp.Message
	alone bool
	at    int64 // of answers.clock

	handle       link.Sending // set before it may be withdrawn; guarded by answers.mu
	next, before *sent        // unanswered ones; guarded by answers.mu
	over         bool         // it has its answer, or gets none; guarded by answers.mu
	state        amqp.DeliveryState
	err          error
}

// rest is the time between the discovery that a message is overdue and the end of
// its link, in which those that are about to be answered are.
type rest struct {
	unanswered int64
	peeks      int
}

const (
	// quietPeek is how long no answer comes before a link is given up whose broker has
	// left a message unanswered; it is given up after quietPeeks of them in any case.
	quietPeek  = 100 * time.Millisecond
	quietPeeks = 10
	// maxOverdue is by how much the limit grows, as a power of two, when giving up links
	// doesn't help.
	maxOverdue = 3
	forEverAgo = 1 << 62
)

// errUnanswered is why a link was given up.
type errUnanswered struct{ after time.Duration }

func (e errUnanswered) Error() string {
	return fmt.Sprintf("the broker has not answered a message for %v", e.after)
}

func newAnswers(s *sender, sess link.Session, link *flightLink) *answers {
	a := &answers{
		s: s, sess: sess, link: link, more: make(chan struct{}, 1), lost: make(chan struct{}),
		peeked: time.Now(), heard: sess.Heard(), progress: s.settled.Load(), probedAt: -forEverAgo,
	}
	a.ctx, a.end = context.WithCancel(s.ctx)
	return a
}

// await adds a message that is about to be sent. Only the flight calls it.
func (a *answers) await(out *outgoing, m *amqp.Message, alone bool) *sent {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.watched {
		a.tick() // the clock has stood still
		a.again(a.s.overdue / 8)
	}
	a.s.sent.Add(1)
	a.seq++
	out.seq = a.seq
	x := &sent{of: a, out: out, msg: m, alone: alone, at: a.clock.Load(), before: a.newest}
	if a.newest == nil {
		a.oldest = x
	} else {
		a.newest.next = x
	}
	a.newest = x
	a.open++
	return x
}

// taken notes that the link has taken x, which can be withdrawn from now on.
func (a *answers) taken(x *sent, handle link.Sending) {
	a.mu.Lock()
	defer a.mu.Unlock()
	x.handle = handle
	if !x.over { // else its outgoing may be in use for something else
		x.out.on.Store(x)
	}
}

// Withdraw removes a message that the link hasn't started to send, and reports whether it could. The
// link may have ended: then the answer that says so comes later, and is ignored.
func (x *sent) Withdraw() bool {
	a := x.of
	a.mu.Lock()
	defer a.mu.Unlock()
	if x.over {
		return errors.As(x.err, new(*link.NeverSent)) // somebody else has withdrawn it
	}
	if !x.handle.Withdraw() {
		return false
	}
	a.take(x)
	a.s.sent.Add(-1)
	a.wake()
	return true
}

// room says whether another message may be sent. If not, more is signalled when it may.
func (a *answers) room() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.full = a.open >= maxInFlight
	return !a.full
}

// drop forgets a message that the link hasn't taken.
func (a *answers) drop(x *sent) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.take(x)
	a.s.sent.Add(-1)
	a.wake()
}

// take takes x out of the unanswered ones, and says whether it was one. It is called with mu
// held.
func (a *answers) take(x *sent) bool {
	if x.over {
		return false
	}
	x.over = true
	if x.before == nil {
		a.oldest = x.next
	} else {
		x.before.next = x.next
	}
	if x.next == nil {
		a.newest = x.before
	} else {
		x.next.before = x.before
	}
	x.before, x.next = nil, nil
	a.open--
	if a.full {
		a.full = false
		a.signal()
	}
	return true
}

// signal has the flight look whether it may send.
func (a *answers) signal() {
	select {
	case a.more <- struct{}{}:
	default:
	}
}

// wake wakes the callers that wait until all are answered and notified. It is called with mu held.
func (a *answers) wake() {
	if a.empty != nil && a.open == 0 && !a.notifying {
		close(a.empty)
		a.empty = nil
	}
}

// Answer takes the broker's answer.
func (x *sent) Answer(state amqp.DeliveryState, err error) {
	a := x.of
	a.mu.Lock()
	if err != nil && !x.over {
		a.learn(err)
	}
	if !a.take(x) {
		a.mu.Unlock()
		return
	}
	x.state, x.err = state, err
	if _, waits := x.out.to.(*call); waits && err == nil {
		a.wake()
		a.mu.Unlock()
		a.notify(x)
		return
	}
	a.hand(x)
	a.mu.Unlock()
}

// hand notifies x on another goroutine. It is called with mu held.
func (a *answers) hand(x *sent) {
	a.answered = append(a.answered, x)
	if !a.notifying {
		a.notifying = true
		a.working.Add(1)
		go a.notifyAll()
	}
}

func (a *answers) notifyAll() {
	defer a.working.Done()
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.answered) > 0 {
		all := a.answered
		a.answered = a.notified[:0]
		a.mu.Unlock()
		for _, x := range all {
			a.notify(x)
		}
		clear(all)
		a.mu.Lock()
		a.notified = all
	}
	a.notifying = false
	a.wake()
}

// notify has a message's caller learn its answer. The message isn't touched any more then.
func (a *answers) notify(x *sent) {
	if x.alone {
		defer a.signal()
	}
	if x.err == nil {
		if x.out.overdue {
			a.s.overdues.Store(0) // giving up the link has helped
		}
		a.s.settled.Add(1) // before its caller knows, who may close the sender then
		a.s.answer(x.out, outSending, a.s.verdict(x.state))
		return
	}
	a.lose(x, x.err)
	a.giveUp()
	a.s.settled.Add(1)
}

// abandon gives up all answers that are missing.
func (a *answers) abandon(why error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for x := a.oldest; x != nil; x = a.oldest {
		x.err = why
		if x.handle != nil && x.handle.Withdraw() {
			x.err = &link.NeverSent{Err: why}
		}
		a.take(x)
		a.hand(x)
	}
}

// finish returns when every message has its answer or none to expect. Those to be sent
// again are in kept, in the order of sending.
func (a *answers) finish() {
	a.mu.Lock()
	a.end() // no probe begins from now on
	empty := make(chan struct{})
	a.empty = empty
	a.wake()
	a.mu.Unlock()
	select {
	case <-empty:
	case <-a.s.ctx.Done():
		a.abandon(context.Cause(a.s.ctx))
	}
	a.working.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.finished = true
	if a.timer != nil {
		a.timer.Stop()
	}
	slices.SortFunc(a.kept, func(x, y *outgoing) int { return cmp.Compare(x.seq, y.seq) })
}

func (a *answers) giveUp() { a.lostOnce.Do(func() { close(a.lost) }) }

// cause is why the link has ended, err being what the engine says.
func (a *answers) cause(err error) error {
	if a.overdue.Load() {
		return errUnanswered{a.limit()}
	}
	if unsent, ok := errors.AsType[*link.NeverSent](err); ok {
		return unsent.Err
	}
	return err
}

// lose notes that a message has no answer and gets none any more on this link.
func (a *answers) lose(x *sent, err error) {
	keep := a.keeps(x, err)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.without++
	if a.noAnswer == nil {
		a.noAnswer = a.cause(err)
	}
	if keep {
		a.kept = append(a.kept, x.out)
	}
}

// keeps says whether a message without an answer is to be sent again. If not, its caller has
// got the reason.
func (a *answers) keeps(x *sent, err error) bool {
	out := x.out
	if a.overdue.Load() {
		out.overdue = a.clock.Load()-x.at >= int64(a.limit()/2)
	}
	if errors.As(err, new(*link.NeverSent)) {
		if out.state.CompareAndSwap(outSending, outQueued) {
			return true
		}
		a.s.answer(out, outSending, nil) // its caller has left
		return false
	}
	err = a.cause(err)
	if a.sess.Login().LearnFrom(err) {
		// Of all messages on a link, the broker refuses the first that has another
		// user's user-id. It has read none of those behind it.
		if m := out.msg; !a.s.copies && a.sess.Login().Refuses(userid.Of(m)) {
			a.s.answer(out, outSending, a.s.userIDRefused(m, false))
			return false
		}
	} else if a.forbidden(x) {
		a.s.answer(out, outSending, a.s.forbidden(out, err))
		return false
	} else if a.unread(x) {
		if out.state.CompareAndSwap(outSending, out.earlier()) {
			return true
		}
		a.s.answer(out, outSending, nil) // its caller has left
		return false
	} else if blames(err) {
		a.mu.Lock()
		a.poison = true
		a.mu.Unlock()
		if x.alone {
			out.blamed++
		}
	}
	if out.blamed < maxBlamed && a.s.keep(out) {
		out.maybe = true
		return true
	}
	a.s.doubtful(out, outSending, a.s.unknown(err))
	return false
}

// limit is how long a message may be unanswered. It grows while giving up links
// doesn't help: one queue without a leader must not cost all the others their link
// every time.
func (a *answers) limit() time.Duration {
	return a.s.overdue << min(max(a.s.overdues.Load()-1, 0), maxOverdue)
}

// peek looks after the unanswered messages, while there are some.
func (a *answers) peek() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.finished {
		return
	}
	a.tick()
	next := a.s.overdue / 8
	switch {
	case a.judge():
		next = quietPeek
	case a.finished || a.open == 0:
		a.watched = false
		return
	}
	a.again(next)
}

// tick advances the clock, which stands still while the broker has an alarm. It is
// called with mu held.
func (a *answers) tick() {
	now := time.Now()
	if !a.sess.Intake().Now().Blocked {
		a.clock.Add(int64(now.Sub(a.peeked)))
	}
	a.peeked = now
}

// again is called with mu held.
func (a *answers) again(d time.Duration) {
	a.watched = true
	if a.timer == nil {
		a.timer = time.AfterFunc(d, a.peek)
	} else {
		a.timer.Reset(d)
	}
}

// judge gives up the link if the broker has left a message unanswered for too long,
// once those that it does answer are answered. It says whether it waits for these.
func (a *answers) judge() bool {
	clock := a.clock.Load()
	if heard := a.sess.Heard(); heard != a.heard {
		a.heard, a.heardAt = heard, clock
	}
	unanswered := a.s.unanswered()
	if a.overdue.Load() {
		a.rest.peeks++
		if a.rest.unanswered != unanswered && a.rest.peeks < quietPeeks {
			a.rest.unanswered = unanswered
			return true
		}
		a.finished = true
		a.giveUp()
		go func() {
			a.link.end() // waits for the broker, within bounds
			a.abandon(errUnanswered{a.limit()})
		}()
		return false
	}
	if settled := a.s.settled.Load(); settled != a.progress {
		a.progress, a.progressAt = settled, clock
	}
	limit := int64(a.limit())
	if a.probing || clock-a.probedAt < limit {
		return false
	}
	x := a.oldest
	if x == nil || clock-x.at < limit {
		return false
	}
	if a.s.resend && !a.proven && a.ctx.Err() == nil && clock-a.progressAt < limit/2 {
		a.probing = true
		a.working.Go(func() { a.probe(x.msg) })
		return false
	}
	a.rest.unanswered = unanswered
	a.overdue.Store(true)
	return true
}

// probe finds out, while other messages are answered, whether the session or the queue is the
// reason that a message isn't answered: it sends the message on a separate session. In a new
// session, RabbitMQ may wait for a queue that doesn't answer, and answer nothing else during
// that time; so the other messages stay where they are until a new session is known to help.
func (a *answers) probe(m *amqp.Message) {
	ctx, cancel := context.WithTimeout(a.ctx, a.s.overdue)
	defer cancel()
	answered := a.answersElsewhere(ctx, m)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.probing, a.proven = false, answered
	if answered {
		return // the next look gives up the link
	}
	a.probedAt = a.clock.Load()
	a.s.overdues.Add(1)
	if a.ctx.Err() == nil {
		a.s.log.Warn("hopback: the broker doesn't answer a message on another session either; check its queue", "op", a.s.op, "target", a.s.target, "to", addressOf(m), "again_in", a.limit())
	}
}

func (a *answers) answersElsewhere(ctx context.Context, m *amqp.Message) bool {
	sess, err := a.s.sessions.Open(ctx)
	if err != nil {
		return false
	}
	defer func() { a.s.sessions.Give(sess, false) }()
	l, err := sess.Sender(ctx, a.s.target)
	if err != nil {
		return false
	}
	defer newFlightLink(l).end()
	answered := make(link.ChanReceipt, 1)
	if _, _, err := l.Send(m, answered); err != nil {
		return false
	}
	select {
	case err := <-answered:
		return err == nil
	case <-ctx.Done():
		return false
	}
}

// silent says whether the connection has given no sign of life either: no answer and
// no delivery, on any of its sessions, for about as long as the limit.
func (a *answers) silent() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.clock.Load()-a.heardAt >= int64(a.limit()*3/4)
}

// flightLink is a sending link that several may close.
type flightLink struct {
	link.SenderLink
	ending atomic.Bool
	closed chan struct{}
	err    error // of closing it; set before closed
}

func newFlightLink(l link.SenderLink) *flightLink {
	return &flightLink{SenderLink: l, closed: make(chan struct{})}
}

// end closes the link, within bounds. The first caller does, and all others wait for it.
func (l *flightLink) end() {
	if l.ending.CompareAndSwap(false, true) {
		defer close(l.closed)
		ctx, cancel := context.WithTimeout(context.Background(), link.CloseTimeout)
		defer cancel()
		l.err = l.Close(ctx)
		return
	}
	<-l.closed
}

// maxBlamed is after how many links that the broker has ended over a message, with
// nothing else in flight, it isn't sent again.
const maxBlamed = 3

// blames says whether what the broker ended a link, session or connection with may be
// the doing of a message. What is expected to would have been refused by Validate.
func blames(err error) bool {
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil {
		return false
	}
	switch remote.Condition {
	case amqp.ErrCondConnectionForced, amqp.ErrCondDetachForced, amqp.ErrCondResourceDeleted:
		return false
	}
	return true
}
