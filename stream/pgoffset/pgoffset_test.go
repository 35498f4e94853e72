package pgoffset_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/service"
	"github.com/hopback/hopback/stream/pgoffset"
)

var postgres *service.Service

func TestMain(m *testing.M) {
	var err error
	if postgres, err = service.Postgres(context.Background(), os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = postgres.Close()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func TestStore(t *testing.T) {
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, postgres.URL)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(ctx, "CREATE SCHEMA pgoffset_test")
	require.NoError(t, err)
	defer func() { _, _ = pool.Exec(context.Background(), "DROP SCHEMA pgoffset_test CASCADE") }()
	cfg := pool.Config()
	cfg.ConnConfig.RuntimeParams["search_path"] = "pgoffset_test"
	db, err := pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(t, err)
	defer db.Close()
	for range 2 {
		require.NoError(t, pgoffset.Migrate(ctx, db))
	}
	s := &pgoffset.Store{DB: db}
	at := func() uint64 {
		t.Helper()
		next, _, err := s.Load(ctx, "c", "log")
		require.NoError(t, err)
		return next
	}
	_, found, err := s.Load(ctx, "c", "log")
	require.NoError(t, err)
	assert.False(t, found)
	require.NoError(t, s.Save(ctx, "c", "log", 0))
	_, found, _ = s.Load(ctx, "c", "log")
	assert.True(t, found)
	require.NoError(t, s.Save(ctx, "c", "log", 7))
	require.NoError(t, s.Save(ctx, "c", "log", 5))
	require.NoError(t, s.Save(ctx, "another", "log", 9))
	assert.Equal(t, uint64(7), at(), "it moves nothing back")

	// A transaction that isn't committed moves nothing.
	d := client.NewDelivery("log", &client.Message{Annotations: amqp.Annotations{"x-stream-offset": int64(7)}})
	advance := func(commit bool) (fresh bool) {
		t.Helper()
		tx, err := db.BeginTx(ctx, pgx.TxOptions{})
		require.NoError(t, err)
		fresh, err = pgoffset.Advance(ctx, tx, "c", d)
		require.NoError(t, err)
		if commit {
			require.NoError(t, tx.Commit(ctx))
		} else {
			require.NoError(t, tx.Rollback(ctx))
		}
		return fresh
	}
	assert.True(t, advance(false))
	assert.Equal(t, uint64(7), at())
	assert.True(t, advance(true))
	assert.Equal(t, uint64(8), at())
	assert.False(t, advance(true), "it was handled")

	require.NoError(t, s.Delete(ctx, "c", "log"))
	assert.Zero(t, at())
}

func TestBadInput(t *testing.T) {
	ctx := t.Context()
	var bad *argument.Error
	require.ErrorAs(t, pgoffset.Migrate(ctx, nil), &bad)
	require.ErrorAs(t, pgoffset.Migrate(ctx, (*pgxpool.Pool)(nil)), &bad)
	require.ErrorAs(t, (&pgoffset.Store{}).Save(ctx, "c", "log", 1), &bad)
	require.ErrorAs(t, (*pgoffset.Store)(nil).Delete(ctx, "c", "log"), &bad)
	_, _, err := (&pgoffset.Store{}).Load(ctx, "c", "log")
	require.ErrorAs(t, err, &bad)
	_, err = pgoffset.Advance(ctx, nil, "c", nil)
	require.ErrorAs(t, err, &bad)
}
