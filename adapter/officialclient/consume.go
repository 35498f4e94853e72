package officialclient

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/adapter"
	"github.com/hopback/hopback/adapter/officialclient/internal/grace"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Receiver is the part of a *rabbitmqamqp.Consumer that Serve uses.
type Receiver interface {
	Receive(ctx context.Context) (rabbitmqamqp.IDeliveryContext, error)
}

// Consume passes the queue's messages to h until ctx ends, and then drains: running
// handlers finish within Config.Grace, their outcomes are sent, and all other messages
// go back to the queue. Then it returns nil, as it does if ctx ends before the start. It
// returns at most 5 s after Grace, even if a handler ignores the end of its ctx. Closing
// the connections can take another 5 s each.
//
// It makes one connection to consume, and another one at the first forward.
// Config.Concurrency goroutines call h at once.
//
// At the start it returns these errors:
//
//   - an *argument.Error for bad input or a hidden Prepare (see client.Middleware);
//   - the errors of h's Prepare;
//   - a *client.Error if it can't connect (client.ErrUnreachable), or can't consume from
//     the queue (client.ErrNotFound, client.ErrUnauthorized and others).
//
// After the start it survives all of these, with back-off and without limit.
//
// A message may be delivered again after its handler has succeeded, if the connection is
// lost before the broker learns of it. So handlers should be idempotent, or recognise
// duplicates by the message-id. The same is true of copies whose confirmation was lost.
//
// The official client panics on certain messages before it returns them, so they can't
// be handled or dead-lettered with a reason. Consume then drops its connection, which
// counts as a failed delivery, and receives one message at a time for a while. In the
// end the queue's delivery limit dead-letters that message and no other. A queue without
// a delivery limit can't get past it.
func Consume(ctx context.Context, dial Dialer, queue string, h client.Handler, cfg Config) error {
	if dial == nil {
		return argument.New("dial", nil, "is nil", "give a Dialer, such as env.NewConnection")
	}
	return consume(ctx, dial.dialer(), queue, h, cfg)
}

