package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// ConsumerConfig is how to consume. The zero value handles one message at a time.
type ConsumerConfig struct {
	// Concurrency is how many handlers run at once. Default: 1.
	Concurrency int
	// Prefetch is how many unsettled messages the broker may have given to this
	// consumer: those waiting for a handler, those in one, and those whose
	// forwarded copy isn't confirmed yet. If the process crashes, each of them
	// counts as delivered once in vain.
	//
	// Default: as many as keep the handlers busy for 200 ms, which follows the
	// handlers' times, and at most twice Concurrency or 64, whichever is more. So a
	// slow consumer leaves to others what it couldn't begin for long. Where
	// deliveries of one key are kept in order (Start.Order) it is that most.
	Prefetch int
	// Grace is how long running handlers may go on after Consume's ctx has ended
	// before their own ctx ends. Default: 30 s.
	Grace time.Duration
	// ForwardPatience is how long a Forward that the broker doesn't take is tried
	// again before its message goes back to the queue, as a failed delivery.
	// Default: 30 s.
	ForwardPatience time.Duration
	// Control, if not nil, pauses the consumer or slows it down while it runs.
	Control *Control
	// NoQuarantine handles messages that may have taken a process down like all
	// others. Without it, a message whose delivery count tells of two failures that
	// no consumer has reported is handled alone: while it is, the consumer holds
	// no other message, so that the others' delivery counts don't rise with its own
	// if it takes the process down again.
	NoQuarantine bool

	adapts bool // Prefetch is the most, and follows the handlers' times
}

// Limits of ConsumerConfig.
const (
	maxConcurrency = 100_000
	maxPrefetch    = 100_000
	// lastGrace is what a handler gets after its ctx was ended by the drain.
	lastGrace = 5 * time.Second
	// prepareSlow is after how long a Prepare that waits is told of.
	prepareSlow = 5 * time.Second
)

