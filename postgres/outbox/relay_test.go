package outbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
)

var orders = []outbox.Order{outbox.OrderNone, outbox.OrderByKey}

func TestWhatIsCommittedIsPublishedAndWhatIsRolledBackIsNot(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			relay, _ := pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order})

			to := address.Queue("orders")
			lost, err := pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = outbox.Publish(t.Context(), lost, to, "rolled back")
			require.NoError(t, err)
			kept, err := pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = outbox.Publish(t.Context(), kept, to, "committed")
			require.NoError(t, err)
			require.NoError(t, lost.Rollback(t.Context()))
			require.NoError(t, kept.Commit(t.Context()))
			got.Await(t, 1)

			// And through database/sql.
			db := stdlib.OpenDBFromPool(pool)
			defer db.Close()
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			_, err = outbox.Publish(t.Context(), postgres.SQL(tx), to, "by database/sql")
			require.NoError(t, err)
			require.NoError(t, tx.Commit())
			assert.Equal(t, []string{`"committed"`, `"by database/sql"`}, got.Await(t, 2))
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)
			assert.Eventually(t, func() bool { return relay.Stats() == outbox.RelayStats{Published: 2} }, 3*time.Minute, 5*time.Millisecond)
		})
	}
}

// The ids of messages don't tell in which order their transactions commit.
func TestTransactionThatCommitsLateIsNotSkipped(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order, PollInterval: 20 * time.Millisecond})
			p := outbox.Publisher[int]{To: address.Queue("orders"), Key: func(i int) string { return strconv.Itoa(i % 2) }}

			late, err := pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = p.Publish(t.Context(), late, 0)
			require.NoError(t, err)
			// Enough later ones for the relay to have passed its place.
			for i := 1; i < 200; i++ {
				_, err := p.Publish(t.Context(), pool, i)
				require.NoError(t, err)
			}
			got.Await(t, 199)
			require.NoError(t, late.Commit(t.Context()))
			all := got.Await(t, 200)
			assert.Equal(t, "0", all[199])
		})
	}
}

// The newest transaction of all is above what a snapshot calls its xmax.
func TestTransactionThatIsTheNewestIsNotSkipped(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			late, err := pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = outbox.Publish(t.Context(), late, address.Queue("orders"), 1)
			require.NoError(t, err)
			pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order})
			// A relay that sleeps has looked before.
			require.Eventually(t, func() bool {
				var sleeps bool
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT NOT pg_try_advisory_xact_lock_shared("+outbox.LockSleep+")").Scan(&sleeps))
				return sleeps
			}, 30*time.Second, time.Millisecond)
			require.NoError(t, late.Commit(t.Context()))
			got.Await(t, 1)
		})
	}
}

func TestMessagesOfAKeyKeepTheirOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	b, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	relay, stop := pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: outbox.OrderByKey, Batch: 50})
	p := outbox.Publisher[string]{To: address.Queue("orders"), Key: func(s string) string { return strings.Split(s, " ")[0] }}

	const writers, each = 8, 250
	_, err := pool.Exec(t.Context(), "CREATE TABLE accounts (key text PRIMARY KEY, n int NOT NULL DEFAULT 0)")
	require.NoError(t, err)
	for k := range 10 {
		_, err := pool.Exec(t.Context(), "INSERT INTO accounts (key) VALUES ($1)", fmt.Sprint("k", k))
		require.NoError(t, err)
	}
	ended := make(chan error, writers*each)
	for w := range writers {
		go func() {
			for i := range each {
				ended <- func() error {
					tx, err := pool.Begin(context.Background())
					if err != nil {
						return err
					}
					defer func() { _ = tx.Rollback(context.Background()) }()
					key := fmt.Sprint("k", (w*7+i)%10)
					// Transactions of one key exclude each other.
					var n int
					if err := tx.QueryRow(context.Background(), "UPDATE accounts SET n = n + 1 WHERE key = $1 RETURNING n", key).Scan(&n); err != nil {
						return err
					}
					if _, err := p.Publish(context.Background(), tx, fmt.Sprintf("%s %d", key, n)); err != nil {
						return err
					}
					if i%3 == 2 {
						return nil // rolled back
					}
					return tx.Commit(context.Background())
				}()
			}
		}()
	}
	// During that, the relay's connection is cut, and the relay replaced.
	for cut := range 5 {
		require.Eventually(t, func() bool { return relay.Stats().Published > int64(100*cut) }, 3*time.Minute, time.Millisecond)
		for _, c := range b.Connections() {
			c.Cut()
		}
	}
	stop()
	second, _ := pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: outbox.OrderByKey})
	for range writers * each {
		require.NoError(t, <-ended)
	}
	require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)

	var want int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT sum(n) FROM accounts").Scan(&want))
	last, ids := map[string]int{}, map[string]bool{}
	for _, m := range b.Queue("orders").Messages() {
		if id := m.Properties.MessageID.(string); ids[id] {
			continue // a duplicate
		} else {
			ids[id] = true
		}
		var body string
		require.NoError(t, json.Unmarshal(m.GetData(), &body))
		key, number, _ := strings.Cut(body, " ")
		n, err := strconv.Atoi(number)
		require.NoError(t, err)
		assert.Equal(t, last[key]+1, n, "of key %s", key)
		last[key] = n
	}
	assert.Len(t, ids, want)
	assert.Eventually(t, func() bool { return relay.Stats().Published+second.Stats().Published == int64(want) }, 3*time.Minute, 10*time.Millisecond)
}

