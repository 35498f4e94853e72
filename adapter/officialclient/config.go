package officialclient

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Dialer makes a connection. The method NewConnection of a *rabbitmqamqp.Environment is
// one, and so is a function that calls rabbitmqamqp.Dial.
//
// The adapter owns the connection and closes it. The adapter replaces lost connections
// itself and doesn't need the official client's recovery. Switch that off
// (RecoveryConfiguration.ActiveRecovery: false) to save a goroutine that sleeps for some
// seconds after each loss.
//
// NewConnection and Dial of version 1.0.0 end with a write to the connection without a
// lock. The race detector may report it if the connection is lost at that moment.
type Dialer func(context.Context) (*rabbitmqamqp.AmqpConnection, error)

// Config configures Consume and Serve. The zero value handles one message at a time.
type Config struct {
	// Concurrency is how many handlers run at once. Default: 1.
	Concurrency int
	// Prefetch is how many unsettled messages the consumer may hold. It is the official
	// client's InitialCredits. Serve ignores it. Default: twice Concurrency, at least 64.
	Prefetch int
	// Grace is how long handlers may run on after ctx has ended. Then their own ctx ends.
	// A handler that ignores that is abandoned 5 s later. Default: 30 s.
	Grace time.Duration
	// ForwardPatience is how long a client.Forward is tried again while the broker doesn't
	// accept the copy. Then the original goes back to its queue as a failed delivery. If
	// the queue isn't known to have a dead-letter exchange, which FailureLimit would send
	// it to, the original is kept and the copy tried again until it is accepted. A
	// dead-letter exchange that a RabbitMQ policy sets isn't known. Default: 30 s.
	ForwardPatience time.Duration
	// FailureLimit is how often a message may fail and stay in its queue. The next
	// failure dead-letters it. Failures are client.Requeue and client.Modify with Failed
	// set, such as any error of a handler without a decorator. This limit replaces the
	// queue's delivery limit: on RabbitMQ 4.3 the official client's settlements don't
	// count toward that. Default: 20, as the broker's own. UnlimitedFailures means none.
	FailureLimit int
	// Reconnect is the back-off between attempts to replace a lost connection, and to
	// attach to an address to forward to. Defaults: 100 ms, growing to 10 s.
	Reconnect client.ReconnectBackoff
	// RecoveryPatience is how long Serve waits for the official client to recover
	// its connection. Default: 3 min, which covers its five attempts.
	RecoveryPatience time.Duration
	// Management lets decorators read about queues when they start: retry.With checks
	// the topology and chooses a strategy with it. It belongs to a connection of
	// client.Connect, which may be closed once Consume has started. Default: nil, no
	// checks.
	Management *client.Management
	// Logger logs losses, retries and faults that no error reports. Default:
	// slog.Default().
	Logger *slog.Logger
}

// UnlimitedFailures is a Config.FailureLimit that sets no limit.
const UnlimitedFailures = -1

const (
	maxConcurrency      = 100_000
	maxPrefetch         = 100_000
	defaultFailureLimit = 20
	// dialTimeout bounds one attempt to connect, and one to attach a consumer.
	dialTimeout = 15 * time.Second
	// closeTimeout bounds how long closing is waited for.
	closeTimeout = 5 * time.Second
)

func (c Config) withDefaults() (Config, error) {
	for _, f := range []struct {
		name string
		n    int
		low  int
		max  int
	}{{"Concurrency", c.Concurrency, 0, maxConcurrency}, {"Prefetch", c.Prefetch, 0, maxPrefetch}, {"FailureLimit", c.FailureLimit, UnlimitedFailures, maxConcurrency}} {
		if f.n < f.low || f.n > f.max {
			return c, argument.New("Config."+f.name, f.n, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", f.max))
		}
	}
	for _, d := range []time.Duration{c.Grace, c.ForwardPatience, c.RecoveryPatience, c.Reconnect.Min, c.Reconnect.Max} {
		if d < 0 {
			return c, argument.New("Config", d, "has a negative duration", "use a positive duration, or 0 for the default")
		}
	}
	setDefault(&c.Concurrency, 1)
	setDefault(&c.Prefetch, max(2*c.Concurrency, 64))
	setDefault(&c.Grace, 30*time.Second)
	setDefault(&c.ForwardPatience, 30*time.Second)
	setDefault(&c.FailureLimit, defaultFailureLimit)
	setDefault(&c.RecoveryPatience, 3*time.Minute)
	setDefault(&c.Reconnect.Min, 100*time.Millisecond)
	setDefault(&c.Reconnect.Max, 10*time.Second)
	c.Reconnect.Max = max(c.Reconnect.Max, c.Reconnect.Min)
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

// pauseBefore is the pause after the given number of earlier failures: random
// between nothing and a span that doubles from b.Min to b.Max.
func pauseBefore(b client.ReconnectBackoff, failures int) time.Duration {
	span := b.Max
	if failures < 30 && b.Min<<failures < b.Max {
		span = b.Min << failures
	}
	return rand.N(span + 1)
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
