package postgres

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/hopback/hopback/postgres/internal/refuse"
)

//go:embed migrations/*.sql
var files embed.FS

// Migrations returns the migrations as plain SQL files, sorted by name. Use it if you apply
// migrations with your own tool. [Migrate] applies the same files.
func Migrations() fs.FS {
	sub, err := fs.Sub(files, "migrations")
	if err != nil {
		panic(err) // the folder is embedded
	}
	return sub
}

// lockMigrate is the advisory lock of a migration.
const lockMigrate = "7525357070202399492"

// Migrate creates the tables of packages outbox, inbox, and offset, or updates them to this
// version. You can call it at each start, from several processes at once. It runs in one
// transaction, or as a part of db's. The user needs the permission to create tables in the first
// schema of the search path.
//
// It records what it has applied in the table hopback_migrations. If another tool applies the
// migrations, don't call Migrate. Such a tool may leave out migrations of packages that you don't
// use.
func Migrate(ctx context.Context, db DB) error {
	if err := refuse.NilDB(db); err != nil {
		return err
	}
	names, err := fs.Glob(Migrations(), "*.sql")
	if err != nil {
		return err
	}
	slices.Sort(names)
	var script strings.Builder
	// The table had another name while it was the outbox's.
	script.WriteString("DO $hopback$ BEGIN\n" +
		"PERFORM pg_advisory_xact_lock(" + lockMigrate + ");\n" +
		"IF to_regclass('hopback_outbox_migrations') IS NOT NULL THEN ALTER TABLE hopback_outbox_migrations RENAME TO hopback_migrations; END IF;\n" +
		"CREATE TABLE IF NOT EXISTS hopback_migrations (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());\n")
	for _, name := range names {
		sql, err := fs.ReadFile(Migrations(), name)
		if err != nil {
			return err
		}
		fmt.Fprintf(&script, "IF NOT EXISTS (SELECT FROM hopback_migrations WHERE name = '%[1]s') THEN\nEXECUTE $migration$%[2]s$migration$;\nINSERT INTO hopback_migrations (name) VALUES ('%[1]s');\nEND IF;\n", name, sql)
	}
	script.WriteString("END $hopback$")
	if _, err := db.Exec(ctx, script.String()); err != nil {
		return fmt.Errorf("postgres: migrate: %w", err)
	}
	return nil
}
