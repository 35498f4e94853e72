package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/inbox"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// withEffects is a database with a table for what handlers do.
func withEffects(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Database(t)
	_, err := pool.Exec(t.Context(), "CREATE TABLE effects (id text NOT NULL)")
	require.NoError(t, err)
	return pool
}

func effects(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM effects").Scan(&n))
	return n
}

// write has the effect of a message.
func write(ctx context.Context, id string) error {
	tx, ok := inbox.Tx(ctx)
	if !ok {
		return errors.New("no transaction")
	}
	_, err := tx.Exec(ctx, "INSERT INTO effects VALUES ($1)", id)
	return err
}

func TestInboxHandlesEachMessageOnce(t *testing.T) {
	t.Parallel()
	pool := withEffects(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	var duplicates, failures atomic.Int64
	once := inbox.With(pool, inbox.Config{OnDuplicate: func(*client.Delivery) { duplicates.Add(1) }})
	pgtest.Consume(t, conn, "orders", once(client.JSON(func(ctx context.Context, id string) error {
		if err := write(ctx, id); err != nil {
			return err
		}
		// Every tenth fails at first, after it has written.
		if strings.HasSuffix(id, "0") && failures.Add(1) <= 10 {
			return client.Requeue{}
		}
		return nil
	})), client.ConsumerConfig{Concurrency: 8})
	const n = 100
	var all [][2]string
	for i := range 2 * n {
		id := fmt.Sprint(i / 2)
		all = append(all, [2]string{id, id})
	}
	pgtest.Publish(t, conn, "orders", all...)
	require.Eventually(t, func() bool { return duplicates.Load() == n }, 3*time.Minute, 5*time.Millisecond)
	assert.Equal(t, n, effects(t, pool))
	assert.GreaterOrEqual(t, failures.Load(), int64(10))
}

// A copy that comes while the first is handled waits, and is handled if that fails.
func TestInboxCopyWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprintf("first fails %v", fails), func(t *testing.T) {
			t.Parallel()
			pool := withEffects(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			var duplicates, calls atomic.Int64
			resume := make(chan struct{})
			once := inbox.With(pool, inbox.Config{OnDuplicate: func(*client.Delivery) { duplicates.Add(1) }})
			pgtest.Consume(t, conn, "orders", once(client.JSON(func(ctx context.Context, id string) error {
				if calls.Add(1) > 1 {
					return write(ctx, id)
				}
				<-resume
				if fails {
					return client.DeadLetter{Err: errors.New("it fails")}
				}
				return write(ctx, id)
			})), client.ConsumerConfig{Concurrency: 2})
			pgtest.Publish(t, conn, "orders", [2]string{"a", "first"}, [2]string{"a", "copy"})
			// The copy waits for a lock.
			require.Eventually(t, func() bool {
				var waiting bool
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')").Scan(&waiting))
				return waiting
			}, 30*time.Second, 5*time.Millisecond)
			assert.EqualValues(t, 1, calls.Load())
			close(resume)
			ended := func() bool { return duplicates.Load() == 1 }
			if fails {
				ended = func() bool { return effects(t, pool) == 1 }
			}
			require.Eventually(t, ended, 3*time.Minute, 5*time.Millisecond)
			assert.Equal(t, 1, effects(t, pool))
			assert.Equal(t, fails, calls.Load() == 2)
		})
	}
}

