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
)

// answers awaits the broker's answers to the messages that one flight has sent.
//
// RabbitMQ answers mostly in the order of sending, so one goroutine awaits one
// message after the other. A queue that doesn't answer must not hold up the answers
// of other queues: when that goroutine gets nowhere while further messages wait to be
// awaited, others join it, and leave again when there is nothing to await. So a
// message costs no goroutine unless one before it is stuck.
type answers struct {
	s        *sender
	sess     session
	ctx      context.Context // ends with finish
	end      context.CancelFunc
	link     *flightLink
	inFlight chan sent
	// alone is signalled when a message that was sent alone has its answer.
	alone chan struct{}
	// lost is closed when the link is gone, or given up.
	lost     chan struct{}
	lostOnce sync.Once
	waiting  sync.WaitGroup

	// overdue says that the broker has left a message unanswered for too long: nothing
	// more is sent on this link.
	overdue atomic.Bool
	watched atomic.Bool  // the next look is a stuckAfter away
	clock   atomic.Int64 // nanoseconds; what messages are stamped with
	crowd   atomic.Int32 // len(waiters)
	idle    atomic.Int32 // waiters with nothing to await

	mu       sync.Mutex
	timer    *time.Timer
	finished bool
	looked   time.Time // when the clock was advanced
	settled  int64     // the sender's, as of the last look
	join     int       // how many waiters join next
	waiters  []*waiter
	// heard is the connection's signs of life as of the last look, heardAt the clock
	// when they last changed.
	heard   uint64
	heardAt int64
	rest    rest

	// progress is the sender's settled as of the last look, progressAt the clock when it
	// last changed.
	progress, progressAt int64
	probing              bool  // a probe is under way
	proven               bool  // a probe was answered
	probedAt             int64 // the clock when the last probe had no answer

	kept     []sent // without an answer, to be sent again
	without  int    // messages without an answer
	noAnswer error
	suspect  bool
}

// sent is a message that awaits its answer.
type sent struct {
	out   *outgoing
	msg   *Message
	r     receipt
	alone bool
	seq   int64 // its place in the order of sending
	at    int64 // of answers.clock
}

// waiter is one goroutine that awaits answers.
type waiter struct {
	// since is the sent.at of the message that it awaits, plus one; 0 if there is none.
	since atomic.Int64
	// msg is that message.
	msg atomic.Pointer[Message]
}

// rest is the time between the discovery that a message is overdue and the end of
// its link, in which those that are about to be answered are.
type rest struct {
	unanswered int64
	looks      int
}

const (
	// stuckAfter is how long one message may hold up the others' answers.
	stuckAfter = 10 * time.Millisecond
	// quietLook is how long no answer comes before a link is given up whose broker has
	// left a message unanswered; it is given up after quietLooks of them in any case.
	quietLook  = 100 * time.Millisecond
	quietLooks = 10
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

func newAnswers(s *sender, sess session, link *flightLink) *answers {
	a := &answers{
		s: s, sess: sess, link: link, inFlight: make(chan sent, maxInFlight),
		alone: make(chan struct{}, 1), lost: make(chan struct{}),
		join: 1, looked: time.Now(), heard: sess.heard(), progress: s.settled.Load(), probedAt: -forEverAgo,
	}
	a.ctx, a.end = context.WithCancel(s.ctx)
	a.add()
	return a
}

// await has the answer to a message awaited. Only the flight calls it.
func (a *answers) await(out *outgoing, m *Message, r receipt, alone bool) {
	seq := a.s.sent.Add(1)
	if !a.watched.Load() {
		a.watch() // the clock has stood still
	}
	a.inFlight <- sent{out, m, r, alone, seq, a.clock.Load()}
	if !a.watched.Load() {
		a.watch() // look has just ended the watch
	}
}

// finish returns when every message has its answer or none to expect. Those to be sent
// again are in kept, in the order of sending.
func (a *answers) finish() {
	close(a.inFlight)
	a.mu.Lock()
	a.end() // no probe begins from now on
	a.mu.Unlock()
	a.waiting.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.finished = true
	if a.timer != nil {
		a.timer.Stop()
	}
	slices.SortFunc(a.kept, func(x, y sent) int { return cmp.Compare(x.seq, y.seq) })
}

// add is called with mu held, or before anybody else knows a.
func (a *answers) add() {
	w := &waiter{}
	a.waiters = append(a.waiters, w)
	a.crowd.Add(1)
	a.waiting.Go(func() { a.run(w) })
}

// run awaits one message after the other, until another waiter has nothing to do.
func (a *answers) run(w *waiter) {
	for {
		var f sent
		var ok bool
		select {
		case f, ok = <-a.inFlight: // what is mostly so, and cheaper to ask for by itself
		default:
			w.since.Store(0)
			w.msg.Store(nil)
			crowded := a.crowd.Load() > 1
			if crowded && a.idle.Add(1) > 1 && a.leave(w) {
				return
			}
			f, ok = <-a.inFlight
			if crowded {
				a.idle.Add(-1)
			}
		}
		if !ok {
			return
		}
		w.since.Store(f.at + 1)
		w.msg.Store(f.msg)
		a.one(f)
	}
}

// leave is called by a waiter that has counted itself as idle, and says whether it may
// end: only if another stays.
func (a *answers) leave(w *waiter) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.idle.Load() < 2 {
		return false
	}
	a.idle.Add(-1)
	a.crowd.Add(-1)
	a.waiters = slices.DeleteFunc(a.waiters, func(o *waiter) bool { return o == w })
	return true
}

