package client

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/frames"
)

// maxInFlight is how many messages a sender has under way before it waits for
// answers. RabbitMQ gives a sending link 170 credits and a session a window of
// 400, so more would only wait in go-amqp.
const maxInFlight = 400

// sender keeps one sending link alive and pipelines messages on it: one goroutine
// owns the link and writes, others await the answers (see answers).
// No caller's ctx reaches go-amqp, where its end could break the link or the
// connection for everybody else; it guards the wait before and after only.
//
// What happens to a message:
//
//	queued ──▶ sending ──▶ answered: nil, ErrUnroutable, ErrRefused
//	   │        │  ▲ └───▶ link lost, and not to be sent again: ErrOutcomeUnknown
//	   │        ▼  │
//	   │        again ───▶ link can't be opened, taken back by its caller: ErrOutcomeUnknown
//	   ├─▶ taken back by its caller: ErrNotSent
//	   └─▶ link can't be opened, too large, not encodable: that error
//
// Messages that are still queued when a link is lost stay queued. Those that are sent
// again go out on the next link before them, in the order of the first time.
type sender struct {
	op     string // for errors: "publish", "forward"
	target string // the encoded address; empty for a link without a target
	open   func(ctx context.Context) (session, error)
	// give returns the session after its link has ended; intact says that the
	// session surely hasn't.
	give    func(s session, intact bool)
	backoff ReconnectBackoff
	tell    func(Event) // nil: nobody listens
	outage  func() error
	// resend says that what is unanswered when a link is lost is sent again.
	resend bool
	// budget bounds the bytes that are queued or unanswered; nil: no bound.
	budget *budget
	// overdue is how long the broker may leave a message unanswered before the link is
	// given up; overdues counts the links in a row that were, to no avail.
	overdue  time.Duration
	overdues atomic.Int32
	log      *slog.Logger

	queue chan *outgoing
	// calls are for reuse: those that were answered, and whose answer was taken.
	calls sync.Pool
	// again is what the next link sends first; suspect says that one of it may be
	// what the broker ended the last link for. Only run and pump use them.
	again   []*outgoing
	suspect bool
	// stop ends the sender once its queue is empty; cut ends it at once.
	stop     chan struct{}
	stopOnce sync.Once
	cut      context.CancelFunc
	ctx      context.Context
	done     chan struct{}

	// sent counts the messages that were sent, settled those of them that have their
	// answer or get none.
	sent, settled atomic.Int64
	// callers counts those who wait in do; when the last one leaves, idle is
	// signalled. What their messages have left in the queue was withdrawn.
	callers atomic.Int64
	idle    chan struct{}

	// doubt says that close has cut off messages that were sent.
	doubt atomic.Bool

	// first receives whether the link could be opened, once that is known.
	first chan error
	// refusal is why the broker refuses the link; nil while it doesn't.
	refusal atomic.Pointer[Error]
	// intake is that of the session in use; nil while there is none.
	intake atomic.Pointer[frames.Intake]
}

// leave takes o back for its caller, and returns what is certain of it: ErrNotSent,
// ErrOutcomeUnknown, or nil if its answer is there or just coming. The message may
// only be read from then on.
func (s *sender) leave(o *outgoing) (*Message, error) {
	for {
		switch state := o.state.Load(); state {
		case outQueued, outAgain:
			if !o.state.CompareAndSwap(state, outOver) {
				continue
			}
			s.budget.give(o.size)
			m := o.msg
			o.msg = nil // o itself stays in the queue until it is its turn
			if state == outQueued {
				return m, ErrNotSent
			}
			return m, ErrOutcomeUnknown
		case outSending:
			m := o.msg
			if o.state.CompareAndSwap(outSending, outLeft) {
				return m, ErrOutcomeUnknown
			}
		default:
			return nil, nil
		}
	}
}

// doubtful is answer for a message that was sent and has no answer.
func (s *sender) doubtful(o *outgoing, from int32, err error) {
	if s.ctx.Err() != nil && o.state.Load() == from {
		s.doubt.Store(true)
	}
	s.answer(o, from, err)
}

