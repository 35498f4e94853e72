// Package pgtest has what the tests of this module share: a PostgreSQL, a broker in memory,
// relays and consumers.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/outbox"
)

// server is the PostgreSQL of a package's tests.
var server *service.Service

// Main runs the tests of a package with a PostgreSQL, and checks for leaked goroutines.
func Main(m *testing.M) {
	var err error
	if server, err = service.Postgres(context.Background(), os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = server.Close()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// Database returns a pool on a database for the test alone, with hopback's tables.
func Database(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return DatabaseOf(t, server)
}

var databases atomic.Int64

// DatabaseOf is Database on another server.
func DatabaseOf(t *testing.T, s *service.Service) *pgxpool.Pool {
	t.Helper()
	name := fmt.Sprintf("test_%d_%d", os.Getpid(), databases.Add(1))
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
	require.NoError(t, postgres.Migrate(t.Context(), pool))
	return pool
}

// Broker returns a broker in memory, and a connection to it.
func Broker(t *testing.T) (*hopbacktest.Broker, *client.Conn) {
	t.Helper()
	return BrokerOf(t, "")
}

// BrokerOf is Broker of a version of RabbitMQ.
func BrokerOf(t *testing.T, version string) (*hopbacktest.Broker, *client.Conn) {
	t.Helper()
	b := hopbacktest.Start(t, hopbacktest.Config{Version: version})
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
	return b, conn
}

// Queues declares quorum queues.
func Queues(t *testing.T, conn *client.Conn, names ...string) {
	t.Helper()
	var topology declare.Topology
	for _, name := range names {
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.Drop()})
	}
	_, err := declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
}

// Run runs a relay until the test ends, or until the function that it returns is called.
func Run(t *testing.T, pool *pgxpool.Pool, conn *client.Conn, cfg outbox.RelayConfig) (relay *outbox.Relay, stop func()) {
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

// Seen collects what a consumer gets.
type Seen struct {
	mu   sync.Mutex
	got  []string
	news chan struct{}
}

// Watch consumes from a queue until the test ends.
func Watch(t *testing.T, conn *client.Conn, queue string) *Seen {
	t.Helper()
	s := &Seen{news: make(chan struct{}, 1)}
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

// All returns what has come.
func (s *Seen) All() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

// Await waits until n messages have come.
func (s *Seen) Await(t *testing.T, n int) []string {
	t.Helper()
	limit := time.After(2 * time.Minute) // a busy machine takes its time over large messages
	for {
		if got := s.All(); len(got) >= n {
			return got
		}
		select {
		case <-s.news:
		case <-limit:
			require.Len(t, s.All(), n)
		}
	}
}

// QueueIsEmpty waits until a queue has no messages to deliver.
func QueueIsEmpty(t *testing.T, conn *client.Conn, queue string) {
	t.Helper()
	require.Eventually(t, func() bool {
		info, err := declare.Inspect(t.Context(), conn.Management(), queue)
		return err == nil && info.Messages == 0
	}, time.Minute, 20*time.Millisecond)
}

// Consume consumes until the test ends.
func Consume(t *testing.T, conn *client.Conn, queue string, h client.Handler, cfg client.ConsumerConfig) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- conn.Consume(ctx, queue, h, cfg) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-ended)
	})
}

// Publish publishes texts with message-ids.
func Publish(t *testing.T, conn *client.Conn, queue string, messages ...[2]string) {
	t.Helper()
	p, err := client.NewPublisher[string](t.Context(), conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	for _, m := range messages {
		require.NoError(t, p.Publish(t.Context(), m[1], func(to *client.Message) { to.Properties.MessageID = m[0] }))
	}
	require.NoError(t, p.Close(t.Context()))
}
