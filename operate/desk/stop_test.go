package desk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// shortLived is a connection that ends after sending a number of bytes.
type shortLived struct {
	net.Conn
	left atomic.Int64
}

func (c *shortLived) Write(b []byte) (int, error) {
	if c.left.Add(-int64(len(b))) < 0 {
		_ = c.Close()
		return 0, errors.New("cut")
	}
	return c.Conn.Write(b)
}

// A replay with Max continues after the connection was lost while it sent the last message: it
// doesn't report success for a message that it hasn't replayed.
func TestReplayOfSomeGoesOnAfterALostAnswer(t *testing.T) {
	t.Parallel()
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	var dialed atomic.Int64
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Logger: quiet, Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := broker.Dial(ctx, network, addr)
		if dialed.Add(1) != 3 || err != nil { // 1 is the client, 2 the scan, 3 sends the copies
			return c, err
		}
		s := &shortLived{Conn: c}
		s.left.Store(50_000)
		return s, nil
	}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}, declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()},
	}})
	require.NoError(t, err)
	p, err := client.NewPublisher[[]byte](t.Context(), conn, address.Queue("dead"), client.PublisherConfig{})
	require.NoError(t, err)
	for i := range 3 {
		require.NoError(t, p.Publish(t.Context(), make([]byte, 100_000), func(m *client.Message) { m.Properties.MessageID = fmt.Sprint("m-", i) }))
	}
	d, err := New(conn, Config{Logger: quiet})
	require.NoError(t, err)
	r, err := d.Replay(t.Context(), ReplayConfig{Queue: "dead", All: true, Max: 2, Address: address.Queue("orders")})
	require.NoError(t, err)
	assert.EqualValues(t, 2, r.Replayed)
	assert.Greater(t, r.Scans, 1)
	assert.Positive(t, r.Unknown)
}