func consume(ctx context.Context, dial dialer, queue string, h client.Handler, cfg Config) (err error) {
	ctx, end := adapter.Context(ctx)
	defer func() { err = end(err) }()
	r, err := newRunner(dial, queue, h, cfg)
	if err != nil {
		return err
	}
	defer r.forwards.close()
	conn, err := dial(ctx)
	var k consumer
	if err == nil {
		if err = r.prepare(ctx, conn.broker()); err == nil {
			k, err = conn.consumer(ctx, queue, int32(r.cfg.Prefetch))
		}
		if err != nil {
			conn.close()
		}
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	handlers := newHandlerContext(ctx)
	defer r.awaitHandlers(handlers)
	leave := 0
	for failures, panics := 0, 0; ; failures++ {
		began := time.Now()
		s := r.newStint(k)
		s.leave = leave
		err := s.run(ctx, handlers)
		if err == nil && ctx.Err() != nil {
			s.end()
			k.close()
			conn.close()
			return nil
		}
		if time.Since(began) > r.cfg.Reconnect.Max {
			failures = 0
		}
		credits := r.cfg.Prefetch
		leave = 0
		if panicked, ok := errors.AsType[*PanicError](err); ok {
			r.log.Error("hopback: the official client panicked on a message; receiving one at a time until the delivery limit removes it", "panic", panicked.Value, "stack", string(panicked.Stack))
			credits, leave = 1, r.cfg.Prefetch
			panics++
			failures = max(0, panics-promptPanics)
		} else if err != nil {
			r.log.Warn("hopback: the consumer was lost; opening it again", "error", newError("consume", queue, client.ErrConnectionLost, err), "unsettled", s.unsettled.Load())
		} else {
			k.close() // what was prefetched with the culprits has been handled
			panics, failures = 0, 0
		}
		// Whatever has failed, the whole connection goes: its session may have
		// ended with the link, and recovery would attach what had failed.
		conn.close()
		if conn, k, failures = r.reopen(ctx, dial, credits, failures); conn == nil {
			return nil
		}
	}
}

// reopen tries until it has a consumer, or returns no connection when ctx ends.
func (r *runner) reopen(ctx context.Context, dial dialer, credits, failures int) (connection, consumer, int) {
	for ; sleep(ctx, pauseBefore(r.cfg.Reconnect, failures)); failures++ {
		conn, err := dial(ctx)
		if err == nil {
			var k consumer
			if k, err = conn.consumer(ctx, r.queue, int32(credits)); err == nil {
				return conn, k, failures
			}
			conn.close()
		}
		if ctx.Err() == nil {
			r.log.Warn("hopback: consuming failed; trying again", "error", err)
		}
	}
	return nil, nil, failures
}

// promptPanics is how many times in a row a message that the official client
// panics on is asked for without back-off: often enough to use up the broker's
// default delivery limit of 20.
const promptPanics = 25

// Serve is Consume with a consumer that the caller has made and owns. queue is the queue
// that c consumes from. When ctx ends, Serve drains and returns nil. c may then
// hold prefetched messages that Serve hasn't received, until it is closed.
//
// dial makes the connections to forward on, the first at the start.
//
// Serve waits while the official client recovers its connection, for
// Config.RecoveryPatience at most. A link or a session that ends by itself is never
// recovered. Then, and after a panic of the official client, Serve returns an error that
// matches client.ErrConnectionLost. Handlers that still run then have Config.Grace to
// end before it returns. The caller should close the connection and start again: closing
// the consumer alone doesn't repair the session. Consume does all this by itself.
//
// c must settle explicitly. A pre-settled one is refused at its first message, and that
// message is LOST, because the broker has already removed it.
func Serve(ctx context.Context, dial Dialer, c Receiver, queue string, h client.Handler, cfg Config) error {
	if dial == nil {
		return argument.New("dial", nil, "is nil", "give a Dialer, such as env.NewConnection")
	}
	if k, ok := c.(*rabbitmqamqp.Consumer); c == nil || ok && k == nil {
		return argument.New("consumer", nil, "is nil", "give what AmqpConnection.NewConsumer returned")
	}
	return serve(ctx, dial.dialer(), c, queue, h, cfg)
}

// aliveAfter tells a link that works from one whose Receive returns errors at
// once.
const aliveAfter = time.Second

func serve(ctx context.Context, dial dialer, c Receiver, queue string, h client.Handler, cfg Config) (err error) {
	ctx, end := adapter.Context(ctx)
	defer func() { err = end(err) }()
	r, err := newRunner(dial, queue, h, cfg)
	if err != nil {
		return err
	}
	defer r.forwards.close()
	conn, err := r.forwards.connect(nil)
	if err == nil {
		err = r.prepare(ctx, conn.broker())
	}
	if err != nil {
		return err
	}
	handlers := newHandlerContext(ctx)
	defer r.awaitHandlers(handlers)
	lost := time.Time{}
	for failures := 0; ; failures++ {
		began := time.Now()
		s := r.newStint(c)
		s.giveBack = true
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
			lost, failures = time.Now(), 0
			r.log.Warn("hopback: the consumer's connection was lost; waiting for its recovery", "error", client.ErrorText(err), "unsettled", s.unsettled.Load())
		}
		_, recoverable := errors.AsType[*amqp.ConnError](err)
		wait := pauseBefore(r.cfg.Reconnect, failures)
		if !recoverable || time.Since(lost)+wait > r.cfg.RecoveryPatience {
			return &client.Error{Op: "consume", Target: queue, Kind: client.ErrConnectionLost, Err: newError("receive", "", nil, err)}
		}
		if !sleep(ctx, wait) {
			return nil
		}
	}
}

// deadLetters knows whether the queue certainly has a dead-letter exchange.
type deadLetters struct {
	dial dialer
	// turn guards what follows.
	turn  chan struct{}
	has   bool
	last  time.Time
	again time.Duration // after which it asks again if it wasn't so
}

