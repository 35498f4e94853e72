package postgres_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestMigrateMayRunAgainAndSideBySide(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, err := outbox.Publish(t.Context(), pool, address.Queue("orders"), 1)
	require.NoError(t, err)
	ended := make(chan error, 4)
	for range 4 {
		go func() { ended <- postgres.Migrate(context.Background(), pool) }()
	}
	for range 4 {
		require.NoError(t, <-ended)
	}
	db := stdlib.OpenDBFromPool(pool)
	defer func() { assert.NoError(t, db.Close()) }()
	require.NoError(t, postgres.Migrate(t.Context(), postgres.SQL(db)))
	var left int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox").Scan(&left))
	assert.Equal(t, 1, left)
}

// Tables of the time when outbox, inbox and offset were migrated one by one are kept.
func TestMigrateKeepsEarlierTables(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, err := pool.Exec(t.Context(), `ALTER TABLE hopback_migrations RENAME TO hopback_outbox_migrations;
DELETE FROM hopback_outbox_migrations WHERE name > '004';
INSERT INTO hopback_inbox (key) VALUES ('a');
INSERT INTO hopback_stream_offset (consumer, stream, next) VALUES ('c', 'log', 7);`)
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, postgres.Migrate(t.Context(), pool))
	}
	var marks, next, applied int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM hopback_inbox), (SELECT next FROM hopback_stream_offset),
	(SELECT count(*) FROM hopback_migrations)`).Scan(&marks, &next, &applied))
	assert.Equal(t, []int{1, 7, 6}, []int{marks, next, applied})
}

func TestNilDatabaseIsRefused(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]postgres.DB{
		"nil": nil, "a nil pool": (*pgxpool.Pool)(nil), "a nil transaction of database/sql": postgres.SQL((*sql.Tx)(nil)),
	} {
		require.ErrorAs(t, postgres.Migrate(t.Context(), db), new(*argument.Error), name)
	}
}
