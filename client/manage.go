package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

const (
	managementNode = "/management"
	// managementLink is the name of both links: RabbitMQ pairs them by it.
	managementLink = "hopback-management"
	// managementRequests is how many may be in flight.
	managementRequests = 64
	// replyCredit is what the broker may send: more than it will, for the requests that were
	// repeated on the way.
	replyCredit = 4 * managementRequests
	// alarmPause is before awaitAlarm looks at the session after one that has ended.
	alarmPause = 10 * time.Millisecond
)

// Management sends requests to the broker's management node, which declares and deletes queues,
// exchanges, and bindings. Pass it to package declare, which builds the requests. Get it from
// [Conn.Management]. It is safe for concurrent use, with up to 64 requests at once. It opens a
// session for the first request, and a new one whenever that session has ended.
type Management struct {
	open func(context.Context) (link.Session, requestLink, link.ReceiverLink, error)
	// life bounds the life of the sessions.
	life context.Context
	// closing, once closed, refuses new requests.
	closing <-chan struct{}
	// version is the broker's version; nil in tests.
	version func() string
	// extra opens a session for Parallel; nil: none may be opened.
	extra func(context.Context) (*link.WireSession, error)

	// slots has one for each request that the broker has not answered.
	slots chan struct{}

	// solo is the turn of a request that has a separate session: see Request.
	solo chan struct{}

	mu   sync.Mutex
	live *managementSession
	next uint64
}

// newManagement returns a Management whose sessions are opened by open.
func newManagement(open func(context.Context) (*link.WireSession, error), life context.Context, closing <-chan struct{}) *Management {
	return &Management{
		open: func(ctx context.Context) (link.Session, requestLink, link.ReceiverLink, error) {
			return openManagement(ctx, open)
		},
		life: life, closing: closing,
		slots: make(chan struct{}, managementRequests), solo: make(chan struct{}, 1),
	}
}

// BrokerVersion returns the version of the broker, such as "4.4.0". It is empty if unknown.
// Package declare uses it to refuse what the broker would ignore.
func (m *Management) BrokerVersion() string {
	if m == nil || m.version == nil {
		return ""
	}
	return m.version()
}

// Parallel returns a function that does what Request does, on up to n sessions at once, and done, which
// closes the additional ones. RabbitMQ carries out the requests of one session one after the other,
// so declaring many queues takes a fraction of the time on several. Package declare uses it.
//
// Requests that run at the same time may be carried out in any order. Parallel uses fewer sessions
// if half of those of the connection are taken, and then also needs no other connection.
func (m *Management) Parallel(n int) (request func(ctx context.Context, method, path string, body any) (status int, reply any, err error), done func()) {
	if m == nil || m.extra == nil || n < 2 {
		return m.Request, func() {}
	}
	life, end := context.WithCancel(m.life)
	p := &parallelManagement{all: []*Management{m}, inFlight: make([]int, n)}
	for range n - 1 {
		p.all = append(p.all, newManagement(m.extra, life, m.closing))
	}
	return p.request, func() {
		ctx, cancel := context.WithTimeout(m.life, link.CloseTimeout)
		defer cancel()
		end()
		for _, x := range p.all[1:] {
			x.close(ctx)
		}
	}
}

// parallelManagement spreads requests over several Managements with a session each. The first is the one
// that all share.
type parallelManagement struct {
	all []*Management

	mu       sync.Mutex
	inFlight []int
	full     bool // no further session can be opened
}

func (p *parallelManagement) request(ctx context.Context, method, path string, body any) (int, any, error) {
	i := p.begin()
	status, reply, err := p.all[i].Request(ctx, method, path, body)
	p.end(i, err)
	if i > 0 && errors.Is(err, failure.ErrNotSent) && errors.Is(err, link.ErrNoRoom) {
		return p.all[0].Request(ctx, method, path, body)
	}
	return status, reply, err
}

// begin chooses the one with the fewest requests in flight.
func (p *parallelManagement) begin() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	best := 0
	for i := range p.all {
		if p.inFlight[i] < p.inFlight[best] && !p.full {
			best = i
		}
	}
	p.inFlight[best]++
	return best
}

