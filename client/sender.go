package client

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"
)

// maxInFlight is how many messages a sender has under way before it waits for
// answers. RabbitMQ gives a sending link 170 credits and a session a window of
// 400, so more would only wait in go-amqp.
const maxInFlight = 400

// sender keeps one sending link alive and pipelines messages on it: one goroutine
// owns the link and writes, another awaits the answers in the order of sending.
// No caller's ctx reaches go-amqp, where its end could break the link or the
// connection for everybody else; it guards the wait before and after only.
//
// What happens to a message:
//
//	queued ──▶ sending ──▶ answered: nil, ErrUnroutable, ErrRefused
//	   │           └─────▶ link lost: ErrOutcomeUnknown
//	   ├─▶ withdrawn by its caller: ErrNotSent
//	   └─▶ link can't be opened, too large, not encodable: that error
//
// Messages that are still queued when a link is lost stay queued.
type sender struct {
	op     string // for errors: "publish", "forward"
	target string // the encoded address; empty for a link without a target
	open   func(ctx context.Context) (session, error)
	// give returns the session after its link has ended; intact says that the
	// session surely hasn't.
	give    func(s session, intact bool)
	backoff Backoff
	tell    func(Event) // nil: nobody listens

	queue chan *outgoing
	// stop ends the sender once its queue is empty; cut ends it at once.
	stop     chan struct{}
	stopOnce sync.Once
	cut      context.CancelFunc
	ctx      context.Context
	done     chan struct{}

	// unanswered counts the messages that were sent and not answered, for close.
	unanswered atomic.Int64
	// callers counts those who wait in do; when the last one leaves, idle is
	// signalled. What their messages have left in the queue was withdrawn.
	callers atomic.Int64
	idle    chan struct{}

	// first receives whether the link could be opened, once that is known.
	first chan error
}

// outgoing is a message on its way out.
type outgoing struct {
	msg   *Message
	state atomic.Int32
	// abandoned, if not nil, is closed when nobody wants it sent any more.
	abandoned <-chan struct{}
	// answer is called once, by the sender's goroutines: it must not block.
	answer func(error)
}

const (
	outQueued int32 = iota
	outSending
	outWithdrawn
)

// withdraw takes back what hasn't been sent yet, and says whether it could.
func (o *outgoing) withdraw() bool { return o.state.CompareAndSwap(outQueued, outWithdrawn) }

func newSender(op, target string, depth int, backoff Backoff, tell func(Event), open func(context.Context) (session, error), give func(session, bool)) *sender {
	s := &sender{
		op: op, target: target, open: open, give: give, backoff: backoff, tell: tell,
		queue: make(chan *outgoing, depth),
		stop:  make(chan struct{}), done: make(chan struct{}), first: make(chan error, 1),
		idle: make(chan struct{}, 1),
	}
	s.ctx, s.cut = context.WithCancel(context.Background())
	go s.run()
	return s
}

// close lets what is queued go out and be answered, within ctx; then it cuts off.
// It is an error if anything was cut off.
func (s *sender) close(ctx context.Context) error {
	s.stopOnce.Do(func() { close(s.stop) })
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		open := s.unanswered.Load() + s.callers.Load()
		s.cut()
		<-s.done
		if open == 0 {
			return nil
		}
		return ended(s.op, s.target, ErrOutcomeUnknown, ctx)
	}
}

func (s *sender) run() {
	defer close(s.done)
	defer s.cut()
	defer s.fail(&Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrClosed})
	defer func() {
		select {
		case s.first <- ErrClosed: // cut off before an attempt decided
		default:
		}
	}()

	failures := 0
	lost, renewed := time.Now(), false // renewed: nobody needs to hear of it
	event := func(e Event) {
		if s.tell != nil {
			e.Op, e.Target, e.Attempt = s.op, s.target, failures+1
			s.tell(e)
		}
	}
	defer func() { event(Event{Kind: Ended}) }()
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
			if !errors.Is(err, ErrConnectionLost) {
				event(Event{Kind: Refused, Err: err})
				s.fail(err)
			}
			if !s.rest(s.backoff.pause(failures)) {
				return
			}
			failures++
			continue
		}
		began := time.Now()
		if !renewed {
			event(Event{Kind: Up, Down: began.Sub(lost)})
		}
		renewed = false
		closeLink := sync.OnceValue(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
			defer cancel()
			return link.close(ctx)
		})
		// While the session's window is full, go-amqp's send heeds no ctx: only the
		// end of the link ends it.
		unwatch := context.AfterFunc(s.ctx, func() { _ = closeLink() })
		finished, why := s.pump(sess, link)
		unwatch()
		err = closeLink()
		s.give(sess, finished && err == nil)
		if finished {
			if sess.wear() < 1 || s.ctx.Err() != nil || isClosed(s.stop) && len(s.queue) == 0 {
				return
			}
			failures, renewed, lost = 0, true, time.Now()
			continue // on another session
		}
		if time.Since(began) > s.backoff.Max {
			failures = 0
		}
		lost = time.Now()
		event(Event{Kind: Lost, Err: newError(s.op, s.target, ErrConnectionLost, why)})
		if !s.rest(s.backoff.pause(failures)) {
			return
		}
		failures++
	}
}

