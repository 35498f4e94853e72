package outbox

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// fatalError stops a relay: another attempt would fail, too.
type fatalError struct{ err error }

func (e *fatalError) Error() string { return e.err.Error() }
func (e *fatalError) Unwrap() error { return e.err }

// fatalIn returns the error that stops the relay, or nil.
func fatalIn(err error) error {
	var fatal *fatalError
	if errors.As(err, &fatal) {
		return fatal
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return nil
	}
	switch pg.Code {
	case "42P01", "42703": // undefined_table, undefined_column
		return &fatalError{fmt.Errorf("outbox: the database has no outbox of this version; call postgres.Migrate, or run \"hopback outbox migrate\": %w", err)}
	case "42501": // insufficient_privilege
		return &fatalError{fmt.Errorf("outbox: the database user lacks a permission; grant it: %w", err)}
	}
	return nil
}

// refusedError is an error of the database in a part of a transaction that continues without it.
type refusedError struct{ err error }

func (e *refusedError) Error() string { return e.err.Error() }
func (e *refusedError) Unwrap() error { return e.err }

// refusedBy reports whether the database has answered with an error.
func refusedBy(err error) bool { return errors.As(err, new(*pgconn.PgError)) }

// clean makes an error text that PostgreSQL can store, of at most 2,000 bytes.
func clean(s string) string {
	if len(s) > 2000 {
		s = s[:2000]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "�"), "\x00", "�")
}
