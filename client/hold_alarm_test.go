package client_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
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

// A consumer that starts in an alarm can't ask whether its queue has a dead-letter exchange. It holds what no handler
// can get until the broker answers, and not for longer.
func TestWhatIsHeldInAnAlarmIsDeadLetteredAfterIt(t *testing.T) {
	for name, c := range map[string]struct {
		dead declare.DeadLetterTarget
		want [2]int // in "dead" and in "orders" after the alarm
	}{
		"with a dead-letter exchange": {declare.ToQueue("dead"), [2]int{3, 0}},
		"without one":                 {declare.Drop(), [2]int{0, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				broker := hopbacktest.Start(t, hopbacktest.Config{})
				connect := func(cfg client.Config) *client.Conn {
					cfg.Dial = broker.Dial
					conn, err := client.Connect(t.Context(), broker.URL(), cfg)
					require.NoError(t, err)
					t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
					return conn
				}
				conn := connect(client.Config{})
				_, err := declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
					declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()},
					declare.QuorumQueue{Name: "orders", DeadLetter: c.dead},
				}})
				require.NoError(t, err)
				p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
				require.NoError(t, err)
				for _, size := range []int{5000, 5000, 10, 5000} {
					require.NoError(t, p.Publish(t.Context(), strings.Repeat("x", size)))
				}
				broker.SetMemoryAlarm(true)
				handled := make(chan struct{}, 4)
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				worker := connect(client.Config{MaxMessageSize: 1000})
				go func() {
					ended <- worker.Consume(ctx, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
						handled <- struct{}{}
						return nil
					}), client.ConsumerConfig{Prefetch: 2})
				}()
				<-handled
				time.Sleep(10 * time.Minute)
				assert.Zero(t, broker.Queue("dead").Counts().Messages)
				broker.SetMemoryAlarm(false)
				time.Sleep(2 * time.Minute)
				assert.Equal(t, c.want, [2]int{broker.Queue("dead").Counts().Messages, broker.Queue("orders").Counts().Messages})
				cancel()
				require.NoError(t, <-ended)
				assert.Equal(t, c.want[1], broker.Queue("orders").Counts().Ready)
				assert.Empty(t, handled)
			})
		})
	}
}

// RabbitMQ 4.3 revokes what a consumer holds for longer than the consumer timeout, and delivers it again. However often
// it does, a message that no handler can get leaves room for the others.
func TestWhatIsHeldForDaysBlocksNoOtherMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{Heartbeat: time.Hour})
		log := new(lines)
		cfg := client.Config{Dial: broker.Dial, IdleTimeout: time.Hour, MaxMessageSize: 1000, Logger: slog.New(slog.NewTextHandler(log, nil))}
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		defer func() { assert.NoError(t, conn.Close(context.Background())) }()
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), strings.Repeat("x", 5000)))
		var handled atomic.Int64
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- conn.Consume(ctx, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
				handled.Add(1)
				return nil
			}), client.ConsumerConfig{Prefetch: 1})
		}()
		for hour := range 48 {
			require.NoError(t, p.Publish(t.Context(), "small"))
			time.Sleep(time.Hour)
			assert.EqualValues(t, hour+1, handled.Load())
		}
		time.Sleep(10 * time.Minute) // no delivery is revoked at the end
		cancel()
		require.NoError(t, <-ended)
		assert.Equal(t, 1, broker.Queue("orders").Counts().Ready)
		assert.Zero(t, strings.Count(log.String(), "handled after its consumer timeout"), "nobody handled it")
	})
}

// lines is a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
