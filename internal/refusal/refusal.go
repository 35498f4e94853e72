// Package refusal lets a handler stop the consumer that calls it, for a fault of the
// program that no message is to blame for and that shows at the first delivery only. It also
// lets a handler tell its consumers apart.
package refusal

import (
	"context"
	"sync/atomic"
)

type key struct{}

// Context returns the ctx of a consumer, of its Prepare calls and of its handlers. It ends
// with parent, and when a handler calls Stop. end must be called with the consumer's result.
// It returns the error that a handler stopped the consumer with, or else the result.
func Context(parent context.Context) (ctx context.Context, end func(result error) error) {
	inner, cancel := context.WithCancelCause(parent)
	c := &Consumer{cancel: cancel, refused: make(chan error, 1)}
	return context.WithValue(inner, key{}, c), func(result error) error {
		cancel(nil)
		c.ended.Store(true)
		select {
		case err := <-c.refused:
			return err
		default:
			return result
		}
	}
}

// Consumer is one call of Consume. A handler that several consumers share keeps its state by
// Consumer: queues of different brokers or virtual hosts can have the same name.
type Consumer struct {
	cancel  context.CancelCauseFunc
	refused chan error // holds the first refusal
	ended   atomic.Bool
}

// Of returns the consumer whose Prepare or handler ctx is, or nil if ctx is of none.
func Of(ctx context.Context) *Consumer {
	c, _ := ctx.Value(key{}).(*Consumer)
	return c
}

// Ended reports whether the consumer has ended.
func (c *Consumer) Ended() bool { return c.ended.Load() }

// Stop ends the consumer with err. It reports whether ctx is of a consumer's handler;
// if not, nothing happens. The delivery is to be requeued as not failed.
func Stop(ctx context.Context, err error) bool {
	c := Of(ctx)
	if c == nil {
		return false
	}
	select {
	case c.refused <- err:
	default: // another handler was first
	}
	c.cancel(err)
	return true
}
