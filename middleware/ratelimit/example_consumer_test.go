package ratelimit_test

import (
	"context"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/retry"
)

// A consumer that calls a service at most 50 times per second, with bursts of ten. Retries count,
// too, because the limit is inside retry.With. The timeout is inside the limit, so it doesn't
// include the waiting time.
func Example() {
	chain := client.Chain(
		retry.With(retry.Policy{}),
		ratelimit.With(ratelimit.Config{PerSecond: 50, Burst: 10}),
		client.Timeout(5*time.Second),
	)
	_ = func(ctx context.Context, conn *client.Conn, handler client.Handler) error {
		return conn.Consume(ctx, "orders", chain(handler), client.ConsumerConfig{Concurrency: 16})
	}
}
