package cli_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/postgres/outbox"
)

// What a transaction has written is published once the tables are there and a relay runs.
func TestOutboxIsMigratedAndRelayed(t *testing.T) {
	t.Parallel()
	postgres, err := service.Postgres(t.Context(), os.Stderr)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, postgres.Close()) })
	b := serveBroker(t)
	definitions := file(t, "topology.yaml", "queues:\n  orders: {dead-letter: drop}\n")

	here := world{env: map[string]string{"DATABASE_URL": postgres.URL, "HOPBACK_URL": b.amqp, "HOPBACK_MANAGEMENT_URL": b.http}}
	run := func(ctx context.Context, args ...string) (code int, stdout, stderr string) {
		r := here.runIn(ctx, args...)
		return r.code, r.stdout, r.stderr
	}
	code, _, stderr := run(t.Context(), "topology", "apply", definitions)
	require.Equal(t, cli.Done, code, stderr)

	code, _, stderr = run(t.Context(), "outbox", "relay")
	assert.Equal(t, cli.No, code)
	assert.Contains(t, stderr, "the database has no outbox of this version")
	for range 2 {
		code, stdout, stderr := run(t.Context(), "outbox", "migrate")
		require.Equal(t, cli.Done, code, stderr)
		assert.Equal(t, "The tables are up to date.\n", stdout)
	}

	db, err := pgx.Connect(t.Context(), postgres.URL)
	require.NoError(t, err)
	defer func() { assert.NoError(t, db.Close(context.Background())) }()
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	_, err = outbox.Publish(t.Context(), tx, address.Queue("orders"), "one")
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))

	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan int, 1)
	var last string
	go func() {
		code, _, stderr := run(ctx, "outbox", "relay", "--order", "by-key")
		last = stderr
		ended <- code
	}()
	require.Eventually(t, func() bool {
		var q struct{ Messages int }
		b.getJSON(t, "api/queues/%2F/orders", &q)
		return q.Messages == 1
	}, 30*time.Second, 20*time.Millisecond)
	require.Eventually(t, func() bool {
		var left int
		require.NoError(t, db.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox").Scan(&left))
		return left == 0
	}, 30*time.Second, 20*time.Millisecond)
	interrupt()
	assert.Equal(t, cli.Done, <-ended)
	assert.Contains(t, last, "published=1")
}

func TestOutboxSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"no URL of a database": {[]string{"outbox", "migrate", "--database", "postgres://%zz"}, cli.Usage, "--database"},
		"nobody there":         {[]string{"outbox", "migrate", "--database", "postgres://ada@127.0.0.1:1/shop"}, cli.Unknown, "the database"},
		"nobody there for it":  {[]string{"outbox", "relay", "--database", "postgres://ada@127.0.0.1:1/shop"}, cli.Unknown, "the database"},
		"an unknown order":     {[]string{"outbox", "relay", "--order", "any"}, cli.Usage, "use unordered or by-key"},
		"an argument":          {[]string{"outbox", "migrate", "now"}, cli.Usage, "1 argument"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := world{}.run(c.args...)
			assert.Equal(t, c.code, r.code, r.stderr)
			assert.Contains(t, r.stderr, c.says)
		})
	}
	r := world{}.run("outbox", "migrate", "--print")
	require.Equal(t, cli.Done, r.code, r.stderr)
	assert.Contains(t, r.stdout, "CREATE TABLE hopback_outbox")
}
