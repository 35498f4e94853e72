package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/grace"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/internal/refusal"
)

// Consume delivers the messages of queue to h until ctx ends, and then drains. The
// drain stops new deliveries, lets running handlers finish within ConsumerConfig.Grace,
// writes all settlements, and gives back what no handler has begun. Consume returns nil
// after a drain. It returns 5 s after Grace at the latest, plus the time to close its
// link, even if a handler ignores the end of its ctx.
//
// The errors, all but the last two only before the first delivery:
//
//	*argument.Error      queue, h or cfg can't be used
//	the error of h's Prepare
//	ErrNotFound          the queue is missing
//	ErrUnauthorized      the user lacks the permission to read from it, or to write to where
//	                     the handler forwards to, such as retry.With's exchange
//	ErrRefused           the broker refuses the consumer for another reason
//	ErrSessionLimit      Config.MaxConnections connections carry all the sessions they can
//	*argument.Error      a middleware hides the Prepare of retry.With: see Middleware
//	ErrClosed            the connection was closed
//
// Once it has begun, Consume survives the loss of its connection, its queue or its
// permission, and tries again with unlimited back-off. A Consume that is called while
// the connection is being rebuilt waits for it within ctx. In an alarm the broker
// answers no requests: a Prepare that asks it, such as that of retry.With, waits within
// ctx. A consumer that has begun goes on receiving.
//
// RabbitMQ 4.0 counts every returned delivery toward the queue's delivery limit, and
// 4.3 only failed ones. So below 4.3 the drain first hands prefetched deliveries to the
// handlers, while Grace lasts.
//
// On a queue with a single active consumer, prefetched deliveries go back after the running
// handlers have ended, so that a message whose handler fails isn't overtaken by those behind
// it. On other queues they go back at once, for other consumers.
//
// A message is delivered again after its handler has succeeded if the connection is
// lost before the broker has read the settlement. Handlers should be idempotent, or
// recognise duplicates by the message-id.
func (c *Conn) Consume(ctx context.Context, queue string, h Handler, cfg ConsumerConfig) error {
	if c == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	source, err := address.Queue(queue).Build()
	if err != nil {
		return err
	}
	if err := checkHandler(h); err != nil {
		return err
	}
	if cfg.Control == nil {
		cfg.Control = &Control{}
	}
	ctx, end := refusal.Context(ctx)
	cfg, asked, err := c.prepare(ctx, queue, h, cfg)
	if err != nil {
		if err = end(err); errors.Is(err, errNotStarted) {
			return nil
		}
		return err
	}
	reserved := c.pool.reserve(consumerSessions)
	defer reserved.release()
	k := newConsumer(queue, source, h, cfg, consumerDeps{
		sessions: reserved, backoff: c.cfg.Reconnect, log: c.log, tell: reserved.notify,
		deadLetters: c.mgmt.deadLetters, singleActive: c.mgmt.singleActive, consumerTimeout: c.mgmt.consumerTimeout,
		look: c.mgmt.look, starving: c.starving, now: c.brokerNow, hooks: c.hooks,
	})
	k.asked = asked
	if err := c.join(k); err != nil {
		return end(&Error{Op: "consume", Target: queue, Kind: ErrClosed})
	}
	defer c.leave(k)
	result := k.run(ctx)
	err = end(result)
	if result == nil && err != nil {
		c.log.Error("hopback: a handler stopped its consumer", "queue", queue, "error", err)
	}
	return err
}

// errNotStarted says that ctx ended before there was a connection.
var errNotStarted = errors.New("not started")