// one awaits one message. The message isn't touched once its caller has the answer.
func (a *answers) one(f sent) {
	state, err := f.r.wait(a.s.ctx)
	if err == nil {
		if f.out.overdue {
			a.s.overdues.Store(0) // giving up the link has helped
		}
		a.s.settled.Add(1) // before its caller knows, who may close the sender then
		a.s.answer(f.out, outSending, a.s.verdict(state))
	} else {
		a.mu.Lock()
		a.without++
		if a.noAnswer == nil {
			a.noAnswer = a.cause(err)
		}
		a.mu.Unlock()
		if a.lose(f.out, f.alone, f.at, err) {
			a.mu.Lock()
			a.kept = append(a.kept, f)
			a.mu.Unlock()
		}
		a.giveUp()
		a.s.settled.Add(1)
	}
	if f.alone {
		select {
		case a.alone <- struct{}{}:
		default:
		}
	}
}

func (a *answers) giveUp() { a.lostOnce.Do(func() { close(a.lost) }) }

// cause is why the link has ended, err being what go-amqp says.
func (a *answers) cause(err error) error {
	if a.overdue.Load() {
		return errUnanswered{a.limit()}
	}
	return err
}

// lose decides about a message, sent at the time at, that has no answer and gets none
// any more on this link. It says whether the message is kept to be sent again.
func (a *answers) lose(out *outgoing, alone bool, at int64, err error) (kept bool) {
	if a.overdue.Load() {
		err = a.cause(err)
		out.overdue = a.clock.Load()-at >= int64(a.limit()/2)
	}
	if userIDRefused(a.sess.login(), err) {
		// Of all messages on a link, the broker refuses the first that has another
		// user's user-id. It has read none of those behind it.
		if m := out.msg; !a.s.copies && a.sess.login().Refuses(userid.Of(m)) {
			a.s.answer(out, outSending, a.s.userIDRefused(m, false))
			return false
		}
	} else if blames(err) {
		a.mu.Lock()
		a.suspect = true
		a.mu.Unlock()
		if alone {
			out.blamed++
		}
	}
	if out.blamed < maxBlamed && a.s.keep(out) {
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

// watch has the waiters looked after from now on.
func (a *answers) watch() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.finished || a.overdue.Load() {
		return
	}
	a.tick()
	a.watched.Store(true)
	a.settled = a.s.settled.Load()
	a.again(stuckAfter)
}

// look looks after the waiters: soon again while messages wait to be awaited, later
// while some are unanswered, and no more otherwise.
func (a *answers) look() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.finished {
		return
	}
	a.tick()
	next := a.s.overdue / 8
	a.watched.Store(false) // before looking, so that await notices if it comes too late
	if waiting := len(a.inFlight); waiting > 0 {
		a.watched.Store(true)
		next = stuckAfter
		if settled := a.s.settled.Load(); settled != a.settled {
			a.settled, a.join = settled, max(a.join/2, 1)
		} else {
			for range min(a.join, waiting) {
				a.add()
			}
			a.join *= 2
		}
	} else {
		a.join = 1
	}
	switch {
	case a.judge():
		next = quietLook
	case a.finished || !a.watched.Load() && a.s.unanswered() == 0:
		return
	}
	a.again(next)
}

