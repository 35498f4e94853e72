// Package breaker pauses consumers while a service that their handlers need is down. The backlog
// stays in its queue. Without a breaker, every message in it would fail, use up its retries, and
// go to the dead-letter queue.
//
//	bank := breaker.With(breaker.Config{Trips: func(err error) bool { return errors.Is(err, errBankDown) }})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(bank(handler)), client.ConsumerConfig{Concurrency: 16})
//
// The circuit has three states:
//
//   - closed: messages are handled. [Config.Failures] failures in a row open the circuit.
//   - open: the consumers are paused (client.Control), and no handler is called. After
//     [Config.OpenFor], the circuit becomes half-open.
//   - half-open: one delivery is handled as a probe. If it succeeds, the circuit closes; if it
//     fails, the circuit opens again for twice as long.
//
// All handlers that one Middleware value wraps share one circuit, so their consumers pause
// together. Call [With] once per service.
//
// # What happens to messages
//
// The failure that opens the circuit is returned unchanged, and so is the failure of a probe:
// retry.With treats them like any other. So an outage uses up about Config.Failures +
// Concurrency retries, and one per probe, however long the queue is.
//
// A delivery that arrives while the circuit is open returns to its queue at once, as a
// client.Requeue that isn't Failed. On RabbitMQ 4.3, this counts toward no limit, and the
// message isn't delivered again while the consumer is paused.
//
// In two cases, the delivery waits in the consumer instead, until the circuit lets it through or
// its ctx ends:
//
//   - Below RabbitMQ 4.3, returning it would count toward the delivery limit.
//   - Another client's consumer has no client.Control, so the broker would deliver the message
//     again at once. On RabbitMQ 4.3, the delivery is returned after 5 minutes, because the
//     broker ends a consumer that exceeds the consumer timeout (30 minutes by default).
//
// While the circuit is half-open, all deliveries except the probe wait in the consumer.
// Deliveries that wait there delay a shutdown until ConsumerConfig.Grace is over.
//
// # Where to put it
//
//   - Inside retry.With. Outside, it would see outcomes rather than failures.
//   - Around client.Timeout, because a call that timed out is a failure.
//   - Around dedupe, because a message that waits here shouldn't be claimed.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package breaker

// The circuit is kept here, not by a library. Those that exist have a fixed open time
// and become half-open only when they are called, and nobody calls them while the
// consumers are paused.

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/middleware/internal/config"
)

// Config defines when a circuit opens and when it probes. The zero value opens it after five
// failures in a row, and probes after 10 s.
type Config struct {
	// Name is the attribute "circuit" of log records. Default: none.
	Name string
	// Trips reports whether an error means an outage. err is never nil. Any other error means
	// that the service is up, because it answered. Trips must be safe for concurrent use.
	//
	// Default: true for every error without a client.Outcome in its chain, except those of
	// retry.Permanent, retry.Discard, and retry.Snooze, which concern one message only.
	// retry.After counts as an outage.
	//
	//   - A client.Requeue that isn't Failed and retry.Snooze count neither as an outage nor as
	//     an answer, unless Trips returns true for them.
	//   - A panic, and a handler whose ctx was canceled, count as neither, and Trips isn't
	//     called.
	Trips func(error) bool
	// Failures is how many failures in a row open the circuit. Default: 5.
	Failures int
	// OpenFor is how long the circuit stays open before the first probe. Default: 10 s.
	OpenFor time.Duration
	// MaxOpenFor limits the time between probes, which doubles after each failed probe. Default:
	// 2 min, or OpenFor if that is longer.
	MaxOpenFor time.Duration
	// OnChange, if not nil, is called for each state change, one at a time and in order.
	// Handlers don't wait for it.
	OnChange func(Change)
	// Logger logs each state change. Default: slog.Default().
	Logger *slog.Logger
}

const (
	defaultFailures   = 5
	defaultOpenFor    = 10 * time.Second
	defaultMaxOpenFor = 2 * time.Minute
	// holdLimit is how long a delivery is held if holding it is a risk and returning it costs
	// nothing.
	holdLimit = 5 * time.Minute
)

// What Change.From and Change.To may be.
const (
	// The values of Change.From and Change.To.
	stateClosed   = "closed"
	stateOpen     = "open"
	stateHalfOpen = "half-open"
)

// Change is a state change of a circuit. [Config.OnChange] receives it.
type Change struct {
	// From and To are "closed" (messages are handled), "open" (no message is handled), or
	// "half-open" (one message at a time is handled, as a probe). A circuit starts closed.
	From, To string
	// Err is the failure that opened the circuit. It is nil for other changes.
	Err error
	// OpenFor is the time until the next probe. It is 0 unless To is "open".
	OpenFor time.Duration
}

// ErrOpen is the error of a delivery that returns to its queue because the circuit is open. Its
// handler wasn't called.
var ErrOpen = errors.New("the circuit is open")

func (c Config) withDefaults() (Config, error) {
	if c.Failures < 0 || c.Failures > math.MaxInt32 {
		return c, argument.New("breaker.Config.Failures", c.Failures, "is out of range", "use 1 or more, or 0 for the default")
	}
	pause := config.Pause{Of: "breaker.Config", Name: "OpenFor", LimitName: "MaxOpenFor", Default: defaultOpenFor, LimitDefault: defaultMaxOpenFor}
	if err := pause.Set(&c.OpenFor, &c.MaxOpenFor); err != nil {
		return c, err
	}
	if c.Failures == 0 {
		c.Failures = defaultFailures
	}
	if c.Trips == nil {
		c.Trips = func(err error) bool { return outcome.Read[client.Outcome](err).Outage() }
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Name != "" {
		c.Logger = c.Logger.With("circuit", c.Name)
	}
	return c, nil
}

// With returns the Middleware, with a new circuit. If cfg is invalid, Consume returns an
// *argument.Error when it starts.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	c := newCircuit(cfg)
	return func(h client.Handler) client.Handler {
		if refused := config.Refused("breaker", h, err); refused != nil {
			return refused
		}
		return &handler{inner: h, circuit: c}
	}
}

type handler struct {
	inner   client.Handler
	circuit *circuit
	// returnable: deliveries of a consumer without a Control may be requeued.
	returnable atomic.Bool
}

// Prepare pauses a consumer from the start while the circuit is open.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if err := client.Prepare(ctx, h.inner, s); err != nil {
		return err
	}
	uncounted := !oldbroker.Of(s.Broker.AtLeast).CountsReturns
	if s.Control == nil {
		h.returnable.Store(uncounted)
		return nil
	}
	h.circuit.join(s.Control, uncounted)
	return nil
}

var errPaused = errors.New("the consumer was paused while the message waited for the circuit")

// Handle calls the handler when the circuit lets it through.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) (err error) {
	p, err := h.circuit.enter(ctx, h.returnable.Load())
	for ; err == nil && inside.Paused(ctx); p, err = h.circuit.enter(ctx, h.returnable.Load()) {
		h.circuit.leave(ctx, p, signNothing, nil)
		if !inside.AwaitResume(ctx) {
			return client.Requeue{Err: errPaused}
		}
	}
	if err != nil {
		return client.Requeue{Err: err}
	}
	says := signNothing
	// A probe that panics must make room for the next.
	defer func() { h.circuit.leave(ctx, p, says, err) }()
	err = h.inner.Handle(ctx, d)
	says = h.circuit.judge(ctx, err)
	return err
}
