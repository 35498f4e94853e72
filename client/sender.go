// How messages are sent, and the broker's answers awaited:
//
//	sender   a queue of messages for one address, and a goroutine that keeps a link for it
//	flight   what a link has of them, in order, until it is answered
//	answers  what the broker says to each, and what a lost link leaves unknown
//
// A forwarder does the same for the retry copies of a consumer: see forwarder.go.

package client

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/userid"
)

// maxInFlight is how many messages a sender has in flight before it waits for answers. RabbitMQ
// gives a sending link 170 credits and a session a window of 400, so more would only wait in the
// engine.
const maxInFlight = 400

// sender keeps one sending link alive and pipelines messages on it: one goroutine
// hands them to the link, and answers come from the goroutine that reads (see answers).
// A caller's ctx ends its wait. Then a message that wasn't sent, not even in part, is removed.
//
// What happens to a message:
//
//	queued ──▶ sending ──▶ answered: nil, ErrUnroutable, ErrRefused
//	   │        │  ▲ └───▶ link lost, and not to be sent again: ErrOutcomeUnknown
//	   │        ▼  │
//	   │        again ───▶ link can't be opened, withdrawn by its caller: ErrOutcomeUnknown
//	   ├─▶ withdrawn by its caller: ErrNotSent
//	   └─▶ link can't be opened, too large, not encodable: that error
//
// Messages that are still queued when a link is lost stay queued. Those that are sent
// again go out on the next link before them, in the order of the first time.
type sender struct {
	op       string // for errors: "publish", "forward"
	target   string // the encoded address; empty for a link without a target
	sessions link.Sessions
	pause    func(failures int) time.Duration
	notify   func(Event) // nil: nobody listens
	outage   func() error
	// resend says that what is unanswered when a link is lost is sent again.
	resend bool
	// copies says that the messages are copies of others' messages.
	copies bool
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
	// what the broker ended the last link for. Only the linkKeeper and its flight use them.
	again  []*outgoing
	poison bool
	// stop ends the sender once its queue is empty; cut ends it at once.
	stop     chan struct{}
	stopOnce sync.Once
	Cut      context.CancelFunc
	ctx      context.Context
	// wanted ends with ctx, or before it when the sender was stopped and nobody waits.
	wanted context.Context
	unwant context.CancelFunc
	done   chan struct{}

	// sent counts the messages that were sent, settled those of them that have their
	// answer or get none.
	sent, settled atomic.Int64
	// callers counts those who wait in do; when the last one leaves, idle is
	// signalled. What their messages have left in the queue was withdrawn.
	callers atomic.Int64
	idle    chan struct{}

	// doubt is set when Close cuts off messages that were sent.
	doubt atomic.Bool

	// First receives whether the link could be opened, once that is known.
	First chan error
	// refusal is why the broker refuses the link; nil while it doesn't.
	refusal atomic.Pointer[failure.Error]
	// intake is that of the session in use; nil while there is none.
	intake atomic.Pointer[link.Intake]
	// flight is the current one; nil while there is none.
	flight atomic.Pointer[flight]
}

// leave takes o back for its caller, and returns what is certain of it: ErrNotSent,
// ErrOutcomeUnknown, or nil if its answer is there or just coming. The message may
// only be read from then on.
func (s *sender) leave(o *outgoing) (*amqp.Message, error) {
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
				return m, failure.ErrNotSent
			}
			return m, failure.ErrOutcomeUnknown
		case outSending:
			x := o.on.Load()
			if x == nil {
				s.flight.Load().settle() // it is being handed to the link
				x = o.on.Load()
			}
			// First, since the end of the link would count a message that is withdrawn as one that
			// was sent.
			if !o.state.CompareAndSwap(outSending, outLeft) {
				continue
			}
			m := o.msg // until then it was that of the answer
			if x == nil || !x.Withdraw() {
				return m, failure.ErrOutcomeUnknown
			}
			if o.state.CompareAndSwap(outLeft, outOver) {
				s.budget.give(o.size)
			}
			return m, failure.ErrNotSent
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

// answer notifies o's caller, unless it has left. from is the state that o is in.
func (s *sender) answer(o *outgoing, from int32, err error) {
	if o.state.CompareAndSwap(from, outOver) {
		s.budget.give(o.size)
		o.to.Answered(o, err)
	} else if o.state.CompareAndSwap(outLeft, outOver) {
		s.budget.give(o.size)
	}
}

// keep puts a message that was sent and not answered aside to be sent again, and
// says whether it should be. If not, it still needs an answer.
func (s *sender) keep(o *outgoing) bool {
	return s.resend && s.ctx.Err() == nil && o.state.CompareAndSwap(outSending, outAgain)
}

// Opened waits within ctx for the first attempt to open the link that decides something.
func (s *sender) Opened(ctx context.Context) error {
	select {
	case err := <-s.First:
		return err
	case <-ctx.Done():
		return s.ended(failure.ErrNotSent, ctx)
	}
}

// Blocked says whether the broker accepts no messages now, and since when.
func (s *sender) Blocked() (since time.Time, blocked bool) {
	in := s.intake.Load()
	if in == nil {
		return time.Time{}, false
	}
	now := in.Now()
	return now.Since, now.Blocked
}

