package client

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

	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/userid"
)

// fakeBroker is one queue, and a sink for all that is sent, behind the
// interfaces of wire_link.go. It keeps what RabbitMQ keeps: credit, unsettled
// deliveries, answers in the order of sending; and it records all that happens,
// in order. What breaks these rules fails the test.
type fakeBroker struct {
	t testing.TB
	// version that sessions report. Default: 4.3.
	version string
	// hook, if set, is asked before each step ("open session", "attach receiver",
	// "attach sender <target>", "credit", "settle <id>", "drain", "send <id>",
	// "close receiver", ...). Its error is the step's. It may block.
	hook func(step string) error
	// verdict, if set, is the answer to a message; nil withholds the answer until
	// answer is called. Default: accepted.
	verdict func(target string, m *amqp.Message) amqp.DeliveryState
	// window is how many unanswered messages stop a sender. 0: no limit.
	window int
	// renewAfter, if set, is how many deliveries wear a session out.
	renewAfter int
	// tell, if set, is told of a consumer's events.
	tell func(stateEvent)
	// overdue is how long it may leave a message unanswered. 0: for ever.
	overdue time.Duration
	// silent leaves drains, closings and the question whether it answers unanswered.
	silent bool
	// alarm is set by setAlarm.
	alarm bool
	// now, if set, is a consumer's idea of the broker's time.
	now func() (time.Time, bool)
	// requeues puts what is given back into the queue again.
	requeues bool
	// singleActive, if set, tells a consumer whether its queue has a single active consumer.
	singleActive func(context.Context, string) (bool, error)
	// timeout, if set, is the queue's own consumer timeout. The fake broker doesn't act on it.
	timeout time.Duration
	// logger, if set, gets a consumer's log.
	logger *slog.Logger

	mu       sync.Mutex
	heard    uint64        // answers and deliveries
	changed  chan struct{} // closed and renewed on every change
	events   []string
	ready    []*amqp.Message
	tags     uint32         // delivery tags given
	stored   map[string]int // ids of the messages accepted, how often
	sessions []*fakeSession // open ones
	last     disposition    // that was settled with
	withheld []*fakeReceipt
	answers  []func() // to be given once mu is free
	// The most that ever was: sessions open, and credit and unsettled deliveries
	// of one receiver.
	mostSessions, mostOutstanding int
}

func newFakeBroker(t testing.TB) *fakeBroker {
	return &fakeBroker{t: t, version: "4.3.0", changed: make(chan struct{}), stored: map[string]int{}}
}

var (
	errFakeLink = &amqp.LinkError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondDetachForced, Description: "link killed"}}
	errFakeConn = &amqp.ConnError{}
	errMissing  = &amqp.Error{Condition: amqp.ErrCondNotFound, Description: "no queue 'q' in vhost '/'"}
)

// unsent is a hook's error for a message that go-amqp refuses before writing.
type unsent struct{ err error }

func (u unsent) Error() string { return u.err.Error() }
func (u unsent) Unwrap() error { return u.err }

// withID is a message with a message-id, by which events name it.
func withID(id string) *amqp.Message {
	return &amqp.Message{
		Header: &amqp.MessageHeader{Durable: true, Priority: 4}, Properties: &amqp.MessageProperties{MessageID: id}, Data: [][]byte{[]byte(id)},
	}
}

func idOf(m *amqp.Message) string { return fmt.Sprint(m.Properties.MessageID) }

func (b *fakeBroker) ask(step string) error {
	if b.hook == nil {
		return nil
	}
	return b.hook(step)
}

// update changes the broker's state, and wakes whoever waits for a change.
func (b *fakeBroker) update(f func()) {
	b.mu.Lock()
	f()
	b.deliver()
	close(b.changed)
	b.changed = make(chan struct{})
	answers := b.answers
	b.answers = nil
	b.mu.Unlock()
	for _, answer := range answers {
		answer()
	}
}

func (b *fakeBroker) log(format string, args ...any) {
	b.events = append(b.events, fmt.Sprintf(format, args...))
}

// await waits until check, which is called with the lock held, says true.
func (b *fakeBroker) await(ctx context.Context, check func() bool) error {
	for {
		b.mu.Lock()
		ok, changed := check(), b.changed
		b.mu.Unlock()
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

// history is what happened so far; with prefixes, only events that begin with one.
func (b *fakeBroker) history(prefixes ...string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(b.events), func(e string) bool {
		return len(prefixes) > 0 && !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(e, p) })
	})
}

// note puts a test's own event between the broker's.
func (b *fakeBroker) note(format string, args ...any) {
	b.update(func() { b.log(format, args...) })
}

// publish makes messages ready in the queue.
func (b *fakeBroker) publish(ids ...string) {
	b.update(func() {
		for _, id := range ids {
			b.ready = append(b.ready, withID(id))
		}
	})
}

