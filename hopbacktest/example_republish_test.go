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

// An order fails at every attempt, with longer delays each time, and is dead-lettered.
func ordersRepublished(t *testing.T) {
	policy := retry.Policy{
		MaxRetries: 3,
		Backoff:    retry.Delays(10*time.Second, time.Minute, 5*time.Minute),
	}
	handler := client.JSON(func(ctx context.Context, order string) error {
		return errors.New("the bank timed out")
	})
	hopbacktest.Run(t, policy, handler, "order 1").Message(0).
		WantAttempts(4).
		WantDelays(10*time.Second, time.Minute, 5*time.Minute).
		WantDead(retry.ReasonExhausted)
}

func ExampleRun_republish() {
	// In your project, this is a test: func TestOrders(t *testing.T).
	_ = ordersRepublished
}
