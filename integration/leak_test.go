package integration

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// heldNow is what a process and its broker hold.
type heldNow struct {
	goroutines, files, sessions int
	heap                        uint64
}

func (s *site) heldNow(t *testing.T) heldNow {
	t.Helper()
	debug.FreeOSMemory() // which collects first
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return heldNow{goroutines: runtime.NumGoroutine(), files: len(files), heap: m.HeapAlloc, sessions: s.sessions(t)}
}

// connections is how many connections the broker has with the site.
func (s *site) connections(t *testing.T) []string {
	t.Helper()
	var connections []struct{ Name string }
	s.http(t, "GET", "/vhosts/"+s.vhost+"/connections?disable_stats=true", nil, &connections)
	names := make([]string, len(connections))
	for i, c := range connections {
		names[i] = c.Name
	}
	return names
}

// sessions is how many sessions the broker has with the site; 4.0 doesn't tell.
func (s *site) sessions(t *testing.T) (n int) {
	t.Helper()
	if !s.newer() {
		return 0
	}
	for _, name := range s.connections(t) {
		var sessions []any
		s.http(t, "GET", "/connections/"+url.PathEscape(name)+"/sessions", nil, &sessions)
		n += len(sessions)
	}
	return n
}

// A hundred reconnects, or a thousand with HOPBACK_LONG, with consumers, publishers,
// forwards and the management in use, leave nothing behind: after the last of them
// there are as many goroutines, files and connections, and as much memory, as after
// the tenth part.
//
// It isn't parallel, since it counts what the whole process holds.
func TestReconnectsLeaveNothingBehind(t *testing.T) {
	reconnects := 100
	if os.Getenv("HOPBACK_LONG") != "" {
		reconnects = 1000
	}
	for _, b := range brokers {
		t.Run(b.Version, func(t *testing.T) {
			s := newSite(t, b)
			wire, through := s.through(t)
			conn, _ := connectTo(t, through, func(c *client.Config) {
				c.Reconnect = client.ReconnectBackoff{Min: time.Millisecond, Max: 20 * time.Millisecond}
				c.Logger = slog.New(slog.DiscardHandler) // a logbook grows
			})
			topology := queueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "copies", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
			apply(t, conn, topology)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var copied, published atomic.Int64
			const consumers, publishers = 4, 4
			ended := make(chan error, 2*consumers+publishers)
			for range consumers {
				go func() {
					ended <- conn.Consume(ctx, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
						return client.Forward{To: address.Queue("copies"), Message: client.Copy(d.Message())}
					}), client.ConsumerConfig{Concurrency: 4})
				}()
				go func() {
					ended <- conn.Consume(ctx, "copies", client.HandlerFunc(func(context.Context, *client.Delivery) error {
						copied.Add(1)
						return nil
					}), client.ConsumerConfig{Concurrency: 4})
				}()
			}
			for i := range publishers {
				p := publisher[order](t, conn, address.Queue("orders"))
				go func() {
					defer func() { ended <- nil }()
					for ctx.Err() == nil {
						if p.Publish(ctx, order{ID: i}) == nil {
							published.Add(1)
						}
						time.Sleep(10 * time.Millisecond) // not to fill the queue
					}
				}()
			}
			// settledDown waits until what was cut is gone, here and at the broker.
			settledDown := func() heldNow {
				poll(t, "all consumers are back", func() bool {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					for _, q := range []string{"orders", "copies"} {
						if info, err := declare.Inspect(ctx, conn.Management(), q); err != nil || info.Consumers != consumers {
							return false
						}
					}
					return wire.Open() == 1 && len(s.connections(t)) == 1
				})
				before := copied.Load()
				poll(t, "messages make their way", func() bool { return copied.Load() > before+10 })
				return s.heldNow(t)
			}
			settledDown()
			began := time.Now()
			var early heldNow
			for n := range reconnects {
				if n == reconnects/10 {
					early = settledDown()
				}
				generation := conn.State().Generation
				require.Positive(t, wire.Cut())
				poll(t, fmt.Sprintf("reconnect %d", n), func() bool {
					st := conn.State()
					return st.Connected && st.Generation > generation
				})
				if n%3 == 0 { // amid the rebuilding of links, or after some work
					time.Sleep(time.Duration(n%9) * 10 * time.Millisecond)
				}
				if n%10 == 0 {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					_, err := declare.Inspect(ctx, conn.Management(), "orders")
					cancel()
					if err != nil && !errors.Is(err, client.ErrOutcomeUnknown) && !errors.Is(err, client.ErrNotSent) {
						require.NoError(t, err)
					}
				}
			}
			took := time.Since(began)
			late := settledDown()
			assert.LessOrEqual(t, late.goroutines, early.goroutines+10)
			assert.LessOrEqual(t, late.files, early.files+3)
			assert.Equal(t, early.sessions, late.sessions)
			assert.Less(t, late.heap, early.heap+1<<20)
			report(t, s, "%d reconnects in %v, %d published, %d copied: %d goroutines, then %d; %d files, then %d; %d sessions, then %d; %d KiB of heap, then %d", reconnects, took.Round(time.Millisecond), published.Load(), copied.Load(), early.goroutines, late.goroutines, early.files, late.files, early.sessions, late.sessions, early.heap>>10, late.heap>>10)
			stop()
			for range cap(ended) {
				assert.NoError(t, await(t, ended, "a consumer or a publisher ends"))
			}
		})
	}
}
