package client_test

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
)

// Claims of tokens under which nothing is parked get messages of the backlog, which they return. All of
// them together take a bounded number of bytes.
func TestTheBacklogOfClaimsIsBoundedInBytes(t *testing.T) {
	if explore.UnderRace {
		t.Skip("memory is measured without the race detector")
	}
	const size, n = 1 << 20, 200
	b := hopbacktest.Start(t, hopbacktest.Config{Version: "4.4.0"})
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	p, err := client.NewPublisher[[]byte](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{Codec: client.RawCodec{}})
	require.NoError(t, err)
	for range n {
		require.NoError(t, p.Publish(t.Context(), make([]byte, size)))
	}
	require.NoError(t, p.Close(t.Context()))
	c, err := client.NewClaimer(t.Context(), conn, "orders")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })

	defer debug.SetGCPercent(debug.SetGCPercent(5)) // so that little of the heap is garbage
	heap := func() int64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	runtime.GC()
	before, most := heap(), int64(0)
	done := make(chan struct{})
	var sampling, claims sync.WaitGroup
	sampling.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
				most = max(most, heap()-before)
			}
		}
	})
	for i := range n {
		claims.Go(func() {
			found, err := c.Cancel(t.Context(), fmt.Sprint("no token ", i))
			assert.NoError(t, err)
			assert.Zero(t, found)
		})
	}
	claims.Wait()
	close(done)
	sampling.Wait()
	// Mostly it is 20 to 40 MiB. On a busy machine, 64 MiB wait for the client, and the broker and the collector lag
	// behind. Who kept the bodies would have all of them at the end.
	assert.Less(t, most, int64(n*size), "of a backlog of %d bytes", n*size)
	assert.Equal(t, n, b.Queue("orders").Counts().Messages)
	t.Logf("%d MiB", most>>20)
}
