// Package dedupe handles a message once even if it is delivered several times. It
// accepts a duplicate without calling the handler.
//
//	once := dedupe.With(dedupe.Config{})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(once(handler)), client.ConsumerConfig{})
//
// RabbitMQ delivers at least once. A duplicate has one of three causes:
//
//   - A publisher sent the message again because it missed the confirmation.
//   - The connection was lost before the broker learned that the message was accepted.
//   - The copy of a retry was stored, and the original could not be accepted any more.
//
// All these copies have the message-id of the first. So have the retries of a message,
// which are not duplicates. Hence:
//
//   - The message is claimed before the handler runs. After success it is marked as
//     done, and only then accepted. After a failure the claim is released, so the retry
//     is handled.
//   - A copy that arrives while another one is handled waits for it in place. It isn't
//     returned: the broker would deliver it again at once, and below RabbitMQ 4.3 that
//     would use up the delivery limit. The wait holds a slot, but no longer than the
//     other copy's handler runs.
//   - A claim is a lease, which is renewed while the handler runs. The claim of a worker
//     that died expires after Config.Lease. The message waits until then.
//
// # What is not promised
//
// It doesn't make handling exactly-once. If the process ends between the handler's last
// effect and the mark, the message is handled again. Where that must not happen, the
// handler has to write a mark of its own in the same transaction as the effect.
//
// A message is also handled again once its mark is forgotten: after Config.TTL, or, with
// the Store in memory, after Config.Size others. That Store isn't shared with other
// processes and doesn't survive a restart.
//
// # Inside or outside of retry.With
//
// Put it inside, as above: the errors of a Store are then retried with the policy's
// back-off, like the handler's own. Outside, duplicates are recognised just as well,
// because only success marks a message as done. But an error of the Store then returns
// the message at once, as a failed delivery, until its queue's delivery limit.
package dedupe

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/internal/config"
)

// Config defines how duplicates are recognised. The zero value remembers the last
// 100,000 messages in memory, by queue and message-id.
type Config struct {
	// Store remembers which messages are done. Default: a NewMemory(Size), shared by all
	// handlers that the Middleware wraps.
	Store Store
	// Size is how many done messages the default Store remembers, in some 200 bytes each.
	// Default: 100,000.
	Size int
	// TTL is how long a message is remembered as done. It should exceed the time in
	// which copies can arrive: that of all retries and of an outage. Default: 24 h.
	TTL time.Duration
	// Lease is how long a claim lasts without renewal, at least 1 s. Handlers may run
	// longer: a claim is renewed after each third of this time. Default: 1 min.
	Lease time.Duration
	// Key returns the key that two copies of a message share. A delivery without one, for
	// which ok is false, is always handled. Keys over 512 bytes are replaced by a hash.
	// Key is called by many goroutines at once. Default: MessageID.
	Key func(*client.Delivery) (key string, ok bool)
	// Handled reports whether a handler that returned err has done its work, so that
	// later copies are duplicates. Default: err == nil.
	//
	// Take care with outcomes. A client.Forward can be a retry, whose copy has the same
	// id, and a dead letter can be replayed. If these were marked as done, the copy or
	// the replay would be accepted as a duplicate and LOST.
	Handled func(err error) bool
	// FailOpen handles a message when the Store fails, even though it may be a
	// duplicate. Default: false, the message fails with the Store's error.
	FailOpen bool
	// OnDuplicate, if not nil, is called for each duplicate that is accepted without
	// calling the handler.
	OnDuplicate func(*client.Delivery)
	// Logger logs faults that no error reports: marks that couldn't be written, and
	// claims that were lost. Default: slog.Default().
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
	firstPeek    = 10 * time.Millisecond
	lastPeek     = time.Second
	storeTimeout = 5 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	switch {
	case c.Size < 0 || c.Size > maxSize:
		return c, argument.New("dedupe.Config.Size", c.Size, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxSize))
	case c.Size > 0 && c.Store != nil:
		return c, argument.New("dedupe.Config.Size", c.Size, "has no effect beside a Store", "set only one of them: Size is for the default Store")
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

// With returns the Middleware. All handlers that it wraps share one Store. The default
// key contains the queue's name, so each of two queues with copies of a message handles
// it once.
//
// A duplicate is accepted. A delivery whose ctx ends while it waits for another copy
// goes back to the queue as a client.Requeue that isn't Failed. With a bad Config no
// consumer starts; the error is an *argument.Error.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	return func(h client.Handler) client.Handler {
		if refused := config.Refused("dedupe", h, err); refused != nil {
			return refused
		}
		return &handler{inner: h, cfg: cfg}
	}
}

type handler struct {
	inner client.Handler
	cfg   Config
}

// Prepare calls the handler's own.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
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
	err = h.inner.Handle(ctx, d)
	handled = h.cfg.Handled(err)
	return err
}

// claim is one delivery's right to handle its message.
type claim struct {
	cfg        *Config
	key, owner string

	mu      sync.Mutex // held while it is being renewed
	renewal *time.Timer
	ended   bool
}

// get claims the message, and waits for whoever else has it: the state is
// Claimed or Done.
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

// end marks the message as done, or gives the claim up. The ctx of the handler may
// have ended; that must not undo what it has done.
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