// prepare checks given, and calls h's Prepare, again if the connection was lost meanwhile.
// It returns the configuration with the handlers that h has asked for, and what else it has.
func (c *Conn) prepare(ctx context.Context, queue string, h Handler, given ConsumerConfig) (cfg ConsumerConfig, a asked, err error) {
	var lost *wire
	checked, err := given.withDefaults()
	if err != nil {
		return given, a, err
	}
	for {
		// Prepare decides by the broker's version, so it needs a connection.
		w, err := c.pool.awaitUp(ctx, lost, c.pool.closing)
		switch {
		case errors.Is(err, ErrClosed):
			return cfg, a, &Error{Op: "consume", Target: queue, Kind: ErrClosed}
		case err != nil:
			return cfg, a, errNotStarted
		}
		if err := checked.supportedBy(w.old, w.broker.Version); err != nil {
			return cfg, a, err
		}
		cfg, a = checked, asked{}
		err = c.preparing.prepare(ctx, h, Start{
			Queue: queue, Broker: Broker(w.broker), Management: c.mgmt, Log: c.log, Control: given.Control,
			Order: func(key func(*Delivery) (string, bool)) { a.order = key },
			Handlers: func(n int) (err error) {
				cfg, err = cfg.raised(given, n)
				return err
			},
			Forwards:   func(to address.Address) { a.forwards = append(a.forwards, to) },
			BrokerTime: c.brokerTime, AskBrokerTime: c.askBrokerTime, ClockDiffers: c.clockDiffers,
		}, c.pool.outage)
		if err != nil && ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))) {
			return cfg, a, errNotStarted // the check was cut short: it has found nothing
		}
		if err == nil || ctx.Err() != nil || !c.pool.hasLost(w) && !errors.Is(err, ErrConnectionLost) {
			return cfg, a, err
		}
		c.log.Warn("hopback: the connection was lost while a consumer started; it starts again", "queue", queue, "error", err)
		if c.pool.hasLost(w) {
			lost = w
		} else if !link.Pause(ctx, 10*time.Millisecond) { // what was lost is the connection before w
			return cfg, a, errNotStarted
		}
	}
}

// run keeps a stint going: a session with a receiver, for as long as it lives.
func (k *consumer) run(ctx context.Context) error {
	defer close(k.gone)
	defer k.forwards.close()
	if k.order != nil && k.appetite != nil {
		// What waits for its key says nothing about the handlers' times.
		k.appetite, k.cfg.Prefetch = nil, k.cfg.near
	}
	k.timeouts.know(k.cfg.ConsumerTimeout)
	defer k.timeouts.end()
	k.control.join(k)
	defer k.control.leave(k)
	// Handlers outlive the end of ctx, with its values; hard ends their ctx.
	handlerCtx, hard := context.WithCancelCause(context.WithoutCancel(ctx))
	defer hard(context.Canceled)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(k.closed, func() { stop(ErrClosed) })()
	k.draining = ctx.Done()
	ended := make(chan time.Time, 1)
	context.AfterFunc(ctx, func() { ended <- time.Now() })
	err := k.checkForwards(ctx)
	if err == nil {
		err = k.stints(ctx, handlerCtx, hard)
	}
	stop(nil)
	k.awaitHandlers(<-ended, hard)
	return err
}

// checkForwards opens the links that a Preparer has asked for, and closes them. The error is
// that the user may not publish there. What else is in the way may pass, or is the business of a check.
func (k *consumer) checkForwards(ctx context.Context) error {
	for _, to := range k.asked.forwards {
		target, err := to.Build()
		if err != nil {
			return err
		}
		if err := k.forwards.check(ctx, target); errors.Is(err, ErrUnauthorized) {
			return fmt.Errorf("hopback: consume %q: what fails couldn't be retried, because the user may not publish retry copies; give the user the write permission (rabbitmqctl set_permissions): %w", k.queue, err)
		}
	}
	return nil
}

// stints runs one stint after the other until ctx ends.
func (k *consumer) stints(ctx, handlerCtx context.Context, hard context.CancelCauseFunc) error {
	try := &link.Try{}
	event := func(e stateEvent) {
		e.Attempt = try.Attempt()
		k.event(e)
	}
	defer func() { event(stateEvent{Kind: eventEnded}) }()
	defer k.active.ended()
	lost, renewed := time.Now(), false // renewed: nobody needs to hear of it
	attached := false
	for try = range link.Tries(ctx, k.deps.backoff.pause) {
		s, err := k.open(ctx)
		if ctx.Err() != nil {
			if err == nil {
				k.deps.sessions.give(s.sess, true)
			}
			break
		}
		if err != nil {
			if !attached && (final(err) || errors.Is(err, ErrSessionLimit)) || errors.Is(err, ErrClosed) {
				return err
			}
			if !errors.Is(err, ErrConnectionLost) {
				event(stateEvent{Kind: eventRefused, Err: err})
			}
			renewed = false
			k.log.Warn("hopback: consuming failed; trying again", "error", err)
			continue
		}
		attached = true
		try.Up()
		if !renewed {
			event(stateEvent{Kind: eventUp, Down: time.Since(lost)})
		}
		end := s.run(ctx, handlerCtx, hard)
		if end == stintDrained {
			break
		}
		lost, renewed = time.Now(), end == stintRenewed
		if renewed {
			try.Worked()
			continue
		}
		k.active.ended()
		k.hunger.reset()
		event(stateEvent{Kind: eventLost, Err: newError("consume", k.queue, ErrConnectionLost, s.why), Unsettled: s.unsettled})
	}
	if errors.Is(context.Cause(ctx), ErrClosed) {
		return &Error{Op: "consume", Target: k.queue, Kind: ErrClosed}
	}
	return nil
}

