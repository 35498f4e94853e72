package partition

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/partition"
)

// How many messages a second a group with so many partitions takes and hands out, on one node, and
// the CPU time of a message in the publisher, the broker, and the worker.
// docs/partitions.md has the numbers.
func TestThroughputOfPartitions(t *testing.T) {
	if os.Getenv("HOPBACK_LONG") == "" {
		t.Skip("it measures a broker for a minute: set HOPBACK_LONG=1")
	}
	const messages, batch, publishers = 60_000, 500, 4
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			return
		}
		conn, _ := s.Connect(t)
		for _, n := range []int{1, 4, 16, 64} {
			g := partition.Group{Name: fmt.Sprint("rate-", n), Partitions: n}
			apply(t, conn, g)
			started, began := cpuOf(t, s), time.Now()
			errs := make(chan error, publishers)
			for i := range publishers {
				go func() {
					errs <- func() error {
						p, err := client.NewPublisher[int](t.Context(), conn, address.Address{}, client.PublisherConfig{})
						if err != nil {
							return err
						}
						defer func() { _ = p.Close(context.Background()) }()
						all := make([]int, batch)
						for j := 0; j < messages/publishers; j += batch {
							for k := range all {
								all[k] = i*messages + j + k
							}
							if err := p.PublishAll(t.Context(), all, func(key int, m *client.Message) {
								client.PublishTo(g.Address(fmt.Sprint(key)))(m)
							}); err != nil {
								return err
							}
						}
						return nil
					}()
				}()
			}
			for range publishers {
				require.NoError(t, <-errs)
			}
			published := time.Since(began)
			publishing := cpuOf(t, s).since(started)
			started = cpuOf(t, s)
			var count, first, last atomic.Int64
			ctx, stop := context.WithCancel(t.Context())
			err := partition.Consume(ctx, conn, g, client.HandlerFunc(func(context.Context, *client.Delivery) error {
				now := time.Now().UnixNano()
				first.CompareAndSwap(0, now)
				if count.Add(1) == messages {
					last.Store(now)
					stop()
				}
				return nil
			}), partition.Config{Concurrency: 64})
			require.NoError(t, err)
			handling := cpuOf(t, s).since(started)
			assert.EqualValues(t, messages, count.Load())
			handled := time.Duration(last.Load() - first.Load())
			suite.Report(t, s, "throughput: %d partitions: published %.0f/s, handled %.0f/s; CPU of a message: publisher %v, and broker %v; broker %v, and worker %v", n,
				messages/published.Seconds(), messages/handled.Seconds(), publishing.client/messages, publishing.broker/messages, handling.broker/messages, handling.client/messages)
		}
	})
}

// cpu is CPU time of this process, and of the broker.
type cpu struct{ client, broker time.Duration }

func cpuOf(t *testing.T, s *suite.Site) cpu {
	t.Helper()
	ms, err := strconv.Atoi(strings.TrimSpace(s.EvalOK(t, "erlang:element(1, erlang:statistics(runtime)).")))
	require.NoError(t, err)
	var u syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return cpu{time.Duration(u.Utime.Nano() + u.Stime.Nano()), time.Duration(ms) * time.Millisecond}
}

func (c cpu) since(before cpu) cpu { return cpu{c.client - before.client, c.broker - before.broker} }
