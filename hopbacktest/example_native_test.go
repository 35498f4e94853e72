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

// The handler sets the delay itself: the shop is closed, so it retries tomorrow.
func ordersNative(t *testing.T) {
	policy := retry.Policy{Strategy: retry.StrategyNative}
	handler := client.JSON(func(ctx context.Context, order string) error {
		if retry.Attempt(ctx) == 1 {
			return retry.After(24*time.Hour, errors.New("closed"))
		}
		return nil
	})
	hopbacktest.Run(t, policy, handler, "order 1").Message(0).
		WantHandled().
		WantDelays(24 * time.Hour)
}

func ExampleRun_native() {
	// In your project, this is a test: func TestOrders(t *testing.T).
	_ = ordersNative
}
