// Package ordered handles messages with the same key one after the other, and messages with
// different keys in parallel.
//
//	inTurn := ordered.With(ordered.Config{Attempts: 5})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(inTurn(handler)), client.ConsumerConfig{Concurrency: 16})
//
// # What is guaranteed
//
// Handlers of one key never run at the same time, and run in the order in which the broker
// delivered the messages. This holds within one consumer. For a whole queue, use a single active
// consumer, or one queue per key.
//
// What is not guaranteed:
//
//   - With another client's consumer, which has no client.Start.Order, the order is that in
//     which deliveries reach this middleware: among deliveries that wait for a key, the first
//     received is next, but two that arrive together while their key is idle may start in either
//     order.
//   - Messages can overtake a poison message that the consumer isolates (see
//     client.ConsumerConfig.NoIsolation), and every message that a lost connection, a pause, or
//     a drain returns to the queue.
//
// # Failures
//
// A message that returns to the queue is overtaken by later ones: a retry by retry.With, a
// client.Requeue, or a delivery that a drain returns. To keep its position, a message must be
// retried in place, up to [Config.Attempts] times. During that time, messages of its key wait;
// other keys continue.
//
// After the last attempt, the failure is returned, for instance to retry.With, and the next
// message of the key starts. With a negative number of attempts, the key waits until the message
// succeeds or its ctx ends. Keep this time well below the consumer timeout of RabbitMQ 4.3 (30
// minutes by default), after which the broker delivers the message again elsewhere.
//
// # Resources
//
// A delivery that waits for its key counts toward the consumer's Prefetch. With
// client.Start.Order, it occupies no handler slot. Without it, it does: a series of messages
// with one busy key can occupy all slots, and then all other keys wait, too. An idle key takes
// no memory, so Prefetch bounds the memory.
//
// # Where to put it
//
// Put it directly inside retry.With, so that Attempts sees failures rather than outcomes. Put it
// around ratelimit, breaker, and dedupe, which let deliveries through in any order.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package ordered

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/middleware/internal/config"
)

// Config defines which messages are kept in order. The zero value orders by group-id and returns
// each failure at once.
type Config struct {
	// Key returns the key of a delivery. If ok is false, the delivery doesn't wait. The same key
	// in two queues is two keys. Key must be safe for concurrent use. Default: the property
	// group-id.
	Key func(*client.Delivery) (key string, ok bool)
	// Attempts is how many times the handler is called before its failure is returned, including
	// the first call. A negative number means until it succeeds. Default: 1.
	Attempts int
	// Pause is the time between the first attempt and the second. It doubles with each further
	// attempt. Default: 100 ms.
	Pause time.Duration
	// MaxPause limits the time between attempts. Default: 5 s, or Pause if that is longer.
	MaxPause time.Duration
	// RetryIf reports whether a failure is retried in place. err is never nil. Default: true for
	// every error without a client.Outcome, retry.Permanent, retry.Discard, retry.After, or
	// retry.Snooze in its chain, because an immediate retry doesn't help with these.
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

// With returns the Middleware. Each handler that it wraps has separate keys.
//
//   - A delivery whose ctx ends before its turn, or between two attempts, returns to its queue
//     as a client.Requeue that isn't Failed.
//   - If cfg is invalid, Consume returns an *argument.Error when it starts.
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

// Prepare makes the consumer deliver in order. Handle still checks keys: a handler that outlives
// its connection runs next to the consumer's next one.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if s.Order != nil {
		s.Order(h.cfg.Key)
	}
	return client.Prepare(ctx, h.inner, s)
}

// Handle waits until it is the turn of d.
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
	if !inside.AwaitResume(ctx) {
		return client.Requeue{Err: errors.New("the consumer was paused while the message waited for its key's turn")}
	}
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
