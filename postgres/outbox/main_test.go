package outbox_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/postgres/internal/pgtest"
)

func TestMain(m *testing.M) {
	if order := os.Getenv(relayOf); order != "" {
		fmt.Fprintln(os.Stderr, runRelay(order, os.Args[1], os.Args[2]))
		os.Exit(1)
	}
	if os.Getenv(workerOf) != "" {
		fmt.Fprintln(os.Stderr, runWorker(os.Args[1], os.Args[2]))
		os.Exit(1)
	}
	pgtest.Main(m)
}

// left returns how many messages are in the outbox.
func left(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox").Scan(&n))
	return n
}
