package client_test

import (
	"context"
	"fmt"
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
)

// A message crashes each of several workers as soon as its handler is called, while what they have settled
// just before is still on the network. Only that message reaches the delivery limit.
func TestACrashTakesNoSettlementAlong(t *testing.T) {
	for _, workers := range []int{1, 3} {
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := hopbacktest.Start(t, hopbacktest.Config{})
				conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial})
				require.NoError(t, err)
				defer conn.Close(context.Background())
				_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{
					declare.QuorumQueue{Name: "orders", DeadLetter: declare.ToQueue("dead"), DeliveryLimit: 6},
					declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited},
				}})
				require.NoError(t, err)
				const messages, poison = 60, "20"
				p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
				require.NoError(t, err)
				for n := range messages {
					require.NoError(t, p.Publish(t.Context(), "", func(m *client.Message) { m.Data = [][]byte{[]byte(fmt.Sprint(n))} }))
				}
				b.SetLatency(5 * time.Millisecond)
				ctx, stop := context.WithCancel(t.Context())
				var ended sync.WaitGroup
				var mu sync.Mutex
				crashed := 0
				worker := func(name string) {
					ctx, crash := context.WithCancel(ctx)
					defer crash()
					conn, err := client.Connect(ctx, b.URL(), client.Config{Name: name, Dial: b.Dial})
					if ctx.Err() != nil {
						return
					}
					require.NoError(t, err)
					defer conn.Close(context.Background())
					_ = conn.Consume(ctx, "orders", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
						if string(d.Message().GetData()) != poison {
							return nil
						}
						for _, conn := range b.Connections() {
							if conn.Info().Container == name {
								conn.Cut()
							}
						}
						mu.Lock()
						crashed++
						mu.Unlock()
						crash()
						<-ctx.Done()
						return ctx.Err()
					}), client.ConsumerConfig{Concurrency: 4, Prefetch: 10})
				}
				for i := range workers {
					ended.Go(func() {
						for n := 0; ctx.Err() == nil; n++ {
							worker(fmt.Sprintf("w%d.%d", i, n))
						}
					})
				}
				for deadline := time.Now().Add(time.Hour); len(b.Queue("orders").Messages()) > 0 && time.Now().Before(deadline); {
					time.Sleep(time.Second)
				}
				stop()
				ended.Wait()
				var dead []string
				for _, m := range b.Queue("dead").Messages() {
					dead = append(dead, string(m.Message.GetData()))
				}
				t.Log("crashes:", crashed)
				assert.Equal(t, []string{poison}, dead)
			})
		})
	}
}