// tick advances the clock, which stands still while the broker has an alarm. It is
// called with mu held.
func (a *answers) tick() {
	now := time.Now()
	if !a.sess.intake().Now().Blocked {
		a.clock.Add(int64(now.Sub(a.looked)))
	}
	a.looked = now
}

// again is called with mu held.
func (a *answers) again(d time.Duration) {
	if a.timer == nil {
		a.timer = time.AfterFunc(d, a.look)
	} else {
		a.timer.Reset(d)
	}
}

// judge gives up the link if the broker has left a message unanswered for too long,
// once those that it does answer are answered. It says whether it waits for these.
func (a *answers) judge() bool {
	clock := a.clock.Load()
	if heard := a.sess.heard(); heard != a.heard {
		a.heard, a.heardAt = heard, clock
	}
	unanswered := a.s.unanswered()
	if a.overdue.Load() {
		a.rest.looks++
		if a.rest.unanswered != unanswered && a.rest.looks < quietLooks {
			a.rest.unanswered = unanswered
			return true
		}
		a.finished = true
		a.giveUp()
		go a.link.end() // waits for the broker, within bounds
		return false
	}
	if settled := a.s.settled.Load(); settled != a.progress {
		a.progress, a.progressAt = settled, clock
	}
	limit := int64(a.limit())
	if a.probing || clock-a.probedAt < limit {
		return false
	}
	for _, w := range a.waiters {
		since := w.since.Load()
		if since == 0 || clock-since+1 < limit {
			continue
		}
		if m := w.msg.Load(); m != nil && a.s.resend && !a.proven && a.ctx.Err() == nil && clock-a.progressAt < limit/2 {
			a.probing = true
			a.waiting.Go(func() { a.probe(m) })
			return false
		}
		a.rest.unanswered = unanswered
		a.overdue.Store(true)
		return true
	}
	return false
}

// probe finds out whether it is the session that doesn't get a message answered, or the
// queue, while others are answered: it sends the message on a session of its own. In a
// new session RabbitMQ may wait for a queue that doesn't answer, and answers nothing
// else meanwhile; so the others stay where they are until it is known to help.
func (a *answers) probe(m *Message) {
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
		a.s.log.Warn("hopback: the broker doesn't answer a message on another session either; the fault is its queue's", "op", a.s.op, "target", a.s.target, "to", addressOf(m), "again_in", a.limit())
	}
}

func (a *answers) answersElsewhere(ctx context.Context, m *Message) bool {
	sess, err := a.s.sessions.open(ctx)
	if err != nil {
		return false
	}
	defer func() { a.s.sessions.give(sess, false) }()
	link, err := sess.sender(ctx, a.s.target)
	if err != nil {
		return false
	}
	// While the session's window is full, go-amqp's send heeds no ctx.
	closed := make(chan struct{})
	unwatch := context.AfterFunc(ctx, func() {
		defer close(closed)
		closing, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = link.close(closing)
	})
	defer func() {
		if !unwatch() {
			<-closed
		}
	}()
	r, _, err := link.send(context.WithoutCancel(ctx), m)
	if err != nil {
		return false
	}
	_, err = r.wait(ctx)
	return err == nil
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
	senderLink
	once   sync.Once
	closed chan struct{}
	err    error // of closing it; set before closed
}

func newFlightLink(l senderLink) *flightLink {
	return &flightLink{senderLink: l, closed: make(chan struct{})}
}

// end closes the link, within bounds. Whoever is first does, and all others wait for that.
func (l *flightLink) end() {
	l.once.Do(func() {
		go func() {
			defer close(l.closed)
			ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
			defer cancel()
			l.err = l.close(ctx)
		}()
	})
	<-l.closed
}

// maxBlamed is after how many links that the broker has ended over a message, with
// nothing else under way, it isn't sent again.
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
