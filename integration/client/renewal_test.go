package client_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/retry"
)

// go-amqp hangs at the last of 2³² delivery-ids (B13), so sessions are replaced long
// before it. Here that is after 50 deliveries: nothing is lost, nothing comes twice,
// no delivery is counted, and what one publisher sends stays in its order.
func TestSessionsAreReplacedLongBeforeTheirDeliveryIDsEnd(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const every, messages = 50, 400
		log := suite.NewLogbook(t)
		ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
		defer cancel()
		conn, err := client.Connect(inside.WithTestSettings(ctx, inside.TestSettings{RenewAfter: every}), s.AMQPURL(), client.Config{Logger: slog.New(log)})
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(context.Background()) })

		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 1})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		var mu sync.Mutex
		var first []int // the order of the first attempts
		again := map[int]int{}
		var counted atomic.Int64
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
			if d, _ := client.DeliveryFrom(ctx); d.DeliveryCount() > 0 {
				counted.Add(1)
			}
			mu.Lock()
			defer mu.Unlock()
			if retry.Attempt(ctx) == 1 {
				first = append(first, o.ID)
				return errors.New("not yet") // a forward, which wears a session, too
			}
			again[o.ID]++
			return nil
		})), client.ConsumerConfig{Prefetch: 20})
		var sent sync.WaitGroup
		for i := range messages {
			turn := make(chan struct{})
			sent.Go(func() { close(turn); assert.NoError(t, p.Publish(ctx, suite.Order{ID: i})) })
			<-turn
			if i%8 == 7 {
				sent.Wait() // so that there is an order among eights
			}
		}
		sent.Wait()
		suite.Poll(t, "every message had its second attempt", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(again) == messages
		})
		mu.Lock()
		defer mu.Unlock()
		require.Len(t, first, messages, "each once")
		for i, id := range first {
			assert.Equal(t, i/8, id/8, "in the order of sending")
		}
		for id, n := range again {
			assert.Equal(t, 1, n, id)
		}
		assert.Zero(t, counted.Load())
		replaced := log.With("is replaced")
		assert.GreaterOrEqual(t, len(replaced), 2*messages/every/2)
		for _, line := range log.With(" WARN ") {
			assert.Contains(t, line, "too many forwards wait", "which a busy machine can do") // and which is tried again
		}
		suite.Report(t, s, "%d messages, %d retries, %d sessions of the consumer replaced", messages, messages, len(replaced))
	})
}

// RabbitMQ numbers the deliveries of a session from 0, on which the point at which
// a session is replaced relies.
func TestDeliveryIDsOfASessionBeginAtZero(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		var mu sync.Mutex
		var ids []uint32
		tap := suite.Tapped(t, s.Host(), func(code byte, fields []byte) {
			if code != 0x14 {
				return
			}
			// transfer: handle, delivery-id, ... both as short as they can be.
			skip := map[byte]int{0x43: 1, 0x52: 2, 0x70: 5}[fields[0]]
			mu.Lock()
			defer mu.Unlock()
			switch id := fields[skip:]; id[0] {
			case 0x43:
				ids = append(ids, 0)
			case 0x52:
				ids = append(ids, uint32(id[1]))
			default:
				t.Errorf("delivery-id % x", id[:5])
			}
		})
		conn, _ := suite.ConnectTo(t, s.AMQPURLWith(func(u *url.URL) { u.Host = tap }))
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		mu.Lock()
		ids = nil // those of the management
		mu.Unlock()
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range 3 {
			suite.Publish(t, p, suite.Order{ID: i})
		}
		got := make(chan int, 3)
		suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		for i := range 3 {
			assert.Equal(t, i, suite.Await(t, got, fmt.Sprint(i)))
		}
		mu.Lock()
		defer mu.Unlock()
		next := uint32(0)
		for _, id := range ids { // among them the reply to a request about the queue, on a session of the management
			if id == next {
				next++
			}
		}
		assert.Equal(t, uint32(3), next, "%v", ids)
		assert.LessOrEqual(t, len(ids), 4)
	})
}