func (p *parallelManagement) end(i int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight[i]--
	p.full = p.full || errors.Is(err, link.ErrNoRoom)
}

// Request sends one request and returns the status and body of the reply. method is GET, PUT,
// POST, or DELETE. path is percent-encoded and at most 8,192 bytes long. body is nil or a value
// that AMQP can encode. A reply of any status has a nil error. The errors:
//
//   - [*argument.Error]: nothing was sent. method, path, or body is invalid.
//   - [ErrNotSent]: nothing was sent. ctx ended, or the connection is closed.
//   - [ErrUnauthorized]: the request had no effect. The user lacks the permission.
//   - [ErrOutcomeUnknown]: ctx or the session ended before the reply.
//   - [ErrConnectionLost], together with ErrNotSent or ErrOutcomeUnknown: send the request
//     again.
//
// If the user lacks a permission, RabbitMQ ends the session, and with it all requests in flight.
// These are idempotent, so Request repeats each of them on a separate session.
func (m *Management) Request(ctx context.Context, method, path string, body any) (status int, reply any, err error) {
	if m == nil {
		return 0, nil, argument.New("management", nil, "is a nil *Management", "use conn.Management()")
	}
	if err := checkRequest(method, path, body); err != nil {
		return 0, nil, err
	}
	target := method + " " + path
	select {
	case m.slots <- struct{}{}:
	case <-ctx.Done():
		return 0, nil, failure.Ended("manage", target, failure.ErrNotSent, ctx)
	case <-m.closing:
		return 0, nil, &failure.Error{Op: "manage", Target: target, Kind: failure.ErrNotSent, Err: failure.ErrClosed}
	}

	release := sync.OnceFunc(func() { <-m.slots })
	s, err := m.session(ctx)
	if err == nil {
		var alone bool
		status, reply, alone, err = m.once(ctx, s, release, method, path, body)
		if err == nil || alone || ctx.Err() != nil || !errors.Is(err, errSessionEnded) {
			return status, reply, err
		}
		// The session ended while other requests were in flight, and one of them may be the cause.
		select {
		case m.solo <- struct{}{}:
			defer func() { <-m.solo }()
		case <-ctx.Done():
			return 0, nil, failure.Ended("manage", target, failure.ErrOutcomeUnknown, ctx)
		}
		return m.onceAlone(ctx, method, path, body)
	}
	release()
	switch {
	case ctx.Err() != nil:
		return 0, nil, failure.Ended("manage", target, failure.ErrNotSent, ctx)
	case errors.Is(err, failure.ErrClosed), failure.IsClosed(m.closing):
		return 0, nil, &failure.Error{Op: "manage", Target: target, Kind: failure.ErrNotSent, Err: failure.ErrClosed}
	}
	return 0, nil, failure.NewError("manage", target, failure.ErrNotSent, lossIn(err))
}

// lossIn marks an error of the transport as the loss of the connection.
func lossIn(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, net.ErrClosed) ||
		errors.As(err, new(*net.OpError)) || errors.As(err, new(*amqp.ConnError)) {
		return fmt.Errorf("%w: %w", failure.ErrConnectionLost, err)
	}
	return err
}

// onceAlone is once on a separate session.
func (m *Management) onceAlone(ctx context.Context, method, path string, body any) (status int, reply any, err error) {
	s := newManagementSession(m.life)
	go s.run(m.open)
	defer s.cancel()
	if err := s.opening(ctx); err != nil {
		return 0, nil, failure.NewError("manage", method+" "+path, failure.ErrOutcomeUnknown, lossIn(err))
	}
	status, reply, _, err = m.once(ctx, s, func() {}, method, path, body)
	return status, reply, err
}

func checkRequest(method, path string, body any) error {
	switch method {
	case "GET", "PUT", "POST", "DELETE":
	default:
		return argument.New("method", method, "is not a method of RabbitMQ's management", "use GET, PUT, POST or DELETE")
	}
	if !strings.HasPrefix(path, "/") || strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return argument.New("path", path, "is not an encoded path", `begin it with "/" and percent-encode each name in it`)
	}
	if len(path) > 8192 {
		return argument.New("path", path, "has more than 8192 bytes", "use shorter names")
	}
	return checkValue("body", body, 0)
}