// Count is how many messages are queued, and how many were sent and have no answer.
func (s *sender) Count() (queued, unanswered int) { return len(s.queue), int(s.unanswered()) }

func (s *sender) unanswered() int64 {
	settled := s.settled.Load() // first, or it could be the larger
	return s.sent.Load() - settled
}

type senderConfig struct {
	Depth  int                              // messages that may be queued
	Bytes  int64                            // that may be queued or unanswered; 0: no bound
	Pause  func(failures int) time.Duration // before another attempt to open the link
	Notify func(Event)                      // nil: nobody listens
	// Outage, if not nil, is why nothing can be sent now; it returns nil if it can.
	Outage  func() error
	Resend  bool
	Copies  bool          // the messages are copies of others' messages
	Overdue time.Duration // how long a message may be unanswered; 0: overdueAfter
	Log     *slog.Logger  // nil: nobody reads
}

// halt ends the sender once its queue is empty.
func (s *sender) halt() {
	s.stopOnce.Do(func() { close(s.stop) })
	s.unneeded()
}

// unneeded ends the search for a link when the sender was stopped and nobody waits for it
// to send.
func (s *sender) unneeded() {
	if failure.IsClosed(s.stop) && s.callers.Load() == 0 {
		s.unwant()
	}
}

// lastAnswer is how long close waits for the broker after its ctx has ended.
const lastAnswer = 100 * time.Millisecond

// Expire is called when the ctx of a Close has ended, before anything is cut off: what has no
// answer by then gets none.
func (s *sender) Expire() {
	if s.unanswered() > 0 {
		s.doubt.Store(true)
	}
}

// Close lets what is queued go out and be answered, within ctx; then it cuts off.
// It is an error if anything was cut off, also if its caller has left.
func (s *sender) Close(ctx context.Context) error {
	s.halt()
	select {
	case <-s.done:
		if s.doubt.Load() && ctx.Err() != nil {
			return failure.Ended(s.op, s.target, failure.ErrOutcomeUnknown, ctx)
		}
		return nil
	case <-ctx.Done():
		callers := s.callers.Load()
		s.Expire()
		s.Cut()
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
			return failure.Ended(s.op, s.target, failure.ErrOutcomeUnknown, ctx)
		case callers > 0:
			return failure.Ended(s.op, s.target, failure.ErrNotSent, ctx)
		}
		return nil
	}
}

// verdict turns the broker's answer into the caller's error.
func (s *sender) verdict(state amqp.DeliveryState) error {
	switch st := state.(type) {
	case *amqp.StateAccepted:
		return nil
	case *amqp.StateReleased:
		return &failure.Error{Op: s.op, Target: s.target, Kind: failure.ErrUnroutable, Text: "no queue is bound for this exchange and routing key"}
	case *amqp.StateRejected:
		e := &failure.Error{Op: s.op, Target: s.target, Kind: failure.ErrRefused}
		if st.Error != nil {
			e.Condition, e.Text, e.Err = string(st.Error.Condition), failure.Readable(st.Error.Description), st.Error
			e.Queue, _ = st.Error.Info["queue"].(string)
			e.Reason, _ = st.Error.Info["reason"].(string)
			if k := failure.KindOf(st.Error); k != nil {
				e.Kind = k
			}
		}
		if e.Text == "" && e.Condition == "" {
			e.Text = "it gave no reason: on RabbitMQ 4.0 that is mostly a full queue with overflow reject-publish"
		}
		return e
	default:
		// RabbitMQ answers with accepted, released or rejected only.
		return &failure.Error{Op: s.op, Target: s.target, Kind: failure.ErrOutcomeUnknown, Text: "the broker answered with an unexpected outcome"}
	}
}

// unknown is the error for a message that was sent and not answered. It keeps this kind for any
// reason why the link ended, because the reason doesn't say what happened to the message.
func (s *sender) unknown(err error) error {
	e := failure.NewError(s.op, s.target, failure.ErrOutcomeUnknown, err)
	e.Kind = failure.ErrOutcomeUnknown
	return e
}

// userIDRefused is the error for a message whose user-id the broker refuses. another reports
// that another user has sent the message before, and the broker may have accepted it then.
func (s *sender) userIDRefused(m *amqp.Message, another bool) error {
	e := &failure.Error{
		Op: s.op, Target: s.target, Kind: failure.ErrUserID, Condition: string(amqp.ErrCondUnauthorizedAccess),
		Text: "the message has the user-id " + failure.Readable(string(userid.Of(m))) + ", which isn't the connection's user; leave it out, or set PublisherConfig.Copies",
	}
	if another {
		return s.unknown(e)
	}
	return e
}

// forbidden is the error for a message that the user may not publish to its address.
func (s *sender) forbidden(o *outgoing, err error) error {
	e := failure.NewError(s.op, s.target, failure.ErrUnauthorized, err)
	if o.maybe {
		return s.unknown(e)
	}
	return e
}