// answer tells o's caller, unless it has left. from is the state that o is in.
func (s *sender) answer(o *outgoing, from int32, err error) {
	if o.state.CompareAndSwap(from, outOver) {
		s.budget.give(o.size)
		o.to.answered(o, err)
	} else if o.state.CompareAndSwap(outLeft, outOver) {
		s.budget.give(o.size)
	}
}

// keep puts a message that was sent and not answered aside to be sent again, and
// says whether it should be. If not, it still needs an answer.
func (s *sender) keep(o *outgoing) bool {
	return s.resend && s.ctx.Err() == nil && o.state.CompareAndSwap(outSending, outAgain)
}

func (s *sender) unanswered() int64 {
	settled := s.settled.Load() // first, or it could be the larger
	return s.sent.Load() - settled
}

type senderConfig struct {
	depth   int   // messages that may be queued
	bytes   int64 // that may be queued or unanswered; 0: no bound
	backoff ReconnectBackoff
	tell    func(Event) // nil: nobody listens
	// outage, if not nil, is why nothing can be sent now; it returns nil if it can.
	outage  func() error
	resend  bool
	overdue time.Duration // how long a message may be unanswered; 0: overdueAfter
	log     *slog.Logger  // nil: nobody reads
}

func newSender(op, target string, cfg senderConfig, open func(context.Context) (session, error), give func(session, bool)) *sender {
	s := &sender{
		op: op, target: target, open: open, give: give, backoff: cfg.backoff, tell: cfg.tell, outage: cfg.outage, resend: cfg.resend, budget: newBudget(cfg.bytes),
		queue: make(chan *outgoing, cfg.depth),
		stop:  make(chan struct{}), done: make(chan struct{}), first: make(chan error, 1),
		idle: make(chan struct{}, 1), overdue: cmp.Or(cfg.overdue, overdueAfter), log: cfg.log,
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.ctx, s.cut = context.WithCancel(context.Background())
	go s.run()
	return s
}

// lastAnswer is how long close waits for the broker after its ctx has ended.
const lastAnswer = 100 * time.Millisecond

// close lets what is queued go out and be answered, within ctx; then it cuts off.
// It is an error if anything was cut off.
func (s *sender) close(ctx context.Context) error {
	s.stopOnce.Do(func() { close(s.stop) })
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		callers := s.callers.Load()
		if s.unanswered() > 0 {
			s.doubt.Store(true)
		}
		s.cut()
		// A broker that doesn't answer isn't waited for; the connection's end ends it.
		t := time.NewTimer(lastAnswer)
		defer t.Stop()
		select {
		case <-s.done:
			for waiting := true; waiting && s.callers.Load() > 0; { // they leave at once
				select {
				case <-s.idle:
				case <-t.C:
					waiting = false
				}
			}
		case <-t.C:
		}
		switch {
		case s.doubt.Load():
			return ended(s.op, s.target, ErrOutcomeUnknown, ctx)
		case callers > 0:
			return ended(s.op, s.target, ErrNotSent, ctx)
		}
		return nil
	}
}