// errSessionEnded marks the errors of requests whose session ended before the reply.
var errSessionEnded = errors.New("the management session ended")

// once sends one request on s. alone reports that no other request was in flight when the
// session ended. release is called when the broker owes no reply any more, which may be after
// ctx has ended: until then, the reply's credit is in use.
func (m *Management) once(ctx context.Context, s *managementSession, release func(), method, path string, body any) (status int, reply any, alone bool, err error) {
	target := method + " " + path
	m.mu.Lock()
	m.next++
	id := m.next
	m.mu.Unlock()

	w := &waiting{reply: make(chan managementReply, 1), release: release}
	if !s.enter(id, w) {
		release()
		return 0, nil, false, &failure.Error{Op: "manage", Target: target, Kind: failure.ErrNotSent, Err: errors.Join(errSessionEnded, lossIn(s.err))}
	}
	late := false
	defer func() {
		if !late {
			s.leave(id)
			release()
		}
	}()

	if body == nil {
		body = amqp.Null{}
	}
	request := &Message{
		Properties: &amqp.MessageProperties{MessageID: id, To: &path, Subject: &method, ReplyTo: new("$me")},
		Value:      body,
	}
	out := &managementRequest{msg: request, reply: w}
	select {
	case s.requests <- out:
	case <-ctx.Done():
		return 0, nil, true, failure.Ended("manage", target, failure.ErrNotSent, ctx)
	case r := <-w.reply:
		return m.result(s, target, r)
	}
	select {
	case r := <-w.reply:
		return m.result(s, target, r)
	case <-ctx.Done():
		if out.take() {
			return 0, nil, true, failure.Ended("manage", target, failure.ErrNotSent, ctx)
		}
		late = true
		return 0, nil, true, failure.Ended("manage", target, failure.ErrOutcomeUnknown, ctx)
	}
}

func (m *Management) result(s *managementSession, target string, r managementReply) (int, any, bool, error) {
	if r.err != nil {
		e := failure.NewError("manage", target, failure.ErrOutcomeUnknown, lossIn(r.err))
		return 0, nil, r.alone, e
	}
	return r.status, r.body, r.alone, nil
}