func (c ConsumerConfig) withDefaults() (ConsumerConfig, error) {
	for _, f := range []struct {
		name string
		n    int
		max  int
	}{{"Concurrency", c.Concurrency, maxConcurrency}, {"Prefetch", c.Prefetch, maxPrefetch}} {
		if f.n < 0 || f.n > f.max {
			return c, argument.New("ConsumerConfig."+f.name, f.n, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", f.max))
		}
	}
	if c.Grace < 0 || c.ForwardPatience < 0 {
		return c, argument.New("ConsumerConfig", nil, "has a negative duration", "use a positive one, or 0 for the default")
	}
	if c.Concurrency == 0 {
		c.Concurrency = 1
	}
	if c.Prefetch == 0 {
		c.Prefetch = max(2*c.Concurrency, 64)
		c.adapts = true
	}
	if c.Grace == 0 {
		c.Grace = 30 * time.Second
	}
	if c.ForwardPatience == 0 {
		c.ForwardPatience = 30 * time.Second
	}
	return c, nil
}

// Consume delivers the queue's messages to h until ctx ends, then drains: no new
// deliveries, running handlers finish within ConsumerConfig.Grace, all that is
// settled reaches the broker, and what no handler has begun goes back to the
// queue. It returns nil after a drain, ErrClosed if the connection was closed.
//
// At the start it returns the errors of h's Prepare, ErrNotFound for a missing
// queue and ErrUnauthorized for a missing permission. Later it survives them like
// the loss of the connection: it comes back with unlimited back-off. What h asks the
// broker in its Prepare, as retry.With does, waits within ctx while the broker has an
// alarm; a consumer that has begun goes on receiving then.
//
// RabbitMQ 4.0 counts every returned delivery toward the queue's delivery limit,
// 4.3 only failed ones. So below 4.3 the drain hands what is prefetched to the
// handlers, as long as Grace lasts, before it gives anything back.
//
// A message may be delivered again after its handler has succeeded, if the
// connection is lost before the broker has heard of it: handlers should be
// idempotent, or use the message-id to tell duplicates.
func (c *Conn) Consume(ctx context.Context, queue string, h Handler, cfg ConsumerConfig) error {
	if c == nil {
		return argument.New("conn", nil, "is nil", "use the connection that client.Connect has returned")
	}
	source, err := address.Queue(queue).Build()
	if err != nil {
		return err
	}
	if err := checkHandler(h); err != nil {
		return err
	}
	if cfg, err = cfg.withDefaults(); err != nil {
		return err
	}
	if cfg.Control == nil {
		cfg.Control = &Control{}
	}
	var order func(*Delivery) (string, bool)
	start := Start{
		Queue: queue, Broker: c.Broker(), Management: c.mgmt, Control: cfg.Control,
		Order: func(key func(*Delivery) (string, bool)) { order = key },
	}
	// Under a memory or disk alarm the broker answers no management requests.
	slow := time.AfterFunc(prepareSlow, func() {
		c.log.Warn("hopback: a consumer can't begin yet: what its handler asks the broker isn't answered, as when it has a memory or disk alarm", "queue", queue)
	})
	err = Prepare(ctx, h, start)
	slow.Stop()
	if err != nil {
		return err
	}
	k := newConsumer(queue, source, h, cfg, consumerDeps{
		open: c.openSession, give: closeSession, backoff: c.cfg.Reconnect, log: c.log, tell: c.tellUser,
		deadLetters: c.deadLetters,
	})
	k.order = order
	if err := c.join(k); err != nil {
		return &Error{Op: "consume", Target: queue, Kind: ErrClosed}
	}
	defer c.leave(k)
	return k.run(ctx)
}

// consumer is one call of Consume.
type consumer struct {
	queue, source string
	handler       Handler
	cfg           ConsumerConfig
	deps          consumerDeps
	log           *slog.Logger
	forwards      *forwarder
	order         func(*Delivery) (string, bool) // nil: none was asked for

	// slots holds the right to run a handler. A worker holds one while it lives;
	// one that outlives its stint, in a long handler, keeps the next stint's from
	// beginning, so that Concurrency holds across a reconnect.
	slots chan struct{}

	appetite *appetite // nil: Prefetch was given
	control  *Control
	mu       sync.Mutex
	limit    int    // the Control's
	current  *stint // for limited

	closed    chan struct{} // shut was called
	closeOnce sync.Once
	gone      chan struct{} // run has returned
	// hurry ends the drain's patience: shut's ctx has ended.
	hurry     chan struct{}
	hurryOnce sync.Once
}

// consumerDeps is what a consumer takes from outside, so that it runs on faulty
// links in tests.
type consumerDeps struct {
	open    func(context.Context) (session, error)
	give    func(session)
	backoff Backoff
	log     *slog.Logger
	tell    func(Event) // nil: nobody listens
	// deadLetters says whether a queue certainly has a dead-letter exchange.
	deadLetters func(ctx context.Context, queue string) bool
}

func newConsumer(queue, source string, h Handler, cfg ConsumerConfig, deps consumerDeps) *consumer {
	if cfg.Control == nil {
		cfg.Control = &Control{}
	}
	var wanted *appetite
	if cfg.adapts {
		wanted = newAppetite(cfg.Concurrency, cfg.Prefetch)
	}
	return &consumer{
		appetite: wanted, control: cfg.Control, limit: noLimit,
		queue: queue, source: source, handler: h, cfg: cfg, deps: deps,
		log:      deps.log.With("queue", queue),
		forwards: newForwarder(cfg.Prefetch, deps),
		slots:    make(chan struct{}, cfg.Concurrency),
		closed:   make(chan struct{}), gone: make(chan struct{}), hurry: make(chan struct{}),
	}
}

// limited is told of the Control's limit.
func (k *consumer) limited(n int) {
	k.mu.Lock()
	k.limit = n
	s := k.current
	k.mu.Unlock()
	if s != nil {
		s.resize()
	}
}

func (k *consumer) setCurrent(s *stint) {
	k.mu.Lock()
	k.current = s
	k.mu.Unlock()
}

// shut drains the consumer, within ctx.
func (k *consumer) shut(ctx context.Context) error {
	k.closeOnce.Do(func() { close(k.closed) })
	select {
	case <-k.gone:
		return nil
	case <-ctx.Done():
		k.hurryOnce.Do(func() { close(k.hurry) })
		<-k.gone
		return ended("consume", k.queue, ErrConnectionLost, ctx)
	}
}

// run keeps a stint going: a session with a receiver, for as long as it lives.
func (k *consumer) run(ctx context.Context) error {
	defer close(k.gone)
	defer k.forwards.close()
	if k.order != nil {
		k.appetite = nil // what waits for its key says nothing about the handlers' times
	}
	k.control.join(k)
	defer k.control.leave(k)
	// Handlers outlive the end of ctx, with its values; hard ends their ctx.
	handlerCtx, hard := context.WithCancelCause(context.WithoutCancel(ctx))
	defer hard(context.Canceled)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-k.closed:
			stop(ErrClosed)
		case <-ctx.Done():
		}
	}()
	ended := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() { ended <- time.Now() })
	err := k.stints(ctx, handlerCtx, hard)
	stop(nil)
	k.awaitHandlers(<-ended, hard)
	return err
}

