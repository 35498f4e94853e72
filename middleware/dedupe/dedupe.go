// Package dedupe handles a message once even if it is delivered several times. It acknowledges a
// duplicate without calling the handler.
//
//	once := dedupe.With(dedupe.Config{})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(once(handler)), client.ConsumerConfig{})
//
// RabbitMQ delivers at least once. A duplicate has one of three causes:
//
//   - A publisher sent the message again because it didn't receive the confirmation.
//   - The connection was lost before the broker received the acknowledgment.
//   - The broker stored a retry copy, but then the original couldn't be acknowledged.
//
// All these copies have the same message-id. So do the retries of a message, but these aren't
// duplicates. So dedupe works like this:
//
//   - It claims the message before the handler runs. After a success, it marks the message as
//     done, and only then acknowledges it. After a failure, it releases the claim, so the retry
//     is handled.
//   - A copy that arrives while another one is being handled waits in the consumer. It isn't
//     requeued: the broker would deliver it again at once, and below RabbitMQ 4.3 that would use
//     up the delivery limit. The wait occupies a slot, but no longer than the other copy's
//     handler runs.
//   - A claim is a lease, which is renewed while the handler runs. If a worker crashes, its
//     claim expires after [Config.Lease], and the message waits until then.
//
// # Limits
//
// It doesn't make handling exactly-once. If the process crashes between the handler's last
// effect and the mark, the message is handled again. If that must not happen, write a mark in
// the same transaction as the effect; package postgres/inbox does that in PostgreSQL.
//
// A message is also handled again once its mark is forgotten: after [Config.TTL], or, with the
// default [Memory], after [Config.Size] other messages. Memory isn't shared with other processes
// and doesn't survive a restart. For several processes, use package dedupe/redisstore.
//
// # Inside or outside of retry.With
//
// Put it inside, as above: then errors of a [Store] are retried with the policy's backoff, like
// the handler's own errors. Outside, it recognizes duplicates just as well, because only a
// success marks a message as done. But then an error of the Store returns the message at once,
// as a failed delivery, until the queue's delivery limit.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package dedupe

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/middleware/internal/config"
)

// Config defines how duplicates are recognized. The zero value remembers the last 100,000
// messages in memory, by queue and message-id.
type Config struct {
	// Store remembers which messages are done. Default: a [NewMemory] with Size, shared by all
	// handlers that the Middleware wraps.
	Store Store
	// Size is how many done messages the default Store remembers. Each takes about 200 bytes.
	// Default: 100,000.
	Size int
	// TTL is how long a message is remembered as done. Make it longer than the time in which
	// copies can arrive: that of all retries, plus an outage. Default: 24 h.
	TTL time.Duration
	// Lease is how long a claim lasts without renewal; at least 1 s. Handlers may run longer: a
	// claim is renewed after each third of this time. Default: 1 min.
	Lease time.Duration
	// Key returns the key that copies of a message share. If ok is false, the delivery is always
	// handled. Keys longer than 512 bytes are replaced by a hash. Key must be safe for
	// concurrent use. Default: [MessageID].
	Key func(*client.Delivery) (key string, ok bool)
	// Handled reports whether a handler that returned err has done its work, so that later
	// copies are duplicates. Default: err == nil.
	//
	// Be careful with outcomes. A dead letter can be replayed. If Handled returned true for it, the
	// replayed message would be acknowledged as a duplicate, and LOST. Handled isn't called for a
	// retry of retry.With: that message returns with the same id, and is never marked as done.
	Handled func(err error) bool
	// FailOpen handles a message when the Store fails, although it may be a duplicate. Default:
	// false, which makes the message fail with the Store's error.
	FailOpen bool
	// OnDuplicate, if not nil, is called for each duplicate that is acknowledged without calling
	// the handler.
	OnDuplicate func(*client.Delivery)
	// Logger logs problems that no error reports: marks that couldn't be written, and claims
	// that were lost. Default: slog.Default().
	Logger *slog.Logger
}

// Defaults and bounds of Config.
const (
	defaultSize  = 100_000
	maxSize      = 100_000_000
	defaultTTL   = 24 * time.Hour
	defaultLease = time.Minute
	minLease     = time.Second
)

// Pauses between looks at a claim that another has, and the time that a Store has
// for an answer.
const (
	// Pauses between checks of a claim that another delivery holds, and the time limit of a
	// Store's call.
	firstPeek    = 10 * time.Millisecond
	lastPeek     = time.Second
	storeTimeout = 5 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	switch {
	case c.Size < 0 || c.Size > maxSize:
		return c, argument.New("dedupe.Config.Size", c.Size, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxSize))
	case c.Size > 0 && c.Store != nil:
		return c, argument.New("dedupe.Config.Size", c.Size, "has no effect if Store is set", "set only one of them: Size is for the default Store")
	case c.TTL < 0:
		return c, argument.New("dedupe.Config.TTL", c.TTL, "is negative", "use a positive duration, or 0 for the default")
	case c.Lease < 0 || c.Lease > 0 && c.Lease < minLease:
		return c, argument.New("dedupe.Config.Lease", c.Lease, "is too short", fmt.Sprintf("use at least %v, or 0 for the default", minLease))
	}
	if c.Store == nil {
		c.Store = NewMemory(c.Size)
	}
	if c.TTL == 0 {
		c.TTL = defaultTTL
	}
	if c.Lease == 0 {
		c.Lease = defaultLease
	}
	if c.Key == nil {
		c.Key = MessageID
	}
	if c.Handled == nil {
		c.Handled = func(err error) bool { return err == nil }
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

// With returns the Middleware. All handlers that it wraps share one Store. The default key
// contains the queue's name, so if two queues each have a copy of a message, each queue handles
// it once.
//
//   - A duplicate is acknowledged.
//   - A delivery whose ctx ends while it waits for another copy returns to the queue as a
//     client.Requeue that isn't Failed.
//   - If cfg is invalid, Consume returns an *argument.Error when it starts.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	var lines *loglines.Repeats
	if err == nil {
		lines = loglines.NewRepeats(cfg.Logger.Handler())
		cfg.Logger = slog.New(lines)
	}
	return func(h client.Handler) client.Handler {
		if refused := config.Refused("dedupe", h, err); refused != nil {
			return refused
		}
		return &handler{inner: h, cfg: cfg, lines: lines}
	}
}

