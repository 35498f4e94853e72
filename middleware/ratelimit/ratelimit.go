// Package ratelimit limits how many handlers start per second, and how many run at once, for a service that accepts no
// more calls.
//
//	limit := ratelimit.With(ratelimit.Config{PerSecond: 50, Burst: 10})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(limit(handler)), client.ConsumerConfig{Concurrency: 16})
//
// All handlers that one Middleware value wraps share its limit. Use the same value for several
// consumers to limit them together, or call [With] for each of them. [Config.Shared] limits all workers
// of a queue together, in any number of processes.
//
// # Where to put it
//
//   - Inside retry.With, and around the calls to limit.
//   - Around client.Timeout; otherwise the timeout would include the waiting time.
//   - Calls that a middleware inside it repeats, such as immediate retries, aren't counted.
//
// # Resources
//
// A delivery that waits occupies a slot of the consumer's Concurrency and counts toward its
// Prefetch. No other consumer can receive it during that time, so choose a Prefetch that is
// handled within seconds. RabbitMQ 4.3 revokes a delivery after the consumer timeout, 30 minutes
// by default: keep Prefetch / PerSecond well below that. With Key, deliveries of a key over its
// limit can occupy all slots, and then other keys wait, too.
//
// With AtOnce and Shared, a worker receives no more messages than it has slots for. With Key, messages without a slot return
// to their queue for a while, where RabbitMQ supports that. See [Config.AtOnce].
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/middleware/internal/config"
	"github.com/hopback/hopback/middleware/internal/lru"
)

// Config defines the limit. The zero value limits nothing.
type Config struct {
	// PerSecond is how many calls may start per second, on average. 0.1 is one call in ten
	// seconds. Default: 0, no limit.
	PerSecond float64
	// Burst is how many calls may start at once after an idle time. Default: 1, which spaces
	// calls evenly.
	Burst int
	// AtOnce is how many calls may run at once, up to 1,000, with or without PerSecond. Default: 0, no limit.
	//
	// With Shared, the limit is for all workers of the queue together, and the sum never exceeds it, except for calls that
	// still run when their worker has lost its connection. A call needs a slot, which is an exclusive queue with a name that
	// begins with "hopback.slots."; RabbitMQ gives it to one connection, and deletes it with that. So workers need the
	// permission to configure these queues: without it, Consume returns client.ErrUnauthorized.
	//
	//   - Consume receives no more messages than it has slots for. They are at most as many as its Concurrency.
	//   - When a worker dies, the others get its slots within about a second. A worker that has slots keeps them while it has work.
	//   - During a memory or disk alarm, workers keep their slots, and nobody gets new ones. A worker that starts
	//     during one waits.
	//   - In a cluster of RabbitMQ 4.3, the slots of workers on a node that fails are missing until that node is back. With
	//     an AtOnce of 1, no call may run until then.
	//   - With Key, messages of a key without a free slot return to their queue for 1 to 30 s. That needs a quorum queue of
	//     RabbitMQ 4.3 or later, without a TTL or a length limit; elsewhere they wait in the process.
	AtOnce int
	// Name is what workers share AtOnce under. Consumers of several queues that share a limit need it, such as those of a
	// fair queue. Default: the name of the queue.
	Name string
	// Shared applies the limits to all workers of the queue together; for AtOnce, see there. Each process gets a share
	// of PerSecond in proportion to its consumers among all consumers of the queue; it asks the broker once a second
	// for their number. That needs a permission on the queue, as consuming does. Default: false, each process has the
	// whole limit.
	//
	//   - When a worker joins or leaves, the others follow within 2 s, in which the sum may be above or below the limit.
	//   - A worker starts a first call at once, so that as many as there are workers may start after an idle time.
	//   - During a memory or disk alarm the last number counts. A worker that starts during one uses a hundredth of the
	//     limit.
	Shared bool
	// Key, if not nil, returns the key that a delivery counts toward, for instance a tenant.
	// PerSecond, Burst, and AtOnce apply to each key separately. If ok is false, the delivery isn't
	// limited. Key must be safe for concurrent use. Default: nil, one limit for all.
	Key func(*client.Delivery) (key string, ok bool)
	// MaxKeys is how many keys are remembered for PerSecond. Beyond that, the least recently used key is
	// forgotten, and starts with a full Burst when it returns. So make MaxKeys larger than the
	// number of keys seen in Burst / PerSecond seconds. Default: 10,000.
	MaxKeys int
}

const (
	defaultMaxKeys = 10_000
	maxMaxKeys     = 100_000_000
)

