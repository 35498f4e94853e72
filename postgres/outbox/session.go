package outbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// limits limit every wait for the database, so that a silently broken connection is noticed, on
// both ends.
type limits struct {
	// connect bounds the attempt to connect to one host, unless the pool's connect_timeout
	// is shorter.
	connect time.Duration
	// statement limits a statement. The server cancels it then; the relay closes the connection a
	// grace later.
	statement, grace time.Duration
	// settle limits a batch's last transaction, which continues when the relay is to stop.
	settle time.Duration
	// lease is how long a leader works without renewing its lease. The others wait half as
	// long again before they take over.
	lease time.Duration
	// bytes is how much of a batch's messages is read at once. A larger message is read alone.
	bytes int64
}

var defaultLimits = limits{
	connect: 5 * time.Second, statement: 20 * time.Second, grace: 2 * time.Second, settle: 10 * time.Second,
	lease: 10 * time.Second, bytes: 16 << 20,
}

// session is a relay's connection to the database, outside of its pool: a relay changes the
// settings of its sessions, and closes one that may be broken.
type session struct {
	conn   *pgx.Conn
	limits limits
}

// open opens a session, as the pool opens its connections.
func (r *Relay) open(ctx context.Context) (*session, error) {
	cfg := r.pool.Config()
	to := cfg.ConnConfig
	if to.ConnectTimeout <= 0 || to.ConnectTimeout > r.limits.connect {
		to.ConnectTimeout = r.limits.connect
	}
	limit := time.Duration(1+len(to.Fallbacks))*to.ConnectTimeout + r.limits.statement
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(within, to); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(within, to)
	if err != nil {
		return nil, err
	}
	s := &session{conn, r.limits}
	if cfg.AfterConnect != nil {
		err = cfg.AfterConnect(within, conn)
	}
	if err == nil {
		err = s.set(ctx, r.cfg.PublishTimeout)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// set changes the session's settings to what the relay relies on, independently of the settings
// of the database, the role, and the pool. Above READ COMMITTED, transactions of several workers
// would fail with serialization errors after their messages were published. The other settings
// make the server close the session, with its locks, when a relay is gone or stopped.
func (s *session) set(ctx context.Context, publish time.Duration) error {
	millis := func(d time.Duration) string { return strconv.FormatInt(max(d.Milliseconds(), 1), 10) }
	names := []string{"default_transaction_isolation", "statement_timeout", "idle_in_transaction_session_timeout",
		"idle_session_timeout", "transaction_timeout", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout"}
	values := []string{"read committed", millis(s.limits.statement), millis(publish + s.limits.settle),
		"0", "0", "10", "5", "3", "25000"}
	// Not every version has all of these.
	_, err := s.exec(ctx, "SELECT set_config(s.name, v.value, false) FROM unnest($1::text[], $2::text[]) AS v (name, value) JOIN pg_settings s ON s.name = v.name", names, values)
	return err
}

func (s *session) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.conn.Close(ctx)
}

// errSilent is the cause of a wait that reached a session's limit.
var errSilent = errors.New("no answer")

// bound returns ctx with the limit of a statement.
func (s *session) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, s.limits.statement+s.limits.grace, errSilent)
}

// explain adds to an error that the database hasn't answered, if that is the cause.
func (s *session) explain(within context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(within), errSilent) {
		return fmt.Errorf("the database hasn't answered for %v: %w", s.limits.statement+s.limits.grace, err)
	}
	return err
}

// exec runs a statement and returns how many rows it is about.
func (s *session) exec(ctx context.Context, sql string, args ...any) (int64, error) {
	within, cancel := s.bound(ctx)
	defer cancel()
	tag, err := s.conn.Exec(within, sql, args...)
	return tag.RowsAffected(), s.explain(within, err)
}

// one returns what scan reads of the first row of a query, or pgx.ErrNoRows.
func (s *session) one(ctx context.Context, into []any, sql string, args ...any) error {
	within, cancel := s.bound(ctx)
	defer cancel()
	return s.explain(within, s.conn.QueryRow(within, sql, args...).Scan(into...))
}

// all returns what scan makes of each row of a query.
func all[T any](ctx context.Context, s *session, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	within, cancel := s.bound(ctx)
	defer cancel()
	rows, err := s.conn.Query(within, sql, args...)
	if err != nil {
		return nil, s.explain(within, err)
	}
	list, err := pgx.CollectRows(rows, scan)
	return list, s.explain(within, err)
}

// begin begins a transaction. The caller calls end.
func (s *session) begin(ctx context.Context) (*transaction, error) {
	within, cancel := s.bound(ctx)
	defer cancel()
	tx, err := s.conn.BeginTx(within, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return nil, s.explain(within, err)
	}
	return &transaction{s, tx}, nil
}

// transaction is one of a session; its methods run the statements.
type transaction struct {
	*session
	tx pgx.Tx
}

func (t *transaction) commit(ctx context.Context) error {
	within, cancel := t.bound(ctx)
	defer cancel()
	return t.explain(within, t.tx.Commit(within))
}

// end rolls back what isn't committed.
func (t *transaction) end(ctx context.Context) {
	within, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.limits.grace)
	defer cancel()
	_ = t.tx.Rollback(within)
}

// attempt runs f. If the database refuses what f does, only that is rolled back.
func (t *transaction) attempt(ctx context.Context, f func() error) error {
	if _, err := t.exec(ctx, "SAVEPOINT hopback"); err != nil {
		return err
	}
	err := f()
	if !refusedBy(err) {
		return err
	}
	if _, undo := t.exec(ctx, "ROLLBACK TO SAVEPOINT hopback"); undo != nil {
		return errors.Join(undo, err)
	}
	return &refusedError{err}
}
