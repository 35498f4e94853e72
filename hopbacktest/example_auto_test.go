package hopbacktest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// The broker crashes while an order waits for its retry. Set Broker.Version to "4.0.5" to run
// the same test with RabbitMQ 4.0.
func ordersAuto(t *testing.T) {
	orders := hopbacktest.Scenario{
		Policy: retry.Policy{Strategy: retry.StrategyAuto, Backoff: retry.Delays(time.Hour)},
		Handler: client.JSON(func(ctx context.Context, order string) error {
			if retry.Attempt(ctx) == 1 {
				return errors.New("the bank timed out")
			}
			return nil
		}),
		Messages: []any{"order 1"},
		Broker:   hopbacktest.Config{Version: "4.3.6"},
		Disturb: func(b *hopbacktest.Broker) {
			time.Sleep(10 * time.Minute)
			b.Kill()
			time.Sleep(10 * time.Minute)
			b.Restart()
		},
	}.Run(t)
	orders.Message(0).WantHandled().WantAttempts(2).WantDelays(time.Hour)
}

func ExampleRun_auto() {
	// In your project, this is a test: func TestOrders(t *testing.T).
	_ = ordersAuto
}
