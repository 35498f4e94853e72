package client_test

import (
	"context"
	"fmt"
	"log/slog"
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

// parallel connects to a broker in memory that is 5 ms away.
func parallel(t *testing.T) (*hopbacktest.Broker, *client.Conn) {
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, MaxConnections: 1, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
	broker.SetLatency(5 * time.Millisecond)
	return broker, conn
}

// many sends n requests that declare queues at the same time, and returns the errors.
func many(ctx context.Context, request func(ctx context.Context, method, path string, body any) (int, any, error), name string, n int) (errs []error) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i := range n {
		wg.Go(func() {
			status, _, err := request(ctx, "PUT", fmt.Sprintf("/queues/%s-%d", name, i), map[string]any{"durable": true, "arguments": map[string]any{"x-queue-type": "quorum"}})
			mu.Lock()
			defer mu.Unlock()
			if err != nil || status != 201 {
				errs = append(errs, fmt.Errorf("%d: %w", status, err))
			}
		})
	}
	wg.Wait()
	return errs
}

// Requests are spread over as many sessions as asked for, which end when they are done.
func TestParallelManagement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := parallel(t)
		m := conn.Management()
		request, done := m.Parallel(8)
		assert.Empty(t, many(t.Context(), request, "q", 100))
		assert.Equal(t, 8, conn.Stats().Sessions)
		done()
		synctest.Wait()
		assert.Equal(t, 1, conn.Stats().Sessions)

		request, done = m.Parallel(1)
		assert.Empty(t, many(t.Context(), request, "r", 10))
		assert.Equal(t, 1, conn.Stats().Sessions)
		done()

		request, done = m.Parallel(8)
		done()
		assert.Empty(t, many(t.Context(), request, "s", 1), "the shared one continues")
	})
}

// Sessions that others may want stay free: with half of them taken, one session carries all requests.
func TestParallelManagementLeavesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, conn := parallel(t)
		require.Empty(t, many(t.Context(), conn.Management().Request, "to", 40))
		var pubs []*client.Publisher[int]
		for i := range 28 {
			p, err := client.NewPublisher[int](t.Context(), conn, address.Queue(fmt.Sprintf("to-%d", i)), client.PublisherConfig{})
			require.NoError(t, err)
			pubs = append(pubs, p)
		}
		before := conn.Stats().Sessions
		request, done := conn.Management().Parallel(8)
		assert.Empty(t, many(t.Context(), request, "q", 100))
		assert.LessOrEqual(t, conn.Stats().Sessions, before+2, "31 of 60")
		done()
		for _, p := range pubs {
			require.NoError(t, p.Close(t.Context()))
		}
	})
}

// A connection that is lost while many queues are declared costs nothing: what got no reply is sent again.
func TestApplyOfManyQueuesThroughAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker, conn := parallel(t)
		var work []declare.QuorumQueue
		for i := range 200 {
			work = append(work, declare.QuorumQueue{Name: fmt.Sprintf("work-%d", i), DeliveryLimit: 20})
		}
		topology, err := retry.Topology(retry.Policy{}, work...)
		require.NoError(t, err)
		go func() {
			time.Sleep(300 * time.Millisecond) // in the middle
			for _, c := range broker.Connections() {
				c.Cut()
			}
		}()
		report, err := declare.Apply(t.Context(), conn.Management(), topology)
		for tries := 0; err != nil && tries < 3; tries++ {
			report, err = declare.Apply(t.Context(), conn.Management(), topology)
		}
		require.NoError(t, err)
		assert.Zero(t, report.Count("not tried"))
		for _, q := range work {
			assert.True(t, broker.Queue(q.Name).Exists())
		}
		synctest.Wait()
		assert.LessOrEqual(t, conn.Stats().Sessions, 1)
	})
}
