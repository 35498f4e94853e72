// Package inbox lets a message have its effect in PostgreSQL once, however often it is
// delivered.
//
//	once := inbox.With(pool, inbox.Config{})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(once(handler)), client.ConsumerConfig{})
//
// The handler gets a transaction with its ctx and writes by it:
//
//	tx, _ := inbox.Tx(ctx)
//	_, err := tx.Exec(ctx, "UPDATE orders SET paid = true WHERE id = $1", order.ID)
//
// The message's key is inserted into the table hopback_inbox in the same transaction. It
// is committed after the handler has returned nil, and before the message is accepted. So
// the effect and the mark are there together, or neither is. A copy that comes later finds
// the mark and is accepted without calling the handler. One that comes at the same time
// waits until the first has committed or failed.
//
// A service that uses database/sql has WithSQL and SQLTx instead.
//
// A handler's error rolls the transaction back. So retries, which have the first
// message-id, are handled.
//
// # What is certain at each point
//
//   - The process, the database or the connection ends before the commit: nothing was
//     done. The broker delivers the message again.
//   - The commit's answer is lost: the handler's error says so, and the message comes
//     again. If the commit had succeeded, it is a duplicate then.
//   - The process ends between the commit and the acceptance: the message comes again,
//     and is a duplicate.
//
// What the handler does outside of the transaction, such as a call to another service, may
// be done twice. What it publishes by package outbox, in this transaction, is published
// for a message that was handled, and only for that.
//
// A mark is kept for Config.Keep. A copy that comes after that is handled again.
package inbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/dedupe"
)

// Config configures With. The zero value is ready to use.
type Config struct {
	// Key returns the key that all copies of a message share. A delivery without one, for
	// which ok is false, is handled in a transaction, too, but without a mark. It is called
	// by many goroutines at once. Keys over 512 bytes are replaced by a hash. Default:
	// dedupe.MessageID, the queue's name and the message-id.
	Key func(*client.Delivery) (key string, ok bool)
	// Keep is how long a mark is kept, at least a minute. It should exceed the time in
	// which copies can arrive: that of all retries, of an outage, and of a replay of dead
	// letters. Marks are removed in the background while messages are handled.
	// Default: 7 days.
	Keep time.Duration
	// Isolation is that of the transactions. One that couldn't be serialized fails as the
	// handler's own errors do. Default: the database's.
	Isolation pgx.TxIsoLevel
	// OnDuplicate, if not nil, is called for each duplicate that is accepted without
	// calling the handler.
	OnDuplicate func(*client.Delivery)
	// Logger logs what no error reports: marks that couldn't be removed.
	// Default: slog.Default().
	Logger *slog.Logger
}

const (
	defaultKeep = 7 * 24 * time.Hour
	minKeep     = time.Minute
	maxKey      = 512
	// commitLimit bounds a commit, whose ctx doesn't end with the handler's.
	commitLimit = 10 * time.Second
	// pruneEvery is the pause between two removals of old marks, pruneBatch how many one
	// statement removes, and pruneLimit its time.
	pruneEvery = time.Minute
	pruneBatch = 5000
	pruneLimit = 10 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	if c.Keep != 0 && c.Keep < minKeep {
		return c, argument.New("inbox.Config.Keep", c.Keep, "is too short", "use at least a minute, or 0 for the default of 7 days")
	}
	if c.Keep == 0 {
		c.Keep = defaultKeep
	}
	if c.Key == nil {
		c.Key = dedupe.MessageID
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

type inTx struct{}

// Tx returns the transaction in which a message is handled. It is false outside of a
// handler that With has wrapped. The handler must neither commit nor roll it back; With
// does so when the handler has returned. A pgx.Tx isn't safe for concurrent use.
func Tx(ctx context.Context) (pgx.Tx, bool) {
	tx, ok := ctx.Value(inTx{}).(pgx.Tx)
	return tx, ok
}

// With returns a Middleware whose handlers handle a message in a transaction of pool's
// database, once. Each handler that runs holds a connection of the pool, so the pool
// should have one more than client.ConsumerConfig.Concurrency.
//
// No consumer starts with a bad Config or without the table that postgres.Migrate creates.
func With(pool *pgxpool.Pool, cfg Config) client.Middleware {
	var bad error
	if pool == nil {
		bad = argument.New("pool", nil, "is nil", "give a pool of pgxpool.New")
	}
	return with(pgxDatabase{pool, cfg.Isolation}, cfg, bad)
}

func with(db database, cfg Config, bad error) client.Middleware {
	cfg, err := cfg.withDefaults()
	if bad == nil {
		bad = err
	}
	pruned := &atomic.Int64{}
	return func(h client.Handler) client.Handler {
		err := bad // of this handler alone
		if err == nil && h == nil {
			err = argument.New("handler", nil, "is nil", "pass a Handler to inbox's Middleware")
		}
		return &handler{inner: h, db: db, cfg: cfg, err: err, pruned: pruned}
	}
}

type handler struct {
	inner  client.Handler
	db     database
	cfg    Config
	err    error         // of the configuration
	pruned *atomic.Int64 // when old marks were removed last, in ns since 1970
}

// Prepare refuses to start without the table.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if h.err != nil {
		return h.err
	}
	if _, err := h.db.exec(ctx, "SELECT FROM hopback_inbox LIMIT 0"); err != nil {
		var pg interface{ SQLState() string } // pgx's error, and lib/pq's
		if errors.As(err, &pg) && pg.SQLState() == "42P01" {
			return fmt.Errorf("inbox: the database has no inbox; call postgres.Migrate: %w", err)
		}
		return fmt.Errorf("inbox: %w", err)
	}
	return client.Prepare(ctx, h.inner, s)
}

