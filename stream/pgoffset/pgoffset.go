// Package pgoffset keeps the positions of stream consumers in PostgreSQL. It is a module
// of its own.
//
// A [Store] is a stream.OffsetStore. With [Advance] a handler saves the position in the
// transaction that does its work, so that each message takes effect exactly once.
package pgoffset

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/stream"
)

//go:embed migrations/*.sql
var files embed.FS

// Migrations returns the migrations as files of plain SQL, in order of their names, for
// those who apply them by a tool of their own. Migrate applies the same.
func Migrations() fs.FS {
	sub, err := fs.Sub(files, "migrations")
	if err != nil {
		panic(err) // the folder is embedded
	}
	return sub
}

// DB is a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// lockMigrate is that of the outbox, plus one.
const lockMigrate = "7525357070202399493"

// Migrate creates the table hopback_stream_offset unless it is there. It may be called at
// each start, by several processes at once. The user needs the right to create tables in
// the first schema of the search path.
func Migrate(ctx context.Context, db DB) error {
	if isNil(db) {
		return noDB
	}
	sql, err := fs.ReadFile(Migrations(), "001_offsets.sql")
	if err != nil {
		return err
	}
	script := "DO $hopback$ BEGIN\nPERFORM pg_advisory_xact_lock(" + lockMigrate + ");\n" +
		"IF to_regclass('hopback_stream_offset') IS NULL THEN\nEXECUTE $migration$" + string(sql) + "$migration$;\nEND IF;\nEND $hopback$"
	if _, err := db.Exec(ctx, script); err != nil {
		return fmt.Errorf("pgoffset: migrate: %w", err)
	}
	return nil
}

var noDB = argument.At(argument.Root("db"), argument.Missing, nil, "is nil", "give a connection, a pool or a transaction")

func isNil(db DB) bool {
	if db == nil {
		return true
	}
	v := reflect.ValueOf(db)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// Store keeps positions in the table that Migrate creates. It is as safe for concurrent
// use as DB is, so DB should be a pool.
type Store struct{ DB DB }

var _ stream.OffsetStore = (*Store)(nil)

// Load returns the position that was saved, or false.
func (s *Store) Load(ctx context.Context, consumer, name string) (next uint64, found bool, err error) {
	if s == nil || isNil(s.DB) {
		return 0, false, noDB
	}
	var n int64
	err = s.DB.QueryRow(ctx, "SELECT next FROM hopback_stream_offset WHERE consumer = $1 AND stream = $2", consumer, name).Scan(&n)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	return uint64(n), err == nil, err
}

// Save keeps the position, unless a later one is saved: a process that lags behind
// another one of the same name moves nothing back.
func (s *Store) Save(ctx context.Context, consumer, name string, next uint64) error {
	if s == nil || isNil(s.DB) {
		return noDB
	}
	_, err := advance(ctx, s.DB, consumer, name, next)
	return err
}

// Delete forgets the position. Save can't move it back.
func (s *Store) Delete(ctx context.Context, consumer, name string) error {
	if s == nil || isNil(s.DB) {
		return noDB
	}
	_, err := s.DB.Exec(ctx, "DELETE FROM hopback_stream_offset WHERE consumer = $1 AND stream = $2", consumer, name)
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
		return false, argument.At(argument.Root("tx"), argument.Missing, nil, "is nil", "give the transaction that does the handler's work")
	}
	offset, ok := stream.OffsetOf(d)
	if !ok {
		return false, argument.At(argument.Root("delivery"), argument.Unsupported, nil, "has no offset", "give the delivery of a stream's message: see client.DeliveryFrom")
	}
	return advance(ctx, tx, consumer, d.Queue(), offset+1)
}

func advance(ctx context.Context, db DB, consumer, name string, next uint64) (bool, error) {
	if next > math.MaxInt64 {
		return false, argument.At(argument.Root("next"), argument.OutOfRange, next, "is no offset", "use at most 2⁶³-1")
	}
	tag, err := db.Exec(ctx, `INSERT INTO hopback_stream_offset AS o (consumer, stream, next) VALUES ($1, $2, $3)
ON CONFLICT (consumer, stream) DO UPDATE SET next = excluded.next, updated_at = clock_timestamp() WHERE o.next < excluded.next`, consumer, name, int64(next))
	if err != nil {
		return false, fmt.Errorf("pgoffset: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}