// A handler that hides an error of the database, panics, or is given hostile message-ids.
func TestInboxKeepsNoHalfEffect(t *testing.T) {
	t.Parallel()
	pool := withEffects(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	var mu sync.Mutex
	calls := map[string]int{}
	var duplicates atomic.Int64
	once := inbox.With(pool, inbox.Config{OnDuplicate: func(*client.Delivery) { duplicates.Add(1) }})
	pgtest.Consume(t, conn, "orders", again(once(client.JSON(func(ctx context.Context, what string) error {
		mu.Lock()
		calls[what]++
		n := calls[what]
		mu.Unlock()
		if err := write(ctx, what); err != nil {
			return err
		}
		if n == 1 {
			switch what {
			case "hides":
				tx, _ := inbox.Tx(ctx)
				_, _ = tx.Exec(ctx, "SELECT 1/0")
			case "panics":
				panic("assignment to entry in nil map")
			}
		}
		return nil
	}))), client.ConsumerConfig{Concurrency: 2})
	pgtest.Publish(t, conn, "orders",
		[2]string{"1", "hides"}, [2]string{"2", "panics"},
		[2]string{"a\x00b", "NUL"}, [2]string{strings.Repeat("x", 1<<20), "a megabyte"}, [2]string{strings.Repeat("x", 1<<20), "a megabyte"})
	require.Eventually(t, func() bool { return duplicates.Load() == 1 && effects(t, pool) == 4 }, 3*time.Minute, 5*time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, map[string]int{"hides": 2, "panics": 2, "NUL": 1, "a megabyte": 1}, calls)
	var longest int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT max(length(key)) FROM hopback_inbox").Scan(&longest))
	assert.Less(t, longest, 600)
}

// again requeues anything that fails.
func again(h client.Handler) client.Handler {
	return client.HandlerFunc(func(ctx context.Context, d *client.Delivery) (err error) {
		defer func() {
			if recover() != nil {
				err = client.Requeue{}
			}
		}()
		if h.Handle(ctx, d) != nil {
			return client.Requeue{}
		}
		return nil
	})
}

// What holds for pgx holds for database/sql: once, in the handler's transaction, with what
// it publishes, and nothing of an attempt that fails, or panics, or hides an error.
func TestInboxByDatabaseSQL(t *testing.T) {
	t.Parallel()
	pool := withEffects(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders", "receipts")
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	pgtest.Run(t, pool, conn, outbox.RelayConfig{})
	receipts := pgtest.Watch(t, conn, "receipts")
	var mu sync.Mutex
	calls := map[string]int{}
	var duplicates atomic.Int64
	once := inbox.WithSQL(db, inbox.Config{Isolation: pgx.RepeatableRead, OnDuplicate: func(*client.Delivery) { duplicates.Add(1) }})
	pgtest.Consume(t, conn, "orders", again(once(client.JSON(func(ctx context.Context, what string) error {
		mu.Lock()
		calls[what]++
		n := calls[what]
		mu.Unlock()
		tx, ok := inbox.SQLTx(ctx)
		if _, other := inbox.Tx(ctx); !ok || other {
			return errors.New("no transaction of database/sql")
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO effects VALUES ($1)", what); err != nil {
			return err
		}
		if _, err := outbox.Publish(ctx, postgres.SQL(tx), address.Queue("receipts"), what); err != nil {
			return err
		}
		if n == 1 {
			switch what {
			case "fails":
				return errors.New("it fails")
			case "hides":
				_, _ = tx.ExecContext(ctx, "SELECT 1/0")
			case "panics":
				panic("assignment to entry in nil map")
			}
		}
		return nil
	}))), client.ConsumerConfig{Concurrency: 2})
	pgtest.Publish(t, conn, "orders", [2]string{"1", "fails"}, [2]string{"2", "hides"}, [2]string{"3", "panics"}, [2]string{"4", "works"}, [2]string{"4", "works"})
	require.Eventually(t, func() bool { return duplicates.Load() == 1 && effects(t, pool) == 4 }, 3*time.Minute, 5*time.Millisecond)
	assert.ElementsMatch(t, []string{`"fails"`, `"hides"`, `"panics"`, `"works"`}, receipts.Await(t, 4))
	mu.Lock()
	assert.Equal(t, map[string]int{"fails": 2, "hides": 2, "panics": 2, "works": 1}, calls)
	mu.Unlock()
	assert.Eventually(t, func() bool { return db.Stats().InUse == 0 }, 3*time.Minute, 5*time.Millisecond, "each connection is returned")
}

// A consumer that stops lets the handler end its work, and commits it.
func TestInboxByDatabaseSQLCommitsWhileItStops(t *testing.T) {
	t.Parallel()
	pool := withEffects(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	ctx, stop := context.WithCancel(t.Context())
	h := inbox.WithSQL(db, inbox.Config{})(client.JSON(func(ctx context.Context, what string) error {
		stop()
		tx, _ := inbox.SQLTx(ctx)
		_, err := tx.ExecContext(context.WithoutCancel(ctx), "INSERT INTO effects VALUES ($1)", what)
		return err
	}))
	pgtest.Publish(t, conn, "orders", [2]string{"1", "last"})
	if err := conn.Consume(ctx, "orders", h, client.ConsumerConfig{}); !errors.Is(err, context.Canceled) {
		require.NoError(t, err)
	}
	assert.Equal(t, 1, effects(t, pool))
	pgtest.QueueIsEmpty(t, conn, "orders")
}

func TestInboxForgetsOldMarks(t *testing.T) {
	t.Parallel()
	pool := withEffects(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	_, err := pool.Exec(t.Context(), "INSERT INTO hopback_inbox SELECT n::text::bytea, now() - interval '8 days' FROM generate_series(1, 12000) n")
	require.NoError(t, err)
	pgtest.Consume(t, conn, "orders", inbox.With(pool, inbox.Config{})(client.JSON(write)), client.ConsumerConfig{})
	pgtest.Publish(t, conn, "orders", [2]string{"a", "a"})
	require.Eventually(t, func() bool {
		var marks int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_inbox").Scan(&marks))
		return marks == 1
	}, 30*time.Second, 10*time.Millisecond)
}

func TestInboxSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, err := pool.Exec(t.Context(), "DROP TABLE hopback_inbox")
	require.NoError(t, err)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	h := client.JSON(write)
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { assert.NoError(t, db.Close()) })
	for name, c := range map[string]struct {
		h    client.Handler
		says string
	}{
		"no table":    {inbox.With(pool, inbox.Config{})(h), "call postgres.Migrate"},
		"no pool":     {inbox.With(nil, inbox.Config{})(h), "pool is nil"},
		"no database": {inbox.WithSQL(nil, inbox.Config{})(h), "db is nil"},
		"isolation":   {inbox.WithSQL(db, inbox.Config{Isolation: "loose"})(h), "inbox.Config.Isolation"},
		"no handler":  {inbox.With(pool, inbox.Config{})(nil), "handler is nil"},
		"short marks": {inbox.With(pool, inbox.Config{Keep: time.Second})(h), "inbox.Config.Keep"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := conn.Consume(t.Context(), "orders", c.h, client.ConsumerConfig{})
			assert.ErrorContains(t, err, c.says)
			var bad *argument.Error
			assert.Equal(t, name != "no table", errors.As(err, &bad))
		})
	}
	// What is wrong with one handler is no other's fault.
	both := inbox.With(pool, inbox.Config{})
	both(nil)
	assert.ErrorContains(t, conn.Consume(t.Context(), "orders", both(h), client.ConsumerConfig{}), "call postgres.Migrate")
	_, ok := inbox.Tx(t.Context())
	assert.False(t, ok)
}
