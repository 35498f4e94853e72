package integration

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// A handler that ends its goroutine, as testing's FailNow does, is a death with all
// that is known of it, and its worker is replaced.
func TestHandlerThatEndsItsGoroutineLeavesItsHistory(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second), Worker: "w-1"}
		applyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 3})
		consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			runtime.Goexit()
			return nil
		})), client.ConsumerConfig{})
		p := publisher[order](t, conn, address.Queue("orders"))
		for i := range 3 {
			publish(t, p, order{ID: i})
		}
		for _, m := range s.peer(t).take("orders.dead", 3) {
			d := retry.Autopsy(m)
			assert.EqualValues(t, client.ReasonPanicked, d.Lane)
			assert.Equal(t, "orders", d.Queue)
			assert.Equal(t, "w-1", d.Worker)
			assert.Contains(t, d.Error, "ended its goroutine")
		}
	})
}