func (c Config) withDefaults() (Config, error) {
	switch {
	case math.IsNaN(c.PerSecond) || math.IsInf(c.PerSecond, 0) || c.PerSecond < 0:
		return c, argument.New("ratelimit.Config.PerSecond", c.PerSecond, "is not a rate", "use the calls per second, or 0 for no limit")
	case c.Burst < 0 || c.Burst > math.MaxInt32:
		return c, argument.New("ratelimit.Config.Burst", c.Burst, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", math.MaxInt32))
	case c.AtOnce < 0 || c.AtOnce > maxAtOnce:
		return c, argument.New("ratelimit.Config.AtOnce", c.AtOnce, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for no limit", maxAtOnce))
	case c.MaxKeys < 0 || c.MaxKeys > maxMaxKeys:
		return c, argument.New("ratelimit.Config.MaxKeys", c.MaxKeys, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxMaxKeys))
	}
	if c.Name != "" {
		if err := names.Check(argument.Root("ratelimit.Config").Field("Name"), c.Name); err != nil {
			return c, err
		}
	}
	if c.Burst == 0 {
		c.Burst = 1
	}
	if c.MaxKeys == 0 {
		c.MaxKeys = defaultMaxKeys
	}
	return c, nil
}

// With returns the Middleware. A delivery over the limit waits before its handler is called.
// Deliveries wait in the order in which they arrive.
//
//   - If the ctx of a delivery ends while it waits, it returns to the queue as a client.Requeue
//     that isn't Failed, and isn't counted.
//   - If cfg is invalid, Consume returns an *argument.Error when it starts.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	l := &limits{cfg: cfg, share: newShare(cfg.Shared && cfg.PerSecond > 0), atOnce: newAtOnce(cfg)}
	if cfg.Key == nil {
		l.one = newBucket(l.cfg, l.share)
	} else {
		l.keys = lru.New[string, *bucket](cfg.MaxKeys)
	}
	return func(h client.Handler) client.Handler {
		if refused := config.Refused("ratelimit", h, err); refused != nil {
			return refused
		}
		return &handler{inner: h, limits: l}
	}
}

// limits is what all handlers of one Middleware share.
type limits struct {
	cfg    Config
	share  *share
	atOnce *atOnce
	one    *bucket // without Config.Key

	mu   sync.Mutex
	keys *lru.Map[string, *bucket]
}

// key returns the key of a delivery; ok is false if it isn't limited.
func (l *limits) key(d *client.Delivery) (key string, ok bool) {
	switch {
	case l.cfg.PerSecond == 0 && l.cfg.AtOnce == 0:
		return "", false
	case l.cfg.Key == nil:
		return "", true
	}
	return l.cfg.Key(d)
}

// of returns the bucket of a key.
func (l *limits) of(key string) *bucket {
	if l.one != nil {
		return l.one
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	one, ok := l.keys.Get(key)
	if !ok {
		one = newBucket(l.cfg, l.share)
		l.keys.Put(key, one)
	}
	return one
}

type handler struct {
	inner  client.Handler
	limits *limits
}

// Prepare calls the inner handler's Prepare, and takes the consumer's part of a shared limit.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if err := client.Prepare(ctx, h.inner, s); err != nil {
		return err
	}
	if h.limits.cfg.AtOnce > 0 {
		if err := h.limits.atOnce.join(ctx, s); err != nil {
			return err
		}
	}
	return h.limits.share.join(ctx, s)
}

// Handle waits for its turn.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	key, limited := h.limits.key(d)
	if !limited {
		return h.inner.Handle(ctx, d)
	}
	for {
		line, err := h.limits.enter(ctx, key)
		if err != nil {
			return err
		}
		if !inside.Paused(ctx) {
			defer h.limits.leave(line)
			return h.inner.Handle(ctx, d)
		}
		h.limits.leave(line)
		if !inside.AwaitResume(ctx) {
			return client.Requeue{Err: errPaused}
		}
	}
}

var errPaused = errors.New("the consumer was paused while the message waited for the limit")

// enter waits until a call may start, after which leave must be called.
func (l *limits) enter(ctx context.Context, key string) (line *line, err error) {
	if l.cfg.AtOnce > 0 {
		if line, err = l.atOnce.enter(ctx, key); err != nil {
			return nil, err
		}
	}
	if l.cfg.PerSecond > 0 {
		if err := l.of(key).wait(ctx); err != nil {
			l.leave(line)
			return nil, client.Requeue{Err: fmt.Errorf("waiting for the rate limit: %w", err)}
		}
	}
	return line, nil
}

// leave ends a call. The line is nil without Config.AtOnce.
func (l *limits) leave(line *line) {
	if line != nil {
		l.atOnce.leave(line)
	}
}
