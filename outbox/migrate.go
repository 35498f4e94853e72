package outbox

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/hopback/hopback/argument"
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

// Migrate creates the outbox's tables, or brings them up to this version. It may be called
// at each start, by several processes at once. All of it is one transaction, or part of
// db's. The user needs the right to create tables in the first schema of the search path.
//
// It notes what it has applied in the table hopback_outbox_migrations. After another tool
// has applied the migrations, don't call it.
func Migrate(ctx context.Context, db DB) error {
	if isNil(db) {
		return argument.New("db", nil, "is nil", "give a connection, a pool or a transaction")
	}
	names, err := fs.Glob(Migrations(), "*.sql")
	if err != nil {
		return err
	}
	slices.Sort(names)
	var script strings.Builder
	script.WriteString("DO $hopback$ BEGIN\n" +
		"PERFORM pg_advisory_xact_lock(" + lockMigrate + ");\n" +
		"CREATE TABLE IF NOT EXISTS hopback_outbox_migrations (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());\n")
	for _, name := range names {
		sql, err := fs.ReadFile(Migrations(), name)
		if err != nil {
			return err
		}
		fmt.Fprintf(&script, "IF NOT EXISTS (SELECT FROM hopback_outbox_migrations WHERE name = '%[1]s') THEN\nEXECUTE $migration$%[2]s$migration$;\nINSERT INTO hopback_outbox_migrations (name) VALUES ('%[1]s');\nEND IF;\n", name, sql)
	}
	script.WriteString("END $hopback$")
	if _, err := db.Exec(ctx, script.String()); err != nil {
		return fmt.Errorf("outbox: migrate: %w", err)
	}
	return nil
}
