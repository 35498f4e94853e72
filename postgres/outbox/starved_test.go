package outbox_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
)

// Messages that have no queue, however many, take up a share of a relay's time and no more.
func TestManyMessagesWithoutAQueueBlockNoOthers(t *testing.T) {
	t.Parallel()
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			bad, good := 5000, 1000 // a batch is 1000
			if os.Getenv("HOPBACK_LONG") != "" {
				bad, good = 20_000, 2000
			}
			pool := pgtest.Database(t)
			_, conn := pgtest.Broker(t)
			pgtest.Queues(t, conn, "orders")
			got := pgtest.Watch(t, conn, "orders")
			p := outbox.Publisher[string]{Key: func(s string) string { return s }}
			send := func(to address.Address, what string, n int) {
				values := make([]string, n)
				for i := range values {
					values[i] = what + strconv.Itoa(i)
				}
				_, err := p.PublishAll(t.Context(), pool, values, func(_ string, m *client.Message) { client.PublishTo(to)(m) })
				require.NoError(t, err)
			}
			send(address.Exchange("amq.direct", "nowhere"), "bad", bad)
			send(address.Queue("orders"), "good", good)
			// One that is behind another without a queue, by its key.
			_, err := p.Publish(t.Context(), pool, "bad7", client.PublishTo(address.Queue("orders")))
			require.NoError(t, err)
			pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order, Retry: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
			came := func() (good, behind int) {
				for _, v := range got.All() {
					if strings.HasPrefix(v, `"good`) {
						good++
					} else {
						behind++
					}
				}
				return good, behind
			}
			began := time.Now()
			require.Eventually(t, func() bool { n, _ := came(); return n == good }, 3*time.Minute, 10*time.Millisecond)
			t.Logf("%d good ones after %v", good, time.Since(began))
			if _, behind := came(); order == outbox.OrderByKey {
				assert.Zero(t, behind, "it came ahead of the one before it")
			}
			// New ones come soon, though all the others are tried again and again.
			for i := range 5 {
				began := time.Now()
				send(address.Queue("orders"), fmt.Sprint("good, later ", i), 1)
				require.Eventually(t, func() bool { n, _ := came(); return n == good+i+1 }, 3*time.Minute, time.Millisecond)
				assert.Less(t, time.Since(began), 10*time.Second)
			}
			// And all come once there is a queue.
			_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Bindings: []declare.Binding{{Source: "amq.direct", Queue: "orders", Key: "nowhere"}}})
			require.NoError(t, err)
			require.Eventually(t, func() bool { return left(t, pool) == 0 }, 3*time.Minute, 50*time.Millisecond)
			if order != outbox.OrderByKey {
				return
			}
			require.Eventually(t, func() bool { _, behind := came(); return behind == bad+1 }, 3*time.Minute, 10*time.Millisecond)
			n := 0
			for _, v := range got.All() {
				if v == `"bad7"` {
					n++
				}
			}
			assert.Equal(t, 2, n)
		})
	}
}

// A relay bounds the bytes that it holds, not only the number of messages.
func TestLargeMessagesAreReadFewAtATime(t *testing.T) {
	// Not parallel: it measures this process' memory, with what isn't collected yet.
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	for _, order := range orders {
		t.Run(string(order), func(t *testing.T) {
			const n, size = 40, 2 << 20
			pool := pgtest.Database(t)
			b, conn := pgtest.Broker(t)
			_, err := declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", MaxLength: 1, DeadLetter: declare.Drop()}}})
			require.NoError(t, err)
			p := outbox.Publisher[*client.Message]{To: address.Queue("orders")}
			m := client.NewMessage(make([]byte, size))
			for range n {
				m.Properties = nil
				_, err := p.Publish(t.Context(), pool, m)
				require.NoError(t, err)
			}
			m = nil
			runtime.GC()
			heap := func() uint64 {
				sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
				metrics.Read(sample)
				return sample[0].Value.Uint64()
			}
			before := heap()
			var peak atomic.Uint64
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				for {
					peak.Store(max(peak.Load(), heap()))
					select {
					case <-stop:
						return
					case <-time.After(2 * time.Millisecond):
					}
				}
			}()
			relay, end := pgtest.Run(t, pool, conn, outbox.RelayConfig{Order: order})
			require.Eventually(t, func() bool { return relay.Stats().Published == n }, 3*time.Minute, 5*time.Millisecond)
			close(stop)
			<-stopped
			end()
			assert.Len(t, b.Queue("orders").Messages(), 1)
			grown := (int64(peak.Load()) - int64(before)) >> 20
			t.Logf("%d MiB of messages, %d MiB more on the heap", n*size>>20, grown)
			assert.Less(t, grown, int64(250))
		})
	}
}

// sizes is a DB that notes how large the statements are.
type sizes struct{ bytes []int }

func (s *sizes) Exec(_ context.Context, _ string, args ...any) (pgconn.CommandTag, error) {
	n := 0
	for _, a := range args {
		if b, ok := a.([]byte); ok {
			n += len(b)
		}
	}
	s.bytes = append(s.bytes, n)
	return pgconn.CommandTag{}, nil
}

func (*sizes) QueryRow(context.Context, string, ...any) pgx.Row { panic("nothing is read") }

// A transaction's messages are written in statements of bounded size: PostgreSQL takes none of
// 1 GiB, and holds it in memory.
func TestStatementsOfPublishAllAreBounded(t *testing.T) {
	t.Parallel()
	body := make([]byte, 3<<20)
	ms := make([]*client.Message, 20)
	for i := range ms {
		ms[i] = client.NewMessage(body)
		ms[i].Properties = nil
	}
	ms[7].Data = [][]byte{make([]byte, 20<<20)}
	var db sizes
	ids, err := outbox.Publisher[*client.Message]{To: address.Queue("orders")}.PublishAll(t.Context(), &db, ms)
	require.NoError(t, err)
	assert.Len(t, ids, len(ms))
	total := 0
	for _, n := range db.bytes {
		total += n
		assert.Less(t, n, 21<<20)
	}
	assert.Greater(t, total, 19*3<<20+20<<20)
	assert.Len(t, db.bytes, 6)
}
