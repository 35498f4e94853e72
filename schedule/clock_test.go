package schedule_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/schedule"
)

// slow passes on what is written only after a while.
type slow struct {
	net.Conn
	by *atomic.Int64
}

func (s slow) Write(b []byte) (int, error) {
	time.Sleep(time.Duration(s.by.Load()))
	return s.Conn.Write(b)
}

// The question for the broker's time took long to get there, so the time that is known is late by that. A message that
// reaches the broker sooner isn't early all the same.
func TestNoMessageIsEarlyBecauseTheBrokersTimeIsLate(t *testing.T) {
	t.Parallel()
	for name, where := range map[string]struct {
		version string
		cfg     schedule.PublisherConfig
		from    time.Duration
	}{
		"ladder":    {"4.3.6", schedule.PublisherConfig{}, 400 * time.Millisecond},
		"claimable": {"4.4.0", schedule.PublisherConfig{Claimable: true}, 0},
	} {
		for _, late := range []time.Duration{0, 60 * time.Millisecond, 300 * time.Millisecond} {
			for ahead := where.from; ahead < where.from+130*time.Millisecond; ahead += 13 * time.Millisecond {
				t.Run(fmt.Sprintf("%s/%v_late/%v_ahead", name, late, ahead), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { testLateTime(t, where.version, where.cfg, late, ahead) })
				})
			}
		}
	}
}

func testLateTime(t *testing.T, version string, cfg schedule.PublisherConfig, late, ahead time.Duration) {
	w := newWorld(t, version, "orders")
	if cfg.Claimable {
		topology, err := schedule.ClaimableTopology(schedule.Names{})
		require.NoError(t, err)
		w.apply(topology)
	}
	var by atomic.Int64
	conn, err := client.Connect(t.Context(), w.broker.URL(), client.Config{
		Logger: slog.New(slog.DiscardHandler),
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := w.broker.Dial(ctx, network, addr)
			return slow{c, &by}, err
		},
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	p, err := schedule.NewPublisher[int](t.Context(), conn, address.Queue("orders"), cfg)
	require.NoError(t, err)
	by.Store(int64(late))
	_, err = conn.BrokerTime(t.Context()) // the answer is kept
	require.NoError(t, err)
	by.Store(0)

	came := make(chan time.Time, 1)
	w.consume("orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { came <- time.Now(); return nil }))
	w.run(func(ctx context.Context) error {
		return schedule.Dispatch(ctx, conn, schedule.DispatchConfig{Claimable: cfg.Claimable})
	})
	synctest.Wait()
	due := time.Now().Add(ahead)
	_, err = p.Publish(t.Context(), schedule.At(due), 1)
	require.NoError(t, err)
	assert.LessOrEqual(t, due.Truncate(time.Millisecond).Sub(<-came), time.Duration(0), "it is early")
}
