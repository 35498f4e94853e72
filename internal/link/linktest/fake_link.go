// Package linktest has a broker for unit tests: one queue behind the interfaces of package link,
// with faults on demand. It runs in virtual time.
package linktest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/userid"
)

// FakeBroker is one queue, and a sink for all that is sent, behind the
// interfaces of package link. It keeps what RabbitMQ keeps: credit, unsettled
// deliveries, answers in the order of sending; and it records all that happens,
// in order. What breaks these rules fails the test.
type FakeBroker struct {
	T testing.TB
	// Version that sessions report. Default: 4.3.
	Version string
	// Hook, if set, is asked before each step ("open session", "attach receiver",
	// "attach sender <target>", "credit", "settle <id>", "drain", "send <id>",
	// "close receiver", ...). Its error is the step's. It may block.
	Hook func(step string) error
	// Verdict, if set, is the answer to a message; nil withholds the answer until
	// answer is called. Default: accepted.
	Verdict func(target string, m *amqp.Message) amqp.DeliveryState
	// Plant, if set, plants a fault between a sender and its link.
	Plant func(link.SenderLink) link.SenderLink
	// Window is how many unanswered messages stop a sender. 0: no limit.
	Window int
	// RenewAfter, if set, is how many deliveries wear a session out.
	RenewAfter int
	// Overdue is how long it may leave a message unanswered. 0 means without limit.
	Overdue time.Duration
	// Silent leaves drains, closings and the question whether it answers unanswered.
	Silent bool
	// alarm is set by setAlarm.
	alarm bool
	// Now, if set, is a consumer's idea of the broker's time.
	Now func() (time.Time, bool)
	// Requeues makes requeued messages ready in the queue again.
	Requeues bool
	// SingleActive, if set, tells a consumer whether its queue has a single active consumer.
	SingleActive func(context.Context, string) (bool, error)
	// Timeout, if set, is the queue's own consumer timeout. The fake broker doesn't act on it.
	Timeout time.Duration
	// Logger, if set, gets a consumer's log.
	Logger *slog.Logger

	Mu       sync.Mutex
	heard    uint64        // answers and deliveries
	changed  chan struct{} // closed and renewed on every change
	Events   []string
	Ready    []*amqp.Message
	tags     uint32           // delivery tags given
	Stored   map[string]int   // ids of the messages accepted, how often
	Sessions []*FakeSession   // open ones
	Last     link.Disposition // that was settled with
	Withheld []*fakeReceipt
	answers  []func() // to be given once mu is free
	// The most that ever was: sessions open, and credit and unsettled deliveries
	// of one receiver.
	MostSessions, MostOutstanding int
}

func NewFakeBroker(t testing.TB) *FakeBroker {
	return &FakeBroker{T: t, Version: "4.3.0", changed: make(chan struct{}), Stored: map[string]int{}}
}

var (
	ErrFakeLink = &amqp.LinkError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondDetachForced, Description: "link killed"}}
	ErrFakeConn = &amqp.ConnError{}
	ErrMissing  = &amqp.Error{Condition: amqp.ErrCondNotFound, Description: "no queue 'q' in vhost '/'"}
)

// Unsent is a hook's error for a message that go-amqp refuses before writing.
type Unsent struct{ Err error }

func (u Unsent) Error() string { return u.Err.Error() }
func (u Unsent) Unwrap() error { return u.Err }

// WithID is a message with a message-id, by which events name it.
func WithID(id string) *amqp.Message {
	return &amqp.Message{
		Header: &amqp.MessageHeader{Durable: true, Priority: 4}, Properties: &amqp.MessageProperties{MessageID: id}, Data: [][]byte{[]byte(id)},
	}
}

func IDOf(m *amqp.Message) string { return fmt.Sprint(m.Properties.MessageID) }

func (b *FakeBroker) ask(step string) error {
	if b.Hook == nil {
		return nil
	}
	return b.Hook(step)
}

// Update changes the broker's state, and wakes all that wait for a change.
func (b *FakeBroker) Update(f func()) {
	b.Mu.Lock()
	f()
	b.deliver()
	close(b.changed)
	b.changed = make(chan struct{})
	answers := b.answers
	b.answers = nil
	b.Mu.Unlock()
	for _, answer := range answers {
		answer()
	}
}

func (b *FakeBroker) Log(format string, args ...any) {
	b.Events = append(b.Events, fmt.Sprintf(format, args...))
}

