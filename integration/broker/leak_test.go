package broker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

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
	for _, b := range suite.Brokers {
		t.Run(b.Version, func(t *testing.T) {
			s := suite.NewSite(t, b)
			wire, through := s.Through(t)
			conn, _ := suite.ConnectTo(t, through, func(c *client.Config) {
				c.Reconnect = client.ReconnectBackoff{Min: time.Millisecond, Max: 20 * time.Millisecond}
				c.Logger = slog.New(slog.DiscardHandler) // a logbook grows
			})
			topology := suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited})
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "copies", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()})
			suite.Apply(t, conn, topology)
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
				p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
				go func() {
					defer func() { ended <- nil }()
					for ctx.Err() == nil {
						if p.Publish(ctx, suite.Order{ID: i}) == nil {
							published.Add(1)
						}
						time.Sleep(10 * time.Millisecond) // not to fill the queue
					}
				}()
			}
			// settledDown waits until what was cut is gone, here and at the broker.
			settledDown := func() suite.HeldNow {
				suite.Poll(t, "all consumers are back", func() bool {
					ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
					defer cancel()
					for _, q := range []string{"orders", "copies"} {
						if info, err := declare.Inspect(ctx, conn.Management(), q); err != nil || info.Consumers != consumers {
							return false
						}
					}
					return wire.Open() == 1 && len(s.Connections(t)) == 1
				})
				before := copied.Load()
				suite.Poll(t, "messages make their way", func() bool { return copied.Load() > before+10 })
				return s.HeldNow(t)
			}
			settledDown()
			began := time.Now()
			var early suite.HeldNow
			for n := range reconnects {
				if n == reconnects/10 {
					early = settledDown()
				}
				generation := conn.State().Generation
				require.Positive(t, wire.Cut())
				suite.Poll(t, fmt.Sprintf("reconnect %d", n), func() bool {
					st := conn.State()
					return st.Connected && st.Generation > generation
				})
				if n%3 == 0 { // while links are rebuilt, or after some work
					time.Sleep(time.Duration(n%9) * 10 * time.Millisecond)
				}
				if n%10 == 0 {
					ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
					_, err := declare.Inspect(ctx, conn.Management(), "orders")
					cancel()
					if err != nil && !errors.Is(err, client.ErrOutcomeUnknown) && !errors.Is(err, client.ErrNotSent) {
						require.NoError(t, err)
					}
				}
			}
			took := time.Since(began)
			late := settledDown()
			assert.LessOrEqual(t, late.Goroutines, early.Goroutines+10)
			assert.LessOrEqual(t, late.Files, early.Files+3)
			assert.Equal(t, early.Sessions, late.Sessions)
			assert.Less(t, late.Heap, early.Heap+1<<20)
			suite.Report(t, s, "%d reconnects in %v, %d published, %d copied: %d goroutines, then %d; %d files, then %d; %d sessions, then %d; %d KiB of heap, then %d", reconnects, took.Round(time.Millisecond), published.Load(), copied.Load(), early.Goroutines, late.Goroutines, early.Files, late.Files, early.Sessions, late.Sessions, early.Heap>>10, late.Heap>>10)
			stop()
			for range cap(ended) {
				assert.NoError(t, suite.Await(t, ended, "a consumer or a publisher ends"))
			}
		})
	}
}
