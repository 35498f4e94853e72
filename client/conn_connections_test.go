package client_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// A broker that accepts each connection and ends it, as one that is overloaded can do, gets
// pauses. A connection that has worked is rebuilt without one.
func TestAConnectionThatIsLostAtOnceIsNotRebuiltInABusyLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cut := func() {
			for _, c := range broker.Connections() {
				c.Cut()
			}
		}
		var healthy atomic.Bool
		down := make(chan time.Duration, 1000)
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{
			Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler), Reconnect: client.ReconnectBackoff{Min: 100 * time.Millisecond, Max: 10 * time.Second},
			OnEvent: func(e client.Event) {
				if e.Kind == client.EventUp && e.Op == "connection" {
					down <- e.Down
					if !healthy.Load() {
						cut()
					}
				}
			},
		})
		require.NoError(t, err)
		defer conn.Close(t.Context())
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Greater(t, len(down), 50)
		assert.Less(t, len(down), 300, "the pauses are 5 s in the mean")
		healthy.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		for len(down) > 0 {
			<-down
		}
		for range 5 {
			cut()
			assert.Zero(t, <-down)
			time.Sleep(2 * time.Second)
		}
	})
}

// opening is a connection that calls f when AMQP begins on it, after SASL.
type opening struct {
	net.Conn
	f func()
}

func (o *opening) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("AMQP\x00\x01\x00\x00")) {
		o.f()
	}
	return o.Conn.Write(b)
}

// A broker that ends while an additional connection opens closes its socket as a limit of
// connections does. Then the first connection is lost, too, and a publisher that wants a session waits.
func TestABrokerThatEndsIsNoConnectionLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		var dials, kills atomic.Int64
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{
			Logger: slog.New(slog.DiscardHandler),
			Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := broker.Dial(ctx, network, address)
				if err == nil && dials.Add(1) == 2 {
					c = &opening{c, func() {
						kills.Add(1)
						broker.Kill()
						time.AfterFunc(5*time.Second, broker.Restart)
					}}
				}
				return c, err
			},
		})
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		for range 100 {
			_, err := client.NewPublisher[string](t.Context(), conn, address.Queue("q"), client.PublisherConfig{})
			require.NoError(t, err)
		}
		assert.EqualValues(t, 1, kills.Load())
	})
}

// reset is a connection that the network resets when AMQP begins on it, after SASL.
type reset struct {
	net.Conn
	over atomic.Bool
}

func (r *reset) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("AMQP\x00\x01\x00\x00")) {
		r.over.Store(true)
		_ = r.Conn.Close()
		return len(b), nil
	}
	return r.Conn.Write(b)
}

func (r *reset) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	if r.over.Load() {
		return 0, &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	}
	return n, err
}

// One connection that the network resets while it opens isn't a limit of the broker's: it is tried
// again, and a consumer that needs it doesn't end.
func TestAResetWhileAFurtherConnectionOpensIsNoLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		var dials, resets atomic.Int64
		resets.Store(2)
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{
			Logger: slog.New(slog.DiscardHandler),
			Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := broker.Dial(ctx, network, address)
				if err == nil && dials.Add(1) > 1 && resets.Add(-1) >= 0 {
					c = &reset{Conn: c}
				}
				return c, err
			},
		})
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		for range 60 {
			_, err := client.NewPublisher[string](t.Context(), conn, address.Queue("q"), client.PublisherConfig{})
			require.NoError(t, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- conn.Consume(ctx, "q", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), client.ConsumerConfig{})
		}()
		time.Sleep(time.Minute)
		assert.Empty(t, ended, "it consumes")
		assert.EqualValues(t, 4, dials.Load())
		assert.Equal(t, 2, conn.State().Connections)
		cancel()
		require.NoError(t, <-ended)

		// If it happens each time, it is tried for as long as the caller waits, whose error says why.
		resets.Store(1 << 30)
		for range 70 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			_, err = client.NewPublisher[string](ctx, conn, address.Queue("q"), client.PublisherConfig{})
			cancel()
			if err != nil {
				break
			}
		}
		require.ErrorIs(t, err, client.ErrNotSent)
		require.ErrorIs(t, err, client.ErrUnreachable)
		assert.NotErrorIs(t, err, client.ErrSessionLimit)
		require.ErrorContains(t, err, "connection reset by peer")
		assert.True(t, client.WorthRetrying(err))
	})
}

// A limit of connections takes RabbitMQ 3 s to tell, by closing the socket. The error names both.
func TestALimitOfConnectionsKeepsTheCause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		request := httptest.NewRequest(http.MethodPut, "/api/vhost-limits/%2F/max-connections", strings.NewReader(`{"value": 1}`))
		request.SetBasicAuth("guest", "guest")
		answer := httptest.NewRecorder()
		broker.HTTPHandler().ServeHTTP(answer, request)
		require.Equal(t, http.StatusNoContent, answer.Code, answer.Body.String())
		for range 61 {
			if _, err = client.NewPublisher[string](t.Context(), conn, address.Queue("q"), client.PublisherConfig{}); err != nil {
				break
			}
		}
		require.ErrorIs(t, err, client.ErrSessionLimit)
		require.ErrorContains(t, err, "the broker refuses another connection (")
		require.ErrorContains(t, err, "EOF")
		require.ErrorContains(t, err, "raise its connection limits")
	})
}
