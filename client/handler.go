package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
)

// Handler handles deliveries. Its result decides what becomes of the message: see
// Outcome. Up to ConsumerConfig.Concurrency goroutines call it at once.
//
// ctx doesn't end with Consume's ctx, so that a handler can finish. It ends when the
// grace time of the drain is over, shortly before the broker takes the delivery back if the
// consumer timeout is known (see ErrConsumerTimeoutNear), or when it has. The
// Delivery must not be used after Handle has returned.
type Handler interface {
	Handle(ctx context.Context, d *Delivery) error
}

// HandlerFunc is a function as a Handler. It reads the message itself.
type HandlerFunc func(ctx context.Context, d *Delivery) error

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, d *Delivery) error { return f(ctx, d) }

// Middleware wraps a Handler. It is the one way to extend a consumer, and it is
// called once, when the chain is built, not for every message.
//
// The Handler that it returns must pass Prepare on to the Handler that it wraps.
// Wrap does that for a function; a type has a Prepare method that calls
// Prepare(ctx, inner, s). A bare HandlerFunc around another Handler hides its
// Prepare. With retry.With inside, Consume then ends at the first delivery with an
// *argument.Error, because nothing has checked the topology.
type Middleware func(Handler) Handler

// Chain makes one Middleware of several; the first is the outermost.
func Chain(ms ...Middleware) Middleware {
	return func(h Handler) Handler {
		for i := len(ms) - 1; i >= 0; i-- {
			if ms[i] != nil {
				h = ms[i](h)
			}
		}
		return h
	}
}

// Preparer is a Handler that looks at the queue and the broker before the first
// delivery. Consume calls Prepare once, and returns its error without consuming.
//
// A test that calls Handle itself, with a Delivery from NewDelivery, needn't call
// Prepare. A Preparer must work without it, as far as it can do so without a broker.
type Preparer interface {
	Prepare(ctx context.Context, s Start) error
}

// Start describes the consumer to a Preparer.
type Start struct {
	// Queue is the name of the queue that will be consumed from, unencoded.
	Queue string
	// Broker is the broker that the connection is to.
	Broker Broker
	// Management asks the broker about its queues. It is nil when the handler runs on
	// something else than Conn.Consume and the broker can't be asked. A test may set a
	// stand-in.
	Management Requester
	// Log is the consumer's logger; nil means no log.
	Log *slog.Logger
	// Control slows the consumer down or pauses it. It is nil when the handler
	// runs on something else than Conn.Consume.
	Control *Control
	// Order makes the consumer hand over deliveries of one key in order: each when the
	// handler of the one before has returned. Waiting deliveries occupy no handler. key
	// returns a delivery's key, or false if it needs no order. The consumer calls key
	// while it receives, so key must be quick. The last call of Order counts. Others of
	// its key may overtake a message in quarantine.
	//
	// Order is nil when the handler runs on something else than Conn.Consume. It
	// may be called in Prepare only.
	Order func(key func(*Delivery) (string, bool))
	// Handlers raises ConsumerConfig.Concurrency to n, if that is less. It is for a handler
	// whose calls wait for each other, as those of package batch do. It returns an
	// *argument.Error if n is out of range, or more than a ConsumerConfig.Prefetch that was
	// set.
	//
	// stream.Consume runs one handler, so its Handlers refuses a larger n. Handlers is nil
	// when the handler runs on something else than these. It may be called in Prepare only.
	Handlers func(n int) error
	// Forwards names an address that the handler's Forward outcomes go to. Consume opens a
	// link to it before the first delivery, and returns ErrUnauthorized if the user may not
	// publish there. Otherwise that would show at the first failure only. Nothing else that
	// keeps the link from being opened is an error.
	//
	// Forwards is nil when the handler runs on something else than Conn.Consume. It may be
	// called in Prepare only.
	Forwards func(to address.Address)
	// BrokerTime returns the time of the node that the connection is to. Its error is at
	// most one round trip. It needs permissions for queues whose names begin with
	// "hopback-clock-" and for the default exchange. Without them, or in an alarm, it
	// fails within 5 s. Answers are cached for 10 minutes, failures for one. It may be
	// called during the handler's whole life. It is nil when the handler runs on
	// something else than Conn.Consume.
	BrokerTime func(context.Context) (time.Time, error)
	// QueryBrokerTime is BrokerTime past the cache, for a handler that has noticed that a
	// clock was set. Calls at the same time can share one answer. It is nil when BrokerTime
	// is.
	QueryBrokerTime func(context.Context) (time.Time, error)
	// OnClockDiffers reports to the log and to Config.OnEvent how far the broker's clock
	// is ahead of this host's. Differences below 1 s and further calls on the same
	// connection are ignored. It is nil when BrokerTime is.
	OnClockDiffers func(ahead time.Duration)
}

