package inbox

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// database is what messages are handled in: by pgx, or by database/sql.
type database interface {
	begin(ctx context.Context) (transaction, error)
	exec(ctx context.Context, query string, args ...any) (rows int64, err error)
}

type transaction interface {
	exec(ctx context.Context, query string, args ...any) (rows int64, err error)
	// with returns the ctx of the handler, which carries the transaction.
	with(ctx context.Context) context.Context
	commit(ctx context.Context) error
	// end rolls back an uncommitted transaction, and releases the connection.
	end(ctx context.Context)
}

type pgxDatabase struct {
	pool      *pgxpool.Pool
	isolation pgx.TxIsoLevel
}

func (d pgxDatabase) begin(ctx context.Context) (transaction, error) {
	tx, err := d.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: d.isolation})
	return pgxTx{tx}, err
}

func (d pgxDatabase) exec(ctx context.Context, query string, args ...any) (int64, error) {
	tag, err := d.pool.Exec(ctx, query, args...)
	return tag.RowsAffected(), err
}

type pgxTx struct{ tx pgx.Tx }

func (t pgxTx) exec(ctx context.Context, query string, args ...any) (int64, error) {
	tag, err := t.tx.Exec(ctx, query, args...)
	return tag.RowsAffected(), err
}

func (t pgxTx) with(ctx context.Context) context.Context {
	return context.WithValue(ctx, inTx{}, t.tx)
}
func (t pgxTx) commit(ctx context.Context) error { return t.tx.Commit(ctx) }
func (t pgxTx) end(ctx context.Context)          { _ = t.tx.Rollback(ctx) }

type inSQLTx struct{}

// SQLTx returns the transaction of a handler that [WithSQL] wraps. The same rules apply as for
// [Tx].
func SQLTx(ctx context.Context) (*sql.Tx, bool) {
	tx, ok := ctx.Value(inSQLTx{}).(*sql.Tx)
	return tx, ok
}

// WithSQL is [With] for database/sql. The driver must be one for PostgreSQL, such as
// github.com/jackc/pgx/v5/stdlib. A handler gets its transaction from [SQLTx], and writes
// messages in it with postgres.SQL and package postgres/outbox. If you call
// sql.DB.SetMaxOpenConns, set more than client.ConsumerConfig.Concurrency.
func WithSQL(db *sql.DB, cfg Config) client.Middleware {
	var bad error
	if db == nil {
		bad = argument.New("db", nil, "is nil", "pass a database from sql.Open")
	}
	level, known := levels[cfg.Isolation]
	if !known {
		bad = argument.New("inbox.Config.Isolation", string(cfg.Isolation), "is unknown", "use one of pgx's constants, such as pgx.Serializable")
	}
	return with(sqlDatabase{db, level}, cfg, bad)
}

var levels = map[pgx.TxIsoLevel]sql.IsolationLevel{
	"":                  sql.LevelDefault,
	pgx.ReadUncommitted: sql.LevelReadUncommitted,
	pgx.ReadCommitted:   sql.LevelReadCommitted,
	pgx.RepeatableRead:  sql.LevelRepeatableRead,
	pgx.Serializable:    sql.LevelSerializable,
}

type sqlDatabase struct {
	db    *sql.DB
	level sql.IsolationLevel
}

// begin waits for a connection within ctx. The transaction doesn't depend on ctx, because
// database/sql would roll it back during the handler's work when ctx is canceled.
func (d sqlDatabase) begin(ctx context.Context) (transaction, error) {
	conn, err := d.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := conn.BeginTx(context.WithoutCancel(ctx), &sql.TxOptions{Isolation: d.level})
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return sqlTx{tx, conn}, nil
}

func (d sqlDatabase) exec(ctx context.Context, query string, args ...any) (int64, error) {
	result, err := d.db.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

type sqlTx struct {
	tx   *sql.Tx
	conn *sql.Conn
}

func (t sqlTx) exec(ctx context.Context, query string, args ...any) (int64, error) {
	result, err := t.tx.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (t sqlTx) with(ctx context.Context) context.Context {
	return context.WithValue(ctx, inSQLTx{}, t.tx)
}

// commit can't be bounded: database/sql has no ctx for it. A driver notices a lost
// connection by itself.
func (t sqlTx) commit(context.Context) error { return t.tx.Commit() }

func (t sqlTx) end(context.Context) {
	_ = t.tx.Rollback()
	_ = t.conn.Close()
}
