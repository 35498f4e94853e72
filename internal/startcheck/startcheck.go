// Package startcheck runs the check that a consumer makes when it starts.
//
// During a memory or disk alarm RabbitMQ answers no management requests, so nothing can be checked.
// But a backlog may be the cause of the alarm, and only consumers can shrink it. So a consumer
// starts, and its check ends when the broker answers.
package startcheck

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
)

// Check is a check with the result T.
type Check[T any] struct {
	// Run is called until it returns no error that can pass.
	Run    func(ctx context.Context) (T, error)
	Alarms inside.Alarms // nil: the check is awaited in any case
	// Stop stops a consumer that started during an alarm, and whose check failed. Nil if the check
	// is canceled during an alarm.
	Stop func(error)
	Log  *slog.Logger // nil: nothing is logged
}

// Pending is a check that waits for the end of an alarm.
type Pending[T any] struct {
	cancel context.CancelFunc
	done   chan struct{}
	result T
}

// Done returns a channel that is closed when the check has found no fault.
func (p *Pending[T]) Done() <-chan struct{} { return p.done }

// Result returns what the check has found. Call it only when Done is closed.
func (p *Pending[T]) Result() T { return p.result }

// Cancel ends the check.
func (p *Pending[T]) Cancel() { p.cancel() }

// Pauses before a failed check is repeated.
const (
	firstPause = time.Second
	maxPause   = 30 * time.Second
)

type answer[T any] struct {
	result T
	err    error
}

// Start returns the result of the check. If an alarm keeps the broker from answering, it returns a
// Pending instead, whose check ends with ctx. passed is then called before Done is closed.
func (c Check[T]) Start(ctx context.Context, passed func(T)) (T, *Pending[T], error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(ctx)
	answers := make(chan answer[T], 1)
	go func() {
		result, err := c.Run(ctx)
		answers <- answer[T]{result, err}
	}()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	alarm := make(chan struct{})
	go func() {
		if c.Alarms != nil && c.Alarms.AwaitAlarm(watching) {
			close(alarm)
		}
	}()
	select {
	case a := <-answers:
		cancel()
		return a.result, nil, a.err
	case <-alarm:
	}
	p := &Pending[T]{cancel: cancel, done: make(chan struct{})}
	go c.finish(ctx, p, answers, passed)
	var none T
	return none, p, nil
}

// finish waits for the result of a check, and repeats it if the connection was lost.
func (c Check[T]) finish(ctx context.Context, p *Pending[T], answers <-chan answer[T], passed func(T)) {
	a := <-answers
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		switch {
		case ctx.Err() != nil || errors.Is(a.err, client.ErrClosed):
			return
		case a.err == nil:
			c.Log.Info("hopback: topology check: the check after the alarm found no fault")
			p.result = a.result
			passed(a.result)
			close(p.done)
			return
		case !passes(a.err):
			if c.Stop != nil {
				c.Stop(a.err)
			}
			return
		}
		c.Log.Warn("hopback: topology check: the check after the alarm failed; it will be tried again", "error", a.err, "again_in", pause)
		if !backoff.Sleep(ctx, pause) {
			return
		}
		a.result, a.err = c.Run(ctx)
	}
}

// passes reports whether a check failed for a reason that may pass.
func passes(err error) bool {
	return errors.Is(err, client.ErrConnectionLost) || errors.Is(err, client.ErrNotSent) || errors.Is(err, client.ErrOutcomeUnknown)
}