// closeTimeout bounds the orderly closing of a link or session, which the broker
// answers at once if it answers at all.
const closeTimeout = 5 * time.Second

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
	return newError(s.op, s.target, attachKind(err), err)
}

// attachKind is what kind of failure to open a link err is: the broker's refusal,
// or the loss of the link, session or connection.
func attachKind(err error) error {
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil || errors.As(err, new(*amqp.ConnError)) {
		return ErrConnectionLost
	}
	switch remote.Condition {
	case amqp.ErrCondDetachForced, amqp.ErrCondConnectionForced, amqp.ErrCondInternalError:
		return ErrConnectionLost // that passes
	}
	return ErrRefused
}

// pump sends until the link ends (false), or the sender is stopped and has sent all,
// or the session is worn out (true). When it returns, every message that it took was
// answered. why is what ended the link.
func (s *sender) pump(sess session, link senderLink) (finished bool, why error) {
	type sent struct {
		out *outgoing
		r   receipt
	}
	inFlight := make(chan sent, maxInFlight)
	lost := make(chan struct{}) // the answers say that the link is gone
	var wg sync.WaitGroup
	var noAnswer error
	defer func() {
		if !finished && why == nil {
			why = noAnswer
		}
	}()
	wg.Go(func() {
		broken := false
		for f := range inFlight {
			state, err := f.r.wait(s.ctx)
			f.out.answer(s.verdict(state, err))
			s.unanswered.Add(-1)
			if err != nil && !broken {
				broken, noAnswer = true, err
				close(lost)
			}
		}
	})
	defer wg.Wait()
	defer close(inFlight)

	take := func(out *outgoing) bool {
		if !out.state.CompareAndSwap(outQueued, outSending) {
			return true // withdrawn, and its caller told so
		}
		if out.abandoned != nil && isClosed(out.abandoned) {
			out.answer(&Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrConnectionLost})
			return true
		}
		r, gone, err := link.send(s.ctx, out.msg)
		if err == nil {
			s.unanswered.Add(1)
			inFlight <- sent{out, r}
			return true
		}
		if !gone {
			out.answer(newError(s.op, s.target, ErrNotSent, err))
			return true
		}
		out.answer(s.unknown(err))
		why = err
		return false
	}
	for {
		select {
		case out := <-s.queue:
			if !take(out) {
				return false, why
			}
			if sess.wear() >= 1 {
				return true, nil
			}
		case <-lost:
			return false, why
		case <-sess.broken():
			return false, why
		case <-s.ctx.Done():
			return true, nil
		case <-s.stop:
			for {
				select {
				case out := <-s.queue:
					if !take(out) {
						return false, why
					}
					if sess.wear() >= 1 {
						return true, nil
					}
				default:
					return true, nil
				}
			}
		}
	}
}

// verdict turns the broker's answer into the caller's error.
func (s *sender) verdict(state amqp.DeliveryState, err error) error {
	if err != nil {
		return s.unknown(err)
	}
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

// do queues out and waits for its answer, both within ctx.
func (s *sender) do(ctx context.Context, m *Message) error {
	select {
	case <-s.stop:
		return &Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrClosed}
	default:
	}
	s.callers.Add(1)
	defer func() {
		if s.callers.Add(-1) == 0 {
			select {
			case s.idle <- struct{}{}:
			default:
			}
		}
	}()
	answered := make(chan error, 1)
	out := &outgoing{msg: m, answer: func(err error) { answered <- err }}
	select {
	case s.queue <- out:
	case <-ctx.Done():
		return ended(s.op, s.target, ErrNotSent, ctx)
	case <-s.done:
		return &Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrClosed}
	}
	select {
	case err := <-answered:
		return err
	case <-s.done:
		// Queued behind the sender's last look at its queue, or answered just now.
		if out.withdraw() {
			return &Error{Op: s.op, Target: s.target, Kind: ErrNotSent, Err: ErrClosed}
		}
		return <-answered
	case <-ctx.Done():
		if out.withdraw() {
			return ended(s.op, s.target, ErrNotSent, ctx)
		}
		select {
		case err := <-answered:
			return err // both at once: the answer is worth more
		default:
			return ended(s.op, s.target, ErrOutcomeUnknown, ctx)
		}
	}
}

// fail answers everything that is queued with err.
func (s *sender) fail(err error) {
	for {
		select {
		case out := <-s.queue:
			if out.state.CompareAndSwap(outQueued, outSending) {
				out.answer(err)
			}
		default:
			return
		}
	}
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
