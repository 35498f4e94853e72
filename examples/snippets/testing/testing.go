// Package testing holds the code that the tests in docs/testing.md are about.
package testing

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

var errTimeout = errors.New("the bank timed out")

// Order is what the messages hold, as JSON.
type Order struct {
	ID string `json:"id"`
}

var policy = retry.Policy{
	MaxRetries: 3,
	Backoff:    retry.Delays(10*time.Second, time.Minute, 5*time.Minute),
}

func charge(ctx context.Context, o Order) error {
	if o.ID == "o-2" && retry.Attempt(ctx) == 1 {
		return errTimeout
	}
	if o.ID == "o-3" {
		return errTimeout
	}
	return nil
}

// Shop takes orders.
type Shop struct {
	orders hopbacktest.Publisher[Order] // a *client.Publisher[Order] in the program
}

// Buy publishes an order.
func (s *Shop) Buy(ctx context.Context, id string) error {
	return s.orders.Publish(ctx, Order{ID: id})
}

var _ hopbacktest.Publisher[Order] = (*client.Publisher[Order])(nil)