type handler struct {
	inner client.Handler
	cfg   Config
	lines *loglines.Repeats // of cfg.Logger
}

// Prepare calls the inner handler's Prepare.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	refusal.Of(ctx).OnEnd(h.lines.Flush)
	return client.Prepare(ctx, h.inner, s)
}

// Handle calls the handler unless d is a duplicate.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	key, ok := h.cfg.Key(d)
	if !ok {
		return h.inner.Handle(ctx, d)
	}
	c := &claim{cfg: &h.cfg, key: shorten(key), owner: rand.Text()}
	state, err := c.get(ctx)
	switch {
	case err != nil && ctx.Err() != nil:
		return client.Requeue{Err: fmt.Errorf("claiming the message: %w", err)}
	case err != nil && h.cfg.FailOpen:
		h.cfg.Logger.Warn("hopback: the dedupe store failed; the message is handled, and may be a duplicate", "key", c.key, "error", err)
		return h.inner.Handle(ctx, d)
	case err != nil:
		return fmt.Errorf("dedupe: asking the store: %w", err)
	case state == StateDone:
		if h.cfg.OnDuplicate != nil {
			h.cfg.OnDuplicate(d)
		}
		return nil
	}

	// A panic, or runtime.Goexit, gives the claim up as an error does.
	handled := false
	c.keep()
	defer func() { c.end(handled) }()
	if !inside.AwaitResume(ctx) {
		return client.Requeue{Err: errors.New("the consumer was paused while the message waited for its claim")}
	}
	err = h.inner.Handle(ctx, d)
	handled = !retries(err) && h.cfg.Handled(err)
	return err
}

// retries reports whether err is a retry of retry.With, which is inside then.
func retries(err error) bool {
	if _, later := outcome.Find[*inside.Later](err); later {
		return true
	}
	o, _ := outcome.Find[client.Outcome](err)
	switch o := o.(type) {
	case client.Forward:
		return o.Message != nil && o.Message.Annotations[annotation.History] != nil
	case client.Modify:
		_, waits := o.Annotations[annotation.Delay]
		return waits
	}
	return false
}

// claim is one delivery's right to handle its message.
type claim struct {
	cfg        *Config
	key, owner string

	mu      sync.Mutex // held while it is being renewed
	renewal *time.Timer
	ended   bool
}

// get claims the message. If another delivery holds the claim, it waits. The state is Claimed or
// Done.
func (c *claim) get(ctx context.Context) (State, error) {
	var timer *time.Timer
	for pause := firstPeek; ; pause = min(2*pause, lastPeek) {
		asking, cancel := context.WithTimeout(ctx, storeTimeout)
		state, err := c.cfg.Store.Claim(asking, c.key, c.owner, c.cfg.Lease)
		cancel()
		switch {
		case err != nil:
			return "", err
		case state == StateClaimed || state == StateDone:
			return state, nil
		case state != StateBusy:
			return "", fmt.Errorf("%T.Claim returned the unknown state %q", c.cfg.Store, state)
		}
		if timer == nil {
			timer = time.NewTimer(pause)
			defer timer.Stop()
		} else {
			timer.Reset(pause)
		}
		select {
		case <-timer.C:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// keep renews the claim until end.
func (c *claim) keep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.renewal = time.AfterFunc(c.cfg.Lease/3, c.renew)
}

func (c *claim) renew() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(storeTimeout, c.cfg.Lease/3))
	defer cancel()
	kept, err := c.cfg.Store.Renew(ctx, c.key, c.owner, c.cfg.Lease)
	if err == nil && !kept {
		c.cfg.Logger.Warn("hopback: the claim on a message expired while its handler runs; another copy may be handled at the same time", "key", c.key)
		return
	}
	if err != nil {
		c.cfg.Logger.Warn("hopback: the claim on a message couldn't be renewed; trying again", "key", c.key, "error", err)
	}
	c.renewal.Reset(c.cfg.Lease / 3)
}

// end marks the message as done, or releases the claim. The handler's ctx may have ended; that
// must not undo its work.
func (c *claim) end(handled bool) {
	c.renewal.Stop()
	c.mu.Lock() // no renewal may come after the release
	c.ended = true
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
	defer cancel()
	if !handled {
		if err := c.cfg.Store.Release(ctx, c.key, c.owner); err != nil {
			c.cfg.Logger.Warn("hopback: the claim on a message couldn't be released; a copy of it waits until the claim expires", "key", c.key, "error", err)
		}
		return
	}
	// The work is done: to fail now would only have it done again.
	if err := c.cfg.Store.Done(ctx, c.key, c.owner, c.cfg.TTL); err != nil {
		c.cfg.Logger.Error("hopback: a message couldn't be marked as done; a copy of it would be handled again", "key", c.key, "error", err)
	}
}
