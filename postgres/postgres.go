// Package postgres contains what packages outbox, inbox, and offset share: [Migrate], which
// creates their tables, and [DB], through which they use a database.
//
//   - Package postgres/outbox publishes messages from a transaction if it commits.
//   - Package postgres/inbox handles each message once.
//   - Package postgres/offset stores the positions of stream consumers.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package postgres

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/hopback/hopback/postgres/internal/refuse"
)

// DB runs statements. Pass a pgx.Tx for a transaction. With a *pgx.Conn or a *pgxpool.Pool each
// call commits by itself. [SQL] converts the types of database/sql.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// querier is a *sql.Tx, a *sql.Conn or a *sql.DB.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// SQL returns a *sql.Tx, *sql.Conn, or *sql.DB of database/sql as a [DB]. The driver must be one
// for PostgreSQL, such as github.com/jackc/pgx/v5/stdlib.
func SQL(db querier) DB {
	if refuse.NilDB(db) != nil {
		return nil
	}
	return sqlDB{db}
}

type sqlDB struct{ db querier }

func (d sqlDB) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	result, err := d.db.ExecContext(ctx, query, args...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	// Some drivers have no number for statements that change no rows.
	n, err := result.RowsAffected()
	if err != nil {
		return pgconn.CommandTag{}, nil
	}
	return pgconn.NewCommandTag(fmt.Sprintf("ROWS %d", n)), nil
}

func (d sqlDB) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	return d.db.QueryRowContext(ctx, query, args...)
}
