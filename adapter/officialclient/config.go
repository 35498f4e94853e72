package officialclient

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/hopback/hopback/argument"
)

// Config configures [Serve]. The zero value handles one message at a time.
type Config struct {
	// Concurrency is how many handlers run at once. Set the consumer's InitialCredits to at
	// least twice that. Default: 1.
	Concurrency int
	// Grace is how long handlers may continue after ctx has ended. Then their own ctx ends. If a
	// handler ignores that, Serve abandons it 5 s later. Default: 30 s.
	Grace time.Duration
	// ForwardPatience is how long Serve tries to publish the copy of a client.Forward that the
	// broker refuses. Then the original returns to its queue as a failed delivery. If the queue
	// isn't known to have a dead-letter exchange, to which FailureLimit would send the original,
	// Serve keeps the original and keeps trying. It can't see a dead-letter exchange that a
	// RabbitMQ policy sets. Default: 30 s.
	ForwardPatience time.Duration
	// FailureLimit is how many times a message may fail and stay in its queue. The next failure
	// dead-letters it. Failures are client.Requeue and client.Modify with Failed set, and so all
	// errors of a handler without middleware. This limit replaces the queue's delivery limit,
	// because on RabbitMQ 4.3 the official client's settlements don't count toward that.
	// Default: 20, like the broker's. -1 means no limit.
	FailureLimit int
	// RecoveryPatience is how long Serve waits for the official client to recover its
	// connection. If you disable its recovery (RecoveryConfiguration.ActiveRecovery: false), set
	// it to 1 (one nanosecond). Default: 3 min, which covers its five attempts.
	RecoveryPatience time.Duration
	// Logger logs losses, retries, and problems that no error reports. Default: slog.Default().
	Logger *slog.Logger
}

// unlimited is a Config.FailureLimit that sets no limit.
const unlimited = -1

const (
	maxConcurrency      = 100_000
	defaultFailureLimit = 20
	// closeTimeout bounds how long closing a link is waited for.
	closeTimeout = 5 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	for _, f := range []struct {
		name   string
		n, low int
	}{{"Concurrency", c.Concurrency, 0}, {"FailureLimit", c.FailureLimit, unlimited}} {
		if f.n < f.low || f.n > maxConcurrency {
			return c, argument.New("Config."+f.name, f.n, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", maxConcurrency))
		}
	}
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"Grace", c.Grace}, {"ForwardPatience", c.ForwardPatience}, {"RecoveryPatience", c.RecoveryPatience}} {
		if f.d < 0 {
			return c, argument.New("Config."+f.name, f.d, "is negative", "use a positive duration, or 0 for the default")
		}
	}
	setDefault(&c.Concurrency, 1)
	setDefault(&c.Grace, 30*time.Second)
	setDefault(&c.ForwardPatience, 30*time.Second)
	setDefault(&c.FailureLimit, defaultFailureLimit)
	setDefault(&c.RecoveryPatience, 3*time.Minute)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// sleep returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
