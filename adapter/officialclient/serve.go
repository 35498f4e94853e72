package officialclient

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/adapter"
	"github.com/hopback/hopback/adapter/officialclient/internal/grace"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Receiver is the part of a *rabbitmqamqp.Consumer that [Serve] uses.
type Receiver interface {
	Receive(ctx context.Context) (rabbitmqamqp.IDeliveryContext, error)
}

// Serve passes the messages that c receives to h until ctx ends. Then it drains and returns nil:
// running handlers finish within [Config.Grace], their outcomes are sent, and all other messages
// return to the queue. Even if a handler ignores its ctx, Serve returns at most 5 s after Grace.
// If ctx ends before the start, Serve returns nil.
//
//   - conn is a connection of client.Connect to the same virtual host. It carries the copies of
//     client.Forward, and lets middleware read about queues, as retry.With does when it checks
//     the topology.
//   - c is yours: create it with AmqpConnection.NewConsumer, and close it after Serve has
//     returned nil. Until then it may hold prefetched messages that Serve hasn't received. It
//     must settle explicitly: Serve refuses a pre-settled consumer at its first message, and
//     that message is LOST, because the broker has already removed it.
//   - queue is the queue that c consumes from.
//   - [Config.Concurrency] goroutines call h at once.
//
// At the start it returns these errors:
//
//   - an *argument.Error for invalid arguments or a hidden Prepare (see client.Middleware);
//   - the errors of the Prepare of h.
//
// While the official client recovers its connection, Serve waits for up to
// [Config.RecoveryPatience]. The official client never recovers a link or a session that ends by
// itself. In that case, and after a panic of the official client, Serve returns an error that
// matches client.ErrConnectionLost. Before that, running handlers have Config.Grace to finish.
// Close the connection, not the consumer, and start again with a new one.
//
// If the connection is lost before the broker has read a settlement, it delivers the message
// again, although its handler succeeded. Copies whose confirmation was lost can be duplicated,
// too. So handlers should be idempotent, or recognize duplicates by their message-id.
//
// The official client panics on certain messages before it returns them, so they can't be
// handled, or dead-lettered with a reason. Closing its connection counts as a failed delivery.
// So in the end the queue's delivery limit dead-letters such a message, along with the messages
// that were prefetched each time. A consumer with InitialCredits: 1 prefetches no others.
func Serve(ctx context.Context, conn *client.Conn, c Receiver, queue string, h client.Handler, cfg Config) error {
	if conn == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	if k, ok := c.(*rabbitmqamqp.Consumer); c == nil || ok && k == nil {
		return argument.New("consumer", nil, "is nil", "pass the consumer from AmqpConnection.NewConsumer")
	}
	return serve(ctx, own{conn}, c, queue, h, cfg)
}

// aliveAfter distinguishes a working link from one whose Receive returns errors at
// once.
const aliveAfter = time.Second

func serve(ctx context.Context, side side, c Receiver, queue string, h client.Handler, cfg Config) (err error) {
	ctx, end := adapter.Context(ctx)
	defer func() { err = end(err) }()
	r, err := newRunner(side, queue, h, cfg)
	if err != nil {
		return err
	}
	defer r.copies.close()
	defer r.flush()
	start := side.start()
	start.Queue, start.Log = queue, r.cfg.Logger
	if err := client.Prepare(ctx, h, start); err != nil {
		return err
	}
	handlers := newHandlerContext(ctx)
	defer r.awaitHandlers(handlers)
	lost := time.Time{}
	for wait := minPause; ; wait = min(2*wait, maxPause) {
		began := time.Now()
		s := r.newLinkSession(c)
		err := s.run(ctx, handlers)
		if err == nil {
			s.end()
			return nil
		}
		if ctx.Err() != nil {
			return nil
		}
		if _, bad := errors.AsType[*argument.Error](err); bad {
			return err
		}
		if lost.IsZero() || time.Since(began) > aliveAfter {
			lost, wait = time.Now(), minPause
			r.log.Warn("hopback: the consumer's connection was lost; waiting for its recovery", "error", client.ErrorText(err), "unsettled", s.unsettled.Load())
		}
		_, recoverable := errors.AsType[*amqp.ConnError](err)
		if !recoverable || time.Since(lost)+wait > r.cfg.RecoveryPatience {
			return &client.Error{Op: "consume", Target: queue, Kind: client.ErrConnectionLost, Err: err}
		}
		if !sleep(ctx, wait) {
			return nil
		}
	}
}