// deliver sends what is ready to receivers with credit.
func (b *fakeBroker) deliver() {
	for _, s := range b.sessions {
		for _, r := range s.receivers {
			for r.err == nil && !r.deaf && !r.starved && r.credit > 0 && len(b.ready) > 0 {
				m := b.ready[0]
				b.tags++
				b.ready = b.ready[1:]
				r.credit--
				s.used++
				b.heard++
				r.arrived = append(r.arrived, arrival{msg: m, id: b.tags})
				if !r.presettled {
					r.unsettled[b.tags] = m
				}
			}
			if r.err == nil {
				b.mostOutstanding = max(b.mostOutstanding, int(r.credit)+len(r.unsettled))
			}
		}
		for _, l := range s.senders {
			l.pump()
		}
	}
}

// answer gives the first n withheld messages the state; all of them if n is
// negative.
func (b *fakeBroker) answer(n int, state amqp.DeliveryState) {
	b.update(func() {
		if n < 0 {
			n = len(b.withheld)
		}
		for _, r := range b.withheld[:n] {
			b.decide(r, state)
		}
		b.withheld = b.withheld[n:]
	})
}

func (b *fakeBroker) decide(r *fakeReceipt, state amqp.DeliveryState) {
	if r.link.err != nil {
		return
	}
	b.answers = append(b.answers, func() { r.to.answer(state, nil) })
	b.heard++
	r.link.open = slices.DeleteFunc(r.link.open, func(o *fakeReceipt) bool { return o == r })
	b.log("answer %s %s", idOf(r.msg), stateName(state))
	if _, ok := state.(*amqp.StateAccepted); ok {
		b.stored[idOf(r.msg)]++
	}
}

func stateName(s amqp.DeliveryState) string {
	return strings.ToLower(strings.TrimPrefix(fmt.Sprintf("%T", s), "*encoding.State"))
}

// setAlarm raises or ends an alarm: the broker takes no messages meanwhile.
func (b *fakeBroker) setAlarm(on bool) {
	b.update(func() {
		b.alarm = on
		b.log("alarm %v", on)
		for _, s := range b.sessions {
			s.in.Set(on)
		}
	})
}

// asked waits for the end of ctx while there is an alarm: management requests aren't answered.
func (b *fakeBroker) asked(ctx context.Context) error {
	return b.await(ctx, func() bool { return !b.alarm })
}

// kill ends every link with err. With errFakeConn, the connection has ended.
func (b *fakeBroker) kill(err error) {
	b.update(func() {
		b.log("link lost")
		for _, s := range b.sessions {
			s.end(err)
		}
	})
}

// takeBack takes a delivery back from its consumer, as RabbitMQ 4.3 does after the consumer
// timeout, and makes it ready again. The link gets nothing more until the stale delivery is
// settled and a flow follows.
func (b *fakeBroker) takeBack(id string, again bool) {
	var told func(first, last uint32)
	var back uint32
	b.update(func() {
		for _, s := range b.sessions {
			for _, r := range s.receivers {
				for n, m := range r.unsettled {
					if idOf(m) == id && !r.stale[n] {
						r.stale[n], r.starved = true, true
						if again { // else another consumer has it
							b.ready = append(b.ready, withID(id))
						}
						told, back = r.takenBack, n
						b.log("take back %s", id)
					}
				}
			}
		}
	})
	told(back, back)
}

// killSenders ends the sending links only.
func (b *fakeBroker) killSenders(err error) {
	b.update(func() {
		for _, s := range b.sessions {
			for _, l := range s.senders {
				l.end(err)
			}
		}
	})
}

func (b *fakeBroker) open(ctx context.Context) (session, error) {
	if err := b.ask("open session"); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s := &fakeSession{b: b, gone: make(chan struct{}), in: newIntake()}
	b.update(func() {
		s.in.Set(b.alarm)
		b.sessions = append(b.sessions, s)
		b.mostSessions = max(b.mostSessions, len(b.sessions))
		b.log("open session")
	})
	return s, nil
}

func (b *fakeBroker) give(s session, _ bool) { closeSession(s) }

// sessionsOf are sessions that open is asked for.
type sessionsOf func(context.Context) (session, error)

func (open sessionsOf) open(ctx context.Context) (session, error) { return open(ctx) }
func (open sessionsOf) give(s session, _ bool)                    { closeSession(s) }

type fakeSession struct {
	b         *fakeBroker
	gone      chan struct{}
	in        *intake
	receivers []*fakeReceiver
	senders   []*fakeSender
	err       error
	used      int // deliveries
}

func (s *fakeSession) end(err error) {
	if s.err != nil {
		return
	}
	s.err = err
	for _, r := range s.receivers {
		r.end(err, 1)
	}
	for _, l := range s.senders {
		l.end(err)
	}
	if err == error(errFakeConn) {
		close(s.gone)
	}
}

