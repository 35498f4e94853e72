package rpc_test

import (
	"context"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

// counted counts what is read.
type counted struct {
	net.Conn
	bytes *atomic.Int64
}

func (c counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.bytes.Add(int64(n))
	return n, err
}

// Replies that arrive together are bounded in bytes, regardless of the credit of their links: the broker keeps
// the others until the calls have taken theirs.
func TestRepliesTogetherAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testRepliesTogetherAreBoundedInBytes)
}

func testRepliesTogetherAreBoundedInBytes(t *testing.T) {
	const size, n, links = 1 << 20, 60, 2
	b := hopbacktest.Start(t, hopbacktest.Config{})
	var read atomic.Int64
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{
		Logger: slog.New(slog.DiscardHandler),
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := b.Dial(ctx, network, addr)
			return counted{c, &read}, err
		},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: "replies", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	p, err := client.NewPublisher[[]byte](t.Context(), conn, address.Queue("replies"), client.PublisherConfig{Codec: client.RawCodec{}})
	require.NoError(t, err)
	for range links * n {
		require.NoError(t, p.Publish(t.Context(), make([]byte, size)))
	}
	require.NoError(t, p.Close(t.Context()))
	to, err := address.Queue("replies").Build()
	require.NoError(t, err)
	place, err := inside.Of(conn).ReserveReplies(func(context.Context) {}, func(*instrument.Stats) {})
	require.NoError(t, err)
	t.Cleanup(place.Leave)
	read.Store(0)
	s, err := place.Open(t.Context(), func(oldbroker.Quirks) (link.ReplySource, error) {
		return link.ReplySource{Queue: to, Links: links, Credit: n}, nil
	})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	synctest.Wait() // until nothing more comes
	assert.Greater(t, read.Load(), int64(40<<20))
	assert.Less(t, read.Load(), int64(85<<20), "nothing was received")

	// All of them come, whichever link they are for.
	received := make(chan error, links)
	for i := range links {
		go func() {
			for range n {
				r, err := s.Receive(t.Context(), i)
				if err == nil {
					err = s.Accept(i, r.ID)
				}
				if err != nil {
					received <- err
					return
				}
			}
			received <- nil
		}()
	}
	for range links {
		require.NoError(t, <-received)
	}
}
