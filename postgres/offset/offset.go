// Package offset keeps the positions of stream consumers in PostgreSQL.
//
// A [Store] is a stream.OffsetStore. With [Advance] a handler saves the position in the
// transaction that does its work, so that each message takes effect exactly once.
package offset

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/internal/refuse"
	"github.com/hopback/hopback/stream"
)

// Store keeps positions in the table that postgres.Migrate creates. It is as safe for concurrent
// use as DB is, so DB should be a pool.
type Store struct{ DB postgres.DB }

var _ stream.OffsetStore = (*Store)(nil)

// db refuses a Store without a DB.
func (s *Store) db() (postgres.DB, error) {
	if s == nil {
		return nil, refuse.NilDB(nil)
	}
	return s.DB, refuse.NilDB(s.DB)
}

// Load returns the position that was saved, or false.
func (s *Store) Load(ctx context.Context, consumer, name string) (next uint64, found bool, err error) {
	db, err := s.db()
	if err != nil {
		return 0, false, err
	}
	var n int64
	err = db.QueryRow(ctx, "SELECT next FROM hopback_stream_offset WHERE consumer = $1 AND stream = $2", consumer, name).Scan(&n)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, false, nil
	}
	return uint64(n), err == nil, err
}

// Save keeps the position, unless a later one is saved: a process that lags behind
// another one of the same name moves nothing back.
func (s *Store) Save(ctx context.Context, consumer, name string, next uint64) error {
	db, err := s.db()
	if err != nil {
		return err
	}
	_, err = advance(ctx, db, consumer, name, next)
	return err
}

// Delete forgets the position. Save can't move it back.
func (s *Store) Delete(ctx context.Context, consumer, name string) error {
	db, err := s.db()
	if err != nil {
		return err
	}
	_, err = db.Exec(ctx, "DELETE FROM hopback_stream_offset WHERE consumer = $1 AND stream = $2", consumer, name)
	return err
}

// Advance moves the consumer's position behind d, in the transaction tx. It returns false
// if the position is there already: another attempt has committed, so the handler should
// do nothing and return nil. Call it first in the transaction: it locks the position, so
// that two processes don't do the same work.
//
// If tx commits, the message has taken effect, and is never handled again. If not, it
// hasn't. Give stream.Consume a Store of the same database, so that it begins where the
// last commit was.
func Advance(ctx context.Context, tx pgx.Tx, consumer string, d *client.Delivery) (fresh bool, err error) {
	if tx == nil {
		return false, argument.At(argument.Root("tx"), argument.CodeMissing, nil, "is nil", "give the transaction that does the handler's work")
	}
	offset, ok := stream.OffsetOf(d)
	if !ok {
		return false, argument.At(argument.Root("delivery"), argument.CodeUnsupported, nil, "has no offset", "give the delivery of a stream's message: see client.DeliveryFrom")
	}
	return advance(ctx, tx, consumer, d.Queue(), offset+1)
}

func advance(ctx context.Context, db postgres.DB, consumer, name string, next uint64) (bool, error) {
	if next > math.MaxInt64 {
		return false, argument.At(argument.Root("next"), argument.CodeOutOfRange, next, "is no offset", "use at most 2⁶³-1")
	}
	tag, err := db.Exec(ctx, `INSERT INTO hopback_stream_offset AS o (consumer, stream, next) VALUES ($1, $2, $3)
ON CONFLICT (consumer, stream) DO UPDATE SET next = excluded.next, updated_at = clock_timestamp() WHERE o.next < excluded.next`, consumer, name, int64(next))
	if err != nil {
		return false, fmt.Errorf("offset: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}
