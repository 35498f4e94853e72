// Package inbox makes a message take effect in PostgreSQL exactly once, however often it is
// delivered. Use it for handlers that write to PostgreSQL.
//
//	once := inbox.With(pool, inbox.Config{})
//	err = conn.Consume(ctx, "orders", retry.With(policy)(once(handler)), client.ConsumerConfig{})
//
// The handler gets a transaction from its ctx and writes in it:
//
//	tx, _ := inbox.Tx(ctx)
//	_, err := tx.Exec(ctx, "UPDATE orders SET paid = true WHERE id = $1", order.ID)
//
// [With] inserts the message's key into the table hopback_inbox in the same transaction. It
// commits after the handler has returned nil, and before the message is acknowledged. So the
// effect and the mark are both there, or neither is. A copy that arrives later is acknowledged
// without calling the handler. A copy that arrives at the same time waits until the first has
// committed or failed. If the handler returns an error, the transaction is rolled back, so a
// retry with the same message-id is handled.
//
// [postgres.Migrate] creates the table. For database/sql, use [WithSQL] and [SQLTx].
//
// # What happens if something fails
//
//   - The process, the database, or the connection fails before the commit: nothing is written.
//     The broker delivers the message again.
//   - The answer to the commit is lost: the handler's error says so, and the message is delivered
//     again. If the commit had succeeded, the message is now a duplicate.
//   - The process stops between the commit and the acknowledgment: the message is delivered
//     again, as a duplicate.
//
// # Limits
//
//   - Effects outside the transaction, such as a call to another service, can happen twice.
//   - A message that the handler writes in this transaction with package postgres/outbox is
//     published only if the transaction commits.
//   - A mark is kept for [Config.Keep]. A copy that arrives after that is handled again.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
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

// Config configures [With]. The zero value is ready to use.
type Config struct {
	// Key returns the key that all copies of a message share. If ok is false, the delivery is
	// handled in a transaction, but without a mark. Many goroutines call it at once. Keys longer
	// than 512 bytes are replaced by a hash. Default: dedupe.MessageID, which is the queue's name
	// and the message-id.
	Key func(*client.Delivery) (key string, ok bool)
	// Keep is how long a mark is kept, at least a minute. Choose it longer than copies can take
	// to arrive: the time of all retries, of an outage, and until a replay of dead letters. Marks
	// are removed in the background while messages are handled. Default: 7 days.
	Keep time.Duration
	// Isolation is the isolation level of the transactions. A serialization error counts as an
	// error of the handler. Default: the database's.
	Isolation pgx.TxIsoLevel
	// OnDuplicate is called for each duplicate that is acknowledged without calling the handler.
	// Default: nil.
	OnDuplicate func(*client.Delivery)
	// Logger logs what isn't in any error: marks that couldn't be removed. Default:
	// slog.Default().
	Logger *slog.Logger
}

const (
	defaultKeep = 7 * 24 * time.Hour
	minKeep     = time.Minute
	maxKey      = 512
	// commitLimit bounds a commit, whose ctx isn't canceled with the handler's.
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

// Tx returns the transaction in which the current message is handled. Call it in a handler that
// [With] wraps, with the handler's ctx; otherwise it returns false. Don't commit the transaction
// or roll it back: With does that when the handler has returned. A pgx.Tx isn't safe for
// concurrent use.
func Tx(ctx context.Context) (pgx.Tx, bool) {
	tx, ok := ctx.Value(inTx{}).(pgx.Tx)
	return tx, ok
}

// With returns a middleware that handles each message once, in a transaction of pool's database.
// Put it inside retry.With.
//
// Each running handler uses a connection of the pool, so set the pool's maximum to at least
// client.ConsumerConfig.Concurrency plus one. If cfg is invalid, or if the table that
// [postgres.Migrate] creates is missing, no consumer starts.
func With(pool *pgxpool.Pool, cfg Config) client.Middleware {
	var bad error
	if pool == nil {
		bad = argument.New("pool", nil, "is nil", "pass a pool from pgxpool.New")
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
			err = argument.New("handler", nil, "is nil", "pass a handler to the middleware of package inbox")
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
			return fmt.Errorf("inbox: the database has no table hopback_inbox; call postgres.Migrate: %w", err)
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
		return h.failed(ctx, "starting a transaction", err)
	}
	defer func() {
		// After a commit this does nothing. A panic passes, rolled back.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitLimit)
		defer cancel()
		tx.end(ending)
	}()
	if key, ok := h.cfg.Key(d); ok {
		// It waits for an open transaction that has inserted the key.
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
	// A shutdown of the consumer doesn't interrupt the commit of finished work.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitLimit)
	defer cancel()
	if err := tx.commit(ending); err != nil {
		return fmt.Errorf("inbox: committing the transaction: %w", err)
	}
	h.prune()
	return nil
}

// failed requeues the message if the consumer is to stop.
func (h *handler) failed(ctx context.Context, what string, err error) error {
	err = fmt.Errorf("inbox: %s: %w", what, err)
	if ctx.Err() != nil {
		return client.Requeue{Err: err}
	}
	return err
}

// prune removes old marks from time to time. One handler of this process does so.
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
			h.cfg.Logger.Warn("inbox: removing old marks failed; trying again in a minute", "error", err)
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