// minPause and maxPause bound the pauses before Receive is tried again.
const (
	minPause = 100 * time.Millisecond
	maxPause = 10 * time.Second
)

// deadLetters knows whether the queue certainly has a dead-letter exchange.
type deadLetters struct {
	mu   sync.Mutex
	has  bool
	last time.Time
}

// keepsDead reports whether the queue certainly has a dead-letter exchange. It asks again
// after Config.ForwardPatience if it wasn't so.
func (s *linkSession) keepsDead() bool {
	a := &s.asked
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.has && (a.last.IsZero() || time.Since(a.last) >= s.cfg.ForwardPatience) {
		a.has, a.last = s.side.deadLetters(s.ctx, s.queue), time.Now()
	}
	return a.has
}

// runner is one call of Serve.
type runner struct {
	side    side
	queue   string
	handler client.Handler
	cfg     Config
	log     *slog.Logger
	flush   func() // of cfg.Logger
	copies  *copies
	// slots holds the right to run a handler. A worker holds one while it lives;
	// one that outlives its link session, in a long handler, keeps the next session's from
	// beginning, so that Concurrency holds across a reconnect.
	slots chan struct{}
	asked deadLetters
}

func newRunner(side side, queue string, h client.Handler, cfg Config) (*runner, error) {
	if err := address.Queue(queue).Validate(); err != nil {
		return nil, err
	}
	if f, ok := h.(client.HandlerFunc); h == nil || ok && f == nil {
		return nil, argument.New("handler", nil, "is nil", "pass a Handler, such as client.JSON(func(ctx, order) error {...})")
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	var flush func()
	cfg.Logger, flush = adapter.Logger(cfg.Logger)
	return &runner{
		side: side, queue: queue, handler: h, cfg: cfg, log: cfg.Logger.With("queue", queue), flush: flush,
		copies: newCopies(side), slots: make(chan struct{}, cfg.Concurrency),
	}, nil
}

// handlerContext is that of handlers: it has the values of Serve's ctx and
// outlives it.
type handlerContext struct {
	context.Context
	end context.CancelCauseFunc
	// ended gets the time at which Serve's ctx ended.
	ended  chan time.Time
	forget func() bool
}

func newHandlerContext(ctx context.Context) handlerContext {
	ended := make(chan time.Time, 1)
	forget := context.AfterFunc(ctx, func() { ended <- time.Now() })
	ctx, end := context.WithCancelCause(context.WithoutCancel(ctx))
	return handlerContext{ctx, end, ended, forget}
}

// awaitHandlers waits, within the grace time that began when Serve's ctx ended or
// begins now, for handlers that still run: no drain waits for those whose link was
// lost.
func (r *runner) awaitHandlers(handlers handlerContext) {
	defer handlers.end(context.Canceled)
	ended := time.Now()
	if !handlers.forget() {
		ended = <-handlers.ended
	}
	grace.Await(r.slots, nil, ended, r.cfg.Grace, handlers.end)
}

// linkSession is the life of one link, as far as Receive shows it:
//
//	receive ──inbox──▶ workers ──▶ settle
//	                      └──▶ copies ──▶ settle
type linkSession struct {
	*runner
	from  Receiver
	inbox chan *delivery
	// dead is closed when the link is gone: nothing can be settled any more. ctx ends with
	// it, and is that of copies.
	dead     chan struct{}
	ctx      context.Context
	cancel   context.CancelFunc
	deadOnce sync.Once
	why      error
	// unsettled counts deliveries received and not settled; when it falls to zero
	// idle is signalled.
	unsettled atomic.Int64
	idle      chan struct{}
	closing   chan struct{} // workers take no more deliveries
	workers   sync.WaitGroup

	mu      sync.Mutex
	ended   bool           // no forward begins any more; guarded by mu
	copying sync.WaitGroup // of forwards; mu is held to add to it
}

type delivery struct {
	*client.Delivery
	official rabbitmqamqp.IDeliveryContext
}

func (r *runner) newLinkSession(from Receiver) *linkSession {
	s := &linkSession{
		runner: r, from: from, inbox: make(chan *delivery, max(2*r.cfg.Concurrency, 64)),
		dead: make(chan struct{}), idle: make(chan struct{}, 1), closing: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

func (s *linkSession) over() bool { return isClosed(s.dead) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (s *linkSession) die(err error) {
	s.deadOnce.Do(func() {
		s.why = err
		close(s.dead)
		s.cancel()
	})
}

// run returns nil when it was drained, because ctx has ended, and why the link was lost
// otherwise.
func (s *linkSession) run(ctx context.Context, handlers handlerContext) error {
	receiving, stop := context.WithCancel(context.Background())
	defer stop()
	var receive sync.WaitGroup
	receive.Go(func() { s.receive(receiving) })
	for range s.cfg.Concurrency {
		s.workers.Go(func() { s.handleAll(handlers) })
	}
	select {
	case <-ctx.Done():
	case <-s.dead:
	}
	stop()
	receive.Wait()
	if s.over() {
		return s.why
	}
	s.drain(handlers)
	return nil
}

// receive moves what arrives into the inbox. It is always in Receive, so it
// notices at once when the link ends.
func (s *linkSession) receive(ctx context.Context) {
	for {
		d, err := guarded("receive", func() (rabbitmqamqp.IDeliveryContext, error) { return s.from.Receive(ctx) })
		if ctx.Err() != nil && err != nil {
			return
		}
		if _, ok := d.(*rabbitmqamqp.PreSettledDeliveryContext); ok {
			err = argument.New("consumer", nil, "is pre-settled: the broker removes a message before it is handled", "create it with SettleStrategy ExplicitSettle")
		}
		if err == nil && (d == nil || d.Message() == nil) {
			err = errors.New("the official client returned no message")
		}
		if err != nil {
			s.die(err)
			return
		}
		s.unsettled.Add(1)
		select {
		case s.inbox <- &delivery{client.NewDelivery(s.queue, d.Message()), d}:
		case <-s.dead:
			return
		case <-ctx.Done():
			s.finish(d, client.Resolution{Kind: client.ResolutionRelease})
			return
		}
	}
}

// handleAll runs handlers, one at a time, until the link session ends.
func (s *linkSession) handleAll(ctx context.Context) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-s.dead:
		return
	case <-s.closing:
		return
	}
	for {
		select {
		case d := <-s.inbox:
			if s.over() {
				return // it will be delivered again: handling it now makes a duplicate
			}
			s.handle(ctx, d)
		case <-s.dead:
			return
		case <-s.closing:
			return
		}
	}
}

// handle runs the handler, and carries out what it decides.
func (s *linkSession) handle(ctx context.Context, d *delivery) {
	adapter.Call(ctx, s.handler, d.Delivery, func(err error, exits bool) {
		if p, ok := panicIn(err); ok {
			s.log.Error("hopback: a handler panicked; the message is dead-lettered", "message_id", messageID(d.Message()), "panic", client.ErrorText(p), "stack", string(p.Stack))
		}
		s.carryOut(d, client.Resolve(err), err)
		if exits {
			s.workers.Go(func() { s.handleAll(ctx) })
		}
	})
}

// messageID is the message_id of a log line.
func messageID(m *client.Message) any {
	if m == nil || m.Properties == nil {
		return nil
	}
	if id, ok := m.Properties.MessageID.(string); ok {
		return strings.ToValidUTF8(id[:min(len(id), 255)], "?")
	}
	return m.Properties.MessageID
}

// panicIn finds the panic of a handler whose message is dead-lettered for it.
func panicIn(err error) (p *client.PanicError, ok bool) {
	dead, ok := client.OutcomeOf(err).(client.DeadLetter)
	if !ok || dead.Reason != client.ReasonPanicked {
		return nil, false
	}
	p, ok = dead.Err.(*client.PanicError)
	return p, ok && p != nil
}

func (s *linkSession) carryOut(d *delivery, what client.Resolution, cause error) {
	if what.Kind == client.ResolutionForward {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.ended {
			s.copying.Go(func() { s.forward(d, what.Forward) })
		}
		return
	}
	what = counted(what, d.Message(), s.cfg.FailureLimit, cause)
	if what.Refused != nil {
		s.log.Error("hopback: an outcome can't be carried out; another one replaces it", "message_id", messageID(d.Message()), "error", what.Refused, "instead", what.Kind, "dead_lettered", what.DeadLetter)
	}
	s.finish(d.official, what)
}

// forward publishes the copy, and accepts the original when it is confirmed.
func (s *linkSession) forward(d *delivery, o client.Forward) {
	for {
		err := s.send(o.To, outgoing(o.Message))
		switch {
		case err == nil:
			s.carryOut(d, client.Resolution{Kind: client.ResolutionAccept}, nil)
			return
		case s.ctx.Err() != nil:
			return // never settled: the broker delivers the original again
		case hopeless(err):
			s.carryOut(d, o.Unsendable(err), nil)
			return
		case s.keepsDead():
			// Never both gone: the original goes back, as a failed delivery, so that a
			// limit ends what can't be forwarded, in the dead-letter queue.
			s.log.Error("hopback: a forward failed; the original returns to its queue", "message_id", messageID(o.Message), "to", o.To.String(), "error", err, "then", "as a failed delivery, which Config.FailureLimit sends to the queue's dead-letter exchange")
			s.carryOut(d, o.Unaccepted(err), err)
			return
		case isClosed(s.closing):
			// A drain doesn't wait for it. The broker delivers it again.
			s.finish(d.official, client.Resolution{Kind: client.ResolutionRelease})
			return
		}
		s.log.Error("hopback: a forward failed; the original is kept, because its queue isn't known to have a dead-letter exchange, and its copy is tried again", "message_id", messageID(o.Message), "to", o.To.String(), "error", err)
	}
}

// send publishes a copy, again and again until the broker accepts it, until
// Config.ForwardPatience has passed since the first failure, or until the link session ends.
func (s *linkSession) send(to address.Address, m *client.Message) error {
	var since time.Time
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := s.copies.publish(s.ctx, to, m)
		if err == nil || hopeless(err) || s.ctx.Err() != nil {
			return err
		}
		if since.IsZero() {
			since = time.Now()
			s.log.Warn("hopback: a copy was not accepted; the original is kept, and its copy is tried again", "message_id", messageID(m), "to", to.String(), "error", err, "again_in", pause)
		}
		if time.Since(since)+pause > s.cfg.ForwardPatience || !sleep(s.ctx, pause) {
			return err
		}
	}
}

// hopeless reports whether the message itself is why it can't be sent.
func hopeless(err error) bool {
	_, bad := errors.AsType[*argument.Error](err)
	return bad || errors.Is(err, client.ErrTooLarge)
}

// outgoing is m without our own count of failures.
func outgoing(m *client.Message) *client.Message {
	if _, ok := m.Annotations[annotationFailures]; !ok {
		return m
	}
	c := *m
	c.Annotations = maps.Clone(m.Annotations)
	delete(c.Annotations, annotationFailures)
	return &c
}

// finish settles a delivery, once.
func (s *linkSession) finish(d rabbitmqamqp.IDeliveryContext, what client.Resolution) {
	if !s.over() {
		if err := settle(d, what); err != nil {
			s.die(err)
		}
	}
	if s.over() {
		s.log.Warn("hopback: a delivery was handled, but its link was lost; the broker delivers it again", "message_id", messageID(d.Message()), "error", client.ErrorText(s.why))
		return
	}
	s.count(-1)
}

// count counts deliveries that are unsettled.
func (s *linkSession) count(n int64) {
	if s.unsettled.Add(n) == 0 {
		select {
		case s.idle <- struct{}{}:
		default:
		}
	}
}

// drain ends the link session: no handler starts; those that run may end, and their
// outcomes are carried out.
func (s *linkSession) drain(handlers handlerContext) {
	close(s.closing)
	for more := true; more; {
		select {
		case d := <-s.inbox:
			s.finish(d.official, client.Resolution{Kind: client.ResolutionRelease})
		default:
			more = false
		}
	}
	wait := func(d time.Duration) {
		ctx, cancel := context.WithTimeout(context.Background(), d)
		defer cancel()
		s.awaitIdle(ctx)
	}
	wait(s.cfg.Grace)
	if s.unsettled.Load() > 0 && !s.over() {
		handlers.end(grace.ErrOver)
		wait(grace.Last)
	}
	if n := s.unsettled.Load(); n > 0 && !s.over() {
		s.log.Warn("hopback: the drain ended with unsettled deliveries; the broker delivers them again", "count", n)
	}
}

// end ends what is left after a drain: copies that aren't confirmed by now never
// will be, for this consumer.
func (s *linkSession) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.cancel()
	s.copying.Wait()
	s.die(client.ErrClosed)
}

// awaitIdle waits until nothing is unsettled, ctx ends, or the link does.
func (s *linkSession) awaitIdle(ctx context.Context) {
	for s.unsettled.Load() > 0 {
		select {
		case <-s.idle:
		case <-ctx.Done():
			return
		case <-s.dead:
			return
		}
	}
}