// Handle calls the handler in a transaction, unless d is a duplicate.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) (err error) {
	if h.err != nil { // a test, or another consumer, may not have called Prepare
		return client.Requeue{Failed: true, Err: h.err}
	}
	tx, err := h.db.begin(ctx)
	if err != nil {
		return h.failed(ctx, "beginning a transaction", err)
	}
	defer func() {
		// After a commit this does nothing. A panic passes, rolled back.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitLimit)
		defer cancel()
		tx.end(ending)
	}()
	if key, ok := h.cfg.Key(d); ok {
		// It waits for a transaction that has inserted the key and not ended yet.
		marked, err := tx.exec(ctx, "INSERT INTO hopback_inbox (key) VALUES ($1) ON CONFLICT DO NOTHING", shorten(key))
		if err != nil {
			return h.failed(ctx, "marking the message", err)
		}
		if marked == 0 {
			if h.cfg.OnDuplicate != nil {
				h.cfg.OnDuplicate(d)
			}
			return nil
		}
	}
	if err := h.inner.Handle(tx.with(ctx), d); err != nil {
		return err
	}
	// The handler's work isn't given up because the consumer is to stop.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitLimit)
	defer cancel()
	if err := tx.commit(ending); err != nil {
		return fmt.Errorf("inbox: the commit: %w", err)
	}
	h.prune()
	return nil
}

// failed gives the message back if the consumer is to stop.
func (h *handler) failed(ctx context.Context, what string, err error) error {
	err = fmt.Errorf("inbox: %s: %w", what, err)
	if ctx.Err() != nil {
		return client.Requeue{Err: err}
	}
	return err
}

// prune removes old marks now and then. One handler of this process does so.
func (h *handler) prune() {
	last, now := h.pruned.Load(), time.Now()
	if now.Sub(time.Unix(0, last)) < pruneEvery || !h.pruned.CompareAndSwap(last, now.UnixNano()) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), pruneLimit)
	defer cancel()
	for removed := int64(pruneBatch); removed == pruneBatch; {
		var err error
		removed, err = h.db.exec(ctx, `DELETE FROM hopback_inbox WHERE key IN (
	SELECT key FROM hopback_inbox WHERE handled_at < now() - make_interval(secs => $1) LIMIT $2 FOR UPDATE SKIP LOCKED)`, h.cfg.Keep.Seconds(), pruneBatch)
		if err != nil {
			h.cfg.Logger.Warn("inbox: old marks couldn't be removed; trying again in a minute", "error", err)
			return
		}
	}
}

func shorten(key string) []byte {
	if len(key) <= maxKey {
		return []byte(key)
	}
	sum := sha256.Sum256([]byte(key))
	return append([]byte("sha256:"), sum[:]...)
}
