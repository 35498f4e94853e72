package breaker_test

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/breaker"
	"github.com/hopback/hopback/retry"
)

// Two consumers that call one bank share a circuit: when the bank is down, both are paused, and
// their messages stay in the queues.
func Example() {
	errBankDown := errors.New("bank is down")
	bank := breaker.With(breaker.Config{
		Name:    "bank",
		Trips:   func(err error) bool { return errors.Is(err, errBankDown) },
		OpenFor: 30 * time.Second,
	})
	retried := retry.With(retry.Policy{})
	_ = func(ctx context.Context, conn *client.Conn, charge, refund client.Handler) {
		go func() { _ = conn.Consume(ctx, "charges", retried(bank(charge)), client.ConsumerConfig{}) }()
		go func() { _ = conn.Consume(ctx, "refunds", retried(bank(refund)), client.ConsumerConfig{}) }()
	}
}
