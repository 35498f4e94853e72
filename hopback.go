// Package hopback connects to RabbitMQ 4, declares a queue with its retry policy, publishes, and
// consumes. Start with it: for many programs it is the only import of the SDK.
//
//	conn, err := hopback.Connect(ctx, "amqp://guest:guest@localhost:5672/", hopback.Config{})
//	orders := hopback.Queue[Order]{
//		Conn:  conn,
//		Name:  "orders",
//		Retry: hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(time.Second, time.Minute)},
//	}
//	err = orders.Declare(ctx)
//	err = orders.Publish(ctx, Order{ID: "o-1"})
//	err = orders.Consume(ctx, charge, hopback.ConsumerConfig{Concurrency: 16})
//
// The package is a thin layer: its types are those of packages client, declare, and retry, so
// you don't rewrite anything when you need more. Use those packages directly for publishers to
// exchanges, middleware, and topologies with several queues.
//
// This package is stable: see docs/versions.md#stability.
package hopback

import (
	"context"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

type (
	// Conn is a connection to RabbitMQ that reconnects by itself. See [client.Conn].
	Conn = client.Conn
	// Config configures a connection: credentials, TLS, further endpoints, logging. The zero
	// value is ready to use. See [client.Config].
	Config = client.Config
	// ConsumerConfig configures a consumer: how many handlers run at once, and how long a
	// shutdown waits for them. The zero value handles one message at a time. See
	// [client.ConsumerConfig].
	ConsumerConfig = client.ConsumerConfig
	// Message is an AMQP message. Use it to set headers and properties when you publish. See
	// [client.Message].
	Message = client.Message
	// Policy decides which errors are retried, how often, and after which delays. The zero value
	// retries five times: after 10 s, 1 min, 5 min, 10 min, and 30 min. See [retry.Policy].
	Policy = retry.Policy
	// Backoff returns the delay before each retry of a [Policy]. See [Delays], [Exponential], and
	// [retry.Backoff].
	Backoff = retry.Backoff
)

// NoRetries is for [Policy].MaxRetries: a message is dead-lettered at its first failure. See [retry.NoRetries].
const NoRetries = retry.NoRetries

// Connect connects to RabbitMQ 4 over AMQP 1.0. The URL has the form
// amqp://user:password@host:5672/vhost, or amqps:// for TLS. The first connection must succeed;
// one that is lost later is rebuilt in the background. See [client.Connect] for the errors.
func Connect(ctx context.Context, url string, cfg Config) (*Conn, error) {
	return client.Connect(ctx, url, cfg)
}

// Delays returns a [Backoff] with the given delays: the first before retry 1, the second before
// retry 2, and so on. Further retries use the last one. See [retry.Delays].
func Delays(delays ...time.Duration) Backoff { return retry.Delays(delays...) }

// Exponential returns a [Backoff] whose delay grows by factor with each retry, starting at initial. The default
// strategy has one delay queue for each different delay: see [retry.Exponential].
func Exponential(initial time.Duration, factor float64) Backoff {
	return retry.Exponential(initial, factor)
}

// Permanent marks err as an error that a retry can't fix. A handler that returns it dead-letters
// the message at once. Permanent(nil) is nil. See [retry.Permanent].
func Permanent(err error) error { return retry.Permanent(err) }

// After makes a handler's error retry the message after d instead of the policy's delay. Use it,
// for instance, for the time in a service's Retry-After header. See [retry.After].
func After(d time.Duration, err error) error { return retry.After(d, err) }

// Snooze makes the message come back after d without using up a retry: the handler isn't ready for it yet. See
// [retry.Snooze].
func Snooze(d time.Duration) error { return retry.Snooze(d) }

// Discard acknowledges and drops the message on purpose; err is logged. See [retry.Discard].
func Discard(err error) error { return retry.Discard(err) }

// Attempt returns the number of the current attempt, starting at 1. Call it in a handler. See
// [retry.Attempt].
func Attempt(ctx context.Context) int { return retry.Attempt(ctx) }