func TestMessageThatCannotBePublishedIsSetAside(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			relay, _ := pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order, Retry: 10 * time.Millisecond, SetAsideAfter: 300 * time.Millisecond})
			p := outbox.Publisher[string]{Key: func(s string) string { return s }}
			send := func(to address.Address, v string) {
				_, err := p.Publish(t.Context(), pool, v, client.PublishTo(to))
				require.NoError(t, err)
			}
			send(address.Queue("missing"), "no queue")
			send(address.Exchange("missing", "key"), "no exchange")
			send(address.Exchange("amq.direct", "nowhere"), "no binding")
			_, err := p.Publish(t.Context(), pool, strings.Repeat("x", 17<<20), client.PublishTo(address.Queue("orders")))
			require.ErrorAs(t, err, new(*argument.Error), "a key is no message")
			_, err = outbox.Publish(t.Context(), pool, address.Queue("orders"), strings.Repeat("x", 17<<20))
			require.NoError(t, err)
			for i := range 50 {
				send(address.Queue("orders"), fmt.Sprint("good ", i))
			}
			got.Await(t, 50)
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)
			rows, err := pool.Query(t.Context(), "SELECT coalesce(key, 'large'), reason FROM hopback_outbox_set_aside")
			require.NoError(t, err)
			reasons := map[string]string{}
			for rows.Next() {
				var key, reason string
				require.NoError(t, rows.Scan(&key, &reason))
				reasons[key] = reason
			}
			require.NoError(t, rows.Err())
			require.Len(t, reasons, 4, "%v", reasons)
			assert.Contains(t, reasons["large"], "too large")
			for key, reason := range reasons {
				t.Log(key, ": ", reason)
			}
			assert.Eventually(t, func() bool { return relay.Stats().SetAside == 4 }, 3*time.Minute, 5*time.Millisecond)

			// Fixed, and returned as docs/outbox.md says.
			pgtest.Queues(t, conn, "missing")
			came := pgtest.Watch(t, conn, "missing")
			docs, err := os.ReadFile("../../docs/outbox.md")
			require.NoError(t, err)
			_, sql, _ := strings.Cut(string(docs), "```sql\n")
			sql, _, _ = strings.Cut(sql, "```")
			tag, err := pool.Exec(t.Context(), sql)
			require.NoError(t, err)
			assert.EqualValues(t, 2, tag.RowsAffected())
			assert.Equal(t, []string{`"no queue"`}, came.Await(t, 1))
		})
	}
}

func TestSegmentsAreTruncatedWhenTheyAreEmptyAndNotBefore(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	p := outbox.Publisher[int]{To: address.Queue("orders")}
	// One transaction writes into the first segment, and commits last.
	late, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = p.Publish(t.Context(), late, -1)
	require.NoError(t, err)
	got := pgtest.Watch(t, conn, "orders")
	pgtest.Run(t, pool, conn, outbox.RelayConfig{})
	size := func(segment int) (n int64) {
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT pg_relation_size($1::text::regclass)", fmt.Sprint("hopback_outbox_", segment)).Scan(&n))
		return n
	}
	for segment := range 20 { // more than once around
		_, err := pool.Exec(t.Context(), "SELECT setval('hopback_outbox_id', $1)", segment<<17+1)
		require.NoError(t, err)
		_, err = p.PublishAll(t.Context(), pool, []int{segment})
		require.NoError(t, err)
	}
	got.Await(t, 20)
	require.Eventually(t, func() bool { return size(15) == 0 && size(1) == 0 }, 3*time.Minute, 20*time.Millisecond)
	assert.NotZero(t, size(0), "a transaction has written here, and is open")
	assert.NotZero(t, size(3), "messages are written here now")
	require.NoError(t, late.Commit(t.Context()))
	assert.Equal(t, "-1", got.Await(t, 21)[20])
	require.Eventually(t, func() bool { return size(0) == 0 }, 3*time.Minute, 50*time.Millisecond)
}

// A transaction that only reads, as pg_dump does, keeps a segment from being truncated. Nobody
// waits behind the relay for that.
func TestTruncationWaitsForNobody(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			p := outbox.Publisher[int]{To: address.Queue("orders")}
			_, err := p.PublishAll(t.Context(), pool, make([]int, 10))
			require.NoError(t, err)
			dump, err := pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = dump.Exec(t.Context(), "LOCK TABLE hopback_outbox IN ACCESS SHARE MODE")
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), "SELECT setval('hopback_outbox_id', $1)", 2<<17)
			require.NoError(t, err)
			pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order})
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)
			// The relay tries in vain, several times.
			for until := time.Now().Add(1500 * time.Millisecond); time.Now().Before(until); {
				var waiting int
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock' AND relation::regclass::text LIKE 'hopback_outbox%' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())").Scan(&waiting))
				require.Zero(t, waiting)
				time.Sleep(10 * time.Millisecond)
			}
			require.NoError(t, dump.Rollback(t.Context()))
			require.Eventually(t, func() bool {
				var size int64
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT pg_relation_size('hopback_outbox_0')").Scan(&size))
				return size == 0
			}, 60*time.Second, 20*time.Millisecond)
		})
	}
}