// stints runs one stint after the other until ctx ends.
func (k *consumer) stints(ctx, handlerCtx context.Context, hard context.CancelCauseFunc) error {
	result := func() error {
		if errors.Is(context.Cause(ctx), ErrClosed) {
			return &Error{Op: "consume", Target: k.queue, Kind: ErrClosed}
		}
		return nil
	}

	failures := 0
	event := func(e Event) {
		e.Attempt = failures + 1
		k.event(e)
	}
	defer func() { event(Event{Kind: Ended}) }()
	lost, renewed := time.Now(), false // renewed: nobody needs to hear of it
	for attached := false; ; {
		s, err := k.open(ctx)
		if ctx.Err() != nil {
			if err == nil {
				k.deps.give(s.sess)
			}
			return result()
		}
		if err != nil {
			if !attached && (final(err) || errors.Is(err, ErrSessionLimit)) || errors.Is(err, ErrClosed) {
				return err
			}
			if !errors.Is(err, ErrConnectionLost) {
				event(Event{Kind: Refused, Err: err})
			}
			renewed = false
			k.log.Warn("hopback: consuming failed, trying again", "error", err)
			if !pause(ctx, k.deps.backoff.pause(failures)) {
				return result()
			}
			failures++
			continue
		}
		attached = true
		began := time.Now()
		if !renewed {
			event(Event{Kind: Up, Down: began.Sub(lost)})
		}
		renewed = false
		switch s.run(ctx, handlerCtx, hard) {
		case stintDrained:
			return result()
		case stintRenewed:
			failures, renewed, lost = 0, true, time.Now()
			continue
		}
		lost = time.Now()
		event(Event{Kind: Lost, Err: newError("consume", k.queue, ErrConnectionLost, s.why), Unsettled: s.unsettled})
		if time.Since(began) > k.deps.backoff.Max {
			failures = 0
		}
		if !pause(ctx, k.deps.backoff.pause(failures)) {
			return result()
		}
		failures++
	}
}

// event tells of the consumer.
func (k *consumer) event(e Event) {
	if k.deps.tell != nil {
		e.Op, e.Target = "consume", k.queue
		k.deps.tell(e)
	}
}

// errGraceOver is the cause of a handler's ctx that the drain has ended.
var errGraceOver = fmt.Errorf("hopback: the consumer's grace time is over: %w", context.Canceled)

// awaitHandlers waits, within the grace time that began at ended, for handlers
// that still run: those whose link was lost hold no delivery that a drain waits for.
func (k *consumer) awaitHandlers(ended time.Time, hard context.CancelCauseFunc) {
	last := ended.Add(k.cfg.Grace + lastGrace)
	timer := time.NewTimer(time.Until(ended.Add(k.cfg.Grace)))
	defer timer.Stop()
	for n := 0; n < cap(k.slots); {
		select {
		case k.slots <- struct{}{}:
			n++
		case <-k.hurry:
			return
		case <-timer.C:
			if !time.Now().Before(last) {
				return
			}
			hard(errGraceOver)
			timer.Reset(time.Until(last))
		}
	}
}

