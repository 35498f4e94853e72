package outbox_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
)

// set changes a setting of the test's database.
func set(t *testing.T, pool *pgxpool.Pool, setting string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), fmt.Sprintf("ALTER DATABASE %s SET %s", pool.Config().ConnConfig.Database, setting))
	require.NoError(t, err)
	pool.Reset()
}

// distinct returns how many different values there are.
func distinct(all []string) int {
	slices.Sort(all)
	return len(slices.Compact(all))
}

// Serialization errors would roll back the deletion of what was published.
func TestNothingIsPublishedTwiceWhereTransactionsAreSerializable(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			set(t, pool, "default_transaction_isolation = 'serializable'")
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			for range 2 {
				pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order, Batch: 50, Logger: slog.New(slog.DiscardHandler)})
			}
			const writers, each = 8, 250
			p := outbox.Publisher[string]{To: address.Queue("orders"), Key: func(s string) string { return s[:1] }}
			ended := make(chan error, writers)
			for w := range writers {
				go func() {
					for i := range each {
						for {
							_, err := p.Publish(context.Background(), pool, fmt.Sprint(w, " ", i))
							if err != nil && strings.Contains(err.Error(), "40001") {
								continue // the writer's own transaction
							}
							if err != nil {
								ended <- err
								return
							}
							break
						}
					}
					ended <- nil
				}()
			}
			for range writers {
				require.NoError(t, <-ended)
			}
			got.Await(t, writers*each)
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)
			pgtest.QueueIsEmpty(t, conn, "orders")
			all := got.All()
			assert.Equal(t, writers*each, distinct(all))
			assert.Equal(t, writers*each, len(got.All()), "duplicates")
		})
	}
}

// Messages that can't be set aside stay, and the batch that they are in isn't published again.
func TestMessageThatCannotBeSetAsideBlocksNoOthers(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			large := strings.Repeat("x", 17<<20)
			_, err := outbox.Publish(t.Context(), pool, address.Queue("orders"), large)
			require.NoError(t, err)
			// The sequence was reset after another message was set aside.
			_, err = pool.Exec(t.Context(), `INSERT INTO hopback_outbox_set_aside (id, message, message_id, address, created_at, failed_since, reason)
SELECT id, '', 'earlier', address, now(), now(), 'old' FROM hopback_outbox`)
			require.NoError(t, err)
			p := outbox.Publisher[int]{To: address.Queue("orders")}
			_, err = p.PublishAll(t.Context(), pool, make([]int, 20))
			require.NoError(t, err)
			pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order, Retry: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)
			var n int
			require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox_set_aside").Scan(&n))
			assert.Equal(t, 2, n)

			// And if the table refuses the message for another reason.
			_, err = pool.Exec(t.Context(), "ALTER TABLE hopback_outbox_set_aside ADD CHECK (length(reason) < 5) NOT VALID")
			require.NoError(t, err)
			_, err = outbox.Publish(t.Context(), pool, address.Queue("orders"), large)
			require.NoError(t, err)
			_, err = p.PublishAll(t.Context(), pool, make([]int, 20))
			require.NoError(t, err)
			require.Eventually(t, func() bool { return left(t, pool) == 1 }, 3*time.Minute, 10*time.Millisecond)
			_, err = pool.Exec(t.Context(), "ALTER TABLE hopback_outbox_set_aside DROP CONSTRAINT hopback_outbox_set_aside_reason_check")
			require.NoError(t, err)
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)
			pgtest.QueueIsEmpty(t, conn, "orders")
			assert.Equal(t, 40, len(got.All()), "duplicates")
		})
	}
}

