package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/service"
	"github.com/hopback/hopback/outbox"
)

var postgres *service.Service

func TestMain(m *testing.M) {
	if order := os.Getenv(relayOf); order != "" {
		fmt.Fprintln(os.Stderr, runRelay(order, os.Args[1], os.Args[2]))
		os.Exit(1)
	}
	if os.Getenv(workerOf) != "" {
		fmt.Fprintln(os.Stderr, runWorker(os.Args[1], os.Args[2]))
		os.Exit(1)
	}
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

// database returns a pool on a database of the test's own, with an outbox.
func database(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return databaseOf(t, postgres)
}

var names sync.Mutex
var nameCount int

func databaseOf(t *testing.T, s *service.Service) *pgxpool.Pool {
	t.Helper()
	names.Lock()
	nameCount++
	name := fmt.Sprintf("test_%d_%d", os.Getpid(), nameCount)
	names.Unlock()
	admin, err := pgx.Connect(t.Context(), s.URL)
	require.NoError(t, err)
	_, err = admin.Exec(t.Context(), "CREATE DATABASE "+name)
	require.NoError(t, err)
	require.NoError(t, admin.Close(t.Context()))
	cfg, err := pgxpool.ParseConfig(s.URL)
	require.NoError(t, err)
	cfg.ConnConfig.Database = name
	cfg.MaxConns = 24
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, outbox.Migrate(t.Context(), pool))
	return pool
}

// broker returns a broker in memory, and a connection to it.
func broker(t *testing.T) (*hopbacktest.Broker, *client.Conn) {
	t.Helper()
	b := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
	return b, conn
}

// queues declares quorum queues.
func queues(t *testing.T, conn *client.Conn, names ...string) {
	t.Helper()
	var topology declare.Topology
	for _, name := range names {
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.Drop()})
	}
	_, err := declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
}

// run runs a relay until the test ends, or until the function that it returns is called.
func run(t *testing.T, pool *pgxpool.Pool, conn *client.Conn, cfg outbox.RelayConfig) (relay *outbox.Relay, stop func()) {
	t.Helper()
	relay, err := outbox.NewRelay(pool, conn, cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, <-ended)
	})
	t.Cleanup(stop)
	return relay, stop
}

// seen collects what a consumer gets.
type seen struct {
	mu   sync.Mutex
	got  []string
	news chan struct{}
}

// watch consumes from a queue until the test ends.
func watch(t *testing.T, conn *client.Conn, queue string) *seen {
	t.Helper()
	s := &seen{news: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- conn.Consume(ctx, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			body, err := client.Body(d.Message())
			s.mu.Lock()
			s.got = append(s.got, string(body))
			s.mu.Unlock()
			select {
			case s.news <- struct{}{}:
			default:
			}
			return err
		}), client.ConsumerConfig{})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			assert.NoError(t, err)
		}
	})
	return s
}

func (s *seen) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

// await waits until n messages have come.
func (s *seen) await(t *testing.T, n int) []string {
	t.Helper()
	limit := time.After(30 * time.Second)
	for {
		if got := s.all(); len(got) >= n {
			return got
		}
		select {
		case <-s.news:
		case <-limit:
			require.Len(t, s.all(), n)
		}
	}
}

// left returns how many messages are in the outbox.
func left(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox").Scan(&n))
	return n
}

// queueIsEmpty waits until a queue has no messages to deliver.
func queueIsEmpty(t *testing.T, conn *client.Conn, queue string) {
	t.Helper()
	require.Eventually(t, func() bool {
		info, err := declare.Inspect(t.Context(), conn.Management(), queue)
		return err == nil && info.Messages == 0
	}, time.Minute, 20*time.Millisecond)
}