func (s *fakeSession) broken() <-chan struct{} { return s.gone }
func (s *fakeSession) wear() float64 {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.b.renewAfter == 0 {
		return 0
	}
	return float64(s.used) / float64(s.b.renewAfter)
}

func (s *fakeSession) heard() uint64 {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.b.heard
}

// mute waits for the end of ctx where the broker is silent.
func (b *fakeBroker) mute(ctx context.Context) {
	b.mu.Lock()
	silent := b.silent
	b.mu.Unlock()
	if silent {
		<-ctx.Done()
	}
}

// answering takes all of limit where the broker is silent.
func (s *fakeSession) answering(ctx context.Context, limit time.Duration) bool {
	s.b.mu.Lock()
	silent := s.b.silent
	s.b.mu.Unlock()
	return !silent || !link.Pause(ctx, limit)
}

func (s *fakeSession) giveUp() {
	s.b.note("give up")
	s.b.kill(errFakeConn)
}

func (s *fakeSession) intake() *intake      { return s.in }
func (s *fakeSession) login() *userid.Login { return userid.NewLogin("", false) }
func (s *fakeSession) quirks() oldbroker.Quirks {
	return oldbroker.Of(brokerInfo{Version: s.b.version}.AtLeast)
}

func (s *fakeSession) close(ctx context.Context) {
	s.b.mute(ctx)
	_ = s.b.ask("close session")
	s.b.update(func() {
		s.end(errFakeLink)
		n := len(s.b.sessions)
		s.b.sessions = slices.DeleteFunc(s.b.sessions, func(o *fakeSession) bool { return o == s })
		if len(s.b.sessions) == n {
			s.b.t.Error("a session was closed twice")
		}
		s.b.log("close session")
	})
}

func (s *fakeSession) receiver(ctx context.Context, source string, o receiverOptions) (receiverLink, error) {
	if err := s.b.ask("attach receiver"); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	r := &fakeReceiver{b: s.b, unsettled: map[uint32]*amqp.Message{}, stale: map[uint32]bool{}, takenBack: o.takenBack}
	s.b.update(func() {
		r.err = s.err
		s.receivers = append(s.receivers, r)
		s.b.log("attach receiver")
	})
	return r, nil
}

func (s *fakeSession) sender(ctx context.Context, target string) (senderLink, error) {
	if err := s.b.ask("attach sender " + target); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	l := &fakeSender{b: s.b, s: s, target: target}
	s.b.update(func() {
		l.err = s.err
		s.senders = append(s.senders, l)
		s.b.log("attach sender %s", target)
	})
	return l, nil
}

type fakeReceiver struct {
	b         *fakeBroker
	err       error // why it has ended
	credit    uint32
	arrived   []arrival
	unsettled map[uint32]*amqp.Message

	takenBack func(first, last uint32)
	stale     map[uint32]bool // were taken back, and aren't settled yet
	starved   bool            // until a flow comes behind that

	presettled bool // deliveries need no settlement
	draining   bool
	deaf       bool // credit, drains and settlements go nowhere
}

// deafen makes the links that there are look healthy, and nothing else.
func (b *fakeBroker) deafen() {
	b.update(func() {
		b.log("deaf")
		for _, s := range b.sessions {
			for _, r := range s.receivers {
				r.deaf = true
			}
		}
	})
}

// end gives back what is unsettled, as a delivery in vain if failed is 1.
func (r *fakeReceiver) end(err error, failed uint32) {
	if r.err != nil {
		return
	}
	r.err = err
	for id, m := range r.unsettled {
		if r.stale[id] {
			continue
		}
		again := withID(idOf(m))
		again.Header.DeliveryCount = m.Header.DeliveryCount + failed
		r.b.ready = append(r.b.ready, again)
	}
}

func (r *fakeReceiver) receive(ctx context.Context) (a arrival, err error) {
	there := false
	err = r.b.await(ctx, func() bool {
		a, there = r.pop()
		return there || r.err != nil
	})
	if err == nil && !there {
		err = r.err
	}
	return a, err
}

func (r *fakeReceiver) pop() (a arrival, ok bool) {
	if len(r.arrived) == 0 {
		return a, false
	}
	a = r.arrived[0]
	r.arrived = r.arrived[1:]
	return a, true
}

func (r *fakeReceiver) prefetched() (arrival, bool) {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	return r.pop()
}

func (r *fakeReceiver) issueCredit(n uint32) (err error) {
	if err := r.b.ask("credit"); err != nil {
		return err
	}
	r.b.update(func() {
		if err = r.err; err == nil {
			if r.draining { // go-amqp refuses it, too
				err = errors.New("the link is being drained")
				return
			}
			r.credit += n
			r.starved = len(r.stale) > 0
			r.b.log("credit %d", n)
		}
	})
	return err
}

