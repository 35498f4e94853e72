package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

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