// The time for which a message has failed doesn't depend on how far the database's clock is
// from the relay's.
func TestDatabaseWhoseClockIsBehindSetsNothingAside(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			_, err := pool.Exec(t.Context(), "CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT pg_catalog.clock_timestamp() - interval '2 h' $$")
			require.NoError(t, err)
			set(t, pool, "search_path = public, pg_catalog")
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "other")
			_, err = outbox.Publish(t.Context(), pool, address.Queue("missing"), 1)
			require.NoError(t, err)
			relay, _ := pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order, Retry: time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
			require.Eventually(t, func() bool {
				var failed int
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(failed_since) FROM hopback_outbox").Scan(&failed))
				return failed == 1 || relay.Stats().SetAside > 0
			}, 30*time.Second, 5*time.Millisecond)
			// It is tried again several times until this has a queue.
			for i := range 5 {
				_, err = outbox.Publish(t.Context(), pool, address.Queue("other"), i)
				require.NoError(t, err)
				require.Eventually(t, func() bool { return relay.Stats().Published == int64(i+1) }, 3*time.Minute, 5*time.Millisecond)
				time.Sleep(5 * time.Millisecond)
			}
			pgtest.Queues(t, conn, "missing")
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)
			assert.Zero(t, relay.Stats().SetAside)
		})
	}
}

// A message without an answer may have been published or not, so those behind it wait, even if
// one before it was set aside.
func TestChainEndsBehindAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	unfit := argument.New("message", nil, "is too large", "")
	unknown := &client.Error{Op: "publish", Kind: client.ErrOutcomeUnknown}
	assert.Equal(t, 2, outbox.Continues(unfit, unknown, nil))
	assert.Equal(t, 3, outbox.Continues(nil, unfit, nil))
	assert.Equal(t, 1, outbox.Continues(&client.Error{Op: "publish", Kind: client.ErrUnroutable}, nil))
}

// behindProxy returns a pool whose connections go through a proxy.
func behindProxy(t *testing.T, pool *pgxpool.Pool) (*pgxpool.Pool, *proxy.Proxy) {
	t.Helper()
	cfg := pool.Config()
	p, err := proxy.New(fmt.Sprintf("%s:%d", cfg.ConnConfig.Host, cfg.ConnConfig.Port))
	require.NoError(t, err)
	t.Cleanup(p.Close)
	u, err := url.Parse(pool.Config().ConnString())
	require.NoError(t, err)
	u.Host, u.Path = p.Addr(), "/"+cfg.ConnConfig.Database
	through, err := pgxpool.New(t.Context(), u.String())
	require.NoError(t, err)
	t.Cleanup(through.Close)
	return through, p
}

// hasty runs a relay that waits for the database, and for a leader, for 2 seconds only.
func hasty(t *testing.T, pool *pgxpool.Pool, conn *client.Conn, cfg outbox.RelayConfig) (cancel func(), ended <-chan error) {
	t.Helper()
	relay, err := outbox.NewRelay(pool, conn, cfg)
	require.NoError(t, err)
	relay.SetLimits(2*time.Second, 2*time.Second)
	ctx, cancel := context.WithCancel(context.Background())
	end, over := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(over)
		end <- relay.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-over
	})
	return cancel, end
}

// A path to the database that goes silent, with its connections open, is noticed and logged.
// The relay continues once there is another, and can be stopped before that.
func TestSilentDatabaseIsNoticed(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			through, silent := behindProxy(t, pool)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			log := &lines{}
			cancel, ended := hasty(t, through, conn, outbox.RelayConfig{Order: order, PublishTimeout: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil))})
			publish := func(n int) {
				_, err := outbox.Publish(t.Context(), pool, address.Queue("orders"), n)
				require.NoError(t, err)
			}
			publish(1)
			got.Await(t, 1)

			// Half-open: what the server holds of the old connections isn't known to be gone.
			silent.Drop()
			publish(2)
			got.Await(t, 2)
			require.Eventually(t, func() bool { return left(t, pool) == 0 && log.has("hasn't answered") }, 3*time.Minute, 10*time.Millisecond)

			// Silent: not even a new connection gets an answer.
			silent.Stall()
			publish(3)
			cancel()
			select {
			case err := <-ended:
				require.NoError(t, err)
			case <-time.After(time.Minute):
				assert.Fail(t, "the relay doesn't end while its database is silent")
				silent.Resume()
				<-ended
			}
			assert.Equal(t, 1, left(t, pool))
		})
	}
}

