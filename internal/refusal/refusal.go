// Package refusal lets a handler stop the consumer that calls it, for a fault of the
// program that no message is to blame for and that shows at the first delivery only. It also
// lets a handler tell its consumers apart.
package refusal

import (
	"context"
	"sync"
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
		c.finish()
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
	// Concurrency is how many handlers run at once, when Conn.Consume has started; 0: it isn't known.
	Concurrency atomic.Int64

	mu    sync.Mutex
	onEnd []func()
}

// Of returns the consumer whose Prepare or handler ctx is, or nil if ctx is of none.
func Of(ctx context.Context) *Consumer {
	c, _ := ctx.Value(key{}).(*Consumer)
	return c
}

// Ended reports whether the consumer has ended.
func (c *Consumer) Ended() bool { return c.ended.Load() }

// OnEnd has f called when the consumer has ended. It does nothing for a nil Consumer.
func (c *Consumer) OnEnd(f func()) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onEnd = append(c.onEnd, f)
}

func (c *Consumer) finish() {
	c.ended.Store(true)
	c.mu.Lock()
	all := c.onEnd
	c.onEnd = nil
	c.mu.Unlock()
	for _, f := range all {
		f()
	}
}

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
