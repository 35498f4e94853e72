package client

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/refusal"
)

// Consume calls h for each message of queue until ctx ends. Then it drains and returns nil: it
// stops receiving, lets running handlers finish for up to [ConsumerConfig.Grace], writes all
// settlements, and requeues the messages that no handler has started. Even if a handler ignores
// its ctx, Consume returns at most 5 s after Grace, plus the time to close its link.
//
// The errors, all but the last two only before the first delivery:
//
//   - [*argument.Error]: queue, h, or cfg is invalid.
//   - An error of the Prepare of h, for instance about a missing delay queue.
//   - [ErrNotFound]: the queue doesn't exist.
//   - [ErrUnauthorized]: the user lacks the permission to read from the queue, or to write to an
//     address that the handler forwards to, such as the exchange of retry.With.
//   - [ErrRefused]: the broker refuses the consumer for another reason.
//   - [ErrSessionLimit]: all sessions of [Config.MaxConnections] connections are in use.
//   - [*argument.Error]: a middleware hides the Prepare of retry.With; see [Middleware].
//   - [ErrClosed]: the connection was closed.
//
// Details:
//
//   - Once started, Consume survives the loss of its connection, of its queue, or of its
//     permission. It keeps trying with backoff.
//   - If the connection is being rebuilt when you call Consume, it waits until ctx ends.
//   - During a memory or disk alarm, the broker answers no requests. A consumer with retry.With
//     starts without its checks, and makes them up when the broker answers. Any other Prepare that needs an answer waits for
//     the end of the alarm, or of ctx. A consumer that has started keeps receiving.
//   - If the connection is lost before the broker has read a settlement, it delivers the message
//     again, although its handler succeeded. So handlers should be idempotent, or recognize
//     duplicates by their message-id.
//   - RabbitMQ 4.0 counts each returned delivery toward the queue's delivery limit; 4.3 counts
//     only failed ones. So below 4.3, the drain first hands prefetched messages to the handlers,
//     while Grace lasts.
//   - On a queue with a single active consumer, Consume requeues prefetched messages after the
//     running handlers have returned, so they can't overtake a message whose handler fails. On
//     other queues it requeues them at once, for other consumers.
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
	return c.consume(ctx, queue, source, h, cfg, nil)
}

// consume is Consume with checked arguments. gated makes a gated consumer; nil: another.
func (c *Conn) consume(ctx context.Context, queue, source string, h Handler, cfg ConsumerConfig, gated *gated) error {
	ctx, end := refusal.Context(ctx)
	lines := loglines.NewRepeats(c.log.Handler())
	defer lines.Flush()
	log := slog.New(lines)
	cfg, asked, err := c.prepare(ctx, queue, h, cfg, log)
	if err != nil {
		if err = end(err); errors.Is(err, errNotStarted) {
			return nil
		}
		return err
	}
	refusal.Of(ctx).Concurrency.Store(int64(cfg.Concurrency))
	reserved := c.pool.Reserve(consumerSessions)
	defer reserved.Release()
	deps := consumerDeps{
		Sessions: reserved, Backoff: c.cfg.Reconnect, Log: log, Notify: c.events.of(reserved),
		Queues: c.mgmt, Starving: c.starving, Now: c.brokerNow,
	}
	gated.prepare(&asked)
	k := newConsumer(queue, source, h, cfg, asked, c.hooks, deps)
	k.conn = c
	if err := c.join(k); err != nil {
		return end(&failure.Error{Op: "consume", Target: queue, Kind: failure.ErrClosed})
	}
	defer c.leave(k)
	result := k.run(ctx)
	err = end(result)
	if result == nil && err != nil {
		c.log.Error("hopback: a handler stopped its consumer", "queue", queue, "error", err)
	}
	return err
}

// errNotStarted: ctx ended before there was a connection.
var errNotStarted = errors.New("not started")

