// Package patterns holds the code of docs/migrating-from-retry-patterns.md.
package patterns

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

var (
	errTimeout = errors.New("timeout")
	errNetwork = errors.New("network")
)

// Rate is an error that says when to try again.
type rate struct{ after time.Duration }

func (r rate) Error() string { return "too many requests" }

func p1(ctx context.Context, conn *client.Conn, handle client.Handler) error {
	topology := declare.Topology{Queues: []declare.Queue{
		declare.QuorumQueue{Name: "orders", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")},
		declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()},
	}}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return err
	}
	return conn.Consume(ctx, "orders", handle, client.ConsumerConfig{})
}

var p2 = retry.Policy{MaxRetries: 5, Backoff: retry.Delays(time.Second)}

var p3 = retry.Policy{MaxRetries: 5, Backoff: retry.Exponential(time.Second, 1.5)}

var p4 = retry.Policy{
	MaxRetries: 5,
	Backoff:    retry.Delays(10*time.Second, time.Minute, 5*time.Minute, 10*time.Minute, 30*time.Minute),
	RetryIf:    retry.On(errTimeout, errNetwork),
	Waive:      retry.AllGuards(), // only while the old definitions are in use
}

func p5(handle client.Handler) client.Handler {
	policy := retry.Policy{Strategy: retry.StrategyDeadLetter, MaxRetries: 3, Backoff: retry.Exponential(time.Second, 2)}
	return client.Chain(retry.With(policy), dedupe.With(dedupe.Config{}))(handle)
}

func p6(m *client.Message) bool {
	return retry.DeadLetterOf(m).Reason == retry.ReasonRejected
}

func p7(send func() error) error {
	if err := send(); err != nil {
		if limited, ok := errors.AsType[rate](err); ok {
			return retry.After(limited.after, err)
		}
		return err
	}
	return nil
}

var p7Policy = retry.Policy{Strategy: retry.StrategyAuto, MaxRetries: 4, Backoff: retry.Delays(500*time.Millisecond, 30*time.Second, time.Minute, 5*time.Minute)}

func p7Later(ctx context.Context, p *schedule.Publisher[string], order string) error {
	_, err := p.Publish(ctx, schedule.After(time.Hour), order)
	return err
}

var p8 = declare.QuorumQueue{Name: "orders", DeliveryLimit: 5}

var (
	_ = p1
	_ = p2
	_ = p3
	_ = p4
	_ = p5
	_ = p6
	_ = p7
	_ = p7Policy
	_ = p7Later
	_ = p8
)

// Central runs the process that retries what workers of other kinds reject.
func Central(ctx context.Context, conn *client.Conn, policy retry.Policy) error {
	cfg := retry.CentralConfig{Queues: []string{"orders"}}
	err := conn.Consume(ctx, "failed_queue", retry.Central(policy, cfg), client.ConsumerConfig{Prefetch: 1000, NoIsolation: true})
	return err
}
