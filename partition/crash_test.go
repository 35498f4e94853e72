package partition_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
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
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// crashes are workers that one message crashes as soon as its handler is called, while what they have
// settled just before is still on the network.
type crashes struct {
	broker *hopbacktest.Broker
	group  partition.Group
	poison string
	inner  func(text string) error // handles all others

	mu    sync.Mutex
	count int
}

// worker runs until it crashes or ctx ends.
func (c *crashes) worker(ctx context.Context, t *testing.T, name string) {
	ctx, crash := context.WithCancel(ctx)
	defer crash()
	conn, err := client.Connect(ctx, c.broker.URL(), client.Config{Name: name, Dial: c.broker.Dial, Logger: quiet})
	if ctx.Err() != nil {
		return
	}
	require.NoError(t, err)
	h := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		text := string(d.Message().GetData())
		if text != c.poison {
			return c.inner(text)
		}
		for _, conn := range c.broker.Connections() {
			if conn.Info().Container == name {
				conn.Cut()
			}
		}
		c.mu.Lock()
		c.count++
		c.mu.Unlock()
		crash()
		<-ctx.Done()
		return ctx.Err()
	})
	cfg := partition.Config{Retry: retry.Policy{Backoff: retry.Exponential(time.Second, 1), MaxRetries: 1000}}
	_ = partition.Consume(ctx, conn, c.group, h, cfg)
	_ = conn.Close(context.Background())
}

// A message that was handled before another one crashes its worker is never given up for that, even if
// the crash is so sudden that its settlement gets lost each time.
func TestACrashIsBlamedOnNoMessageBeforeIt(t *testing.T) {
	var failed sync.Map
	for name, inner := range map[string]func(text string) error{
		"handled": func(string) error { return nil },
		"forwarded": func(text string) error {
			return client.Forward{To: address.Queue("done"), Message: client.NewMessage([]byte(text))}
		},
		"failed": func(text string) error { // 40 times
			n, _ := failed.LoadOrStore(text, new(int))
			if *n.(*int)++; *n.(*int) <= 40 && strings.HasSuffix(text, "/2") {
				return errors.New("busy")
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := hopbacktest.Start(t, hopbacktest.Config{})
				c := &crashes{broker: b, group: partition.Group{Name: "poisoned", Partitions: 3}, poison: "k4/3", inner: inner}
				topology, err := c.group.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead"), DeliveryLimit: 6})
				require.NoError(t, err)
				for _, name := range []string{"dead", "done"} {
					topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
				}
				conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial, Logger: quiet})
				require.NoError(t, err)
				defer conn.Close(context.Background())
				_, err = declare.Apply(t.Context(), conn.Management(), topology)
				require.NoError(t, err)
				const keys, each = 12, 7
				for n := range each {
					for k := range keys {
						publish(t, conn, c.group.Address(fmt.Sprint("k", k)), fmt.Sprintf("k%d/%d", k, n))
					}
				}
				b.SetLatency(5 * time.Millisecond)
				ctx, stop := context.WithCancel(t.Context())
				var ended sync.WaitGroup
				ended.Go(func() {
					for n := 0; ctx.Err() == nil; n++ {
						c.worker(ctx, t, fmt.Sprint("w", n))
					}
				})
				waiting := func() (n int) {
					for _, q := range c.group.Queues() {
						n += len(b.Queue(q).Messages())
					}
					return n
				}
				for deadline := time.Now().Add(2 * time.Hour); waiting() > 0 && time.Now().Before(deadline); {
					time.Sleep(time.Second)
				}
				stop()
				ended.Wait()
				var dead []string
				for _, m := range b.Queue("dead").Messages() {
					dead = append(dead, string(m.Message.GetData()))
				}
				t.Log("crashes:", c.count)
				assert.Equal(t, []string{c.poison}, dead)
				assert.Zero(t, waiting())
				assert.LessOrEqual(t, c.count, 12)
			})
		})
	}
}

// publish publishes a message whose body is text.
func publish(t *testing.T, conn *client.Conn, to address.Address, text string) {
	p, err := client.NewPublisher[string](t.Context(), conn, to, client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), text, func(m *client.Message) { m.Data = [][]byte{[]byte(text)} }))
	require.NoError(t, p.Close(t.Context()))
}
