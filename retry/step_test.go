package retry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// Somebody sets the broker's clock while messages wait in their queue.
func TestNativeSurvivesAStepOfTheBrokersClock(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, step time.Duration) []*hopbacktest.Outcome {
		return hopbacktest.Scenario{
			Policy: retry.Policy{Strategy: retry.StrategyNative, MaxRetries: 8, Backoff: retry.Delays(5 * time.Second)},
			Handler: client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
				if retry.Attempt(ctx) < 8 {
					return errors.New("again")
				}
				return nil
			}),
			Messages: []any{"a", "b", "c", "d"},
			Consumer: client.ConsumerConfig{Concurrency: 4},
			Disturb: func(b *hopbacktest.Broker) {
				time.Sleep(12 * time.Second)
				b.StepClock(step)
			},
		}.Run(t).Messages
	}
	t.Run("forward", func(t *testing.T) {
		t.Parallel()
		for _, o := range run(t, time.Hour) {
			o.WantAttempts(8)
			for _, had := range o.Delays() {
				assert.InDelta(t, 5*time.Second, had, float64(500*time.Millisecond), o.Timeline())
			}
		}
	})
	t.Run("back", func(t *testing.T) {
		t.Parallel()
		for _, o := range run(t, -time.Hour) {
			o.WantAttempts(8)
			late := 0
			for _, had := range o.Delays() {
				if had > 6*time.Second {
					late++
					assert.Less(t, had, time.Hour+10*time.Second, o.Timeline())
				}
			}
			assert.Equal(t, 1, late, "the one that waited then is late, and no other:\n%s", o.Timeline())
		}
	})
}