// Await waits until check, which is called with the lock held, says true.
func (b *FakeBroker) Await(ctx context.Context, check func() bool) error {
	for {
		b.Mu.Lock()
		ok, changed := check(), b.changed
		b.Mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// History is what happened so far; with prefixes, only events that begin with one.
func (b *FakeBroker) History(prefixes ...string) []string {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	return slices.DeleteFunc(slices.Clone(b.Events), func(e string) bool {
		return len(prefixes) > 0 && !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(e, p) })
	})
}

// Note puts a test's own event between the broker's.
func (b *FakeBroker) Note(format string, args ...any) {
	b.Update(func() { b.Log(format, args...) })
}

// Publish makes messages ready in the queue.
func (b *FakeBroker) Publish(ids ...string) {
	b.Update(func() {
		for _, id := range ids {
			b.Ready = append(b.Ready, WithID(id))
		}
	})
}

// deliver sends what is ready to receivers with credit.
func (b *FakeBroker) deliver() {
	for _, s := range b.Sessions {
		for _, r := range s.Receivers {
			for r.Err == nil && !r.deaf && !r.starved && r.credit > 0 && len(b.Ready) > 0 {
				m := b.Ready[0]
				b.tags++
				b.Ready = b.Ready[1:]
				r.credit--
				s.used++
				b.heard++
				r.arrived = append(r.arrived, link.Arrival{Msg: m, ID: b.tags})
				r.all++
				if !r.Presettled {
					r.Unsettled[b.tags] = m
				}
			}
			if r.Err == nil {
				b.MostOutstanding = max(b.MostOutstanding, int(r.credit)+len(r.Unsettled))
			}
		}
		for _, l := range s.senders {
			l.pump()
		}
	}
}

// Answer gives the first n withheld messages the state; all of them if n is
// negative.
func (b *FakeBroker) Answer(n int, state amqp.DeliveryState) {
	b.Update(func() {
		if n < 0 {
			n = len(b.Withheld)
		}
		for _, r := range b.Withheld[:n] {
			b.decide(r, state)
		}
		b.Withheld = b.Withheld[n:]
	})
}

func (b *FakeBroker) decide(r *fakeReceipt, state amqp.DeliveryState) {
	if r.link.err != nil {
		return
	}
	b.answers = append(b.answers, func() { r.to.Answer(state, nil) })
	b.heard++
	r.link.open = slices.DeleteFunc(r.link.open, func(o *fakeReceipt) bool { return o == r })
	b.Log("answer %s %s", IDOf(r.msg), stateName(state))
	if _, ok := state.(*amqp.StateAccepted); ok {
		b.Stored[IDOf(r.msg)]++
	}
}

func stateName(s amqp.DeliveryState) string {
	return strings.ToLower(strings.TrimPrefix(fmt.Sprintf("%T", s), "*encoding.State"))
}

// SetAlarm raises or clears an alarm. During an alarm, the broker accepts no messages.
func (b *FakeBroker) SetAlarm(on bool) {
	b.Update(func() {
		b.alarm = on
		b.Log("alarm %v", on)
		for _, s := range b.Sessions {
			s.In.Set(on)
		}
	})
}

// Asked waits for the end of ctx while there is an alarm: management requests aren't answered.
func (b *FakeBroker) Asked(ctx context.Context) error {
	return b.Await(ctx, func() bool { return !b.alarm })
}

// Kill ends every link with err. With errFakeConn, the connection has ended.
func (b *FakeBroker) Kill(err error) {
	b.Update(func() {
		b.Log("link lost")
		for _, s := range b.Sessions {
			s.End(err)
		}
	})
}

// Revoke takes a delivery back from its consumer, as RabbitMQ 4.3 does after the consumer
// timeout, and makes it ready again. The link gets nothing more until the stale delivery is
// settled and a flow follows.
func (b *FakeBroker) Revoke(id string, again bool) {
	var notified link.ReceiverEvents
	var back uint32
	b.Update(func() {
		for _, s := range b.Sessions {
			for _, r := range s.Receivers {
				for n, m := range r.Unsettled {
					if IDOf(m) == id && !r.stale[n] {
						r.stale[n], r.starved = true, true
						if again { // else another consumer has it
							b.Ready = append(b.Ready, WithID(id))
						}
						notified, back = r.events, n
						b.Log("take back %s", id)
					}
				}
			}
		}
	})
	notified.Revoked(back, back)
}

