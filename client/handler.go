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

// Handler handles deliveries. The error that Handle returns decides what happens to the message:
// see [Outcome]. Most programs get a Handler from [JSON] or [Typed], or use a [HandlerFunc].
//
//   - Up to [ConsumerConfig.Concurrency] goroutines call Handle at once.
//   - ctx outlives Consume's ctx, so that a running handler can finish. It ends when
//     [ConsumerConfig.Grace] is over, when the broker revokes the delivery, or shortly before
//     that if the consumer timeout is known: see [ErrConsumerTimeoutNear].
//   - Don't use the Delivery after Handle has returned.
type Handler interface {
	Handle(ctx context.Context, d *Delivery) error
}

// HandlerFunc is a function as a [Handler]. It gets the message undecoded.
type HandlerFunc func(ctx context.Context, d *Delivery) error

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, d *Delivery) error { return f(ctx, d) }

// Middleware wraps a [Handler]. It is the only way to extend a consumer. It is called once, when
// you build the chain, rather than for every message.
//
// The Handler that it returns must pass Prepare on to the Handler that it wraps:
//
//   - For a function, use [Wrap].
//   - A type has a method Prepare that calls [Prepare](ctx, inner, s).
//
// A bare [HandlerFunc] around another Handler hides that Handler's Prepare. With retry.With
// inside, Consume then stops at the first delivery with an [*argument.Error], because nothing
// has checked the topology.
type Middleware func(Handler) Handler

// Chain combines several middlewares into one. The first is the outermost. It skips nil.
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

// Preparer is a [Handler] that checks the queue and the broker before the first delivery.
// Consume calls Prepare when it starts. If Prepare returns an error, Consume returns it without
// consuming. If the connection is lost during Prepare, Consume calls it again.
//
// A test that calls Handle itself, with a Delivery from [NewDelivery], doesn't have to call
// Prepare. So Handle must work without it, as far as that is possible without a broker.
type Preparer interface {
	Prepare(ctx context.Context, s Start) error
}

// Start describes the consumer to a [Preparer]. Its functions are nil if the handler runs
// outside of [Conn.Consume], for instance in a test, except where their comments name another
// caller.
type Start struct {
	// Queue is the name of the queue to consume from, not percent-encoded.
	Queue string
	// Broker describes the broker at the other end of the connection.
	Broker Broker
	// Management sends requests about queues to the broker. It is nil if the broker can't be
	// asked. A test may set a fake.
	Management Requester
	// Log is the consumer's logger. It limits lines about single messages: see [Config].Logger. nil
	// means that nothing is logged.
	Log *slog.Logger
	// Control slows the consumer down or pauses it. It is nil outside of Conn.Consume.
	Control *Control
	// Order makes the consumer process deliveries with the same key in order: each one starts
	// when the handler of the previous one has returned. Waiting deliveries don't occupy a
	// handler.
	//
	// key returns a delivery's key, or false if the delivery needs no order. The consumer calls
	// it while it receives, so it must be fast. If key panics, the delivery isn't handled, but
	// dead-lettered with ReasonPanicked: nobody knows which others it has to wait for. If Order is
	// called several times, the last call counts. A poison message that is handled in isolation may be overtaken by others of its
	// key.
	//
	// Call Order only in Prepare. It is nil outside of Conn.Consume.
	Order func(key func(*Delivery) (string, bool))
	// Handlers raises [ConsumerConfig.Concurrency] to n if it is lower. Use it for a handler
	// whose calls wait for each other, as in package batch. It returns an [*argument.Error] if n
	// is out of range, or higher than a [ConsumerConfig.Prefetch] that the user set.
	//
	// Call Handlers only in Prepare. stream.Consume sets it too, but runs one handler, so it
	// refuses a higher n. Elsewhere it is nil.
	Handlers func(n int) error
	// Forwards announces an address that the handler's [Forward] outcomes will use. Consume then
	// opens a link to it before the first delivery, and returns [ErrUnauthorized] if the user
	// lacks the permission to publish there. Without it, the missing permission would show only
	// at the first failed message. Other reasons why the link can't be opened aren't errors at
	// this point.
	//
	// Call Forwards only in Prepare. It is nil outside of Conn.Consume.
	Forwards func(to address.Address)
	// BrokerTime returns the current time of the broker's node. It may be called during the
	// handler's whole life. It is nil outside of Conn.Consume.
	//
	//   - The result is off by at most one round trip.
	//   - The user needs permissions for queues whose names begin with "hopback-clock-", and for
	//     the default exchange. Without them, or in an alarm, BrokerTime fails within 5 s.
	//   - Results are cached for 10 minutes, failures for one minute.
	BrokerTime func(context.Context) (time.Time, error)
	// QueryBrokerTime is BrokerTime without the cache. Use it when a clock seems to have been
	// set. Concurrent calls may share one result. It is nil when BrokerTime is.
	QueryBrokerTime func(context.Context) (time.Time, error)
	// OnClockDiffers reports to the log and to [Config.OnEvent] how far the broker's clock is
	// ahead of this host's. It ignores differences below 1 s, and repeated calls on the same
	// connection. It is nil when BrokerTime is.
	OnClockDiffers func(ahead time.Duration)
}

// Requester sends one request to the broker's management node and returns the status and body of
// the reply: see [Management.Request]. A *[Management] is a Requester, and package declare needs
// no more than that.
type Requester interface {
	Request(ctx context.Context, method, path string, body any) (status int, reply any, err error)
}

// Prepare calls the Prepare of h if h is a [Preparer]. Otherwise it returns nil.
func Prepare(ctx context.Context, h Handler, s Start) error {
	if p, ok := h.(Preparer); ok {
		return p.Prepare(ctx, s)
	}
	return nil
}

// Wrap returns a [Handler] whose Handle is handle, and whose Prepare is that of inner. Use it to
// write a [Middleware] as a function. handle calls inner.Handle.
func Wrap(inner Handler, handle HandlerFunc) Handler { return wrapped{inner, handle} }

type wrapped struct {
	inner  Handler
	handle HandlerFunc
}

func (w wrapped) Handle(ctx context.Context, d *Delivery) error { return w.handle(ctx, d) }
func (w wrapped) Prepare(ctx context.Context, s Start) error    { return Prepare(ctx, w.inner, s) }

// Recover returns a [Middleware] that turns a handler's panic into a *[PanicError]. Use it
// inside retry.With to retry panics like other errors. Without Recover, a panic doesn't stop the
// consumer either, but dead-letters the message with [ReasonPanicked].
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

// ErrHandlerTimeout is the cause of a handler's ctx that [Timeout] has ended.
var ErrHandlerTimeout = errors.New("handler ran out of time")

// Timeout returns a [Middleware] that ends the handler's ctx after limit, with
// [ErrHandlerTimeout] as its cause. If the handler then returns the error of its ctx, the result
// matches ErrHandlerTimeout, so it is retried like any other error. A limit of 0 or less means
// no limit.
//
// A handler that ignores its ctx keeps running and keeps its slot.
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
		return argument.New("handler", nil, "is nil", "pass a Handler, such as client.JSON(func(ctx, order) error {...})")
	}
	if f, ok := h.(HandlerFunc); ok && f == nil {
		return argument.New("handler", nil, "is a nil HandlerFunc", "pass a function")
	}
	if c, ok := h.(interface{ check() error }); ok {
		return c.check()
	}
	return nil
}
