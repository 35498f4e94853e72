// Package offset stores the positions of stream consumers in PostgreSQL. Use it with package
// stream.
//
// A [Store] is a stream.OffsetStore. With [Advance], a handler saves the position in the
// transaction of its work, so that each message takes effect exactly once.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
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

// Store stores positions in the table that [postgres.Migrate] creates. Set DB to a pool: Store is
// as safe for concurrent use as DB.
type Store struct{ DB postgres.DB }

var _ stream.MarkStore = (*Store)(nil)

// db returns an error for a Store without a DB.
func (s *Store) db() (postgres.DB, error) {
	if s == nil {
		return nil, refuse.NilDB(nil)
	}
	return s.DB, refuse.NilDB(s.DB)
}

// Load returns the saved position. found is false if there is none.
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

// Save stores the position, unless a later one is stored: a process that lags behind another one
// with the same name moves nothing back.
func (s *Store) Save(ctx context.Context, consumer, name string, next uint64) error {
	db, err := s.db()
	if err != nil {
		return err
	}
	_, err = advance(ctx, db, consumer, name, next)
	return err
}

// LoadMark returns the mark that was saved last, or "".
func (s *Store) LoadMark(ctx context.Context, consumer, name string) (mark string, err error) {
	db, err := s.db()
	if err != nil {
		return "", err
	}
	err = db.QueryRow(ctx, "SELECT mark FROM hopback_stream_offset WHERE consumer = $1 AND stream = $2", consumer, name).Scan(&mark)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return mark, err
}

// SaveMark stores a mark next to the position, if there is one.
func (s *Store) SaveMark(ctx context.Context, consumer, name, mark string) error {
	db, err := s.db()
	if err != nil {
		return err
	}
	_, err = db.Exec(ctx, "UPDATE hopback_stream_offset SET mark = $3 WHERE consumer = $1 AND stream = $2", consumer, name, mark)
	return err
}

// Delete deletes the position and its mark, so that the consumer starts again at its configured start. Save
// can't move a position back.
func (s *Store) Delete(ctx context.Context, consumer, name string) error {
	db, err := s.db()
	if err != nil {
		return err
	}
	_, err = db.Exec(ctx, "DELETE FROM hopback_stream_offset WHERE consumer = $1 AND stream = $2", consumer, name)
	return err
}

// Advance moves the consumer's position past d, in the transaction tx. Call it first in the
// transaction: it locks the position, so that two processes don't do the same work. Pass
// stream.Consume a [Store] of the same database, so that it starts after the last commit.
//
// If fresh is false, the position is already past d, because another attempt has committed: do
// nothing, and return nil. If tx commits, the message has taken effect and is never handled
// again. If it doesn't, the message hasn't taken effect.
func Advance(ctx context.Context, tx pgx.Tx, consumer string, d *client.Delivery) (fresh bool, err error) {
	if tx == nil {
		return false, argument.At(argument.Root("tx"), argument.CodeMissing, nil, "is nil", "pass the transaction of the handler's work")
	}
	offset, ok := stream.OffsetOf(d)
	if !ok {
		return false, argument.At(argument.Root("delivery"), argument.CodeUnsupported, nil, "has no offset", "pass the delivery of a message from a stream: see client.DeliveryFrom")
	}
	return advance(ctx, tx, consumer, d.Queue(), offset+1)
}

func advance(ctx context.Context, db postgres.DB, consumer, name string, next uint64) (bool, error) {
	if next > math.MaxInt64 {
		return false, argument.At(argument.Root("next"), argument.CodeOutOfRange, next, "isn't an offset", "use at most 2⁶³-1")
	}
	tag, err := db.Exec(ctx, `INSERT INTO hopback_stream_offset AS o (consumer, stream, next) VALUES ($1, $2, $3)
ON CONFLICT (consumer, stream) DO UPDATE SET next = excluded.next, updated_at = clock_timestamp() WHERE o.next < excluded.next`, consumer, name, int64(next))
	if err != nil {
		return false, fmt.Errorf("offset: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}
