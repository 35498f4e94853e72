package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
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
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
)

// times has when each message came, by its message-id.
type times struct {
	mu   sync.Mutex
	came map[string]time.Time
	ids  []string
}

func (a *times) Handle(_ context.Context, d *client.Delivery) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	id, _ := d.Message().Properties.MessageID.(string)
	a.came[id] = time.Now()
	a.ids = append(a.ids, id)
	return nil
}

func (a *times) order() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(a.ids, " ")
}

// timesOf consumes a queue until the test ends.
func timesOf(t *testing.T, conn *client.Conn, queue string) *times {
	t.Helper()
	a := &times{came: map[string]time.Time{}}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- conn.Consume(ctx, queue, a, client.ConsumerConfig{}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			assert.NoError(t, err)
		}
	})
	return a
}

func id(id string) func(*client.Message) {
	return func(m *client.Message) { m.Properties.MessageID = id }
}

// waiting is how many messages wait for their time.
func waiting(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox_scheduled WHERE ended IS NULL").Scan(&n))
	return n
}

// A message comes when it is due and not before, behind what its key had until then. What
// isn't due delays nothing.
func TestScheduledMessagesArePublishedWhenTheyAreDue(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := timesOf(t, conn, "orders")
			pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order})
			p := outbox.Publisher[string]{To: address.Queue("orders"), Key: func(string) string { return "one" }}
			now := time.Now()
			due := map[string]time.Time{"far": now.Add(24 * time.Hour), "third": now.Add(2200 * time.Millisecond), "second": now.Add(2 * time.Second), "past": now.Add(-time.Hour)}
			for _, name := range []string{"far", "third", "second", "past"} {
				given, err := p.PublishAt(t.Context(), pool, due[name], name, id(name))
				require.NoError(t, err)
				assert.Equal(t, name, given)
			}
			require.Eventually(t, func() bool { return strings.HasPrefix(got.order(), "past") }, 3*time.Minute, time.Millisecond)
			_, err := p.Publish(t.Context(), pool, "at once", id("at-once"))
			require.NoError(t, err)
			inTime := time.Now().Before(due["second"])
			tx, err := pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = p.PublishAt(t.Context(), tx, now, "rolled back")
			require.NoError(t, err)
			require.NoError(t, tx.Rollback(t.Context()))

			require.Eventually(t, func() bool { return strings.Contains(got.order(), "third") && strings.Contains(got.order(), "at-once") }, 3*time.Minute, time.Millisecond)
			if inTime { // or else the machine was too slow to tell
				assert.Equal(t, "past at-once second third", got.order())
			}
			for _, name := range []string{"second", "third"} {
				late := got.came[name].Sub(due[name])
				assert.Positive(t, late, name)
				assert.Less(t, late, 30*time.Second, name)
			}
			assert.Equal(t, 1, waiting(t, pool))
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)
		})
	}
}

// A queue of RabbitMQ 4.4 could hold the message until it is due. It waits in the database all the
// same: there a transaction can cancel it, and nothing depends on the queue until then.
func TestScheduledMessagesWaitInTheDatabaseWhereTheQueueCouldHoldThem(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	b, conn := pgtest.BrokerOf(t, "4.4.0")
	pgtest.Queues(t, conn, "orders")
	pgtest.Run(t, pool, conn, outbox.RelayConfig{})
	put := func(name string, due time.Time) {
		t.Helper()
		_, err := outbox.PublishAt(t.Context(), pool, address.Queue("orders"), due, name, id(name))
		require.NoError(t, err)
	}
	put("far", time.Now().Add(time.Hour))
	put("canceled", time.Now().Add(5*time.Second))
	put("due", time.Now().Add(time.Second))
	queue := b.Queue("orders")
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	require.NoError(t, queue.Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready == 1 }), "the relay has looked at all of them")
	assert.Zero(t, queue.Counts().Delayed)
	assert.Equal(t, 2, waiting(t, pool))

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	for _, name := range []string{"far", "canceled"} {
		is, err := outbox.Cancel(t.Context(), tx, name)
		require.NoError(t, err)
		assert.Equal(t, outbox.Canceled, is)
	}
	require.NoError(t, tx.Commit(t.Context()))
	consuming, done := context.WithCancel(ctx)
	require.NoError(t, conn.Consume(consuming, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		assert.Equal(t, "due", d.Message().Properties.MessageID)
		assert.NotContains(t, d.Message().Annotations, "x-opt-delivery-time")
		done()
		return nil
	}), client.ConsumerConfig{}))
	require.NoError(t, ctx.Err(), "it came")
}