// awaitHandlers waits, within the grace time that began at ended, for handlers
// that still run: those whose link was lost hold no delivery that a drain waits for.
func (k *consumer) awaitHandlers(ended time.Time, hard context.CancelCauseFunc) {
	grace.Await(k.slots, k.hurry, ended, k.cfg.Grace, hard)
}

func (k *consumer) open(ctx context.Context) (*stint, error) {
	if k.missing && k.cfg.OnGone != nil {
		if err := onGone(ctx, k.cfg.OnGone); err != nil {
			return nil, newError("consume", k.queue, ErrNotFound, err)
		}
	}
	sess, err := k.deps.sessions.open(ctx)
	if err != nil {
		kind := ErrConnectionLost
		if errors.Is(err, ErrSessionLimit) {
			kind = ErrSessionLimit
		}
		return nil, newError("consume", k.queue, kind, err)
	}
	room := k.cfg.Prefetch
	if k.cfg.near > 0 {
		room = min(room, max(k.cfg.near/2, 1)) // more than that waits seldom
	}
	s := &stint{
		consumer: k, sess: sess, old: sess.quirks(),
		settles: newBacklog[settlement](room),
		dead:    make(chan struct{}), idle: make(chan struct{}, 1), closing: make(chan struct{}),
		worn: make(chan struct{}, 1),
	}
	s.crew = newCrew(s, k.cfg.Concurrency, k.slots, &k.workers)
	s.settler = newSettler(s)
	o := receiverOptions{properties: k.cfg.linkProperties()}
	if !s.old.LacksConsumerTimeout {
		s.leases = &leases{byID: map[uint32]*Delivery{}}
		o.takenBack = s.leaseEnded
	}
	if k.active != nil {
		o.state = k.active.state(sess)
	}
	began := time.Now()
	link, err := sess.receiver(ctx, k.source, o)
	if err != nil {
		k.deps.sessions.give(sess, true)
		err := newError("consume", k.queue, attachKind(err), err)
		k.missing = k.attached && errors.Is(err, ErrNotFound)
		return nil, err
	}
	k.attached, k.missing = true, false
	if k.appetite != nil {
		k.appetite.attached(time.Since(began))
	}
	s.link = link
	s.window = newWindow(link, s.dead, s, k.cfg.Concurrency, 0)
	s.lanes = &lanes{key: k.order}
	s.quarantine = &quarantine{off: k.cfg.NoQuarantine}
	return s, nil
}

// onGone calls ConsumerConfig.OnGone.
func onGone(ctx context.Context, call func(context.Context) error) (err error) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) {
		err = &PanicError{Value: value, Stack: stack}
	})
	err = call(ctx)
	returned = true
	return err
}

// ControlFrom returns the Control of the consumer that a handler's ctx comes from. It
// returns false outside of Conn.Consume.
func ControlFrom(ctx context.Context) (*Control, bool) {
	k := consumerOf(ctx)
	if k == nil {
		return nil, false
	}
	return k.control, true
}

// Draining returns a channel that is closed when the consumer that a handler's ctx comes
// from begins to drain. It is for handlers that wait for something which they needn't
// finish. Draining returns nil outside of Conn.Consume: a receive from it blocks for ever.
func Draining(ctx context.Context) <-chan struct{} {
	k := consumerOf(ctx)
	if k == nil {
		return nil
	}
	return k.draining
}

// consumerOf returns the consumer that a handler's ctx comes from; nil if there is none.
func consumerOf(ctx context.Context) *consumer {
	d, ok := DeliveryFrom(ctx)
	if !ok {
		return nil
	}
	s, ok := d.link.(*stint)
	if !ok {
		return nil
	}
	return s.consumer
}
