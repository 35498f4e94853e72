// Package hopback is the short way into the SDK: connect to RabbitMQ, declare a queue with its
// retry policy, publish, and handle.
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
// The package is thin, and you don't rewrite anything when you need more: its types are those of
// packages client, declare, and retry. Use those packages directly for publishers to exchanges,
// middleware, topologies with several queues, and everything else.
//
// This package is stable: see docs/stability.md.
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
	// Message is an AMQP message, for setting headers and properties when you publish. See
	// [client.Message].
	Message = client.Message
	// Policy decides which errors are retried, how often, and after which delays. The zero value
	// retries five times: after 10 s, 1 min, 5 min, 10 min, and 30 min. See [retry.Policy].
	Policy = retry.Policy
	// Backoff is the delays of a Policy. See [Delays] and [retry.Backoff].
	Backoff = retry.Backoff
)

// Connect connects to RabbitMQ 4 over AMQP 1.0. The URL has the form
// amqp://user:password@host:5672/vhost, or amqps:// for TLS. The first attempt must succeed; a
// connection that is lost later is rebuilt by itself. See [client.Connect] for the errors.
func Connect(ctx context.Context, url string, cfg Config) (*Conn, error) {
	return client.Connect(ctx, url, cfg)
}

// Delays is a Backoff that waits for the given times, one after the other. Further retries wait
// for the last one. See [retry.Delays].
func Delays(delays ...time.Duration) Backoff { return retry.Delays(delays...) }

// Permanent marks err as an error that a retry can't fix. A handler that returns it
// dead-letters the message at once. Permanent(nil) is nil. See [retry.Permanent].
func Permanent(err error) error { return retry.Permanent(err) }

// After has a message retried after d instead of the policy's delay, for instance after the time
// that a service asked for with Retry-After. See [retry.After].
func After(d time.Duration, err error) error { return retry.After(d, err) }

// Attempt returns the number of the current attempt, from 1. Call it in a handler. See
// [retry.Attempt].
func Attempt(ctx context.Context) int { return retry.Attempt(ctx) }