// keepsDead says whether the queue certainly has a dead-letter exchange. It asks on a
// connection of its own: RabbitMQ ends the session of a user who may not know.
func (s *stint) keepsDead() bool {
	a := &s.asked
	if !s.forwards.take(a.turn, s.dead) {
		return false
	}
	defer func() { <-a.turn }()
	if a.has || !a.last.IsZero() && time.Since(a.last) < a.again {
		return a.has
	}
	conn, err := a.dial(s.forwards.ctx)
	if err == nil {
		a.has = conn.deadLetters(s.forwards.ctx, s.queue)
		conn.close()
	}
	a.last = time.Now()
	return a.has
}

// runner is one call of Consume or Serve.
type runner struct {
	queue    string
	handler  client.Handler
	cfg      Config
	log      *slog.Logger
	forwards *forwarder
	// slots holds the right to run a handler. A worker holds one while it lives;
	// one that outlives its stint, in a long handler, keeps the next stint's from
	// beginning, so that Concurrency holds across a reconnect.
	slots chan struct{}
	asked deadLetters
}

func newRunner(dial dialer, queue string, h client.Handler, cfg Config) (*runner, error) {
	if err := address.Queue(queue).Validate(); err != nil {
		return nil, err
	}
	if f, ok := h.(client.HandlerFunc); h == nil || ok && f == nil {
		return nil, argument.New("handler", nil, "is nil", "give a Handler, such as client.JSON(func(ctx, order) error {...})")
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &runner{
		queue: queue, handler: h, cfg: cfg, log: cfg.Logger.With("queue", queue),
		forwards: newForwarder(dial, cfg.Prefetch, cfg.Reconnect),
		slots:    make(chan struct{}, cfg.Concurrency),
		asked:    deadLetters{dial: dial, turn: make(chan struct{}, 1), again: cfg.ForwardPatience},
	}, nil
}

func (r *runner) prepare(ctx context.Context, b client.Broker) error {
	start := client.Start{Queue: r.queue, Broker: b, Log: r.cfg.Logger}
	if r.cfg.Management != nil { // a nil *Management in an interface isn't nil
		start.Management = r.cfg.Management
	}
	return client.Prepare(ctx, r.handler, start)
}

// handlerContext is that of handlers: it has the values of Consume's ctx and
// outlives it.
type handlerContext struct {
	context.Context
	end context.CancelCauseFunc
	// ended gets the time at which Consume's ctx ended.
	ended  chan time.Time
	forget func() bool
}

func newHandlerContext(ctx context.Context) handlerContext {
	ended := make(chan time.Time, 1)
	forget := context.AfterFunc(ctx, func() { ended <- time.Now() })
	ctx, end := context.WithCancelCause(context.WithoutCancel(ctx))
	return handlerContext{ctx, end, ended, forget}
}

// awaitHandlers waits, within the grace time that began when Consume's ctx ended or
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

// stint is the life of one link, as far as Receive shows it:
//
//	receive ──inbox──▶ workers ──▶ settle
//	                      └──▶ forwarder ──▶ settle
type stint struct {
	*runner
	from Receiver
	// giveBack: what no handler has begun is released by a drain. Otherwise it is
	// left for the detach: while there is credit, a released message would come
	// back to this very consumer, and count twice on RabbitMQ 4.0.
	giveBack bool
	// leave ends the stint after so many deliveries, if it isn't 0.
	leave int

	inbox chan *delivery
	// dead is closed when the link is gone: nothing can be settled any more.
	dead     chan struct{}
	deadOnce sync.Once
	why      error
	// unsettled counts deliveries received and not settled; when it falls to zero
	// idle is signalled.
	unsettled atomic.Int64
	idle      chan struct{}
	left      chan struct{} // leave is reached
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

func (r *runner) newStint(from Receiver) *stint {
	return &stint{
		runner: r, from: from, inbox: make(chan *delivery, r.cfg.Prefetch),
		dead: make(chan struct{}), idle: make(chan struct{}, 1), left: make(chan struct{}), closing: make(chan struct{}),
	}
}

func (s *stint) over() bool { return isClosed(s.dead) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (s *stint) die(err error) {
	s.deadOnce.Do(func() {
		s.why = err
		close(s.dead)
	})
}

// run returns nil when it was drained, because ctx has ended or leave was
// reached, and why the link was lost otherwise.
func (s *stint) run(ctx context.Context, handlers handlerContext) error {
	receiving, stop := context.WithCancel(context.Background())
	defer stop()
	var receive sync.WaitGroup
	receive.Go(func() { s.receive(receiving) })
	for range s.cfg.Concurrency {
		s.workers.Go(func() { s.handleAll(handlers) })
	}
	select {
	case <-ctx.Done():
	case <-s.left:
	case <-s.dead:
	}
	stop()
	receive.Wait()
	if s.over() {
		return s.why
	}
	if ctx.Err() == nil {
		s.awaitIdle(ctx) // leave is reached, and what was received is handled in full
	}
	if ctx.Err() != nil {
		s.drain(handlers)
		return nil
	}
	if s.over() {
		return s.why
	}
	close(s.closing)
	return nil
}

// receive moves what arrives into the inbox. It is always in Receive, so it
// notices at once when the link ends.
func (s *stint) receive(ctx context.Context) {
	for n := 1; ; n++ {
		d, err := guarded("receive", func() (rabbitmqamqp.IDeliveryContext, error) { return s.from.Receive(ctx) })
		if ctx.Err() != nil && err != nil {
			return
		}
		if _, ok := d.(*rabbitmqamqp.PreSettledDeliveryContext); ok {
			err = argument.New("consumer", nil, "is pre-settled: the broker removes a message before it is handled", "make it with SettleStrategy ExplicitSettle")
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
			// Only with Serve, where the credit isn't ours to know.
			s.finish(d, client.Resolution{Kind: client.ResolutionRelease})
			return
		}
		if n == s.leave {
			close(s.left)
			return
		}
	}
}

// handleAll runs handlers, one at a time, until the stint ends.
func (s *stint) handleAll(ctx context.Context) {
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

// handle runs the handler and turns whatever it does into an outcome.
func (s *stint) handle(ctx context.Context, d *delivery) {
	var err error
	var what client.Resolution
	returned := false
	defer func() {
		if returned {
			return
		}
		// A panic, or runtime.Goexit: recover gives nil for that, and the
		// goroutine ends whatever is done here.
		p := &client.PanicError{Value: recover(), Stack: debug.Stack()}
		s.log.Error("hopback: a handler panicked; the message is dead-lettered", "panic", client.ErrorText(p), "stack", string(p.Stack))
		err = client.DeadLetter{Reason: client.ReasonPanicked, Err: p}
		s.carryOut(d, client.Resolve(err), err)
		if p.Value == nil {
			s.workers.Go(func() { s.handleAll(ctx) })
		}
	}()
	err = s.handler.Handle(client.WithDelivery(ctx, d.Delivery), d.Delivery)
	what = client.Resolve(err) // within, since methods of a handler's error may panic too
	returned = true
	s.carryOut(d, what, err)
}

func (s *stint) carryOut(d *delivery, what client.Resolution, cause error) {
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
		s.log.Error("hopback: an outcome can't be carried out as it is", "error", what.Refused, "instead", what.Kind, "dead_lettered", what.DeadLetter)
	}
	s.finish(d.official, what)
}

// forward publishes the copy, and accepts the original when it is confirmed.
func (s *stint) forward(d *delivery, o client.Forward) {
	for {
		err := s.forwards.send(s.dead, o.To, outgoing(o.Message), s.cfg.ForwardPatience, func(err error, again time.Duration) {
			s.log.Warn("hopback: a copy was not accepted; the original is kept, and its copy is tried again", "to", o.To.String(), "error", err, "again_in", again)
		})
		switch {
		case err == nil:
			s.carryOut(d, client.Resolution{Kind: client.ResolutionAccept}, nil)
			return
		case errors.Is(err, errStopped):
			return // never settled: the broker delivers the original again
		case hopeless(err):
			s.carryOut(d, o.Unsendable(err), nil)
			return
		case s.keepsDead():
			// Never both gone: the original goes back, as a failed delivery, so that a
			// limit ends what can't be forwarded, in the dead-letter queue.
			s.log.Error("hopback: a forward failed; the original goes back to its queue", "to", o.To.String(), "error", err, "then", "as a failed delivery, which Config.FailureLimit sends to the queue's dead-letter exchange")
			s.carryOut(d, o.Unaccepted(err), err)
			return
		case isClosed(s.closing):
			s.leaveUnsettled(d)
			return
		}
		s.log.Error("hopback: a forward failed; the original is kept, as its queue isn't known to have a dead-letter exchange, and its copy is tried again", "to", o.To.String(), "error", err)
	}
}

// leaveUnsettled ends the wait for a delivery that a drain needn't wait for. The broker
// delivers it again.
func (s *stint) leaveUnsettled(d *delivery) {
	if s.giveBack {
		s.finish(d.official, client.Resolution{Kind: client.ResolutionRelease})
		return
	}
	s.count(-1)
}

// outgoing is m as the official client may have it, which writes to what it
// sends: without our own count of failures, and with a header. Without one, the
// official client would set a header with priority 0.
//
// The official client doesn't say who its user is, so that all of its copies have the
// user-id in an annotation.
func outgoing(m *client.Message) *client.Message {
	m = unsigned(m)
	c := &client.Message{
		Format: m.Format, Header: m.Header, DeliveryAnnotations: m.DeliveryAnnotations, Annotations: m.Annotations,
		Properties: m.Properties, ApplicationProperties: m.ApplicationProperties,
		Data: m.Data, Value: m.Value, Sequence: m.Sequence, Footer: m.Footer,
	}
	if c.Header == nil {
		c.Header = &amqp.MessageHeader{Durable: true, Priority: 4}
	}
	if _, ok := m.Annotations[AnnotationFailures]; ok {
		c.Annotations = make(amqp.Annotations, len(m.Annotations))
		for k, v := range m.Annotations {
			if k != AnnotationFailures {
				c.Annotations[k] = v
			}
		}
	}
	return c
}

// unsigned returns m without its user-id, which is in client.AnnotationUserID instead. m isn't
// changed.
func unsigned(m *client.Message) *client.Message {
	if m.Properties == nil || len(m.Properties.UserID) == 0 {
		return m
	}
	c := new(*m)
	c.Properties = new(*m.Properties)
	c.Properties.UserID = nil
	if c.Annotations = maps.Clone(m.Annotations); c.Annotations == nil {
		c.Annotations = amqp.Annotations{}
	}
	c.Annotations[client.AnnotationUserID] = m.Properties.UserID
	if utf8.Valid(m.Properties.UserID) {
		c.Annotations[client.AnnotationUserID] = string(m.Properties.UserID)
	}
	return c
}

// finish settles a delivery, once.
func (s *stint) finish(d rabbitmqamqp.IDeliveryContext, what client.Resolution) {
	if !s.over() {
		if err := settle(d, what); err != nil {
			s.die(err)
		}
	}
	if s.over() {
		s.log.Warn("hopback: a delivery was handled, but its link was lost; the broker delivers it again", "error", client.ErrorText(s.why))
		return
	}
	s.count(-1)
}

// count counts deliveries that are unsettled.
func (s *stint) count(n int64) {
	if s.unsettled.Add(n) == 0 {
		select {
		case s.idle <- struct{}{}:
		default:
		}
	}
}

// drain ends the stint: no handler begins; those that run may end, and their
// outcomes are carried out.
func (s *stint) drain(handlers handlerContext) {
	close(s.closing)
	for more := true; more; {
		select {
		case d := <-s.inbox:
			s.leaveUnsettled(d)
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
func (s *stint) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.forwards.close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.copying.Wait()
	}()
	t := time.NewTimer(closeTimeout)
	defer t.Stop()
	select {
	case <-ended:
	case <-t.C: // a publish that not even the end of its connection has ended
	}
	s.die(client.ErrClosed)
}

// awaitIdle waits until nothing is unsettled, ctx ends, or the link does.
func (s *stint) awaitIdle(ctx context.Context) {
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
