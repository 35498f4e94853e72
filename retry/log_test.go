package retry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// A failed attempt that will be retried is logged once, and nothing else is.
func TestFailedAttemptsAreLogged(t *testing.T) {
	t.Parallel()
	handle := func(p retry.Policy, at slog.Level, results ...error) (lines []map[string]any) {
		var log bytes.Buffer
		h := retry.With(p)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			err := results[0]
			if len(results) > 1 {
				results = results[1:]
			}
			return err
		}))
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders", Log: slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: at}))}))
		m := client.NewMessage(nil)
		m.Properties = &amqp.MessageProperties{MessageID: "order 1" + strings.Repeat("x", 1000)}
		m.ApplicationProperties = map[string]any{retry.CountProperty: int64(1)}
		_ = h.Handle(t.Context(), client.NewDelivery("orders", m))
		for line := range strings.Lines(log.String()) {
			var all map[string]any
			require.NoError(t, json.Unmarshal([]byte(line), &all))
			lines = append(lines, all)
		}
		return lines
	}
	failed := errors.New("the bank is closed " + strings.Repeat("x", 5000))
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Minute), Immediate: 2}
	for _, p := range []retry.Policy{policy, {MaxRetries: 3, Backoff: retry.Delays(time.Minute), Strategy: retry.StrategyDeadLetter}, {MaxRetries: 3, Backoff: retry.Delays(time.Minute), AnyDelay: &retry.Ladder{}}} {
		lines := handle(p, slog.LevelInfo, failed)
		require.Len(t, lines, 1, p.Strategy)
		l := lines[0]
		assert.Equal(t, "INFO", l["level"])
		assert.Equal(t, "orders", l["queue"])
		assert.EqualValues(t, 2, l["attempt"])
		assert.EqualValues(t, time.Minute, l["delay"])
		assert.Len(t, l["message_id"], 255)
		assert.Contains(t, l["error"], "the bank is closed")
		assert.Len(t, l["error"], client.ErrorTextLimit)
	}
	warn := policy
	warn.LogLevel = slog.LevelWarn
	assert.Equal(t, "WARN", handle(warn, slog.LevelWarn, failed)[0]["level"])
	debug := policy
	debug.LogLevel = slog.LevelDebug
	assert.Empty(t, handle(debug, slog.LevelInfo, failed))
	asked := handle(policy, slog.LevelInfo, retry.After(10*time.Minute, failed))
	require.Len(t, asked, 1)
	assert.EqualValues(t, 10*time.Minute, asked[0]["delay"], "not that of the first delay queue")
	for what, err := range map[string]error{
		"handled": nil, "snoozed": retry.Snooze(time.Minute), "discarded": retry.Discard(failed), "permanent": retry.Permanent(failed),
		"an outcome": client.Requeue{}, "dead": client.DeadLetter{},
	} {
		assert.Empty(t, handle(policy, slog.LevelDebug, err), what)
	}
	assert.Empty(t, handle(policy, slog.LevelDebug, failed, nil), "an immediate retry succeeds")
}