func (k *consumer) open(ctx context.Context) (*stint, error) {
	sess, err := k.deps.open(ctx)
	if err != nil {
		return nil, newError("consume", k.queue, ErrConnectionLost, err)
	}
	n := k.cfg.Prefetch
	s := &stint{
		consumer: k, sess: sess, counts: !sess.broker().AtLeast(4, 3),
		// About n deliveries are unsettled at the most, so that sends on these
		// hardly ever block.
		inbox: make(chan *Delivery, n), settles: make(chan settlement, n),
		dead: make(chan struct{}), idle: make(chan struct{}, 1), closing: make(chan struct{}),
		worn: make(chan struct{}, 1),
	}
	var takenBack func([]byte)
	if !s.counts { // 4.3 brought the consumer timeout to AMQP 1.0
		s.leases = &leases{byTag: make(map[tag]*Delivery, n), taken: s.takenBack}
		takenBack = s.leases.takenBack
	}
	link, err := sess.receiver(ctx, k.source, takenBack)
	if err != nil {
		k.deps.give(sess)
		return nil, newError("consume", k.queue, attachKind(err), err)
	}
	s.link = link
	s.window = newWindow(link, s.dead, k.cfg.Concurrency, 0)
	s.lanes = &lanes{key: k.order, run: s.enqueue}
	s.quarantine = &quarantine{off: k.cfg.NoQuarantine, run: s.lanes.admit, narrow: func(on bool) {
		s.narrow.Store(on)
		s.resize()
	}}
	return s, nil
}

// stint is the life of one receiver link. Four kinds of goroutines share the
// work, so that none waits for another's broker:
//
//	receive ──inbox──▶ workers ──settles──▶ settle
//	                      └──▶ forwarder ──────┘
type stint struct {
	*consumer
	sess    session
	link    receiverLink
	inbox   chan *Delivery
	settles chan settlement
	// dead is closed when the link is gone: nothing can be settled any more.
	dead     chan struct{}
	deadOnce sync.Once
	why      error
	// unsettled is how many deliveries were when the link was lost.
	unsettled int
	// window grants credit; when it counts nothing unsettled any more, idle is
	// signalled.
	window     *window
	idle       chan struct{}
	quarantine *quarantine
	lanes      *lanes
	narrow     atomic.Bool // the quarantine allows one delivery only
	resizing   sync.Mutex
	// worn is signalled when the session has carried as many deliveries as it should.
	worn chan struct{}
	// counts says that the broker counts what is given back as a delivery.
	counts bool
	leases *leases // nil where the broker takes no delivery back
	// held are deliveries that nobody can read; guarded by consumer.mu.
	held    []*Delivery
	holding sync.WaitGroup
	// closing is closed when workers are to take no more deliveries.
	closing    chan struct{}
	workers    sync.WaitGroup
	handlerCtx context.Context
}

// deliveryLink is what a delivery came in on.
type deliveryLink interface{ over() bool }

func (s *stint) over() bool {
	select {
	case <-s.dead:
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

type settlement struct {
	delivery *Delivery
	d        disposition
}

// resize sets the window to the lowest of all that limits it.
func (s *stint) resize() {
	s.resizing.Lock() // so that the last to look is the last to set
	defer s.resizing.Unlock()
	s.mu.Lock()
	limit := s.limit
	s.mu.Unlock()
	n := min(limit, s.cfg.Prefetch)
	if s.appetite != nil {
		n = min(n, s.appetite.size())
	}
	if s.narrow.Load() {
		n = min(n, 1)
	}
	s.window.setLimit(n)
	if limit == 0 && !s.counts {
		s.giveBack()
	}
}

// giveBack returns what no handler has begun.
func (s *stint) giveBack() {
	for {
		select {
		case d := <-s.inbox:
			s.push(d, disposition{kind: released})
			s.lanes.next(d) // into the inbox, so that they go back in their order
		default:
			for _, d := range s.lanes.empty() {
				s.push(d, disposition{kind: released})
			}
			return
		}
	}
}

// stintEnd is how a stint came to its end.
type stintEnd int

const (
	stintLost    stintEnd = iota // the link was lost
	stintDrained                 // ctx has ended
	stintRenewed                 // the session is worn out, and nothing is left on it
)

// receiving is the goroutine that receives, which renew stops and may start again.
type receiving struct {
	stint  *stint
	cancel context.CancelFunc
	ended  sync.WaitGroup
}

func (r *receiving) start() {
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	r.ended.Go(func() { r.stint.receive(ctx) })
}

// stop returns when all that has arrived was taken.
func (r *receiving) stop() {
	r.cancel()
	r.ended.Wait()
}

// run handles deliveries until ctx ends, the link is lost or the session worn out.
func (s *stint) run(ctx, handlerCtx context.Context, hard context.CancelCauseFunc) stintEnd {
	s.handlerCtx = handlerCtx
	receive := &receiving{stint: s}
	var settle sync.WaitGroup
	s.quarantine.begin()
	s.setCurrent(s)
	defer s.setCurrent(nil)
	s.resize()
	receive.start()
	settling := make(chan struct{}) // closed: no further settlement will come
	settle.Go(func() { s.settle(settling) })
	for range s.cfg.Concurrency {
		s.workers.Go(func() { s.work(handlerCtx) })
	}

	end := s.live(ctx, receive)
	switch end {
	case stintDrained:
		s.drain(receive, hard)
	case stintLost:
		s.unsettled = s.window.open()
		s.log.Warn("hopback: consumer's link lost, opening it again", "error", newError("consume", s.queue, ErrConnectionLost, s.why), "unsettled", s.unsettled)
	}
	receive.stop()
	switch end {
	case stintDrained:
		// Handlers that ignored the end of their ctx can't be waited for: their
		// messages go back to the queue as the link closes.
		s.forwards.close()
		close(settling)
		settle.Wait()
		s.closeLink()
		if s.window.open() == 0 {
			s.workers.Wait() // none is in a handler
		}
		s.die(ErrClosed)
	case stintRenewed:
		close(settling)
		settle.Wait()
		s.closeLink()
		s.die(errWorn)
	default:
		close(settling)
		settle.Wait()
	}
	s.give()
	return end
}

// closeLink is called before the session is closed: see DESIGN.md, delivery counts.
func (s *stint) closeLink() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = s.link.close(ctx)
}

// live waits for the end of the stint.
func (s *stint) live(ctx context.Context, receive *receiving) stintEnd {
	worn := s.worn
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return stintDrained
		case <-s.dead:
			return stintLost
		case <-worn:
			worn = nil
		case <-again:
		}
		if s.renew(ctx, receive) {
			return stintRenewed
		}
		again = time.After(renewPause)
	}
}

