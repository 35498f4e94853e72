package retry_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

var (
	errDeclined  = errors.New("card declined")
	errDuplicate = errors.New("already charged")
)

// A policy treats each kind of error differently. The first matching rule decides; for all other
// errors, the policy's own retries apply.
func ExamplePolicy_rules() {
	policy := retry.Policy{
		MaxRetries: 5,
		Backoff:    retry.Delays(10*time.Second, time.Minute),
		Rules: []retry.ErrorRule{
			{If: retry.On(errDeclined), Do: retry.ActionDeadLetter},
			{If: retry.On(errDuplicate), Do: retry.ActionDiscard},
			{If: retry.OnType[*net.OpError](), MaxRetries: 50, Backoff: retry.Exponential(time.Second, 2).Cap(5 * time.Minute)},
		},
	}
	for _, err := range []error{
		errors.New("database is busy"),
		&net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")},
		fmt.Errorf("charge: %w", errDeclined),
		fmt.Errorf("charge: %w", errDuplicate),
	} {
		handler := retry.With(policy)(client.HandlerFunc(func(context.Context, *client.Delivery) error { return err }))
		fmt.Println(handler.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage(nil))))
	}
	// Output:
	// forward to /exchanges/retry_exchange/delay.10000.orders: database is busy
	// forward to /exchanges/retry_exchange/delay.1000.orders: dial tcp: connection refused
	// dead-letter (permanent): charge: card declined
	// <nil>
}
