package client

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/refusal"

	"github.com/hopback/hopback/internal/consume"
	"github.com/hopback/hopback/internal/failure"
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
		cfg.Control = &Control{} // for Start.Control
	}
	ctx, end := refusal.Context(ctx)
	cfg, asked, err := c.prepare(ctx, queue, h, cfg)
	if err != nil {
		if err = end(err); errors.Is(err, errNotStarted) {
			return nil
		}
		return err
	}
	reserved := c.pool.Reserve(consumerSessions)
	defer reserved.Release()
	k := newConsuming(queue, source, h, cfg, asked, c.hooks, consume.ConsumerDeps{
		Sessions: reserved, Backoff: link.Backoff(c.cfg.Reconnect), Log: c.log, Notify: reserved.Notify,
		DeadLetters: c.mgmt.deadLetters, SingleActive: c.mgmt.singleActive, ConsumerTimeout: c.mgmt.consumerTimeout,
		Peek: c.mgmt.peek, Starving: c.starving, Now: c.brokerNow,
	})
	if err := c.join(k); err != nil {
		return end(&failure.Error{Op: "consume", Target: queue, Kind: failure.ErrClosed})
	}
	defer c.leave(k)
	result := k.core.Run(ctx)
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
	var lost *link.Wire
	checked, err := given.withDefaults()
	if err != nil {
		return given, a, err
	}
	for {
		// Prepare decides by the broker's version, so it needs a connection.
		w, err := c.pool.AwaitUp(ctx, lost, c.pool.Closing)
		switch {
		case errors.Is(err, failure.ErrClosed):
			return cfg, a, &failure.Error{Op: "consume", Target: queue, Kind: failure.ErrClosed}
		case err != nil:
			return cfg, a, errNotStarted
		}
		if err := checked.supportedBy(w.Old, w.Broker.Version); err != nil {
			return cfg, a, err
		}
		cfg, a = checked, asked{}
		err = c.preparing.prepare(ctx, h, Start{
			Queue: queue, Broker: Broker(w.Broker), Management: c.mgmt, Log: c.log, Control: given.Control,
			Order: func(key func(*Delivery) (string, bool)) { a.order = key },
			Handlers: func(n int) (err error) {
				cfg, err = cfg.raised(given, n)
				return err
			},
			Forwards:   func(to address.Address) { a.forwards = append(a.forwards, to) },
			BrokerTime: c.brokerTime, QueryBrokerTime: c.askBrokerTime, OnClockDiffers: c.clockDiffers,
		}, c.pool.Outage)
		if err != nil && ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))) {
			return cfg, a, errNotStarted // the check was cut short: it has found nothing
		}
		if err == nil || ctx.Err() != nil || !c.pool.HasLost(w) && !errors.Is(err, failure.ErrConnectionLost) {
			return cfg, a, err
		}
		c.log.Warn("hopback: the connection was lost while a consumer started; it starts again", "queue", queue, "error", err)
		if c.pool.HasLost(w) {
			lost = w
		} else if !link.Pause(ctx, 10*time.Millisecond) { // what was lost is the connection before w
			return cfg, a, errNotStarted
		}
	}
}

// ControlFrom returns the Control of the consumer that a handler's ctx comes from. It
// returns false outside of Conn.Consume.
func ControlFrom(ctx context.Context) (*Control, bool) {
	k := consumingOf(ctx)
	if k == nil {
		return nil, false
	}
	return k.control, true
}

// Draining returns a channel that is closed when the consumer that a handler's ctx comes
// from begins to drain. It is for handlers that wait for something which they needn't
// finish. Draining returns nil outside of Conn.Consume: a receive from it blocks for ever.
func Draining(ctx context.Context) <-chan struct{} {
	k := consumingOf(ctx)
	if k == nil {
		return nil
	}
	return k.core.Draining
}

// consumingOf returns the call of Consume that a handler's ctx comes from; nil if there is none.
func consumingOf(ctx context.Context) *consuming {
	d, ok := DeliveryFrom(ctx)
	if !ok || d.state == nil {
		return nil
	}
	c, ok := d.state.Handled.(*consumed)
	if !ok {
		return nil
	}
	return c.of
}
