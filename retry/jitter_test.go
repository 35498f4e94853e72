package retry_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

// Messages that failed together don't come back together, where a strategy can hold each for
// its own time.
func TestJitterSpreadsDelays(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]retry.Policy{
		"ladder": {AnyDelay: &retry.Ladder{}},
		"native": {Strategy: retry.StrategyNative},
		"auto":   {Strategy: retry.StrategyAuto},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p.Jitter, p.Backoff = retry.JitterEqual, retry.Delays(time.Minute)
			o := hopbacktest.Run(t, p, client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
				if retry.Attempt(ctx) == 1 {
					return errors.New("once")
				}
				return nil
			}), make([]any, 40)...)
			seconds := map[int64]int{}
			for _, m := range o.Messages {
				had := m.WantAttempts(2).Delays()[0]
				assert.GreaterOrEqual(t, had, 30*time.Second)
				assert.Less(t, had, 68*time.Second) // the ladder rounds up by less than an eighth
				seconds[int64(had/(2*time.Second))]++
			}
			assert.Greater(t, len(seconds), 5, "%v", seconds)
		})
	}
}

// Where it would have no effect, it is refused, or told.
func TestJitterWithDelayQueues(t *testing.T) {
	t.Parallel()
	for _, strategy := range []retry.Strategy{"", retry.StrategyRepublish, retry.StrategyDeadLetter} {
		for _, jitter := range []retry.Jitter{retry.JitterEqual, retry.JitterFull} {
			var bad *argument.Error
			require.ErrorAs(t, retry.Policy{Strategy: strategy, Jitter: jitter}.Validate(), &bad)
			assert.Equal(t, "Policy.Jitter", bad.Path.String())
			assert.NotEmpty(t, bad.Remedy)
		}
		require.NoError(t, retry.Policy{Strategy: strategy, Jitter: retry.JitterNone}.Validate())
	}
	for jitter, warned := range map[retry.Jitter]bool{retry.JitterFull: true, retry.JitterNone: false} {
		var log bytes.Buffer
		h := retry.With(retry.Policy{Strategy: retry.StrategyAuto, Jitter: jitter})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders", Log: slog.New(slog.NewTextHandler(&log, nil))}))
		assert.Equal(t, warned, bytes.Contains(log.Bytes(), []byte("Policy.Jitter")), "%s", log.String())
	}
}