// Requester sends one request to the broker's management node and returns the reply's
// status and body: see Management.Request. A *Management is one, and a Requester is
// all that package declare needs.
type Requester interface {
	Request(ctx context.Context, method, path string, body any) (status int, reply any, err error)
}

// Prepare calls h's Prepare if it is a Preparer.
func Prepare(ctx context.Context, h Handler, s Start) error {
	if p, ok := h.(Preparer); ok {
		return p.Prepare(ctx, s)
	}
	return nil
}

// Wrap returns a Handler whose Handle is handle and whose Prepare is inner's. It
// makes a Middleware of a function.
func Wrap(inner Handler, handle HandlerFunc) Handler { return wrapped{inner, handle} }

type wrapped struct {
	inner  Handler
	handle HandlerFunc
}

func (w wrapped) Handle(ctx context.Context, d *Delivery) error { return w.handle(ctx, d) }
func (w wrapped) Prepare(ctx context.Context, s Start) error    { return Prepare(ctx, w.inner, s) }

// Recover returns a Middleware that turns a panic of its handler into a *PanicError.
// Inside retry.With it makes panics errors that are retried. Without Recover a consumer
// survives a panic as well, and dead-letters the message with ReasonPanicked.
func Recover() Middleware {
	return func(h Handler) Handler {
		return Wrap(h, func(ctx context.Context, d *Delivery) (err error) {
			defer func() {
				if v := recover(); v != nil {
					err = &failure.PanicError{Value: v, Stack: debug.Stack()}
				}
			}()
			return h.Handle(ctx, d)
		})
	}
}

// ErrHandlerTimeout is the cause of a ctx that Timeout has ended.
var ErrHandlerTimeout = errors.New("handler ran out of time")

// Timeout returns a Middleware that ends the handler's ctx after limit, with
// ErrHandlerTimeout as its cause. If the handler then returns the ctx's error, the
// result matches ErrHandlerTimeout. A handler that ignores its ctx goes on and keeps
// its slot. A limit of 0 or less means no limit.
func Timeout(limit time.Duration) Middleware {
	return func(h Handler) Handler {
		if limit <= 0 {
			return h
		}
		return Wrap(h, func(ctx context.Context, d *Delivery) error {
			ctx, cancel := context.WithTimeoutCause(ctx, limit, ErrHandlerTimeout)
			defer cancel()
			err := h.Handle(ctx, d)
			if err != nil && errors.Is(err, context.DeadlineExceeded) && context.Cause(ctx) == ErrHandlerTimeout {
				err = fmt.Errorf("%w after %v: %w", ErrHandlerTimeout, limit, err)
			}
			return err
		})
	}
}

func checkHandler(h Handler) error {
	if h == nil {
		return argument.New("handler", nil, "is nil", "give Consume a Handler, such as client.JSON(func(ctx, order) error {...})")
	}
	if f, ok := h.(HandlerFunc); ok && f == nil {
		return argument.New("handler", nil, "is a nil HandlerFunc", "give Consume a function")
	}
	if c, ok := h.(interface{ check() error }); ok {
		return c.check()
	}
	return nil
}