// prepare checks given, and calls the Prepare of h with log. It returns the configuration with the
// concurrency that h asked for, and what else h asked for.
func (c *Conn) prepare(ctx context.Context, queue string, h Handler, given ConsumerConfig, log *slog.Logger) (cfg ConsumerConfig, a asked, err error) {
	checked, err := given.withDefaults()
	if err != nil {
		return given, a, err
	}
	err = c.starting(ctx, queue, func(w *link.Wire) error {
		if err := checked.supportedBy(w.Old, w.Version); err != nil {
			return err
		}
		cfg, a = checked, asked{}
		start := Start{
			Queue: queue, Broker: brokerOf(w), Management: c.mgmt, Log: log, Control: given.Control,
			Order: func(key func(*Delivery) (string, bool)) { a.order = key },
			Handlers: func(n int) (err error) {
				cfg, err = cfg.raised(given, n)
				return err
			},
			Forwards:   func(to address.Address) { a.forwards = append(a.forwards, to) },
			BrokerTime: c.brokerTime, QueryBrokerTime: c.askBrokerTime, OnClockDiffers: c.clockDiffers,
		}
		return Prepare(inside.WithAlarms(ctx, internal{c}), h, start)
	})
	if err != nil && ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))) {
		return cfg, a, errNotStarted // the check was cut short: it has found nothing
	}
	return cfg, a, err
}

// starting calls f with a connection, because a start depends on the broker's version, and again if the
// connection was lost during the call. During it a consumer of the queue counts as starting, and a long
// call is logged.
func (c *Conn) starting(ctx context.Context, queue string, f func(*link.Wire) error) error {
	var lost *link.Wire
	for failures := 0; ; failures++ {
		w, err := c.pool.AwaitUp(ctx, lost, c.pool.Closing)
		switch {
		case errors.Is(err, failure.ErrClosed):
			return &failure.Error{Op: "consume", Target: queue, Kind: failure.ErrClosed}
		case err != nil:
			return errNotStarted
		}
		err = c.preparing.run(c.log, queue, c.pool.Outage, func() error { return f(w) })
		if err == nil || ctx.Err() != nil || !c.pool.HasLost(w) && !errors.Is(err, failure.ErrConnectionLost) {
			return err
		}
		c.log.Warn("hopback: the connection was lost while a consumer started; it starts again", "queue", queue, "error", err)
		if c.pool.HasLost(w) {
			lost = w
		} else if !backoff.Sleep(ctx, c.cfg.Reconnect.Pause(failures)) { // what was lost is the connection before w
			return errNotStarted
		}
	}
}

// ControlFrom returns the [Control] of the consumer that a handler's ctx belongs to. It returns
// false outside of [Conn.Consume].
func ControlFrom(ctx context.Context) (*Control, bool) {
	k := consumingOf(ctx)
	if k == nil || k.control == nil {
		return nil, false
	}
	return k.control, true
}

// Draining returns a channel that is closed when the consumer of a handler's ctx starts to
// drain. Use it in handlers that wait for something they can abandon. Outside of [Conn.Consume],
// Draining returns nil, and a receive from nil blocks forever.
func Draining(ctx context.Context) <-chan struct{} {
	k := consumingOf(ctx)
	if k == nil {
		return nil
	}
	return k.draining
}

// consumingOf returns the call of Consume that a handler's ctx comes from; nil if there is none.
func consumingOf(ctx context.Context) *consumer {
	d, ok := DeliveryFrom(ctx)
	if !ok || d.core == nil {
		return nil
	}
	return d.core.consumer
}

// preparations counts the consumers that are starting.
type preparations struct {
	mu       sync.Mutex
	count    int
	notified time.Time // when a slow one was last logged
}

// prepareSlow is how long a Prepare may take before it is logged, and prepareQuiet
// how long the connection then logs no other.
const (
	prepareSlow  = 5 * time.Second
	prepareQuiet = time.Minute
)

// run calls f, which asks the broker before a consumer starts. When many wait, one line is logged for
// all, with the outage that they may wait for.
func (p *preparations) run(log *slog.Logger, queue string, outage func() error, f func() error) error {
	p.mu.Lock()
	p.count++
	p.mu.Unlock()
	slow := time.AfterFunc(prepareSlow, func() {
		p.mu.Lock()
		waiting := p.count
		quiet := time.Since(p.notified) < prepareQuiet
		if !quiet {
			p.notified = time.Now()
		}
		p.mu.Unlock()
		if quiet {
			return
		}
		// In an alarm the broker answers no management requests.
		why := outage()
		if why == nil {
			why = errors.New("the broker hasn't answered yet")
		}
		log.Warn("hopback: consumers can't start yet; their handlers wait for answers from the broker", "queue", queue, "waiting", waiting, "error", why)
	})
	defer func() {
		slow.Stop()
		p.mu.Lock()
		p.count--
		p.mu.Unlock()
	}()
	return f()
}