// While a batch is in flight the path goes silent: the relay ends, and what it has locked is
// free again without it.
func TestSilentDatabaseWhileABatchIsInFlight(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Database(t)
			through, silent := behindProxy(t, pool)
			b, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			cancel, ended := hasty(t, through, conn, outbox.RelayConfig{Order: order, PublishTimeout: time.Second, Logger: slog.New(slog.DiscardHandler)})
			release := b.HoldAnswers()
			_, err := outbox.Publish(t.Context(), pool, address.Queue("orders"), 1)
			require.NoError(t, err)
			require.NoError(t, b.Await(t.Context(), func() bool { return len(b.Queue("orders").Messages()) > 0 }))
			silent.Stall()
			release()
			cancel()
			select {
			case err := <-ended:
				require.NoError(t, err)
			case <-time.After(time.Minute):
				assert.Fail(t, "the relay doesn't end while its database is silent")
				silent.Resume()
				<-ended
				return
			}
			hasty(t, pool, conn, outbox.RelayConfig{Order: order})
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 10*time.Millisecond)
		})
	}
}

// A leader whose process is stopped is replaced, and does no harm when it continues.
func TestStoppedLeaderIsReplaced(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	m := hopbacktest.Start(t, hopbacktest.Config{})
	at, err := m.Listen("127.0.0.1:0")
	require.NoError(t, err)
	conn, err := client.Connect(t.Context(), at, client.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
	pgtest.Queues(t, conn, "orders")
	got := pgtest.Watch(t, conn, "orders")
	u, err := url.Parse(pool.Config().ConnString())
	require.NoError(t, err)
	u.Path = "/" + pool.Config().ConnConfig.Database
	leader := startChild(t, relayOf, string(outbox.OrderByKey), u.String(), at)
	defer leader.kill()
	p := outbox.Publisher[int]{To: address.Queue("orders"), Key: func(int) string { return "k" }}
	publish := func(n int) {
		_, err := p.Publish(t.Context(), pool, n)
		require.NoError(t, err)
	}
	publish(1)
	got.Await(t, 1)
	require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)

	require.NoError(t, leader.cmd.Process.Signal(syscall.SIGSTOP))
	cancel, ended := hasty(t, pool, conn, outbox.RelayConfig{Order: outbox.OrderByKey, Logger: slog.New(slog.DiscardHandler)})
	publish(2)
	publish(3)
	got.Await(t, 3)
	require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)

	// The old leader finds out, and leads again once the other has ended.
	require.NoError(t, leader.cmd.Process.Signal(syscall.SIGCONT))
	publish(4)
	got.Await(t, 4)
	cancel()
	require.NoError(t, <-ended)
	publish(5)
	got.Await(t, 5)
	require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)
	first := []string{}
	for _, v := range got.All() {
		if !slices.Contains(first, v) {
			first = append(first, v)
		}
	}
	assert.Equal(t, []string{"1", "2", "3", "4", "5"}, first)
}

// A batch is settled only by the leader that has the lease then.
func TestLeaderWithoutItsLeaseSettlesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Database(t)
	b, conn := pgtest.Broker(t)
	pgtest.Queues(t, conn, "orders")
	log := &lines{}
	pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: outbox.OrderByKey, Logger: slog.New(slog.NewTextHandler(log, nil))})
	release := b.HoldAnswers()
	_, err := outbox.Publish(t.Context(), pool, address.Queue("orders"), 1)
	require.NoError(t, err)
	require.NoError(t, b.Await(t.Context(), func() bool { return len(b.Queue("orders").Messages()) == 1 }))
	_, err = pool.Exec(t.Context(), "UPDATE hopback_outbox_lease SET epoch = epoch + 100") // as one that takes over does
	require.NoError(t, err)
	release()
	require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 5*time.Millisecond)
	assert.Len(t, b.Queue("orders").Messages(), 2, "the next leader has published it, too")
	assert.True(t, log.has("another relay has taken over"))
}