// session returns the live session, or opens one.
func (m *Management) session(ctx context.Context) (*managementSession, error) {
	for {
		m.mu.Lock()
		s := m.live
		if s == nil {
			s = newManagementSession(m.life)
			m.live = s
			go func() {
				s.run(m.open)
				m.mu.Lock()
				m.live = nil
				m.mu.Unlock()
				close(s.gone)
			}()
		}
		m.mu.Unlock()
		if err := s.opening(ctx); err != nil {
			return nil, err
		}
		if !s.over() {
			return s, nil
		}
		// It has ended since: open the next one.
		select {
		case <-s.gone:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// awaitAlarm returns true once requests wait for the end of a memory or disk alarm. It returns false
// if it can't tell, or ctx ends before.
func (m *Management) awaitAlarm(ctx context.Context) bool {
	for {
		s, err := m.session(ctx)
		if err != nil {
			return false
		}
		in := s.intake.Now()
		if in.Blocked {
			return true
		}
		select {
		case <-in.Changed:
		case <-s.ctx.Done():
			if !backoff.Sleep(ctx, alarmPause) {
				return false
			}
		case <-ctx.Done():
			return false
		}
	}
}

func (m *Management) close(ctx context.Context) {
	m.mu.Lock()
	s := m.live
	m.mu.Unlock()
	if s == nil {
		return
	}
	s.cancel()
	select {
	case <-s.gone:
	case <-ctx.Done():
	}
}

// managementSession is one session with its pair of links.
type managementSession struct {
	ctx      context.Context
	cancel   context.CancelFunc
	ready    chan struct{} // closed when opening has succeeded or failed
	intake   *link.Intake  // set before ready, if opening has succeeded
	refused  error         // why opening failed; set before ready
	gone     chan struct{} // closed when the shared session has ended and the next may be opened
	requests chan *managementRequest

	mu      sync.Mutex
	waiting map[uint64]*waiting
	ended   bool
	err     error // why it ended; set before ended
}

func newManagementSession(life context.Context) *managementSession {
	s := &managementSession{
		waiting:  map[uint64]*waiting{},
		requests: make(chan *managementRequest, managementRequests),
		ready:    make(chan struct{}), gone: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(life)
	return s
}

// opening waits until the session is open.
func (s *managementSession) opening(ctx context.Context) error {
	select {
	case <-s.ready:
		return s.refused
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

type waiting struct {
	reply   chan managementReply
	once    sync.Once
	release func()
}

func (w *waiting) answer(r managementReply) {
	w.once.Do(func() {
		w.release()
		w.reply <- r
	})
}

// managementRequest is a request on its way to the link.
type managementRequest struct {
	msg   *Message
	reply *waiting
	taken atomic.Bool
}

// take returns true once: to the session that sends the request, or to its caller if that leaves
// first.
func (r *managementRequest) take() bool { return r.taken.CompareAndSwap(false, true) }

type managementReply struct {
	status int
	body   any
	err    error
	alone  bool
}

func (s *managementSession) enter(id uint64, w *waiting) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.waiting[id] = w
	return true
}

func (s *managementSession) leave(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.waiting, id)
}

func (s *managementSession) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// finish answers all waiting requests with err.
func (s *managementSession) finish(err error) {
	s.mu.Lock()
	s.ended, s.err = true, err
	all := s.waiting
	s.waiting = map[uint64]*waiting{}
	s.mu.Unlock()
	for _, w := range all {
		w.answer(managementReply{err: errors.Join(errSessionEnded, err), alone: len(all) == 1})
	}
}

func (s *managementSession) run(open func(context.Context) (link.Session, requestLink, link.ReceiverLink, error)) {
	defer s.cancel()
	sess, send, receive, err := open(s.ctx)
	if err != nil {
		s.refused = err
		s.finish(err)
		close(s.ready)
		return
	}
	s.intake = sess.Intake()
	close(s.ready)
	defer link.CloseSession(sess)

	// One goroutine writes the requests, this one reads the replies. The first one that finds the session ended stops the other through ctx.
	ctx, cancel := context.WithCancelCause(s.ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			// Under an alarm the requests stay here, where they are certainly unsent.
			in := sess.Intake().Now()
			requests := s.requests
			if in.Blocked {
				requests = nil
			}
			select {
			case <-in.Changed:
			case out := <-requests:
				if !out.take() {
					continue // its caller has left
				}
				if lost, err := send.send(out.msg); lost {
					cancel(err)
					return
				} else if err != nil {
					out.reply.answer(managementReply{err: err})
				}
			case <-ctx.Done():
				return
			}
		}
	})
	for {
		reply, err := receive.Receive(ctx)
		if err != nil {
			if cause := context.Cause(ctx); cause != nil && cause != context.Canceled {
				err = cause
			}
			if s.ctx.Err() != nil {
				err = failure.ErrClosed
			}
			cancel(err)
			s.finish(err)
			break
		}
		// A reply comes settled; grant its credit again.
		_ = receive.IssueCredit(1)
		s.dispatch(reply.Msg)
	}
	wg.Wait()
}

// dispatch passes a reply to its caller. If the caller's ctx has ended, the reply is dropped: ids are never used twice.
func (s *managementSession) dispatch(msg *Message) {
	if msg.Properties == nil {
		return
	}
	id, ok := msg.Properties.CorrelationID.(uint64)
	if !ok {
		return
	}
	s.mu.Lock()
	w, alone := s.waiting[id], len(s.waiting) == 1
	delete(s.waiting, id)
	s.mu.Unlock()
	if w == nil {
		return
	}
	r := managementReply{body: msg.Value, alone: alone}
	if msg.Properties.Subject == nil {
		r.err = errors.New("the reply has no status")
	} else if status, err := strconv.Atoi(*msg.Properties.Subject); err != nil || status < 100 || status > 999 {
		r.err = fmt.Errorf("the reply's status is %s", failure.Quote(*msg.Properties.Subject))
	} else {
		r.status = status
	}
	w.answer(r)
}

// requestLink sends settled requests: the reply is their answer.
type requestLink interface {
	// send is as senderLink's, but for the answer.
	send(m *Message) (lost bool, err error)
}

type managementSender struct{ s *link.WireSender }

func (m managementSender) send(msg *Message) (lost bool, err error) {
	_, lost, err = m.s.Send(msg, noReceipt{})
	return lost, err
}

// noReceipt is for what needs no answer.
type noReceipt struct{}

func (noReceipt) Answer(amqp.DeliveryState, error) {}

// openManagement opens a session with the pair of links that RabbitMQ wants:
// the same name, the property "paired", and the same node at both ends.
func openManagement(ctx context.Context, open func(context.Context) (*link.WireSession, error)) (link.Session, requestLink, link.ReceiverLink, error) {
	sess, err := open(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	// Replies say nothing about whether the broker answers messages: they don't count as heard.
	requests, replies, err := sess.Pair(ctx, managementLink, managementNode, replyCredit)
	if err != nil {
		link.CloseSession(sess)
		return nil, nil, nil, err
	}
	return sess, managementSender{requests}, replies, nil
}

// managementOf returns one that uses the connection w alone. Its sessions live as long as the
// connection does.
func managementOf(w *link.Wire, after uint64) *Management {
	open := func(ctx context.Context) (*link.WireSession, error) { return w.OpenSession(ctx, after) }
	return newManagement(open, w.Ctx, nil)
}

// replyValue is the value of key in the map of a management reply, or nil.
func replyValue(reply any, key string) any {
	switch m := reply.(type) {
	case map[string]any:
		return m[key]
	case map[any]any:
		return m[key]
	}
	return nil
}

// peek asks the broker about the queue. A user who may read from a queue may also inspect it.
func (m *Management) peek(ctx context.Context, queue string) (queuePeek, error) {
	path, err := address.Queue(queue).Build()
	if err != nil {
		return queuePeek{}, err
	}
	status, reply, err := m.Request(ctx, "GET", path, nil)
	if err != nil {
		return queuePeek{}, err
	}
	if status != 200 {
		return queuePeek{}, fmt.Errorf("the broker answers %d", status)
	}
	var l queuePeek
	switch n := replyValue(reply, "message_count").(type) {
	case uint64:
		l.Ready = n
	case uint32:
		l.Ready = uint64(n)
	}
	l.Leader, _ = replyValue(reply, "leader").(string)
	return l, nil
}

// deadLetters reports whether the queue's arguments name a dead-letter exchange. They don't
// include those of a RabbitMQ policy. An error means that the broker hasn't answered.
func (m *Management) deadLetters(ctx context.Context, queue string) (bool, error) {
	exchange, err := m.argument(ctx, queue, "x-dead-letter-exchange")
	return exchange != nil, err
}

// singleActive reports whether the queue has a single active consumer. No policy can set that.
func (m *Management) singleActive(ctx context.Context, queue string) (bool, error) {
	single, err := m.argument(ctx, queue, "x-single-active-consumer")
	return single == true, err
}

// consumerTimeout returns the queue's own consumer timeout; 0 if it has none.
func (m *Management) consumerTimeout(ctx context.Context, queue string) (time.Duration, error) {
	ms, err := m.argument(ctx, queue, "x-consumer-timeout")
	n := reflect.ValueOf(ms)
	switch {
	case err != nil:
	case n.CanInt() && n.Int() > 0 && n.Int() <= math.MaxUint32:
		return time.Duration(n.Int()) * time.Millisecond, nil
	case n.CanUint() && n.Uint() <= math.MaxUint32:
		return time.Duration(n.Uint()) * time.Millisecond, nil
	}
	return 0, err
}

// argument returns an argument of the queue; nil if it isn't set, or the queue doesn't exist.
func (m *Management) argument(ctx context.Context, queue, key string) (any, error) {
	path, err := address.Queue(queue).Build()
	if err != nil {
		return nil, err
	}
	status, reply, err := m.Request(ctx, "GET", path, nil)
	if err != nil || status != 200 {
		return nil, err
	}
	return replyValue(replyValue(reply, "arguments"), key), nil
}
