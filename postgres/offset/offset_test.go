package offset_test

import (
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/offset"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestStore(t *testing.T) {
	pool := pgtest.Database(t)
	db := stdlib.OpenDBFromPool(pool)
	defer func() { assert.NoError(t, db.Close()) }()
	for name, by := range map[string]postgres.DB{"pgx": pool, "database/sql": postgres.SQL(db)} {
		t.Run(name, func(t *testing.T) { testStore(t, pool, by) })
	}
}

func testStore(t *testing.T, db *pgxpool.Pool, by postgres.DB) {
	ctx := t.Context()
	s := &offset.Store{DB: by}
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
		fresh, err = offset.Advance(ctx, tx, "c", d)
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

	mark := func() string {
		t.Helper()
		mark, err := s.LoadMark(ctx, "c", "log")
		require.NoError(t, err)
		return mark
	}
	assert.Empty(t, mark())
	require.NoError(t, s.SaveMark(ctx, "c", "log", "7:ab"))
	require.NoError(t, s.Save(ctx, "c", "log", 9))
	assert.Equal(t, "7:ab", mark(), "a position leaves the mark alone")
	require.NoError(t, s.SaveMark(ctx, "nobody", "log", "7:ab"))

	require.NoError(t, s.Delete(ctx, "c", "log"))
	require.NoError(t, s.Delete(ctx, "another", "log"))
	assert.Zero(t, at())
	assert.Empty(t, mark())
}

func TestBadInput(t *testing.T) {
	ctx := t.Context()
	var bad *argument.Error
	require.ErrorAs(t, (&offset.Store{DB: (*pgxpool.Pool)(nil)}).Save(ctx, "c", "log", 1), &bad)
	require.ErrorAs(t, (&offset.Store{}).Save(ctx, "c", "log", 1), &bad)
	require.ErrorAs(t, (*offset.Store)(nil).Delete(ctx, "c", "log"), &bad)
	_, _, err := (&offset.Store{}).Load(ctx, "c", "log")
	require.ErrorAs(t, err, &bad)
	_, err = offset.Advance(ctx, nil, "c", nil)
	require.ErrorAs(t, err, &bad)
}