// The table of docs/schedule.md for the outbox.
func TestCancelAtEachMomentOfAMessageInTheOutbox(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	got := timesOf(t, conn, "orders")
	to := address.Queue("orders")
	cancel := func(db postgres.DB, name string, want outbox.Cancellation) {
		t.Helper()
		is, err := outbox.Cancel(t.Context(), db, name)
		require.NoError(t, err)
		assert.Equal(t, want, is, name)
	}
	put := func(db postgres.DB, name string, due time.Time) {
		t.Helper()
		_, err := outbox.PublishAt(t.Context(), db, to, due, name, id(name))
		require.NoError(t, err)
	}
	begin := func() pgx.Tx {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		return tx
	}
	soon := time.Now().Add(time.Hour)

	cancel(pool, "never", outbox.CancelUnknownID)

	// Before its transaction commits, from another one and from its own.
	own := begin()
	put(own, "uncommitted", soon)
	cancel(pool, "uncommitted", outbox.CancelUnknownID)
	cancel(own, "uncommitted", outbox.Canceled)
	require.NoError(t, own.Commit(t.Context()))

	// While it waits, and once more.
	put(pool, "waiting", soon)
	cancel(pool, "waiting", outbox.Canceled)
	cancel(pool, "waiting", outbox.Canceled)

	// By database/sql.
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	put(postgres.SQL(db), "sql", soon)
	cancel(postgres.SQL(db), "sql", outbox.Canceled)
	cancel(postgres.SQL(db), "other", outbox.CancelUnknownID)

	// In a transaction that lasts until it is due, and that ends one way or the other.
	put(pool, "held", time.Now())
	put(pool, "given up", time.Now())
	held, givenUp := begin(), begin()
	cancel(held, "held", outbox.Canceled)
	cancel(givenUp, "given up", outbox.Canceled)
	put(pool, "behind", time.Now())
	relay, _ := pgtest.Run(t, pool, conn, outbox.RelayConfig{})
	require.Eventually(t, func() bool { return got.order() == "behind" }, 3*time.Minute, time.Millisecond, "the others are passed over")
	require.NoError(t, held.Commit(t.Context()))
	require.NoError(t, givenUp.Rollback(t.Context()))
	require.Eventually(t, func() bool { return got.order() == "behind given up" }, 3*time.Minute, time.Millisecond)

	// After it was published.
	cancel(pool, "behind", outbox.CancelPublished)
	cancel(pool, "given up", outbox.CancelPublished)
	assert.Zero(t, waiting(t, pool))
	require.Eventually(t, func() bool { return relay.Stats().Published == 2 }, 3*time.Minute, time.Millisecond)

	// Later than that is remembered.
	_, err := pool.Exec(t.Context(), "UPDATE hopback_outbox_scheduled SET ended_at = now() - interval '8 days'")
	require.NoError(t, err)
	pgtest.Run(t, pool, conn, outbox.RelayConfig{})
	require.Eventually(t, func() bool {
		is, err := outbox.Cancel(t.Context(), pool, "behind")
		return err == nil && is == outbox.CancelUnknownID
	}, time.Minute, 10*time.Millisecond)
}

