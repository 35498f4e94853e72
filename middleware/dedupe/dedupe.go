// Package dedupe handles each message once where it is delivered several times: a
// duplicate is accepted without a call of the handler.
//
//	once := dedupe.With(dedupe.Config{})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(once(handler)), client.ConsumerConfig{})
//
// RabbitMQ delivers at least once. A copy more than one comes from a publisher
// that sent again because it didn't hear of the confirmation, from a connection
// that was lost before the broker heard that a message was accepted, or from a
// retry whose copy was stored and whose original couldn't be accepted any more.
// All these copies have the message-id of the first, and so have the retries of a
// message, which must not be taken for duplicates. Hence:
//
//   - Before the handler runs, the message is claimed. When the handler has
//     succeeded it is marked done, and only then accepted. When the handler fails
//     the claim is given up, so that the message is handled again as it hops back.
//   - A copy that comes while another is being handled waits for it, in place.
//     Giving it back would spin, since the broker delivers it again at once, and
//     on RabbitMQ below 4.3 it would use up the delivery limit. Waiting holds a
//     slot, but no longer than the other's handler runs.
//   - A claim is a lease, renewed while the handler runs. That of a worker that
//     died runs out after Config.Lease; until then the message waits.
//
// # What is not promised
//
// Exactly once. Should the process end between the handler's last effect and the
// mark, the message is handled again. Where that mustn't be, the mark has to be
// written in the same transaction as the effect, by the handler itself.
// A message is also handled again once its mark is forgotten: after Config.TTL,
// or, in memory, when Config.Size others were handled since; and with the memory
// store by every other process, and after a restart.
//
// # Inside or outside of retry.With
//
// Inside, as above, is right: then the errors of a Store are retried with the
// policy's back-off like the handler's own. Outside, duplicates are told just as
// well, since only success marks a message done, but an error of the Store
// makes the message come back at once, as a failed delivery, until its
// queue's delivery limit.
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
)

// Config is how to tell duplicates. The zero value remembers the last 100,000
// messages in memory, by queue and message-id.
type Config struct {
	// Store remembers which messages are done. Default: a NewMemory(Size) that
	// all handlers share that the Middleware wraps.
	Store Store
	// Size is how many done messages the default Store remembers. A message takes
	// some 200 bytes. Default: 100000.
	Size int
	// TTL is how long a message is remembered as done. It should exceed the time
	// in which copies may come: all retries, and an outage. Default: 24 h.
	TTL time.Duration
	// Lease is after how long without a renewal a claim is taken for a dead
	// worker's. Handlers may run longer: it is renewed three times as often. At
	// least a second. Default: 1 min.
	Lease time.Duration
	// Key names what must be handled once only. A delivery for which it says
	// false is handled always. Keys longer than 512 bytes are replaced by a hash
	// of them. It is called by many goroutines at once. Default: MessageID.
	Key func(*client.Delivery) (key string, ok bool)
	// Handled says whether a handler that returned err has done the work, so that
	// later copies are duplicates. Default: err == nil.
	//
	// Take care with outcomes. A client.Forward may be a retry, whose copy has
	// the same id; a dead letter may be replayed: were these marked as done, the
	// copy or the replay would be accepted as a duplicate, and be lost.
	Handled func(err error) bool
	// FailOpen handles messages that the Store couldn't be asked about, and so
	// perhaps duplicates. Without it they fail with the Store's error.
	FailOpen bool
	// OnDuplicate, if not nil, is told of each duplicate that is accepted without
	// a call of the handler.
	OnDuplicate func(*client.Delivery)
	// Logger gets what can't be returned: marks that couldn't be written, claims
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
	firstLook    = 10 * time.Millisecond
	lastLook     = time.Second
	storeTimeout = 5 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	switch {
	case c.Size < 0 || c.Size > maxSize:
		return c, argument.New("dedupe.Config.Size", c.Size, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxSize))
	case c.Size > 0 && c.Store != nil:
		return c, argument.New("dedupe.Config.Size", c.Size, "has no effect beside a Store", "leave one of them out; Size is for the default Store")
	case c.TTL < 0:
		return c, argument.New("dedupe.Config.TTL", c.TTL, "is negative", "give a duration, or 0 for the default")
	case c.Lease < 0 || c.Lease > 0 && c.Lease < minLease:
		return c, argument.New("dedupe.Config.Lease", c.Lease, "is too short", fmt.Sprintf("give at least %v, or 0 for the default", minLease))
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

// With returns the Middleware. All handlers that it wraps share one Store; the
// default key holds the queue's name, so that two queues which get copies of the
// same message handle it once each.
//
// A duplicate is accepted. A delivery whose ctx ends while it waits for another
// copy goes back to the queue as a client.Requeue that isn't Failed. A Config
// that can't be used stops the consumer at its start, with an *argument.Error.
func With(cfg Config) client.Middleware {
	cfg, err := cfg.withDefaults()
	return func(h client.Handler) client.Handler {
		invalid := err
		if h == nil && invalid == nil {
			invalid = argument.New("handler", nil, "is nil", "give dedupe's Middleware a Handler")
		}
		return &handler{inner: h, cfg: cfg, invalid: invalid}
	}
}

type handler struct {
	inner   client.Handler
	cfg     Config
	invalid error
}

// Prepare refuses a bad Config.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if h.invalid != nil {
		return h.invalid
	}
	return client.Prepare(ctx, h.inner, s)
}

// Handle calls the handler unless d is a duplicate.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	if h.invalid != nil {
		return client.Requeue{Failed: true, Err: h.invalid}
	}
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
		h.cfg.Logger.Warn("hopback: duplicates can't be told, the message is handled", "key", c.key, "error", err)
		return h.inner.Handle(ctx, d)
	case err != nil:
		return fmt.Errorf("dedupe: asking the store: %w", err)
	case state == Done:
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
	for pause := firstLook; ; pause = min(2*pause, lastLook) {
		asking, cancel := context.WithTimeout(ctx, storeTimeout)
		state, err := c.cfg.Store.Claim(asking, c.key, c.owner, c.cfg.Lease)
		cancel()
		switch {
		case err != nil:
			return 0, err
		case state == Claimed || state == Done:
			return state, nil
		case state != Busy:
			return 0, fmt.Errorf("%T answered to Claim with the state %d", c.cfg.Store, state)
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
			return 0, context.Cause(ctx)
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
		c.cfg.Logger.Warn("hopback: the claim on a message ran out while its handler runs, another copy may be handled at the same time", "key", c.key)
		return
	}
	if err != nil {
		c.cfg.Logger.Warn("hopback: the claim on a message couldn't be renewed, trying again", "key", c.key, "error", err)
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
			c.cfg.Logger.Warn("hopback: the claim on a message couldn't be given up, it waits for the claim to run out", "key", c.key, "error", err)
		}
		return
	}
	// The work is done: to fail now would only have it done again.
	if err := c.cfg.Store.Done(ctx, c.key, c.owner, c.cfg.TTL); err != nil {
		c.cfg.Logger.Error("hopback: a message couldn't be marked as done, a copy of it will be handled again", "key", c.key, "error", err)
	}
}
