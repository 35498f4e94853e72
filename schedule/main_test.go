package schedule_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/schedule"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a broker in memory with a ladder, in virtual time.
type world struct {
	t      *testing.T
	broker *hopbacktest.Broker
	conn   *client.Conn
	idle   time.Duration // client.Config.IdleTimeout
}

func newWorld(t *testing.T, version string, queues ...string) *world {
	t.Helper()
	return newWorldThatIdles(t, 0, version, queues...)
}

// newWorldThatIdles has connections that may be idle for so long. Where hours pass and no
// connection falls silent, signs of life would take most of the test's time.
func newWorldThatIdles(t *testing.T, idle time.Duration, version string, queues ...string) *world {
	t.Helper()
	w := &world{t: t, idle: idle, broker: hopbacktest.Start(t, hopbacktest.Config{Version: version})}
	w.conn = w.connect()
	topology, err := schedule.Topology(schedule.Names{}, queues...)
	require.NoError(t, err)
	for _, q := range queues {
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: q, DeadLetter: declare.Drop()})
	}
	w.apply(topology)
	return w
}

func (w *world) connect() *client.Conn {
	w.t.Helper()
	conn, err := client.Connect(w.t.Context(), w.broker.URL(), client.Config{Dial: w.broker.Dial, IdleTimeout: w.idle, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func (w *world) apply(topology declare.Topology) {
	w.t.Helper()
	_, err := declare.Apply(w.t.Context(), w.conn.Management(), topology)
	require.NoError(w.t, err)
}

func newPublisher[T any](w *world, to address.Address) *schedule.Publisher[T] {
	w.t.Helper()
	p, err := schedule.NewPublisher[T](w.t.Context(), w.conn, to, schedule.PublisherConfig{})
	require.NoError(w.t, err)
	return p
}

// run runs f until stop is called, or the test ends.
func (w *world) run(f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f(ctx); err != nil && !errors.Is(err, client.ErrClosed) {
			w.t.Error(err)
		}
	}()
	stop = func() { cancel(); <-done }
	w.t.Cleanup(stop)
	return stop
}

func (w *world) consume(queue string, h client.Handler) (stop func()) {
	return w.run(func(ctx context.Context) error {
		return w.conn.Consume(ctx, queue, h, client.ConsumerConfig{Concurrency: 100})
	})
}

func (w *world) dispatch(cfg schedule.DispatchConfig) (stop func()) {
	return w.run(func(ctx context.Context) error { return schedule.Dispatch(ctx, w.conn, cfg) })
}

// ready is how many messages a queue has.
func (w *world) ready(queue string) int {
	w.t.Helper()
	info, err := declare.Inspect(w.t.Context(), w.conn.Management(), queue)
	require.NoError(w.t, err)
	return int(info.Messages)
}

var lostQueue = schedule.Names{}.UndeliverableQueue()

const day = 24 * time.Hour
