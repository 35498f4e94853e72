package hopbacktest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

var errDeclined = errors.New("declined")

// failing fails the first n attempts of each message.
func failing(n int) client.Handler {
	return client.JSON(func(ctx context.Context, _ any) error {
		if retry.Attempt(ctx) <= n {
			return errDeclined
		}
		return nil
	})
}

// withEach runs a test for each version and strategy that goes with it.
func withEach(t *testing.T, f func(t *testing.T, version string, s retry.Strategy)) {
	for _, version := range []string{"4.3.6", "4.0.5"} {
		for _, s := range append(strategies(version), retry.StrategyAuto) {
			t.Run(fmt.Sprint(version, " ", s), func(t *testing.T) { f(t, version, s) })
		}
	}
}

func TestRunTellsWhatBecameOfEachMessage(t *testing.T) {
	delays := []time.Duration{10 * time.Second, time.Minute, 5 * time.Hour}
	withEach(t, func(t *testing.T, version string, s retry.Strategy) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(delays...), Strategy: s}
		handler := client.JSON(func(ctx context.Context, order string) error {
			switch {
			case order == "dies":
				return errDeclined
			case order == "hopeless":
				return retry.Permanent(errDeclined)
			case order == "unwanted":
				return retry.Discard(errDeclined)
			case order == "panics":
				panic("at the disco")
			case order == "later" && retry.Attempt(ctx) == 1:
				return retry.After(time.Minute, errDeclined)
			case order == "recovers" && retry.Attempt(ctx) < 3:
				return errDeclined
			}
			return nil
		})
		r := hopbacktest.Scenario{
			Policy: policy, Handler: handler, Broker: hopbacktest.Config{Version: version},
			Messages: []any{"fine", "dies", "hopeless", "unwanted", "panics", "later", "recovers"},
		}.Run(t)
		r.Message(0).WantHandled().WantAttempts(1).WantDelays()
		r.Message(1).WantDead(retry.ReasonExhausted).WantAttempts(4).WantDelays(delays...)
		r.Message(2).WantDead(retry.ReasonPermanent).WantAttempts(1)
		r.Message(3).WantFate("discarded").WantAttempts(1)
		r.Message(4).WantDead(client.ReasonPanicked).WantAttempts(1)
		r.Message(5).WantHandled().WantAttempts(2).WantDelays(time.Minute)
		r.Message(6).WantHandled().WantAttempts(3).WantDelays(delays[:2]...)
		dead := r.Message(1)
		for i, a := range dead.Attempts {
			assert.Equal(t, i+1, a.Number)
			assert.Equal(t, errDeclined, a.Err)
			if i < len(delays) {
				assert.Equal(t, delays[i], a.WantedDelay)
			}
		}
		assert.Equal(t, "declined", dead.DeadLetter.Error)
		assert.Equal(t, "work.dead", dead.In)
		assert.Equal(t, "exhausted", dead.Annotations[client.AnnotationReason])
		assert.Equal(t, "at the disco", r.Message(4).Attempts[0].Panic)
		assert.Equal(t, 3, r.Count("handled"))
		assert.GreaterOrEqual(t, r.Elapsed, 5*time.Hour)
		assert.Contains(t, dead.Timeline(), "attempt 2 failed: declined; was to wait 1m0s, waited 1m0")
		assert.Same(t, dead, r.ByID("2"))
		t.Log(r.Timeline())
	})
}

func TestRunWithHarm(t *testing.T) {
	withEach(t, func(t *testing.T, version string, s retry.Strategy) {
		r := hopbacktest.Scenario{
			Policy:  retry.Policy{MaxRetries: 2, Backoff: retry.Delays(time.Minute), Strategy: s},
			Handler: failing(2), Messages: []any{1, 2, 3}, Broker: hopbacktest.Config{Version: version}, Workers: 2,
			Disturb: func(b *hopbacktest.Broker) {
				time.Sleep(30 * time.Second)
				b.Kill()
				time.Sleep(10 * time.Second)
				b.Restart()
				time.Sleep(10 * time.Second)
				for _, c := range b.Connections() {
					c.Cut()
				}
			},
		}.Run(t)
		r.Each(func(o *hopbacktest.Outcome) { o.WantHandled().WantAttempts(3) })
	})
}

// failure is a tb that records its calls.
type failure struct{ text string }

func (f *failure) Helper()        {}
func (f *failure) Cleanup(func()) {}
func (f *failure) Errorf(format string, args ...any) {
	f.text += fmt.Sprintf(format, args...) + "\n"
}
func (f *failure) Fatalf(format string, args ...any) { f.Errorf(format, args...) }

func TestFailedWantsTellTheTimeline(t *testing.T) {
	r := hopbacktest.Run(t, retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Minute)}, failing(9), "order")
	var f failure
	o := hopbacktest.Notified(r.Message(0), &f)
	o.WantHandled().WantDead(retry.ReasonPermanent).WantAttempts(7).WantDelays(time.Hour)
	for _, want := range []string{
		"message 1 is dead-lettered, want handled", `was dead-lettered with the reason "exhausted", want "permanent"`, "had 2 attempts, want 7",
		"had the delays [1m0s], want [1h0m0s]",
		"+0s            published to work\n", "+1m0s          attempt 2 failed: declined\n", "+1m0s          dead-lettered in work.dead as exhausted\n",
	} {
		assert.Contains(t, f.text, want)
	}
	f.text = ""
	o.WantFate("dead-lettered").WantDead(retry.ReasonExhausted).WantAttempts(2).WantDelays(time.Minute)
	assert.Empty(t, f.text)
	assert.Equal(t, 1, strings.Count(r.Timeline(), "message 1"))
}

func TestMessagesOfOnesOwn(t *testing.T) {
	m := client.NewMessage([]byte("raw"))
	m.Properties.MessageID = "own"
	m.ApplicationProperties = map[string]any{"tenant": "a"}
	var got []string
	r := hopbacktest.Run(t, retry.Policy{}, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		body, err := client.Body(d.Message())
		got = append(got, string(body))
		assert.Equal(t, "a", d.Property("tenant"))
		return err
	}), m)
	require.NotNil(t, r.ByID("own"))
	r.Message(0).WantHandled()
	assert.Equal(t, []string{"raw"}, got)
}