// errWorn is why a stint has ended whose session was replaced.
var errWorn = errors.New("the session has carried as many deliveries as it should")

// renewPause is between two attempts to replace a session, which a long handler
// can be in the way of. There are 2³⁰ deliveries left before it must be.
const renewPause = time.Minute

// renew has all that was delivered handled, so that another session can take over:
// no credit for more, and within Grace nothing is unsettled. If it is by then, the
// stint goes on, and renew says false; unless it can't any more: then what is left
// goes back to the queue with the link.
func (s *stint) renew(ctx context.Context, receive *receiving) bool {
	s.window.stop(s.hurry)
	receive.stop()
	s.giveBackHeld()
	grace := time.NewTimer(s.cfg.Grace)
	defer grace.Stop()
	s.awaitIdle(grace.C, ctx.Done())
	switch {
	case s.over() || ctx.Err() != nil:
	case s.window.open() == 0:
		s.log.Debug("hopback: the consumer's session has carried as many deliveries as it should, and is replaced")
		return true
	case s.sess.wear() >= 1.5:
		s.log.Warn("hopback: the consumer's session must be replaced; the broker delivers again what is unsettled", "count", s.window.open())
		return true
	}
	receive.start()
	s.window.resume()
	return false
}

func (s *stint) give() { s.deps.give(s.sess) }

// receive moves what arrives into the inbox. It never blocks on a handler, so it
// notices at once when the link ends.
func (s *stint) receive(ctx context.Context) {
	for {
		m, err := s.link.receive(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.die(err)
				return
			}
			for m := s.link.prefetched(); m != nil; m = s.link.prefetched() {
				s.take(m)
			}
			return
		}
		s.take(m)
	}
}

func (s *stint) take(m *Message) {
	s.window.received()
	if s.sess.wear() >= 1 {
		select {
		case s.worn <- struct{}{}:
		default:
		}
	}
	d := &Delivery{message: m, queue: s.queue, received: time.Now(), link: s}
	s.leases.begin(d)
	if undecodable(m) {
		s.hold(d)
		return
	}
	s.quarantine.admit(d)
}