// KillSenders ends the sending links only.
func (b *FakeBroker) KillSenders(err error) {
	b.Update(func() {
		for _, s := range b.Sessions {
			for _, l := range s.senders {
				l.end(err)
			}
		}
	})
}

func (b *FakeBroker) Open(ctx context.Context) (link.Session, error) {
	if err := b.ask("open session"); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s := &FakeSession{B: b, Gone: make(chan struct{}), In: link.NewIntake()}
	b.Update(func() {
		s.In.Set(b.alarm)
		b.Sessions = append(b.Sessions, s)
		b.MostSessions = max(b.MostSessions, len(b.Sessions))
		b.Log("open session")
	})
	return s, nil
}

func (b *FakeBroker) Give(s link.Session, _ bool) { link.CloseSession(s) }

// SessionsOf are sessions that open is asked for.
type SessionsOf func(context.Context) (link.Session, error)

func (open SessionsOf) Open(ctx context.Context) (link.Session, error) { return open(ctx) }
func (open SessionsOf) Give(s link.Session, _ bool)                    { link.CloseSession(s) }

type FakeSession struct {
	B         *FakeBroker
	Gone      chan struct{}
	In        *link.Intake
	Receivers []*FakeReceiver
	senders   []*fakeSender
	err       error
	used      int // deliveries
}

func (s *FakeSession) End(err error) {
	if s.err != nil {
		return
	}
	s.err = err
	for _, r := range s.Receivers {
		r.end(err, 1)
	}
	for _, l := range s.senders {
		l.end(err)
	}
	if err == error(ErrFakeConn) {
		close(s.Gone)
	}
}

func (s *FakeSession) Broken() <-chan struct{} { return s.Gone }
func (s *FakeSession) Exhaust() float64 {
	s.B.Mu.Lock()
	defer s.B.Mu.Unlock()
	if s.B.RenewAfter == 0 {
		return 0
	}
	return float64(s.used) / float64(s.B.RenewAfter)
}

func (s *FakeSession) Heard() uint64 {
	s.B.Mu.Lock()
	defer s.B.Mu.Unlock()
	return s.B.heard
}

// mute waits for the end of ctx where the broker is silent.
func (b *FakeBroker) mute(ctx context.Context) {
	b.Mu.Lock()
	silent := b.Silent
	b.Mu.Unlock()
	if silent {
		<-ctx.Done()
	}
}

// Answering takes all of limit where the broker is silent.
func (s *FakeSession) Answering(ctx context.Context, limit time.Duration) bool {
	s.B.Mu.Lock()
	silent := s.B.Silent
	s.B.Mu.Unlock()
	return !silent || !backoff.Sleep(ctx, limit)
}

func (s *FakeSession) GiveUp() {
	s.B.Note("give up")
	s.B.Kill(ErrFakeConn)
}

func (s *FakeSession) Intake() *link.Intake { return s.In }
func (s *FakeSession) Login() *userid.Login { return userid.NewLogin("", false) }
func (s *FakeSession) Quirks() oldbroker.Quirks {
	return oldbroker.Of(oldbroker.Version(s.B.Version).AtLeast)
}

func (s *FakeSession) Close(ctx context.Context) {
	s.B.mute(ctx)
	_ = s.B.ask("close session")
	s.B.Update(func() {
		s.End(ErrFakeLink)
		n := len(s.B.Sessions)
		s.B.Sessions = slices.DeleteFunc(s.B.Sessions, func(o *FakeSession) bool { return o == s })
		if len(s.B.Sessions) == n {
			s.B.T.Error("a session was closed twice")
		}
		s.B.Log("close session")
	})
}

func (s *FakeSession) Receiver(ctx context.Context, source string, o link.ReceiverOptions) (link.ReceiverLink, error) {
	if err := s.B.ask("attach receiver"); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	r := &FakeReceiver{B: s.B, Unsettled: map[uint32]*amqp.Message{}, stale: map[uint32]bool{}, events: o.Events}
	s.B.Update(func() {
		r.Err = s.err
		s.Receivers = append(s.Receivers, r)
		s.B.Log("attach receiver")
	})
	return r, nil
}

