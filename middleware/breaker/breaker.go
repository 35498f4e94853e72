// Package breaker stops consuming while something that handlers depend on is down,
// and leaves the backlog in its queue: otherwise every message of it would fail,
// use up its retries, and end in the dead-letter queue.
//
//	bank := breaker.With(breaker.Config{Trips: func(err error) bool { return errors.Is(err, errBankDown) }})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(bank(handler)), client.ConsumerConfig{Concurrency: 16})
//
// The circuit is one of three:
//
//	closed     all is well; Config.Failures failures in a row open it
//	open       the consumer is paused (client.Control), and no handler is called;
//	           after Config.OpenFor it is half open
//	half-open  one delivery is handled, to probe: success closes the circuit, failure
//	           opens it again, for twice as long
//
// All handlers that one Middleware value has wrapped share one circuit, since it
// stands for the one thing that they depend on; when it opens, all their
// consumers pause. Call With once for each such thing.
//
// # What becomes of messages
//
// The failures that open the circuit, and those of probes, are returned as they
// are: retry.With deals with them as with any other. An outage so costs about
// Config.Failures + Concurrency retries, and one for each probe, of however
// many messages.
//
// A delivery that gets here while the circuit is open goes back to its queue at
// once, as a client.Requeue that isn't Failed, which costs nothing on RabbitMQ
// 4.3 and doesn't spin, since its consumer is paused. Below 4.3 it would count
// toward the delivery limit: there it waits in place, until the circuit lets it
// through or its ctx ends. So it does where there is no client.Control, with
// another client's consumer, since the broker would deliver it again at once; there
// it is given back after 5 minutes if the broker is 4.3, whose consumer timeout (by
// default 30 minutes) would cut the consumer off. In a half-open circuit all but
// the probe wait in place.
//
// Deliveries that wait in place keep a drain waiting until ConsumerConfig.Grace
// is over.
//
// # Where it belongs
//
// Inside retry.With, or it doesn't see failures, only what retry.With has made of
// them. Around client.Timeout and dedupe: a call that ran out of time is a failure,
// and a message that waits here shouldn't be claimed.
//
// The states are kept here, not by a library: those that there are have a fixed
// open time, and change to half-open only when they are called, which nobody does
// while consumers are paused.
package breaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Config is when to stop and when to try again. The zero value opens after five
// failures in a row and probes after 10 s.
type Config struct {
	// Name is in the log.
	Name string
	// Trips says whether an error, which is never nil, tells of an outage. Any
	// other is a sign that the thing is up: it answered. It is called by many
	// goroutines at once.
	//
	// Default: every error without a client.Outcome in its chain. That includes
	// what only package retry understands, such as retry.Permanent: handlers
	// that return it for a message that is bad should say here what an outage is.
	//
	// Three things aren't asked about, and are taken for a sign of neither: a
	// client.Requeue that isn't Failed, a handler whose ctx was cancelled, and
	// one that panics.
	Trips func(error) bool
	// Failures is how many calls in a row have to trip the circuit. Default: 5.
	Failures int
	// OpenFor is how long the circuit is open before the first probe.
	// Default: 10 s.
	OpenFor time.Duration
	// MaxOpenFor is the most that OpenFor grows to, doubled after each probe that
	// failed. Default: 2 min, or OpenFor if that is longer.
	MaxOpenFor time.Duration
	// OnChange, if not nil, is told of each change of the state, one at a time and
	// in their order. Handlers go on meanwhile.
	OnChange func(Change)
	// Logger gets each change too. Default: slog.Default().
	Logger *slog.Logger
}

const (
	defaultFailures   = 5
	defaultOpenFor    = 10 * time.Second
	defaultMaxOpenFor = 2 * time.Minute
	// holdLimit is how long a delivery is held where that is a risk and giving it
	// back costs nothing.
	holdLimit = 5 * time.Minute
)

// State of a circuit.
type State int

// The states.
const (
	Closed State = iota
	Open
	HalfOpen
)

func (s State) String() string {
	switch s {
	case Closed:
		return "closed"
	case Open:
		return "open"
	case HalfOpen:
		return "half-open"
	}
	return fmt.Sprintf("State(%d)", int(s))
}

// Change of a circuit's state.
type Change struct {
	From, To State
	// Err is what opened the circuit; nil for other changes.
	Err error
	// OpenFor is when the next probe will come; 0 unless To is Open.
	OpenFor time.Duration
}

// ErrOpen is why a delivery is given back that the handler wasn't called for.
var ErrOpen = errors.New("the circuit is open")

func (c Config) withDefaults() (Config, error) {
	switch {
	case c.Failures < 0 || c.Failures > math.MaxInt32:
		return c, argument.New("breaker.Config.Failures", c.Failures, "is out of range", "use 1 or more, or 0 for the default")
	case c.OpenFor < 0:
		return c, argument.New("breaker.Config.OpenFor", c.OpenFor, "is negative", "give a duration, or 0 for the default")
	case c.MaxOpenFor < 0:
		return c, argument.New("breaker.Config.MaxOpenFor", c.MaxOpenFor, "is negative", "give a duration, or 0 for the default")
	}
	if c.OpenFor == 0 {
		c.OpenFor = defaultOpenFor
		if c.MaxOpenFor > 0 {
			c.OpenFor = min(c.OpenFor, c.MaxOpenFor)
		}
	}
	switch {
	case c.MaxOpenFor == 0:
		c.MaxOpenFor = max(defaultMaxOpenFor, c.OpenFor)
	case c.MaxOpenFor < c.OpenFor:
		return c, argument.New("breaker.Config.MaxOpenFor", c.MaxOpenFor, "is less than OpenFor", "make it at least as long, or 0 for the default")
	}
	if c.Failures == 0 {
		c.Failures = defaultFailures
	}
	if c.Trips == nil {
		c.Trips = func(err error) bool { return !errors.As(err, new(client.Outcome)) }
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Name != "" {
		c.Logger = c.Logger.With("circuit", c.Name)
	}
	return c, nil
}

// With returns the Middleware. A Config that can't be used stops the consumer at
// its start, with an *argument.Error.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	c := newCircuit(cfg)
	return func(h client.Handler) client.Handler {
		invalid := err
		if h == nil && invalid == nil {
			invalid = argument.New("handler", nil, "is nil", "give breaker's Middleware a Handler")
		}
		return &handler{inner: h, circuit: c, invalid: invalid}
	}
}

type handler struct {
	inner   client.Handler
	circuit *circuit
	invalid error
	// returnable: deliveries of a consumer without a Control may be given back.
	returnable atomic.Bool
}

// Prepare refuses a bad Config. A consumer that starts while the circuit is open
// starts paused.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if h.invalid != nil {
		return h.invalid
	}
	if err := client.Prepare(ctx, h.inner, s); err != nil {
		return err
	}
	uncounted := s.Broker.AtLeast(4, 3)
	if s.Control == nil {
		h.returnable.Store(uncounted)
		return nil
	}
	h.circuit.join(s.Control, uncounted)
	return nil
}

// Handle calls the handler when the circuit lets it through.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) (err error) {
	if h.invalid != nil {
		return client.Requeue{Failed: true, Err: h.invalid}
	}
	p, err := h.circuit.enter(ctx, h.returnable.Load())
	if err != nil {
		return client.Requeue{Err: err}
	}
	says := nothing
	// A probe that panics must make room for the next.
	defer func() { h.circuit.leave(ctx, p, says, err) }()
	err = h.inner.Handle(ctx, d)
	says = h.circuit.judge(ctx, err)
	return err
}
