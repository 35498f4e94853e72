package batch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/outcome"
)

// handler gathers calls into batches, for each queue by itself.
type handler struct {
	cfg     Config
	invalid error
	item    func([]*call)  // makes the items of a batch
	single  client.Handler // decodes a message into its item
	handle  func(context.Context, []*call) error
	queues  sync.Map // of *group, by queue
}

// Prepare asks for as many handlers as the batches need.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if h.invalid != nil {
		return h.invalid
	}
	if err := client.Prepare(ctx, h.single, s); err != nil {
		return err
	}
	if s.Handlers != nil {
		return s.Handlers(h.cfg.Size * h.cfg.Parallel)
	}
	return nil
}

// Handle returns when d's batch was handled.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	if h.invalid != nil {
		return client.Requeue{Failed: true, Err: h.invalid} // the message isn't at fault
	}
	if own, ok := client.DeliveryFrom(ctx); !ok || own != d {
		ctx = client.WithDelivery(ctx, d)
	}
	return h.join(ctx, d)
}

// call is one message that is waiting for its batch.
type call struct {
	ctx      context.Context
	delivery *client.Delivery
	item     any        // an *Item, once its batch begins
	result   chan error // of one

	mu      sync.Mutex
	err     error
	decided bool // err is the message's own
	over    bool // the function has returned
}

func (c *call) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over {
		c.err, c.decided = err, true
	}
}

// own returns the result that the function has set; false if it has set none.
func (c *call) own() (error, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err, c.decided
}

// finish ends the call with its own result, or with err if it has none.
func (c *call) finish(err error) {
	c.mu.Lock()
	if !c.decided {
		c.err = err
	}
	c.over = true
	err = c.err
	c.mu.Unlock()
	c.result <- err
}

// join adds the message of ctx to a batch, and returns its result.
func (h *handler) join(ctx context.Context, d *client.Delivery) error {
	g, ok := h.queues.Load(d.Queue())
	if !ok {
		g, _ = h.queues.LoadOrStore(d.Queue(), &group{of: h})
	}
	c := &call{ctx: ctx, delivery: d, result: make(chan error, 1)}
	b, first := g.(*group).add(c)
	if !first {
		return <-c.result
	}
	return g.(*group).lead(b, c)
}

// group is the batches of one queue.
type group struct {
	of *handler

	mu      sync.Mutex
	open    *gathering   // that calls join; nil: none has
	waiting []*gathering // full ones that wait until another has ended
	running int
}

// gathering is a batch that hasn't begun.
type gathering struct {
	calls []*call
	due   bool // it starts even if it isn't full
	begun chan struct{}
}

// add has c join a batch, and says whether it is the first.
func (g *group) add(c *call) (b *gathering, first bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open == nil {
		g.open = &gathering{begun: make(chan struct{})}
		first = true
	}
	b = g.open
	b.calls = append(b.calls, c)
	if len(b.calls) >= g.of.cfg.Size {
		g.open = nil
		g.waiting = append(g.waiting, b)
		g.advance()
	}
	return b, first
}

// lead waits for the result of c, the first of b, and has b begin in time.
func (g *group) lead(b *gathering, c *call) error {
	wait := max(g.of.cfg.Wait-time.Since(c.delivery.Received()), min(shortWait, g.of.cfg.Wait))
	draining := client.Draining(c.ctx)
	select {
	case <-draining: // what was prefetched is handed over now: handling it one by one would be wasteful
		wait, draining = min(wait, lastWait), nil
	default:
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-b.begun:
	case <-timer.C:
		g.expire(b)
	case <-draining:
		g.expire(b)
	}
	return <-c.result
}

// expire has b begin, now or when another has ended.
func (g *group) expire(b *gathering) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b.due = true
	g.advance()
}

// advance begins what may begin. It is called with mu held.
func (g *group) advance() {
	for g.running < g.of.cfg.Parallel {
		var b *gathering
		switch {
		case len(g.waiting) > 0:
			b = g.waiting[0]
			g.waiting = slices.Delete(g.waiting, 0, 1)
		case g.open != nil && g.open.due:
			b, g.open = g.open, nil
		default:
			return
		}
		g.running++
		close(b.begun)
		go func() {
			defer g.ended()
			g.of.run(b.calls)
		}()
	}
}

func (g *group) ended() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	g.advance()
}

// run handles a batch.
func (h *handler) run(all []*call) {
	calls := make([]*call, 0, len(all))
	for _, c := range all {
		if err := c.ctx.Err(); err != nil {
			c.finish(late(c.ctx, err))
			continue
		}
		if !inside.AwaitResume(c.ctx) {
			c.finish(client.Requeue{Err: errors.New("the consumer was paused while the message waited for its batch")})
			continue
		}
		calls = append(calls, c)
	}
	calls = h.decode(calls)
	if len(calls) == 0 {
		return
	}
	slices.SortStableFunc(calls, func(a, b *call) int { return a.delivery.Received().Compare(b.delivery.Received()) })
	err := h.call(calls)
	if err == nil || !h.cfg.Split || len(calls) == 1 {
		for _, c := range calls {
			c.finish(err)
		}
		return
	}
	for _, c := range calls {
		if _, decided := c.own(); decided || c.ctx.Err() != nil {
			c.finish(err)
			continue
		}
		c.finish(h.call([]*call{c}))
	}
}