// A relay that takes the message and a Cancel at the same time agree: it is published if
// and only if Cancel says so.
func TestCancelAndTheRelayAgree(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	got := timesOf(t, conn, "orders")
	relay, _ := pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: outbox.OrderByKey})
	const messages = 300
	results := make([]outbox.Cancellation, messages)
	var all sync.WaitGroup
	for i := range 6 {
		all.Go(func() {
			for n := i; n < messages; n += 6 {
				name := fmt.Sprintf("m%d", n)
				_, err := outbox.PublishAt(t.Context(), pool, address.Queue("orders"), time.Now().Add(time.Duration(n%5)*time.Millisecond), n, id(name))
				if !assert.NoError(t, err) {
					return
				}
				if n%2 == 0 {
					time.Sleep(time.Duration(n%7) * time.Millisecond) // only so that some are taken before
				}
				results[n], err = outbox.Cancel(t.Context(), pool, name)
				assert.NoError(t, err)
			}
		})
	}
	all.Wait()
	published := 0
	for _, is := range results {
		if is == outbox.CancelPublished {
			published++
		} else {
			assert.Equal(t, outbox.Canceled, is)
		}
	}
	require.Eventually(t, func() bool { return int(relay.Stats().Published) == published }, 3*time.Minute, time.Millisecond)
	got.mu.Lock()
	defer got.mu.Unlock()
	for n, is := range results {
		_, came := got.came[fmt.Sprintf("m%d", n)]
		assert.Equal(t, is == outbox.CancelPublished, came, "message %d", n)
	}
	t.Logf("%d of %d were published", published, messages)
}

// However many messages wait for a later time, a relay looks at one entry of an index, and
// none of them is in the table from which messages are published.
func TestMessagesForLaterCostTheRelayNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO hopback_outbox_scheduled (due_at, message, message_id, address, ended, ended_at)
SELECT now() + interval '1 year' - n * interval '1 s', '', n, '', CASE WHEN n % 4 = 0 THEN 'published' END, CASE WHEN n % 4 = 0 THEN now() END FROM generate_series(1, 20000) n`)
	require.NoError(t, err)
	assert.Zero(t, left(t, pool))
	_, err = pool.Exec(t.Context(), "ANALYZE hopback_outbox_scheduled")
	require.NoError(t, err)
	explain := func(query string, args ...any) string {
		t.Helper()
		rows, err := pool.Query(t.Context(), "EXPLAIN "+query, args...)
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return strings.Join(lines, "\n")
	}
	for _, plan := range []string{explain(outbox.NextDue), explain(outbox.MoveDue, 1000, 16<<20)} {
		assert.Contains(t, plan, "using hopback_outbox_scheduled_due")
		assert.NotContains(t, plan, "Seq Scan on hopback_outbox_scheduled")
	}
}

func TestPublishAtRefusesWhatCanNotBe(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	to := address.Queue("orders")
	later := time.Now().Add(time.Hour)
	bad := func(err error, text string) {
		t.Helper()
		var a *argument.Error
		require.ErrorAs(t, err, &a)
		assert.ErrorContains(t, err, text)
	}
	_, err := outbox.PublishAt(t.Context(), pool, to, time.Time{}, 1)
	bad(err, "due is the zero time")
	_, err = outbox.PublishAt(t.Context(), pool, to, time.Now().AddDate(1000, 0, 0), 1)
	bad(err, "more than ten years ahead")
	_, err = outbox.PublishAt(t.Context(), nil, to, later, 1)
	bad(err, "db is nil")
	_, err = outbox.PublishAt(t.Context(), pool, address.Address{}, later, 1)
	bad(err, "message Properties.To is missing")
	_, err = outbox.PublishAt(t.Context(), pool, to, later, func() {})
	bad(err, "can't be encoded")
	_, err = outbox.Cancel(t.Context(), nil, "a")
	bad(err, "db is nil")
	for _, text := range []string{"", "a\x00b", "\xff"} {
		_, err = outbox.Cancel(t.Context(), pool, text)
		bad(err, "messageID")
	}
	assert.Zero(t, waiting(t, pool))
	_, err = outbox.PublishAt(t.Context(), pool, to, later, 1, id("taken"))
	require.NoError(t, err)
	_, err = outbox.PublishAt(t.Context(), pool, to, later, 2, id("taken"))
	bad(err, "belongs to another scheduled message")
	assert.Equal(t, 1, waiting(t, pool))
}