func (s *sender) run() {
	defer close(s.done)
	defer s.cut()
	defer func() { s.fail(&Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrClosed}) }()
	defer func() {
		select {
		case s.first <- ErrClosed: // cut off before an attempt decided
		default:
		}
	}()

	failures := 0
	lost, renewed := time.Now(), false // renewed: nobody needs to hear of it
	var lastOverdue time.Time
	event := func(e Event) {
		if s.tell != nil {
			e.Op, e.Target, e.Attempt = s.op, s.target, failures+1
			s.tell(e)
		}
	}
	defer func() { event(Event{Kind: EventEnded}) }()
	for told := false; s.ctx.Err() == nil; {
		sess, link, err := s.attach()
		// A connection that is lost meanwhile decides nothing.
		if !told && !errors.Is(err, ErrConnectionLost) {
			told = true
			s.first <- err
		}
		if err != nil {
			if errors.Is(err, ErrClosed) {
				return
			}
			renewed = false
			// While there is no connection, messages wait. When the broker has
			// refused the link they are told why.
			if refusal, ok := errors.AsType[*Error](err); ok && !errors.Is(err, ErrConnectionLost) {
				event(Event{Kind: EventRefused, Err: err})
				s.refusal.Store(refusal)
				s.fail(refusal)
			}
			if !s.rest(s.backoff.pause(failures)) {
				return
			}
			failures++
			continue
		}
		began := time.Now()
		if !renewed {
			event(Event{Kind: EventUp, Down: began.Sub(lost)})
		}
		renewed = false
		s.refusal.Store(nil)
		s.intake.Store(sess.intake())
		// Whoever is first ends the link, whoever is next waits for that.
		var closing sync.Once
		var closeErr error
		closed := make(chan struct{})
		closeLink := func() {
			closing.Do(func() {
				go func() {
					defer close(closed)
					ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
					defer cancel()
					closeErr = link.close(ctx)
				}()
			})
			<-closed
		}
		// While the session's window is full, go-amqp's send heeds no ctx: only the
		// end of the link ends it.
		unwatch := context.AfterFunc(s.ctx, closeLink)
		p := s.pump(sess, link, closeLink)
		unwatch()
		s.intake.Store(nil)
		if p.overdue {
			lastOverdue = s.overdueLink(sess, p, lastOverdue)
		}
		closeLink()
		s.give(sess, !p.lost && closeErr == nil)
		if !p.lost {
			if !p.worn || s.ctx.Err() != nil || isClosed(s.stop) && s.callers.Load() == 0 {
				return
			}
			failures, renewed, lost = 0, true, time.Now()
			continue // on another session
		}
		lost = time.Now()
		if lost.Sub(began) > s.backoff.Max {
			failures = 0
		}
		event(Event{Kind: EventLost, Unsettled: p.unanswered, Err: newError(s.op, s.target, ErrConnectionLost, p.why)})
		if p.overdue || isClosed(sess.broken()) && lost.Sub(began) >= provenAfter {
			failures = 0
			continue // the next session, or the next connection, owes nothing to this one
		}
		if !s.rest(s.backoff.pause(failures)) {
			return
		}
		failures++
	}
}

// provenAfter is how long a link has lived whose loss with its connection says nothing
// against the next: it is opened without a pause. One that lived shorter may be what the
// broker ends its connections for.
const provenAfter = time.Second

// overdueLink is called when a link was given up over an unanswered message: the first
// time its session is replaced, since the broker may only have lost its way there; a
// link of the same session would find it so again. If the next session gets no answer
// either, and nothing else on the connection gives a sign of life, the connection is
// given up, so that another endpoint is tried. It returns the time.
func (s *sender) overdueLink(sess session, p pumped, last time.Time) time.Time {
	now := time.Now()
	if now.Sub(last) > s.overdue<<(maxOverdue+1) {
		s.overdues.Store(0)
	}
	again := s.overdues.Add(1) > 1
	what := "its session is replaced"
	if again && p.silent {
		what = "the connection is given up, as it gives no other sign of life"
		sess.giveUp()
	}
	s.log.Warn("hopback: the broker doesn't answer a message: "+what, "op", s.op, "target", s.target, "after", s.overdue, "unanswered", p.unanswered)
	return now
}

