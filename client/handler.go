package client

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/hopback/hopback/argument"
)

// Handler does the work for a delivery. What it returns decides what becomes of
// the message: see Outcome. It is called by as many goroutines at once as the
// consumer's Concurrency says.
//
// ctx outlives the cancellation of Consume, so that work that has begun can end;
// it is cancelled when the grace time of the drain is over. Nothing may be kept
// of the Delivery after Handle has returned.
type Handler interface {
	Handle(ctx context.Context, d *Delivery) error
}

// HandlerFunc is a function as a Handler: the raw handler, which reads the
// message itself.
type HandlerFunc func(ctx context.Context, d *Delivery) error

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, d *Delivery) error { return f(ctx, d) }

// Middleware wraps a Handler: the one way to extend a consumer. It is called
// once, when the chain is built, not for every message.
//
// The Handler that it returns should pass Prepare on to the one it wraps, where
// it has one: WrapPrepare does that.
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

// Preparer is a Handler that wants to look at what it is about to run on before
// the first delivery. An error stops the consumer before it has begun.
type Preparer interface {
	Prepare(ctx context.Context, s Start) error
}

// Start is what a Preparer is told.
type Start struct {
	// Queue that will be consumed from.
	Queue string
	// Broker that the connection is with.
	Broker Broker
	// Management asks the broker about its queues.
	Management *Management
	// Control slows the consumer down or pauses it. It is nil when the handler
	// runs on something else than Conn.Consume.
	Control *Control
	// Order asks the consumer to hand over deliveries of one key one at a time, in
	// the order in which the broker has delivered them, each when the handler of the
	// one before has returned. Those that wait hold no slot. Deliveries for which
	// key says false are handed over at once. It is called while deliveries are
	// received, so it must be quick. Of several calls the last counts. A message
	// in quarantine is overtaken by its key's others.
	//
	// Order is nil when the handler runs on something else than Conn.Consume. It
	// may be called in Prepare only.
	Order func(key func(*Delivery) (string, bool))
}

// Prepare calls h's Prepare if it is a Preparer.
func Prepare(ctx context.Context, h Handler, s Start) error {
	if p, ok := h.(Preparer); ok {
		return p.Prepare(ctx, s)
	}
	return nil
}

// Wrap returns a Handler that calls handle, and whose Prepare is inner's: for
// writing a Middleware in one line.
func Wrap(inner Handler, handle HandlerFunc) Handler { return wrapped{inner, handle} }

type wrapped struct {
	inner  Handler
	handle HandlerFunc
}

func (w wrapped) Handle(ctx context.Context, d *Delivery) error { return w.handle(ctx, d) }
func (w wrapped) Prepare(ctx context.Context, s Start) error    { return Prepare(ctx, w.inner, s) }

// PanicError is what a panic in a handler becomes.
type PanicError struct {
	// Value that was given to panic; nil if the handler ended its goroutine
	// with runtime.Goexit.
	Value any
	// Stack of the goroutine at the panic.
	Stack []byte
}

func (e *PanicError) Error() string {
	if e.Value == nil {
		return "handler ended its goroutine"
	}
	return fmt.Sprintf("handler panicked: %v", e.Value)
}

// Unwrap returns the panic's value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Recover returns a Middleware that turns a panic of the handler inside it into
// a *PanicError, an error like any other. Inside retry.With it lets panics be
// retried. Without it a consumer survives a panic too, and dead-letters the
// message with ReasonPanicked.
func Recover() Middleware {
	return func(h Handler) Handler {
		return Wrap(h, func(ctx context.Context, d *Delivery) (err error) {
			defer func() {
				if v := recover(); v != nil {
					err = &PanicError{Value: v, Stack: debug.Stack()}
				}
			}()
			return h.Handle(ctx, d)
		})
	}
}

// ErrHandlerTimeout is the cause of a context that Timeout ended.
var ErrHandlerTimeout = errors.New("handler ran out of time")

// Timeout returns a Middleware that gives every call of the handler at most
// limit: its ctx ends then, with ErrHandlerTimeout as its cause. A handler that
// heeds its ctx and returns the ctx's error gives an error that matches
// ErrHandlerTimeout. One that doesn't heed it keeps its slot: a goroutine can't
// be stopped from outside. A limit of zero or less is none.
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
	return nil
}