// hold deals with a message that go-amqp can't decode, so that nobody can handle it.
// It is dead-lettered, as it was sent, if the queue is known to have a dead-letter
// exchange; a queue that has none would drop it. So there it is held, unsettled, until
// the consumer ends.
func (s *stint) hold(d *Delivery) {
	s.quarantine.pass(d)
	s.holding.Go(func() {
		err := errors.New("the message has a char or a decimal, is nested too deeply, or isn't encoded well: go-amqp can't decode it")
		ctx, cancel := context.WithTimeout(context.Background(), prepareSlow)
		defer cancel()
		if s.deps.deadLetters != nil && s.deps.deadLetters(ctx, s.queue) {
			s.log.Error("hopback: a message can't be read, it is dead-lettered", "error", err)
			s.deadLetter(d, DeadLetter{Reason: ReasonUndecodable, Err: err})
			return
		}
		s.log.Error("hopback: a message can't be read, and its queue isn't known to have a dead-letter exchange: it is held until the consumer ends", "error", err)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.held = append(s.held, d)
		if len(s.held) <= s.cfg.Prefetch { // it mustn't take the place of what can be handled
			d.message.Data = nil
			d.uncounted.Store(true)
			s.uncount()
		}
	})
}

// deadLetters asks the broker for the queue's arguments. A policy's dead-letter exchange
// isn't among them.
func (c *Conn) deadLetters(ctx context.Context, queue string) bool {
	path, err := address.Queue(queue).Build()
	if err != nil {
		return false
	}
	status, reply, err := c.mgmt.Request(ctx, "GET", path, nil)
	if err != nil || status != 200 {
		return false
	}
	value := func(in any, key string) any {
		switch m := in.(type) {
		case map[string]any:
			return m[key]
		case map[any]any:
			return m[key]
		}
		return nil
	}
	return value(value(reply, "arguments"), "x-dead-letter-exchange") != nil
}

// giveBackHeld is called by the drain, and before the session is replaced.
func (s *stint) giveBackHeld() {
	s.holding.Wait()
	s.mu.Lock()
	held := s.held
	s.held = nil
	s.mu.Unlock()
	for _, d := range held {
		s.push(d, disposition{kind: released})
	}
}

// takenBack is told that the broker has given d to somebody else, since it was
// held for longer than the queue's consumer timeout. The broker gives this link
// nothing more until the stale delivery is settled, so that is done at once; what
// the handler decides on it comes to nothing, and the handler is told by its ctx.
func (s *stint) takenBack(d *Delivery) {
	s.log.Warn("hopback: the broker took a delivery back: it was held for longer than the consumer timeout", "message_id", messageID(d.message), "held", time.Since(d.received).Round(time.Millisecond))
	d.end(ErrTakenBack)
	s.push(d, disposition{kind: released})
}

func (s *stint) enqueue(d *Delivery) {
	select {
	case s.inbox <- d:
	case <-s.dead:
	}
	if isClosed(s.closing) {
		s.giveBack() // a suspect whose turn came after the drain had looked
	}
}

// work runs handlers, one at a time, until the stint ends.
func (s *stint) work(ctx context.Context) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-s.dead:
		return
	case <-s.closing:
		return
	}
	for !isClosed(s.closing) {
		var d *Delivery
		select {
		case d = <-s.inbox: // what is mostly so, and cheaper to ask for by itself
		default:
			select {
			case d = <-s.inbox:
			case <-s.dead:
				return
			case <-s.closing:
				return
			}
		}
		if s.over() {
			return // it will be delivered again: handling it now makes a duplicate
		}
		if !d.settling.Load() && s.mayBegin(d) {
			s.handle(ctx, d)
		} else {
			s.lanes.next(d)
		}
	}
}

// mayBegin waits while the consumer is paused, or gives d back where that costs it
// nothing.
func (s *stint) mayBegin(d *Delivery) bool {
	resumed, paused := s.control.gate()
	if !paused {
		return true
	}
	if s.counts {
		select {
		case <-resumed:
			return true
		case <-s.dead:
			return false
		case <-s.closing:
		}
	}
	s.push(d, disposition{kind: released})
	return false
}

func (s *stint) handle(ctx context.Context, d *Delivery) {
	defer s.lanes.next(d)
	defer d.end(nil) // frees what its ctx holds
	d.ctx.Context, d.ctx.delivery = ctx, d
	if s.appetite == nil {
		s.carryOut(d, s.call(&d.ctx, d))
		return
	}
	began := time.Now()
	err := s.call(&d.ctx, d)
	if s.appetite.handled(time.Since(began)) {
		s.resize()
	}
	s.carryOut(d, err)
}

