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

// One order succeeds at its second attempt. Another one fails for good at the first.
func ordersDeadLettered(t *testing.T) {
	policy := retry.Policy{
		Strategy: retry.StrategyDeadLetter,
		Backoff:  retry.Exponential(time.Minute, 2).Cap(time.Hour),
	}
	handler := client.JSON(func(ctx context.Context, order string) error {
		switch {
		case order == "hopeless":
			return retry.Permanent(errors.New("no such customer"))
		case retry.Attempt(ctx) == 1:
			return errors.New("the bank timed out")
		}
		return nil
	})
	orders := hopbacktest.Run(t, policy, handler, "order 1", "hopeless")
	orders.Message(0).WantHandled().WantDelays(time.Minute)
	orders.Message(1).WantDead(retry.ReasonPermanent).WantAttempts(1)
}

func ExampleRun_deadLetter() {
	// In your project, this is a test: func TestOrders(t *testing.T).
	_ = ordersDeadLettered
}
