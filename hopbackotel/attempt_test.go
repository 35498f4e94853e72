package hopbackotel_test

import (
	"context"
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
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// A span has the number of the attempt that its handler gets: that of a copy which a handler has forwarded
// to another queue starts over, and a message that stays in hand is counted.
func TestASpanHasTheAttemptOfItsHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cfg := l.config(t, hopbackotel.Config{})
		cfg.Dial = broker.Dial
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "next"})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		g := partition.Group{Name: "parts", Partitions: 1}
		topology, err = g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("receipts")})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)

		var mu sync.Mutex // the handlers of three consumers
		handled := map[string][]string{}
		fails := func(attempts int, then error) client.HandlerFunc {
			return func(ctx context.Context, d *client.Delivery) error {
				n := retry.Attempt(ctx)
				mu.Lock()
				handled[d.Queue()] = append(handled[d.Queue()], fmt.Sprint(n))
				mu.Unlock()
				if n <= attempts {
					return errBank
				}
				if then == nil {
					return nil
				}
				return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
			}
		}
		shop := open(t, t.Context(), conn, policy, fails(3, client.Forward{}))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		go func() {
			ended <- conn.Consume(ctx, "next", retry.With(policy)(fails(1, nil)), client.ConsumerConfig{})
		}()
		go func() {
			ended <- partition.Consume(ctx, conn, g, fails(2, nil), partition.Config{Retry: retry.Policy{Backoff: retry.Delays(time.Second)}})
		}()
		pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Address{}, client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, pub.Publish(t.Context(), order("o-1"), client.PublishTo(address.Queue("orders"))))
		require.NoError(t, pub.Publish(t.Context(), order("o-2"), client.PublishTo(g.Address("key"))))
		time.Sleep(time.Minute)
		synctest.Wait()
		stop()
		shop.stop()
		for range 2 {
			require.NoError(t, <-ended)
		}
		require.NoError(t, conn.Close(t.Context()))
		spans := map[string][]string{}
		for _, x := range l.history().spans {
			var queue, attempt string
			for _, kv := range x.Attributes {
				switch kv.Key {
				case "messaging.destination.name":
					queue = kv.Value.AsString()
				case "hopback.attempt":
					attempt = fmt.Sprint(kv.Value.AsInt64())
				}
			}
			if attempt != "" && !strings.Contains(queue, g.Name+".1.members") { // which has beats
				spans[queue] = append(spans[queue], attempt)
			}
		}
		assert.Equal(t, []string{"1", "2", "3", "4"}, handled["orders"])
		assert.Equal(t, []string{"1", "2"}, handled["next"])
		assert.Equal(t, []string{"1", "2", "3"}, handled[g.Queues()[0]])
		t.Log(handled, spans)
		var all []string
		for _, list := range spans {
			all = append(all, list...)
		}
		assert.ElementsMatch(t, []string{"1", "2", "3", "4", "1", "2", "1", "2", "3"}, all)
	})
}
