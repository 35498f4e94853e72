package client_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// outageLog keeps what is logged, with the time since its start. Durations that backoff makes random are
// left out.
type outageLog struct {
	mu  sync.Mutex
	out bytes.Buffer
}

func (l *outageLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(b)
}

func (l *outageLog) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(l.out.String()), "\n")
	l.out.Reset()
	return lines
}

func (l *outageLog) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		switch a.Key {
		case slog.TimeKey, "message_id":
			return slog.Attr{}
		case "attempts":
			return slog.String(a.Key, "N")
		case "after", "down":
			return slog.Duration(a.Key, a.Value.Duration().Truncate(10*time.Second))
		case "error":
			// It is a read or a write that fails, and the port of this end varies.
			before, after, _ := strings.Cut(strings.Replace(a.Value.String(), "write tcp", "read tcp", 1), "127.0.0.1:")
			if _, rest, ok := strings.Cut(after, "->"); ok {
				return slog.String(a.Key, before+"self->"+rest)
			}
		}
		return a
	}}))
}

// outage runs a worker whose handler fails, and a publisher, through an outage of the broker. It returns
// what is logged from the moment of the loss until 20 s after the outage.
func outage(t *testing.T, cfg client.Config, length time.Duration) (lines []string) {
	synctest.Test(t, func(t *testing.T) {
		var log outageLog
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cfg.Dial, cfg.Logger = broker.Dial, log.logger()
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		defer conn.Close(context.Background())
		policy := retry.Policy{MaxRetries: 1000, Backoff: retry.Delays(2 * time.Second), LogLevel: slog.LevelDebug}
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "work"})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		pub, err := client.NewPublisher[int](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		for range 3 {
			running.Go(func() {
				assert.NoError(t, conn.Consume(ctx, "work", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
					time.Sleep(30 * time.Millisecond)
					return errors.New("the bank timed out")
				})), client.ConsumerConfig{Concurrency: 5}))
			})
		}
		running.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
				_ = pub.Publish(ctx, 1)
			}
		})
		time.Sleep(5*time.Second + 10*time.Millisecond)
		broker.Kill()
		time.Sleep(length)
		broker.Restart()
		time.Sleep(20 * time.Second)
		lines = log.lines()
		stop()
		running.Wait()
	})
	return lines
}

const (
	lostLine = `level=WARN msg="hopback: connection lost; reconnecting" endpoint=amqp://guest:xxxxx@rabbitmq.memory:5672/ node=rabbit@memory ` +
		`error="hopback: connection amqp://guest:xxxxx@rabbitmq.memory:5672/: connection lost: the connection ended: read tcp self->rabbitmq.memory:5672: connection reset by peer"`
	backLine = `level=INFO msg="hopback: reconnected" endpoint=amqp://guest:xxxxx@rabbitmq.memory:5672/ node=rabbit@memory version=4.3.6`
	downLine = `level=WARN msg="hopback: reconnecting failed; trying again" endpoint=amqp://guest:xxxxx@rabbitmq.memory:5672/`
	refused  = `error="hopback: connect amqp://guest:xxxxx@rabbitmq.memory:5672/: broker unreachable: dial tcp rabbitmq.memory:5672: connection refused; check whether the broker is running, and the network"`
)

// A short outage is two lines, however many consumers, publishers, and attempts to reconnect there are.
func TestAnOutageIsTwoLines(t *testing.T) {
	lines := outage(t, client.Config{Reconnect: client.ReconnectBackoff{Max: time.Second}}, 18*time.Second)
	assert.Equal(t, []string{lostLine, backLine + " after=10s attempts=N"}, lines)
}

// While an outage continues, a line says so after a minute, and whenever it has lasted twice as long.
func TestALongOutageIsAFewLines(t *testing.T) {
	lines := outage(t, client.Config{Reconnect: client.ReconnectBackoff{Max: time.Second}}, 10*time.Minute+5*time.Second)
	assert.Equal(t, []string{
		lostLine,
		downLine + " down=1m0s attempts=N " + refused,
		downLine + " down=2m0s attempts=N " + refused,
		downLine + " down=4m0s attempts=N " + refused,
		downLine + " down=8m0s attempts=N " + refused,
		backLine + " after=10m0s attempts=N",
	}, lines)
}