// call runs the handler and turns whatever it does into an error.
func (s *stint) call(ctx context.Context, d *Delivery) (err error) {
	returned := false
	defer func() {
		if returned {
			return
		}
		// A panic, or runtime.Goexit: recover gives nil for that, and the
		// goroutine ends whatever is done here.
		p := &PanicError{Value: recover(), Stack: debug.Stack()}
		err = DeadLetter{Reason: ReasonPanicked, Err: p}
		if p.Value == nil {
			if d.lastWord != nil {
				err = d.lastWord
			}
			s.carryOut(d, err)
			s.workers.Go(func() { s.work(s.handlerCtx) })
		}
	}()
	err = s.handler.Handle(ctx, d)
	returned = true
	return err
}

// carryOut does what the outcome says, without waiting for the broker.
func (s *stint) carryOut(d *Delivery, err error) {
	switch o := OutcomeOf(err).(type) {
	case nil:
		s.push(d, disposition{kind: accepted})
	case Requeue:
		if o.Failed {
			s.push(d, disposition{kind: modified, failed: true})
		} else {
			s.push(d, disposition{kind: released})
		}
	case DeadLetter:
		if _, panicked := errors.AsType[*PanicError](o.Err); !panicked { // which tells more
			text := ""
			if o.Err != nil {
				text = ErrorText(o.Err)
			}
			s.log.Warn("hopback: a message is dead-lettered", "message_id", messageID(d.message), "reason", clip(string(o.Reason), 255), "error", text)
		}
		s.deadLetter(d, o)
	case Modify:
		if err := checkModified(o.Annotations); err != nil {
			s.log.Error("hopback: annotations refused, the message is requeued", "error", err)
			s.push(d, disposition{kind: modified, failed: true})
			return
		}
		s.push(d, disposition{kind: modified, failed: o.Failed, dead: o.DeadLetter, annotations: annotations(o.Annotations, 1)})
	case Forward:
		s.forward(d, o)
	default: // OutcomeOf knows no other
		s.push(d, disposition{kind: modified, failed: true})
	}
}

// deadLetter uses modified with undeliverable-here, which RabbitMQ dead-letters
// like a rejected message, and which can carry annotations. delivery-failed stays
// false, or on 4.3 the delivery-count would add up over the dead-letter queue.
func (s *stint) deadLetter(d *Delivery, o DeadLetter) {
	if p, ok := errors.AsType[*PanicError](o.Err); ok {
		s.log.Error("hopback: handler panicked, the message is dead-lettered", "message_id", messageID(d.message), "panic", ErrorText(p), "stack", string(p.Stack))
	}
	a := annotations(o.Annotations, 3)
	err := checkModified(o.Annotations)
	if err != nil {
		s.log.Error("hopback: annotations refused, the message is dead-lettered without them", "error", err)
		a = annotations(nil, 3)
	}
	// What is added fits: it is bounded, and checkModified leaves room for it.
	if o.Reason != "" || err != nil {
		a[AnnotationReason] = clip(string(o.Reason), 255)
	}
	if o.Err != nil {
		a[AnnotationError] = ErrorText(o.Err)
	}
	s.push(d, disposition{kind: modified, dead: true, annotations: a})
}

// forward hands the copy to the forwarder and accepts the original when the copy
// is confirmed.
func (s *stint) forward(d *Delivery, o Forward) {
	if err := Validate(o.Message); err != nil {
		s.unforwardable(d, o, err)
		return
	}
	target, err := o.To.Build()
	if err != nil {
		s.unforwardable(d, o, err)
		return
	}
	s.forwards.send(&forward{
		target: target, msg: o.Message, patience: s.cfg.ForwardPatience,
		abandoned: s.dead,
		report: func(err error, again time.Duration) {
			s.log.Warn("hopback: a forward was not taken, the original is kept", "to", o.To.String(), "error", err, "again_in", again)
		},
		done: func(err error) {
			switch {
			case err == nil:
				s.push(d, disposition{kind: accepted})
			case errors.Is(err, ErrTooLarge) || errors.As(err, new(*argument.Error)):
				s.unforwardable(d, o, err)
			default:
				// Never both gone: the original goes back, as a failed delivery, so
				// that the queue's delivery limit ends what can't be forwarded.
				s.log.Error("hopback: a forward failed, the original goes back to its queue", "to", o.To.String(), "error", err)
				s.push(d, disposition{kind: modified, failed: true})
			}
		},
	})
}

func (s *stint) unforwardable(d *Delivery, o Forward, err error) {
	s.log.Error("hopback: a message can't be forwarded, it is dead-lettered", "to", o.To.String(), "error", err)
	s.deadLetter(d, DeadLetter{Reason: ReasonUnforwardable, Err: errors.Join(err, o.Err)})
}

