// Package common is what the previous and the current worker have in common. It is built
// with both revisions of hopback.
package common

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// MaxRetries is how often a message is retried.
const MaxRetries = 3

// Policy is the workers' policy.
func Policy(strategy, worker string) retry.Policy {
	p := retry.Policy{MaxRetries: MaxRetries, Backoff: retry.Delays(50*time.Millisecond, 100*time.Millisecond), Worker: worker}
	switch strategy {
	case "republish":
		p.Strategy = retry.StrategyRepublish
	case "dead-letter":
		p.Strategy = retry.StrategyDeadLetter
	case "ladder":
		p.AnyDelay = &retry.Ladder{Unit: 50 * time.Millisecond, Levels: 2}
	case "auto":
		p.Strategy = retry.StrategyAuto
	case "native":
		p.Strategy = retry.StrategyNative
	}
	return p
}

// Attempt is a message in a worker's hands.
type Attempt struct {
	Worker string
	Body   string
	Count  int
}

// Worker handles messages. It fails on all but those that begin with "twice", which succeed
// at the third attempt.
func Worker(strategy, worker string, notify func(Attempt)) client.Handler {
	return retry.With(Policy(strategy, worker))(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		a := Attempt{worker, string(d.Message().GetData()), retry.Count(d.Message())}
		notify(a)
		if strings.HasPrefix(a.Body, "twice") && a.Count == 2 {
			return nil
		}
		return errors.New("no")
	}))
}

// DeadLetter is what a reader makes of a dead letter.
type DeadLetter struct {
	Body, Queue, Exchange, RoutingKey, Reason, Error, Worker string

	Retries int
	Ordered bool // the first failure is known, and not behind the last
}