// decode decodes the messages, and returns those that could be. It is done here and not by
// each message's own goroutine, as decoding needs a deep stack: one that the CPU's caches
// hold makes it faster than a hundred do.
func (h *handler) decode(calls []*call) []*call {
	h.item(calls)
	results := make([]error, len(calls))
	for next := 0; next < len(calls); {
		done := make(chan struct{})
		go func() { // runtime.Goexit would end this one
			defer close(done)
			into := &decoding{Context: context.Background()}
			for next < len(calls) {
				i := next
				next++
				into.call = calls[i]
				results[i] = errGoexit
				results[i] = h.single.Handle(into, calls[i].delivery)
			}
		}()
		<-done
	}
	decoded := calls[:0]
	for i, c := range calls {
		if results[i] != nil {
			c.finish(results[i])
			continue
		}
		decoded = append(decoded, c)
	}
	return decoded
}

// errGoexit is the result of a message whose codec has ended its goroutine.
var errGoexit error = client.DeadLetter{Reason: client.ReasonPanicked, Err: &client.PanicError{}}

// decoding is the ctx by which what is decoded finds its call.
type decoding struct {
	context.Context
	call *call
}

type callKey struct{}

func (d *decoding) Value(key any) any {
	if key == (callKey{}) {
		return d.call
	}
	return d.Context.Value(key)
}

// late is the result of a message whose ctx ended before its batch began.
func late(ctx context.Context, err error) error {
	waiting := fmt.Errorf("waiting for the batch: %w: %w", err, context.Cause(ctx))
	if errors.Is(err, context.DeadlineExceeded) {
		return waiting // a client.Timeout's: uncounted redeliveries would never end
	}
	return client.Requeue{Err: waiting}
}

// call calls the function, and turns a panic or Goexit into an error.
func (h *handler) call(calls []*call) (err error) {
	ctx := &batchCtx{values: shared{context.WithoutCancel(calls[0].ctx)}, calls: calls}
	defer ctx.end()
	// On a separate goroutine: runtime.Goexit would end this one, which has more to do.
	done := make(chan struct{})
	go func() {
		defer close(done)
		returned := false
		defer outcome.Catch(&returned, func(value any, stack []byte) {
			err = &client.PanicError{Value: value, Stack: stack}
		})
		err = h.handle(ctx, calls)
		returned = true
	}()
	<-done
	if err != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = fmt.Errorf("%w: %w", err, context.Cause(ctx)) // such as client.ErrHandlerTimeout
	}
	return err
}

// batchCtx ends when those of all calls have ended. It watches them once it is asked for
// more than a value, as that costs nine allocations a message, and many a function never
// asks.
type batchCtx struct {
	values context.Context
	calls  []*call

	once  sync.Once
	ctx   context.Context
	stop  context.CancelCauseFunc
	stops []func() bool
}

func (b *batchCtx) Deadline() (time.Time, bool) { return b.values.Deadline() }
func (b *batchCtx) Done() <-chan struct{}       { return b.watching().Done() }
func (b *batchCtx) Err() error                  { return b.watching().Err() }

// Value asks the ctx that watches where there is no such value: package context finds the
// cause in that way.
func (b *batchCtx) Value(key any) any {
	if v := b.values.Value(key); v != nil {
		return v
	}
	return b.watching().Value(key)
}

func (b *batchCtx) watching() context.Context {
	b.once.Do(func() {
		b.ctx, b.stop = context.WithCancelCause(b.values)
		left := &counter{n: len(b.calls)}
		b.stops = make([]func() bool, len(b.calls))
		for i, c := range b.calls {
			b.stops[i] = context.AfterFunc(c.ctx, func() {
				if left.down() {
					b.stop(context.Cause(c.ctx))
				}
			})
		}
	})
	return b.ctx
}

// end ends it when the function has returned.
func (b *batchCtx) end() {
	b.once.Do(func() { b.ctx, b.stop = context.WithCancelCause(b.values) })
	for _, stop := range b.stops {
		stop()
	}
	b.stop(nil)
}

type counter struct {
	mu sync.Mutex
	n  int
}

// down says whether it has come to zero.
func (c *counter) down() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n--
	return c.n == 0
}

// shared is a message's ctx without what is about that message alone.
type shared struct{ context.Context }

func (s shared) Value(key any) any {
	if key == (outcome.LastWordKey{}) {
		return nil
	}
	v := s.Context.Value(key)
	if _, ok := v.(*client.Delivery); ok {
		return nil
	}
	return v
}