// push hands a settlement to the settling goroutine.
func (s *stint) push(d *Delivery, disp disposition) {
	if !d.settling.CompareAndSwap(false, true) {
		s.log.Warn("hopback: a delivery was handled after the broker had taken it back: it delivers it again", "message_id", messageID(d.message))
		s.event(Event{Kind: Late, Err: ErrTakenBack})
		return
	}
	if disp.kind == modified {
		disp.annotations = withKnownCount(d, disp)
	}
	if !s.over() {
		select {
		case s.settles <- settlement{d, disp}:
			return
		case <-s.dead:
		}
	}
	s.late(d)
}

func (s *stint) late(d *Delivery) {
	s.log.Warn("hopback: a delivery was handled, but its link is gone: the broker delivers it again", "message_id", messageID(d.message))
	s.event(Event{Kind: Late, Err: ErrConnectionLost})
}

// withKnownCount notes the delivery count that the message will have, so that
// whoever gets it next knows that nothing went wrong unseen.
func withKnownCount(d *Delivery, disp disposition) amqp.Annotations {
	n := int64(d.DeliveryCount())
	if disp.failed {
		n++
	}
	if n == 0 {
		return disp.annotations
	}
	a := disp.annotations
	if a == nil {
		a = make(amqp.Annotations, 1)
	}
	a[AnnotationKnownCount] = n
	return a
}

// annotations copies what a handler gave, with room for some more.
func annotations(given map[string]any, more int) amqp.Annotations {
	a := make(amqp.Annotations, len(given)+more)
	for k, v := range given {
		a[keys.boxed(k)] = v
	}
	return a
}

// uncount is told of a delivery that isn't the window's any more.
func (s *stint) uncount() {
	if s.window.settled() == 0 {
		select {
		case s.idle <- struct{}{}:
		default:
		}
	}
}

// settle writes dispositions, which gives the broker room for more.
func (s *stint) settle(finish <-chan struct{}) {
	one := func(x settlement) {
		var err error
		if s.over() {
			err = s.why
		} else {
			err = s.link.settle(x.delivery.message, x.d)
		}
		if err != nil {
			s.die(err)
			s.late(x.delivery)
			return
		}
		s.leases.end(x.delivery)
		s.quarantine.settled(x.delivery)
		if !x.delivery.uncounted.Load() {
			s.uncount()
		}
	}
	for {
		select {
		case x := <-s.settles: // what is mostly so, and cheaper to ask for by itself
			one(x)
			continue
		default:
		}
		select {
		case x := <-s.settles:
			one(x)
		case <-finish:
			for {
				select {
				case x := <-s.settles:
					one(x)
				default:
					return
				}
			}
		}
	}
}

// drain ends the stint in the order that leaves delivery counts alone: no more
// credit, then what no handler has begun, then the handlers, then their
// settlements; the link after that, and the session last.
func (s *stint) drain(receive *receiving, hard context.CancelCauseFunc) {
	s.window.stop(s.hurry)
	receive.stop()

	s.giveBackHeld()
	giveBack := func() {
		for _, d := range s.quarantine.empty() {
			s.push(d, disposition{kind: released})
		}
		s.giveBack()
	}
	if !s.counts {
		close(s.closing)
		giveBack()
	}
	grace := time.NewTimer(s.cfg.Grace)
	defer grace.Stop()
	s.awaitIdle(grace.C, s.hurry)
	if s.counts {
		close(s.closing)
		giveBack()
	}
	if s.window.open() > 0 && !s.over() {
		hard(errGraceOver)
		last := time.NewTimer(lastGrace)
		defer last.Stop()
		s.awaitIdle(last.C, s.hurry)
	}
	if n := s.window.open(); n > 0 && !s.over() {
		s.log.Warn("hopback: drained with deliveries unsettled; the broker delivers them again", "count", n)
	}
}

// awaitIdle waits until nothing is unsettled, the timer fires, or the link ends.
func (s *stint) awaitIdle(timer <-chan time.Time, hurry <-chan struct{}) {
	for s.window.open() > 0 {
		select {
		case <-s.idle:
		case <-timer:
			return
		case <-hurry:
			return
		case <-s.dead:
			return
		}
	}
}
