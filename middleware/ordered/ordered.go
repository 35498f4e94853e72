// Package ordered handles messages with the same key one after the other, and messages
// with different keys at the same time.
//
//	inTurn := ordered.With(ordered.Config{Attempts: 5})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(inTurn(handler)), client.ConsumerConfig{Concurrency: 16})
//
// # What is promised, and what isn't
//
// Handlers of one key never run at the same time. They run in the order in which the
// broker delivered the messages. This holds within one consumer. For a whole queue, use
// a single active consumer, or a queue for each key.
//
// Another client's consumer has no client.Start.Order. There the order is that in which
// deliveries reach this middleware: of those that wait for a key, the first received is
// next, but two that arrive together while their key is idle may begin swapped.
//
// Other messages overtake one in the consumer's quarantine (see
// client.ConsumerConfig.NoIsolation), and every message that a lost connection, a pause
// or a drain returns to the queue.
//
// # A failure
//
// A message that goes back to the queue is overtaken by those behind it: a retry by
// retry.With, a client.Requeue, a delivery that a drain returns. To keep its turn, a
// message has to be tried again in place, up to Config.Attempts times. Its key waits
// meanwhile, and other keys go on.
//
// After the last attempt the failure is returned, for retry.With to treat, and the key
// moves on. With a negative number of attempts, the key waits until the message succeeds
// or its ctx ends. Keep this time well below the consumer timeout of RabbitMQ 4.3 (by
// default 30 minutes), after which the broker delivers the message elsewhere.
//
// # What waiting costs
//
// A delivery that waits for its key is one of the consumer's Prefetch. It holds no slot
// where there is a client.Start.Order. Without one it does: a run of messages with one
// busy key can hold all slots, and all other keys wait, too. An idle key takes no
// memory, so memory is bounded by Prefetch.
//
// # Where it belongs
//
// Put it directly inside retry.With, so Attempts sees failures rather than outcomes. Put
// it around ratelimit, breaker and dedupe, which release deliveries in any order.
package ordered

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/middleware/internal/config"
)

// Config defines which messages are kept in order. The zero value orders by group-id
// and returns each failure at once.
type Config struct {
	// Key returns the key of a delivery. A delivery without one, for which ok is false,
	// doesn't wait. The same key in two queues is two keys. Key is called by many
	// goroutines at once. Default: the property group-id.
	Key func(*client.Delivery) (key string, ok bool)
	// Attempts is how often the handler is called before its failure is returned, the
	// first call included. A negative number means until it succeeds. Default: 1.
	Attempts int
	// Pause is the time between the first attempt and the second. It doubles with each
	// further attempt. Default: 100 ms.
	Pause time.Duration
	// MaxPause is the longest time between attempts. Default: 5 s, or Pause if that is
	// longer.
	MaxPause time.Duration
	// RetryIf reports whether a failure is tried again in place. err is never nil.
	// Default: true for every error without a client.Outcome, retry.Permanent,
	// retry.Discard, retry.After or retry.Snooze in its chain: with these, another
	// attempt at once is of no use.
	RetryIf func(error) bool
}

const (
	defaultPause    = 100 * time.Millisecond
	defaultMaxPause = 5 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	pause := config.Pause{Of: "ordered.Config", Name: "Pause", LimitName: "MaxPause", Default: defaultPause, LimitDefault: defaultMaxPause}
	if err := pause.Set(&c.Pause, &c.MaxPause); err != nil {
		return c, err
	}
	if c.Key == nil {
		c.Key = groupID
	}
	switch {
	case c.Attempts == 0:
		c.Attempts = 1
	case c.Attempts < 0:
		c.Attempts = math.MaxInt
	}
	if c.RetryIf == nil {
		c.RetryIf = func(err error) bool { return outcome.Read[client.Outcome](err).Plain() }
	}
	return c, nil
}

// groupID is the default Config.Key: the property group-id. It returns false for a
// message without one.
func groupID(d *client.Delivery) (string, bool) {
	p := d.Message().Properties
	if p == nil || p.GroupID == nil {
		return "", false
	}
	return *p.GroupID, true
}

// With returns the Middleware. Each handler that it wraps has keys of its own. A
// delivery whose ctx ends before its turn, or between two attempts, goes back to its
// queue as a client.Requeue that isn't Failed. With a bad Config no consumer starts; the
// error is an *argument.Error.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	return func(h client.Handler) client.Handler {
		if refused := config.Refused("ordered", h, err); refused != nil {
			return refused
		}
		return &handler{inner: h, cfg: cfg}
	}
}

type handler struct {
	inner client.Handler
	cfg   Config
	turns turns
}

// Prepare has the consumer hand over in order. Handle
// still looks at keys: a handler that outlives its connection runs beside the
// consumer's next.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if s.Order != nil {
		s.Order(h.cfg.Key)
	}
	return client.Prepare(ctx, h.inner, s)
}

// Handle waits for d's turn.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	key, ok := h.cfg.Key(d)
	if !ok {
		return h.attempts(ctx, d)
	}
	l := laneKey{d.Queue(), key}
	if err := h.turns.enter(ctx, l, d); err != nil {
		return client.Requeue{Err: fmt.Errorf("waiting for the key's turn: %w", err)}
	}
	defer h.turns.leave(l) // also after a panic, or runtime.Goexit
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
