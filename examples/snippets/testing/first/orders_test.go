package orders_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

type Order struct {
	ID string `json:"id"`
}

var policy = retry.Policy{
	MaxRetries: 3,
	Backoff:    retry.Delays(10*time.Second, time.Minute, 5*time.Minute),
}

// charge is the handler to test.
func charge(ctx context.Context, o Order) error {
	if o.ID == "o-3" || o.ID == "o-2" && retry.Attempt(ctx) == 1 {
		return errors.New("the bank timed out")
	}
	return nil
}

func TestOrders(t *testing.T) {
	orders := hopbacktest.Run(t, policy, client.JSON(charge), Order{ID: "o-1"}, Order{ID: "o-2"}, Order{ID: "o-3"})

	orders.Message(0).WantHandled().WantAttempts(1)
	orders.Message(1).WantHandled().WantDelays(10 * time.Second)
	orders.Message(2).WantDead(retry.ReasonExhausted).
		WantAttempts(4).
		WantDelays(10*time.Second, time.Minute, 5*time.Minute)
}