func (s *FakeSession) Sender(ctx context.Context, target string) (link.SenderLink, error) {
	if err := s.B.ask("attach sender " + target); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	l := &fakeSender{b: s.B, s: s, target: target}
	s.B.Update(func() {
		l.err = s.err
		s.senders = append(s.senders, l)
		s.B.Log("attach sender %s", target)
	})
	if s.B.Plant != nil {
		return s.B.Plant(l), nil
	}
	return l, nil
}

type FakeReceiver struct {
	B         *FakeBroker
	Err       error // why it has ended
	credit    uint32
	arrived   []link.Arrival
	all       uint64 // that have arrived
	Unsettled map[uint32]*amqp.Message

	events  link.ReceiverEvents
	stale   map[uint32]bool // were taken back, and aren't settled yet
	starved bool            // until a flow comes behind that

	Presettled bool // deliveries need no settlement
	draining   bool
	deaf       bool // credit, drains and settlements go nowhere
}

// Deafen makes the links that there are look healthy, and nothing else.
func (b *FakeBroker) Deafen() {
	b.Update(func() {
		b.Log("deaf")
		for _, s := range b.Sessions {
			for _, r := range s.Receivers {
				r.deaf = true
			}
		}
	})
}

// end requeues what is unsettled, as a failed delivery if failed is 1.
func (r *FakeReceiver) end(err error, failed uint32) {
	if r.Err != nil {
		return
	}
	r.Err = err
	for id, m := range r.Unsettled {
		if r.stale[id] {
			continue
		}
		again := WithID(IDOf(m))
		again.Header.DeliveryCount = m.Header.DeliveryCount + failed
		r.B.Ready = append(r.B.Ready, again)
	}
}

func (r *FakeReceiver) Receive(ctx context.Context) (a link.Arrival, err error) {
	there := false
	err = r.B.Await(ctx, func() bool {
		a, there = r.pop()
		return there || r.Err != nil
	})
	if err == nil && !there {
		err = r.Err
	}
	return a, err
}

func (r *FakeReceiver) pop() (a link.Arrival, ok bool) {
	if len(r.arrived) == 0 {
		return a, false
	}
	a = r.arrived[0]
	r.arrived = r.arrived[1:]
	return a, true
}

func (r *FakeReceiver) Prefetched() (link.Arrival, bool) {
	r.B.Mu.Lock()
	defer r.B.Mu.Unlock()
	return r.pop()
}

func (r *FakeReceiver) IssueCredit(n uint32) (err error) {
	if err := r.B.ask("credit"); err != nil {
		return err
	}
	r.B.Update(func() {
		if err = r.Err; err == nil {
			if r.draining { // go-amqp refuses it, too
				err = errors.New("the link is being drained")
				return
			}
			r.credit += n
			r.starved = len(r.stale) > 0
			r.B.Log("credit %d", n)
		}
	})
	return err
}

func (r *FakeReceiver) Drain(ctx context.Context) (err error) {
	deaf := false
	r.B.Update(func() { r.draining, deaf = true, r.deaf })
	if deaf {
		<-ctx.Done()
		return ctx.Err()
	}
	if err := r.B.ask("drain"); err != nil {
		return err
	}
	r.B.Update(func() {
		if err = r.Err; err == nil {
			r.credit, r.draining = 0, false
			r.starved = len(r.stale) > 0
			r.B.Log("drain")
		}
	})
	return err
}

// Release and Full: the fake broker bounds no bytes.
func (r *FakeReceiver) Release(int) {}

func (r *FakeReceiver) Full() bool { return false }

func (r *FakeReceiver) Arrived() (n uint64) {
	r.B.Update(func() { n = r.all })
	return n
}

func (r *FakeReceiver) Claims() bool { return false }

func (r *FakeReceiver) Claim(ctx context.Context, _ uint32, _ []string, _ func()) error {
	return r.Drain(ctx)
}