// rest waits before the next attempt, and says whether there should be one: not
// when the sender was stopped and nobody waits for it to send.
func (s *sender) rest(d time.Duration) bool {
	ctx, cancel := s.wanted()
	defer cancel()
	return pause(ctx, d)
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
	sess, err := s.open(ctx)
	if err != nil {
		return nil, nil, s.refused(ctx, err)
	}
	link, err := sess.sender(ctx, s.target)
	if err != nil {
		s.give(sess, linkRefused(err))
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

// pumped is how pump has ended.
type pumped struct {
	// lost says that the link has ended, and why, which may be nil.
	lost bool
	why  error
	// worn says that the session must be replaced by another.
	worn bool
	// unanswered is how many messages were sent and get no answer on this link.
	unanswered int
	// overdue says that the link was given up over an unanswered message, silent that
	// the connection gave no sign of life either.
	overdue, silent bool
}

// pump sends until the link ends, the session is worn out, or the sender is stopped
// and nobody waits for it any more. When it returns, every message that it took was
// answered, or is kept to be sent again. cut ends the link.
func (s *sender) pump(sess session, link senderLink, cut func()) (p pumped) {
	a := newAnswers(s, sess, cut)
	var written *outgoing // kept, which was being written when the link ended
	rest := s.again
	alone := s.suspect && len(rest) > 0
	defer func() {
		a.finish()
		p.unanswered += a.without
		p.overdue = a.overdue.Load()
		p.silent = p.overdue && a.silent()
		if p.lost && (p.why == nil || p.overdue) {
			p.why = a.noAnswer
		}
		again := make([]*outgoing, 0, len(a.kept)+1+len(rest))
		for _, f := range a.kept {
			again = append(again, f.out)
		}
		if written != nil {
			again = append(again, written)
		}
		s.again = append(again, rest...)
		s.suspect = a.suspect || alone
	}()

	// take sends a message, and says whether to go on.
	take := func(out *outgoing, from int32) bool {
		if !out.state.CompareAndSwap(from, outSending) {
			return true // taken back, and its caller told so
		}
		if out.abandoned != nil && isClosed(out.abandoned) {
			s.answer(out, outSending, &Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrConnectionLost})
			return true
		}
		m := out.msg
		r, gone, err := link.send(s.ctx, m)
		switch {
		case err == nil:
			a.await(out, m, r, alone)
		case gone:
			if a.lose(out, alone, a.clock.Load(), err) {
				written = out
			}
			p.lost, p.why = true, err
			p.unanswered++
			return false
		case from == outAgain: // on an earlier link it may have arrived
			s.answer(out, outSending, s.unknown(err))
		default:
			s.answer(out, outSending, newError(s.op, s.target, ErrNotSent, err))
		}
		p.worn = sess.wear() >= 1
		return !p.worn
	}

	stop := s.stop
	var idle <-chan struct{} // once the sender is stopped
	for {
		in := sess.intake().Now()
		queue := s.queue
		switch {
		case in.Blocked, a.overdue.Load(), alone && s.unanswered() > 0:
			queue = nil
		case len(rest) > 0:
			if isClosed(a.lost) {
				p.lost = true
				return p
			}
			out := rest[0]
			rest = rest[1:]
			if !take(out, outAgain) {
				return p
			}
			continue
		default:
			alone = false
			select {
			case out := <-queue: // what is mostly so, and cheaper to ask for by itself
				if !take(out, outQueued) {
					return p
				}
				continue
			default:
			}
		}
		if idle != nil && s.callers.Load() == 0 {
			return p
		}
		select {
		case out := <-queue:
			if !take(out, outQueued) {
				return p
			}
		case <-a.alone:
		case <-in.Changed:
		case <-a.lost:
			p.lost = true
			return p
		case <-sess.broken():
			p.lost = true
			return p
		case <-s.ctx.Done():
			return p
		case <-stop:
			stop, idle = nil, s.idle
		case <-idle:
		}
	}
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

// verdict turns the broker's answer into the caller's error.
func (s *sender) verdict(state amqp.DeliveryState) error {
	switch st := state.(type) {
	case *amqp.StateAccepted:
		return nil
	case *amqp.StateReleased:
		return &Error{Op: s.op, Target: s.target, Kind: ErrUnroutable, Text: "no queue is bound for this exchange and routing key"}
	case *amqp.StateRejected:
		e := &Error{Op: s.op, Target: s.target, Kind: ErrRefused}
		if st.Error != nil {
			e.Condition, e.Text, e.Err = string(st.Error.Condition), readable(st.Error.Description), st.Error
			if k := kindOf(st.Error); k != nil {
				e.Kind = k
			}
		}
		if e.Text == "" && e.Condition == "" {
			e.Text = "it gave no reason: on RabbitMQ 4.0 that is mostly a full queue with overflow reject-publish"
		}
		return e
	default:
		// RabbitMQ answers with accepted, released or rejected only.
		return &Error{Op: s.op, Target: s.target, Kind: ErrOutcomeUnknown, Text: "the broker answered with an outcome that it has no use for"}
	}
}

// unknown is the error for a message that left and got no answer. Whatever ended
// the link, it stays of that kind: the reason doesn't say what became of the
// message.
func (s *sender) unknown(err error) error {
	e := newError(s.op, s.target, ErrOutcomeUnknown, err)
	e.Kind = ErrOutcomeUnknown
	return e
}

// enter counts a caller, and is nil unless the sender is stopped.
func (s *sender) enter() error {
	select {
	case <-s.stop:
		return s.closed(ErrNotSent)
	default:
		s.callers.Add(1)
		return nil
	}
}

// exit is called when nothing of the caller's is queued any more.
func (s *sender) exit() {
	if s.callers.Add(-1) == 0 {
		select {
		case s.idle <- struct{}{}:
		default:
		}
	}
}

// ended is the error for a wait that ctx ended. It tells of the outage that was waited for.
func (s *sender) ended(kind error, ctx context.Context) error {
	e := ended(s.op, s.target, kind, ctx)
	if refusal := s.refusal.Load(); refusal != nil {
		return e.during(refusal)
	}
	if s.outage != nil {
		return e.during(s.outage())
	}
	return e
}

// closed is what a caller is told whose message is cut off.
func (s *sender) closed(kind error) error {
	if kind == ErrOutcomeUnknown {
		s.doubt.Store(true)
	}
	return &Error{Op: s.op, Target: s.target, Kind: kind, Err: ErrClosed}
}

// put queues out, within ctx. After an error it isn't queued.
func (s *sender) put(ctx context.Context, out *outgoing) error {
	if out.size = s.budget.size(out.msg); !s.budget.take(ctx, s.ctx.Done(), out.size) {
		if ctx.Err() == nil {
			return s.closed(ErrNotSent)
		}
		return s.ended(ErrNotSent, ctx)
	}
	select {
	case s.queue <- out:
		return nil
	case <-ctx.Done():
		s.budget.give(out.size)
		return s.ended(ErrNotSent, ctx)
	case <-s.ctx.Done():
		s.budget.give(out.size)
		return s.closed(ErrNotSent)
	}
}

// call is a message that somebody waits for.
type call struct {
	outgoing
	answer chan error
}

func (c *call) answered(_ *outgoing, err error) { c.answer <- err }

// do queues m and waits for its answer, both within ctx.
func (s *sender) do(ctx context.Context, m *Message) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.exit()
	c, _ := s.calls.Get().(*call)
	if c == nil {
		c = &call{answer: make(chan error, 1)}
	}
	c.outgoing = outgoing{msg: m, to: c}
	err := s.put(ctx, &c.outgoing)
	if err != nil {
		return err
	}
	select {
	case err = <-c.answer:
	case <-s.ctx.Done():
		// Cut off; or queued behind the sender's last look at its queue.
		if _, kind := s.leave(&c.outgoing); kind != nil {
			return s.closed(kind)
		}
		err = <-c.answer
	case <-ctx.Done():
		if _, kind := s.leave(&c.outgoing); kind != nil {
			return s.ended(kind, ctx)
		}
		err = <-c.answer // both at once: the answer is worth more
	}
	c.outgoing = outgoing{}
	s.calls.Put(c)
	return err
}

// fail answers everything that is queued with err, and what was to be sent again
// with ErrOutcomeUnknown.
func (s *sender) fail(err *Error) {
	for _, out := range s.again {
		unknown := *err
		unknown.Kind, unknown.unsent = ErrOutcomeUnknown, false
		if err.Kind != ErrNotSent { // it says why there is no link
			unknown.Err = err
		}
		s.doubtful(out, outAgain, &unknown)
	}
	s.again = nil
	for {
		select {
		case out := <-s.queue:
			s.answer(out, outQueued, err)
		default:
			return
		}
	}
}