// enter counts a caller, and is nil unless the sender is stopped.
func (s *sender) enter() error {
	select {
	case <-s.stop:
		return s.closed(failure.ErrNotSent)
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
		s.unneeded()
	}
}

// ended is the error for a wait that ctx ended. It includes the outage, if there is one.
func (s *sender) ended(kind error, ctx context.Context) error {
	e := failure.Ended(s.op, s.target, kind, ctx)
	if refusal := s.refusal.Load(); refusal != nil {
		return failure.During(e, refusal)
	}
	if s.outage != nil {
		return failure.During(e, s.outage())
	}
	return e
}

// closed is the error for a caller whose message was aborted.
func (s *sender) closed(kind error) error {
	if kind == failure.ErrOutcomeUnknown {
		s.doubt.Store(true)
	}
	return &failure.Error{Op: s.op, Target: s.target, Kind: kind, Err: failure.ErrClosed}
}

// put queues out, within ctx. After an error it isn't queued. Messages that the same caller puts
// go out in their order.
func (s *sender) put(ctx context.Context, out *outgoing) error {
	if err := s.charge(ctx, out); err != nil {
		return err
	}
	return s.enqueue(ctx, out)
}

// charge takes out's size from the budget, within ctx.
func (s *sender) charge(ctx context.Context, out *outgoing) error {
	if ctx.Err() != nil { // with room for the message, select would send it now and then
		return s.ended(failure.ErrNotSent, ctx)
	}
	if out.size = s.budget.size(out.msg); !s.budget.take(ctx, s.ctx.Done(), out.size) {
		if ctx.Err() == nil {
			return s.closed(failure.ErrNotSent)
		}
		return s.ended(failure.ErrNotSent, ctx)
	}
	return nil
}

func (s *sender) enqueue(ctx context.Context, out *outgoing) error {
	select {
	case s.queue <- out:
		return nil
	case <-ctx.Done():
		s.budget.give(out.size)
		return s.ended(failure.ErrNotSent, ctx)
	case <-s.ctx.Done():
		s.budget.give(out.size)
		return s.closed(failure.ErrNotSent)
	}
}

// call is a message that somebody waits for.
type call struct {
	outgoing
	answer chan error
}

func (c *call) Answered(_ *outgoing, err error) { c.answer <- err }

// Do queues m and waits for its answer, both within ctx.
func (s *sender) Do(ctx context.Context, m *amqp.Message) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.exit()
	c, _ := s.calls.Get().(*call)
	if c == nil {
		c = &call{answer: make(chan error, 1)}
	}
	c.outgoing = outgoing{msg: m, to: c}
	err := s.charge(ctx, &c.outgoing)
	if err != nil {
		return err
	}
	if !s.flight.Load().try(&c.outgoing) {
		if err := s.enqueue(ctx, &c.outgoing); err != nil {
			return err
		}
	}
	select {
	case err = <-c.answer:
	case <-s.ctx.Done():
		// Cut off; or queued after the sender's last check of its queue.
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
func (s *sender) fail(err *failure.Error) {
	for _, out := range s.again {
		if out.state.Load() == outQueued {
			s.answer(out, outQueued, err)
			continue
		}
		unknown := failure.Uncertain(err)
		if err.Kind != failure.ErrNotSent { // it says why there is no link
			unknown.Err = err
		}
		s.doubtful(out, outAgain, unknown)
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

// overdueAfter is how long the broker may leave a message unanswered, unless it has an
// alarm. RabbitMQ 4.0.5 can go on sending a session's messages to a queue's deposed
// leader: only another session gets them answered.
const overdueAfter = 30 * time.Second

// outgoing is a message on its way out.
type outgoing struct {
	msg   *amqp.Message
	state atomic.Int32
	// blamed counts the links that the broker ended while nothing else was in flight.
	blamed uint8
	// overdue says that a link was given up since it wasn't answered.
	overdue bool
	// maybe says that the broker may have stored it, from an earlier link.
	maybe bool
	// by is the user that it was sent by last.
	by *userid.Login
	// index is its place in its batch.
	index int
	// seq is its place among the messages of the link that it was with last.
	seq int64
	// size is what it takes of the budget.
	size int64
	// abandoned, if not nil, is closed when nobody wants it sent any more.
	abandoned <-chan struct{}
	to        answerer
	// on is what the link has of it; nil before it is with a link.
	on atomic.Pointer[sent]
}

// answerer is whom a message's answer goes to.
type answerer interface {
	// Answered is called at most once for each message, by the sender's goroutines:
	// it must not block. The sender doesn't touch o any more.
	Answered(o *outgoing, err error)
}

// earlier is the state of a message that was sent on a link whose broker hasn't read it.
func (o *outgoing) earlier() int32 {
	if o.maybe {
		return outAgain
	}
	return outQueued
}

const (
	outQueued  int32 = iota
	outSending       // with its link, or with the broker
	outAgain         // was sent, and waits for the next link
	outLeft          // was being sent when its caller left
	outOver          // answered, or taken back
)

// addressOf is the address in a message itself: where a sender without a target sends it.
func addressOf(m *amqp.Message) string {
	if m.Properties == nil || m.Properties.To == nil {
		return ""
	}
	return *m.Properties.To
}