func (r *fakeReceiver) drain(ctx context.Context) (err error) {
	deaf := false
	r.b.update(func() { r.draining, deaf = true, r.deaf })
	if deaf {
		<-ctx.Done()
		return ctx.Err()
	}
	if err := r.b.ask("drain"); err != nil {
		return err
	}
	r.b.update(func() {
		if err = r.err; err == nil {
			r.credit, r.draining = 0, false
			r.starved = len(r.stale) > 0
			r.b.log("drain")
		}
	})
	return err
}

func (r *fakeReceiver) settle(id uint32, d disposition) (err error) {
	r.b.mu.Lock()
	m := r.unsettled[id]
	r.b.mu.Unlock()
	if m == nil {
		r.b.t.Errorf("delivery %d was settled, and isn't an unsettled delivery of this link", id)
		return nil
	}
	if err := r.b.ask("settle " + idOf(m)); err != nil {
		return err
	}
	r.b.update(func() {
		if err = r.err; err != nil {
			return
		}
		if r.deaf {
			r.b.log("unheard %s %s", outcomeName(d), idOf(m))
			return
		}
		delete(r.unsettled, id)
		if r.stale[id] {
			delete(r.stale, id)
			r.b.log("stale %s %s", outcomeName(d), idOf(m))
			return
		}
		r.b.log("%s %s", outcomeName(d), idOf(m))
		r.b.last = d
		if r.b.requeues && (d.kind == released || d.kind == modified && !d.dead) {
			r.b.ready = append([]*amqp.Message{m}, r.b.ready...)
		}
	})
	return err
}

func outcomeName(d disposition) string {
	switch {
	case d.kind == accepted:
		return "accept"
	case d.kind == released:
		return "release"
	case d.dead && d.failed:
		return "dead-letter as failed"
	case d.dead:
		return fmt.Sprintf("dead-letter (%v)", d.annotations["x-opt-hopback-reason"])
	case d.failed:
		return "requeue as failed"
	}
	return fmt.Sprintf("modify %v", d.annotations)
}

func (r *fakeReceiver) close(ctx context.Context) error {
	r.b.mute(ctx)
	if err := r.b.ask("close receiver"); err != nil {
		return err
	}
	r.b.update(func() {
		r.end(errFakeLink, 0)
		r.b.log("close receiver")
	})
	return nil
}

type fakeSender struct {
	b       *fakeBroker
	s       *fakeSession
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
		l.b.answers = append(l.b.answers, func() { r.to.answer(nil, err) })
	}
	for _, r := range l.pending {
		l.b.answers = append(l.b.answers, func() { r.to.answer(nil, &neverSent{err: err}) })
	}
	l.open, l.pending = nil, nil
}

func (l *fakeSender) send(m *amqp.Message, to receipt) (x sending, lost bool, err error) {
	open := false
	l.b.update(func() { open = l.err == nil })
	if err := l.b.ask("send " + idOf(m)); err != nil {
		return nil, !errors.As(err, new(unsent)), err
	}
	r := &fakeReceipt{link: l, msg: m, to: to}
	l.b.update(func() {
		switch err = l.err; {
		case err == nil:
			l.pending = append(l.pending, r)
			l.pump()
		case open: // the link has ended over it
			ended := err
			l.b.answers = append(l.b.answers, func() { to.answer(nil, ended) })
			err = nil
		}
	})
	return r, err != nil, err
}

func (r *fakeReceipt) withdraw() bool {
	r.link.b.mu.Lock()
	defer r.link.b.mu.Unlock()
	i := slices.Index(r.link.pending, r)
	if i >= 0 {
		r.link.pending = slices.Delete(r.link.pending, i, i+1)
	}
	return i >= 0
}

// pump sends what the window allows.
func (l *fakeSender) pump() {
	for l.err == nil && len(l.pending) > 0 && !l.b.alarm && (l.b.window == 0 || len(l.open) < l.b.window) {
		r := l.pending[0]
		l.pending = l.pending[1:]
		l.open = append(l.open, r)
		l.s.used++
		l.b.log("send %s", idOf(r.msg))
		var state amqp.DeliveryState = &amqp.StateAccepted{}
		if l.b.verdict != nil {
			state = l.b.verdict(l.target, r.msg)
		}
		if state == nil {
			l.b.withheld = append(l.b.withheld, r)
			continue
		}
		l.b.decide(r, state)
	}
}

func (l *fakeSender) close(ctx context.Context) error {
	l.b.mute(ctx)
	if err := l.b.ask("close sender " + l.target); err != nil {
		return err
	}
	l.b.update(func() {
		l.end(errFakeLink)
		l.b.log("close sender %s", l.target)
	})
	return nil
}

type fakeReceipt struct {
	link *fakeSender
	msg  *amqp.Message
	to   receipt
}
