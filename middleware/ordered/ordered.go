// Package ordered handles messages of one key one after the other, and those of
// different keys at the same time.
//
//	inTurn := ordered.With(ordered.Config{Attempts: 5})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(inTurn(handler)), client.ConsumerConfig{Concurrency: 16})
//
// # What is promised, and what isn't
//
// No two handlers of one key run at once, and they run in the order in which the
// broker has delivered their messages. That is within one consumer; for a whole
// queue it needs a single active consumer, or a queue for each key.
//
// Where there is no client.Start.Order, with another client's consumer, the order
// is kept only as far as deliveries get here in it: of those that wait for a key
// the one received first is next, but two that arrived together may begin
// swapped while their key is idle.
//
// A message in the consumer's quarantine (see client.ConsumerConfig.NoQuarantine)
// is overtaken, and so is everything that a lost connection, a pause or a drain
// brings back to the queue.
//
// # A failure
//
// Whatever goes back to the queue is overtaken by those behind it: a retry by
// retry.With, a client.Requeue, a delivery that a drain gives back. To keep its
// turn a message has to be tried again in place: Config.Attempts. Its key waits
// meanwhile, and others go on. With Attempts used up the failure is returned, for
// retry.With to deal with, and the key moves on; with a negative number of them the
// key waits until it succeeds, or the message's ctx ends. Keep the time of that
// well below the consumer timeout of RabbitMQ 4.3 (by default 30 minutes), after
// which the broker gives the message to somebody else.
//
// # What waiting costs
//
// A delivery that waits for its key is one of the consumer's Prefetch. It holds no
// slot, but where there is no client.Start.Order it does: as many messages of one
// busy key in a row as there are slots then keep all other keys waiting too.
// Nothing is kept for a key that is idle: memory is bounded by Prefetch.
//
// # Where it belongs
//
// Right inside retry.With, so that Attempts sees failures and not what is made of
// them, and around whatever else waits, such as ratelimit, breaker and dedupe,
// which let deliveries through in any order.
package ordered

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Config is what to keep in order. The zero value orders by group-id, and hands
// each failure on.
type Config struct {
	// Key names what a delivery has to wait for its turn of. A delivery for which
	// it says false doesn't wait. Keys of different queues are different. It is
	// called by many goroutines at once. Default: GroupID.
	Key func(*client.Delivery) (key string, ok bool)
	// Attempts is how often the handler is called in place, the first call
	// included, before its failure is returned. Negative: until it succeeds.
	// Default: 1.
	Attempts int
	// Pause is the time between the first attempt and the second; it doubles with
	// each. Default: 100 ms.
	Pause time.Duration
	// MaxPause is the most that Pause grows to. Default: 5 s, or Pause if that is
	// longer.
	MaxPause time.Duration
	// RetryIf says whether a failure, which is never nil, is tried again in place.
	// Default: every error without a client.Outcome in its chain.
	RetryIf func(error) bool
}

const (
	defaultPause    = 100 * time.Millisecond
	defaultMaxPause = 5 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	switch {
	case c.Pause < 0:
		return c, argument.New("ordered.Config.Pause", c.Pause, "is negative", "give a duration, or 0 for the default")
	case c.MaxPause < 0:
		return c, argument.New("ordered.Config.MaxPause", c.MaxPause, "is negative", "give a duration, or 0 for the default")
	}
	if c.Pause == 0 {
		c.Pause = defaultPause
		if c.MaxPause > 0 {
			c.Pause = min(c.Pause, c.MaxPause)
		}
	}
	switch {
	case c.MaxPause == 0:
		c.MaxPause = max(defaultMaxPause, c.Pause)
	case c.MaxPause < c.Pause:
		return c, argument.New("ordered.Config.MaxPause", c.MaxPause, "is less than Pause", "make it at least as long, or 0 for the default")
	}
	if c.Key == nil {
		c.Key = GroupID
	}
	switch {
	case c.Attempts == 0:
		c.Attempts = 1
	case c.Attempts < 0:
		c.Attempts = math.MaxInt
	}
	if c.RetryIf == nil {
		c.RetryIf = func(err error) bool { return !errors.As(err, new(client.Outcome)) }
	}
	return c, nil
}

// GroupID is the default key: the property group-id. It says false for a message
// without one.
func GroupID(d *client.Delivery) (string, bool) {
	p := d.Message().Properties
	if p == nil || p.GroupID == nil {
		return "", false
	}
	return *p.GroupID, true
}

// With returns the Middleware. Each handler that it wraps has keys of its own. A
// delivery whose ctx ends before its turn has come, or between two attempts, goes
// back to its queue as a client.Requeue that isn't Failed. A Config that can't be
// used stops the consumer at its start, with an *argument.Error.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	return func(h client.Handler) client.Handler {
		invalid := err
		if h == nil && invalid == nil {
			invalid = argument.New("handler", nil, "is nil", "give ordered's Middleware a Handler")
		}
		return &handler{inner: h, cfg: cfg, invalid: invalid, lanes: newLanes()}
	}
}

type handler struct {
	inner   client.Handler
	cfg     Config
	invalid error
	lanes   *lanes
}

// Prepare refuses a bad Config, and has the consumer hand over in order. Handle
// still looks at keys: a handler that outlives its connection runs beside the
// consumer's next.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if h.invalid != nil {
		return h.invalid
	}
	if s.Order != nil {
		s.Order(h.cfg.Key)
	}
	return client.Prepare(ctx, h.inner, s)
}

// Handle waits for d's turn.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	if h.invalid != nil {
		return client.Requeue{Failed: true, Err: h.invalid}
	}
	key, ok := h.cfg.Key(d)
	if !ok {
		return h.attempts(ctx, d)
	}
	l := laneKey{d.Queue(), key}
	if err := h.lanes.enter(ctx, l, d); err != nil {
		return client.Requeue{Err: fmt.Errorf("waiting for the key's turn: %w", err)}
	}
	defer h.lanes.leave(l) // also after a panic, or runtime.Goexit
	return h.attempts(ctx, d)
}

func (h *handler) attempts(ctx context.Context, d *client.Delivery) error {
	pause := h.cfg.Pause
	for n := 1; ; n++ {
		err := h.inner.Handle(ctx, d)
		if err == nil || n >= h.cfg.Attempts || !h.cfg.RetryIf(err) {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return client.Requeue{Err: err}
		}
		pause = min(2*pause, h.cfg.MaxPause)
	}
}
