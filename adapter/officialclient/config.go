package officialclient

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/hopback/hopback/argument"
)

// Config configures Serve. The zero value handles one message at a time.
type Config struct {
	// Concurrency is how many handlers run at once. Default: 1. Give the consumer
	// InitialCredits of twice that, or more.
	Concurrency int
	// Grace is how long handlers may continue after ctx has ended. Then their own ctx ends.
	// A handler that ignores that is abandoned 5 s later. Default: 30 s.
	Grace time.Duration
	// ForwardPatience is how long a client.Forward is tried again while the broker refuses
	// the copy. Then the original goes back to its queue as a failed delivery. If
	// the queue isn't known to have a dead-letter exchange, which FailureLimit would send
	// it to, the original is kept and the copy tried again until it is accepted. A
	// dead-letter exchange that a RabbitMQ policy sets isn't known. Default: 30 s.
	ForwardPatience time.Duration
	// FailureLimit is how often a message may fail and stay in its queue. The next
	// failure dead-letters it. Failures are client.Requeue and client.Modify with Failed
	// set, such as any error of a handler without a decorator. This limit replaces the
	// queue's delivery limit: on RabbitMQ 4.3 the official client's settlements don't
	// count toward that. Default: 20, as the broker's own. -1 means none.
	FailureLimit int
	// RecoveryPatience is how long Serve waits for the official client to recover
	// its connection. Default: 3 min, which covers its five attempts. Where its recovery is
	// switched off (RecoveryConfiguration.ActiveRecovery: false), set it to 1.
	RecoveryPatience time.Duration
	// Logger logs losses, retries and faults that no error reports. Default:
	// slog.Default().
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
	for _, d := range []time.Duration{c.Grace, c.ForwardPatience, c.RecoveryPatience} {
		if d < 0 {
			return c, argument.New("Config", d, "has a negative duration", "use a positive duration, or 0 for the default")
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
