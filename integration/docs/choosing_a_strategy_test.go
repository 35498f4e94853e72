package docs

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// How long a message waits whose handler asks for a delay that the policy doesn't have: what
// docs/choosing-a-strategy.md says of After.
func TestAfter(t *testing.T) {
	t.Parallel()
	delays := retry.Delays(10*time.Second, time.Minute)
	for _, c := range []struct {
		policy  retry.Policy
		version string
		waited  map[time.Duration]time.Duration
	}{
		{policy: retry.Policy{Backoff: delays}, waited: inQueues},
		{policy: retry.Policy{Backoff: delays, Strategy: retry.StrategyDeadLetter}, waited: inQueues},
		{policy: retry.Policy{Backoff: delays, Strategy: retry.StrategyAuto}, version: "4.0.5", waited: inQueues},
		{policy: retry.Policy{Backoff: delays, AnyDelay: &retry.Ladder{}}, waited: map[time.Duration]time.Duration{
			3 * time.Second: 3 * time.Second, 25 * time.Second: 25600 * time.Millisecond,
			55 * time.Second: 57600 * time.Millisecond, 11 * time.Minute: 665600 * time.Millisecond,
		}},
		{policy: retry.Policy{Backoff: delays, Strategy: retry.StrategyNative}, waited: exact},
		{policy: retry.Policy{Backoff: delays, Strategy: retry.StrategyAuto}, waited: exact},
		// More than 16 delay queues one after the other.
		{policy: retry.Policy{Backoff: retry.Delays(time.Second)}, version: "4.0.5", waited: map[time.Duration]time.Duration{time.Hour: 256 * time.Second}},
		{policy: retry.Policy{Backoff: retry.Delays(time.Second)}, version: "4.3.6", waited: map[time.Duration]time.Duration{time.Hour: time.Hour}},
		// A part isn't shorter than a sixteenth of the delay.
		{policy: retry.Policy{Backoff: retry.Delays(time.Second, time.Hour)}, version: "4.0.5", waited: map[time.Duration]time.Duration{30 * time.Minute: time.Hour}},
	} {
		for asked, want := range c.waited {
			t.Run(fmt.Sprintf("%s %s %t %v", c.policy.Strategy, c.version, c.policy.AnyDelay != nil, asked), func(t *testing.T) {
				t.Parallel()
				run := hopbacktest.Scenario{
					Policy: c.policy, Messages: []any{"x"}, Broker: hopbacktest.Config{Version: c.version},
					Handler: client.JSON(func(ctx context.Context, _ string) error {
						if retry.Attempt(ctx) == 1 {
							return retry.After(asked, errors.New("busy"))
						}
						return nil
					}),
					Queue: declare.QuorumQueue{Name: "orders"},
				}.Run(t)
				run.Message(0).WantHandled().WantDelays(want)
			})
		}
	}
}

var (
	inQueues = map[time.Duration]time.Duration{
		3 * time.Second: 10 * time.Second, 25 * time.Second: 30 * time.Second,
		55 * time.Second: time.Minute, 11 * time.Minute: 11 * time.Minute,
	}
	exact = map[time.Duration]time.Duration{
		3 * time.Second: 3 * time.Second, 25 * time.Second: 25 * time.Second,
		55 * time.Second: 55 * time.Second, 11 * time.Minute: 11 * time.Minute,
	}
)