func (r *FakeReceiver) Settle(id uint32, d link.Disposition) (err error) {
	r.B.Mu.Lock()
	m := r.Unsettled[id]
	r.B.Mu.Unlock()
	if m == nil {
		r.B.T.Errorf("delivery %d was settled, and isn't an unsettled delivery of this link", id)
		return nil
	}
	if err := r.B.ask("settle " + IDOf(m)); err != nil {
		return err
	}
	r.B.Update(func() {
		if err = r.Err; err != nil {
			return
		}
		if r.deaf {
			r.B.Log("unheard %s %s", outcomeName(d), IDOf(m))
			return
		}
		delete(r.Unsettled, id)
		if r.stale[id] {
			delete(r.stale, id)
			r.B.Log("stale %s %s", outcomeName(d), IDOf(m))
			return
		}
		r.B.Log("%s %s", outcomeName(d), IDOf(m))
		r.B.Last = d
		if r.B.Requeues && (d.Kind == link.DispositionReleased || d.Kind == link.DispositionModified && !d.Dead) {
			r.B.Ready = append([]*amqp.Message{m}, r.B.Ready...)
		}
	})
	return err
}

func outcomeName(d link.Disposition) string {
	switch {
	case d.Kind == link.DispositionAccepted:
		return "accept"
	case d.Kind == link.DispositionReleased:
		return "release"
	case d.Dead && d.Failed:
		return "dead-letter as failed"
	case d.Dead:
		return fmt.Sprintf("dead-letter (%v)", d.Annotations["x-opt-hopback-reason"])
	case d.Failed:
		return "requeue as failed"
	}
	return fmt.Sprintf("modify %v", d.Annotations)
}

func (r *FakeReceiver) Close(ctx context.Context) error {
	r.B.mute(ctx)
	if err := r.B.ask("close receiver"); err != nil {
		return err
	}
	r.B.Update(func() {
		r.end(ErrFakeLink, 0)
		r.B.Log("close receiver")
	})
	return nil
}

type fakeSender struct {
	b       *FakeBroker
	s       *FakeSession
	target  string
	err     error
	pending []*fakeReceipt // that wait for the window
	open    []*fakeReceipt // that are sent and not answered
}

// end answers what wasn't.
func (l *fakeSender) end(err error) {
	if l.err != nil {
		return
	}
	l.err = err
	for _, r := range l.open {
		l.b.answers = append(l.b.answers, func() { r.to.Answer(nil, err) })
	}
	for _, r := range l.pending {
		r.unsent = true
		l.b.answers = append(l.b.answers, func() { r.to.Answer(nil, &link.NeverSent{Err: err}) })
	}
	l.open, l.pending = nil, nil
}

func (l *fakeSender) Send(m *amqp.Message, to link.Receipt) (x link.Sending, lost bool, err error) {
	open := false
	l.b.Update(func() { open = l.err == nil })
	if err := l.b.ask("send " + IDOf(m)); err != nil {
		return nil, !errors.As(err, new(Unsent)), err
	}
	r := &fakeReceipt{link: l, msg: m, to: to}
	l.b.Update(func() {
		switch err = l.err; {
		case err == nil:
			l.pending = append(l.pending, r)
			l.pump()
		case open: // the link has ended over it
			ended := err
			l.b.answers = append(l.b.answers, func() { to.Answer(nil, ended) })
			err = nil
		}
	})
	return r, err != nil, err
}

func (r *fakeReceipt) Withdraw() bool {
	r.link.b.Mu.Lock()
	defer r.link.b.Mu.Unlock()
	i := slices.Index(r.link.pending, r)
	if i >= 0 {
		r.link.pending = slices.Delete(r.link.pending, i, i+1)
	}
	return i >= 0 || r.unsent
}

// pump sends what the window allows.
func (l *fakeSender) pump() {
	for l.err == nil && len(l.pending) > 0 && !l.b.alarm && (l.b.Window == 0 || len(l.open) < l.b.Window) {
		r := l.pending[0]
		l.pending = l.pending[1:]
		l.open = append(l.open, r)
		l.s.used++
		l.b.Log("send %s", IDOf(r.msg))
		var state amqp.DeliveryState = &amqp.StateAccepted{}
		if l.b.Verdict != nil {
			state = l.b.Verdict(l.target, r.msg)
		}
		if state == nil {
			l.b.Withheld = append(l.b.Withheld, r)
			continue
		}
		l.b.decide(r, state)
	}
}

func (l *fakeSender) Close(ctx context.Context) error {
	l.b.mute(ctx)
	if err := l.b.ask("close sender " + l.target); err != nil {
		return err
	}
	l.b.Update(func() {
		l.end(ErrFakeLink)
		l.b.Log("close sender %s", l.target)
	})
	return nil
}

type fakeReceipt struct {
	link   *fakeSender
	msg    *amqp.Message
	to     link.Receipt
	unsent bool // the link has ended before it was sent
}