func TestPublishRefusesWhatCannotBeCarried(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	to := address.Queue("orders")
	refused := func(err error) {
		t.Helper()
		require.ErrorAs(t, err, new(*argument.Error))
	}
	_, err := outbox.Publish(t.Context(), nil, to, 1)
	refused(err)
	_, err = outbox.Publish(t.Context(), postgres.SQL((*sql.Tx)(nil)), to, 1)
	refused(err)
	_, err = outbox.Publish(t.Context(), pool, address.Address{}, 1)
	refused(err)
	_, err = outbox.Publish(t.Context(), pool, address.Queue(""), 1)
	refused(err)
	for _, bad := range []string{"orders", "/queues/", "/queues/a b", "/queues/%zz", "/queues/a/b", "/exchanges/", "/exchanges/%", "/exchanges/x/a/b", "/topics/x", "/queues/\xff"} {
		_, err = outbox.Publish(t.Context(), pool, address.Address{}, 1, func(m *client.Message) { m.Properties.To = &bad })
		refused(err)
		_, err = outbox.PublishAt(t.Context(), pool, to, time.Now().Add(time.Hour), 1, func(m *client.Message) { m.Properties.To = &bad })
		refused(err)
	}
	_, err = outbox.Publish(t.Context(), pool, to, func() {})
	refused(err)
	_, err = outbox.Publish(t.Context(), pool, to, (*client.Message)(nil))
	refused(err)
	_, err = outbox.Publish(t.Context(), pool, to, 1, func(m *client.Message) { m.Properties.MessageID = "\x00" })
	refused(err)
	_, err = outbox.Publish(t.Context(), pool, to, 1, func(m *client.Message) { m.Properties.MessageID = uint64(7) })
	refused(err)
	_, err = outbox.Publish(t.Context(), pool, to, 1, func(m *client.Message) { m.Value = 1 })
	refused(err)
	_, err = outbox.Publisher[string]{To: to, Key: func(s string) string { return s }}.Publish(t.Context(), pool, "\xff")
	refused(err)
	assert.Zero(t, left(t, pool))

	given := client.NewMessage([]byte("mine"))
	id, err := outbox.Publish(t.Context(), pool, to, given, nil)
	require.NoError(t, err)
	assert.Equal(t, given.Properties.MessageID, id)
	assert.Nil(t, given.Properties.To, "the caller's message is unchanged")
	ids, err := outbox.Publisher[int]{To: to}.PublishAll(t.Context(), pool, slices.Repeat([]int{7}, 2500))
	require.NoError(t, err)
	assert.Len(t, ids, 2500)
	ids, err = outbox.Publisher[int]{To: to}.PublishAll(t.Context(), pool, nil)
	require.NoError(t, err)
	assert.Empty(t, ids)
	assert.Equal(t, 2501, left(t, pool))
}

func TestRelayTellsWhatIsMissing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, conn := pgtest.Broker(t)
	_, err := outbox.NewRelay(nil, conn, outbox.RelayConfig{})
	require.ErrorAs(t, err, new(*argument.Error))
	_, err = outbox.NewRelay(pool, nil, outbox.RelayConfig{})
	require.ErrorAs(t, err, new(*argument.Error))
	_, err = outbox.NewRelay(pool, conn, outbox.RelayConfig{Order: "sorted"})
	require.ErrorAs(t, err, new(*argument.Error))

	_, err = pool.Exec(t.Context(), "DROP TABLE hopback_outbox")
	require.NoError(t, err)
	relay, err := outbox.NewRelay(pool, conn, outbox.RelayConfig{})
	require.NoError(t, err)
	require.ErrorContains(t, relay.Run(t.Context()), "call postgres.Migrate")
}

// The relay concludes from an id that isn't there that its transaction began earlier than
// those it sees, so the number of the transaction has to come before the id.
func TestTransactionHasItsNumberBeforeItTakesAnID(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, err := pool.Exec(t.Context(), `CREATE FUNCTION numbered() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
	IF pg_current_xact_id_if_assigned() IS NULL THEN RAISE 'no number yet'; END IF;
	RETURN nextval('hopback_outbox_id');
END $$`)
	require.NoError(t, err)
	for range 20 {
		_, err = pool.Exec(t.Context(), strings.Replace(outbox.InsertOne, "nextval('hopback_outbox_id')", "numbered()", 1), []byte("m"), "id", "/queues/q", nil)
		require.NoError(t, err)
	}
}
