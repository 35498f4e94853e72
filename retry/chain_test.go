package retry_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// A delay that a handler asks for is never cut, and rounded up only where that is late by
// little: not from 11 s to the next queue's minute.
func TestAskedDelaysAreKept(t *testing.T) {
	t.Parallel()
	delays := retry.Delays(time.Second, 10*time.Second, time.Minute)
	for name, p := range map[string]retry.Policy{
		"republish":   {Backoff: delays},
		"dead-letter": {Backoff: delays, Strategy: retry.StrategyDeadLetter},
		"native":      {Backoff: delays, Strategy: retry.StrategyNative},
		"ladder":      {Backoff: delays, AnyDelay: &retry.Ladder{Unit: time.Second, Levels: 6}}, // up to 60 s
	} {
		for asked, want := range map[time.Duration]time.Duration{
			time.Second:              time.Second,
			11 * time.Second:         11 * time.Second,
			30 * time.Second:         30 * time.Second,
			55 * time.Second:         time.Minute,
			61 * time.Second:         61 * time.Second,
			10 * time.Minute:         10 * time.Minute,
			10*time.Minute + 5:       10*time.Minute + time.Second,
			20 * time.Minute:         20 * time.Minute,
			1500 * time.Millisecond:  2 * time.Second,
			90*time.Second + 1000000: 91 * time.Second,
		} {
			for what, again := range map[string]func(time.Duration) error{
				"After":  func(d time.Duration) error { return retry.After(d, errors.New("busy")) },
				"Snooze": retry.Snooze,
			} {
				if what == "Snooze" && asked != 11*time.Second && asked != 10*time.Minute {
					continue // they differ in nothing but the count
				}
				t.Run(fmt.Sprint(name, " ", what, " ", asked), func(t *testing.T) {
					t.Parallel()
					calls := 0
					o := hopbacktest.Scenario{
						Policy: p,
						Handler: client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
							switch calls++; calls {
							case 1:
								return again(asked)
							case 2:
								return errors.New("once more")
							}
							return nil
						}),
						Messages: []any{"x"},
					}.Run(t).Message(0)
					o.WantAttempts(3)
					require.Len(t, o.Attempts, 3)
					assert.GreaterOrEqual(t, o.Attempts[0].ActualDelay, asked-2*time.Millisecond, o.Timeline())
					assert.Less(t, o.Attempts[0].ActualDelay, want+want/8+50*time.Millisecond, o.Timeline())
					if name == "republish" || name == "dead-letter" {
						assert.InDelta(t, want, o.Attempts[0].ActualDelay, float64(want/100+50*time.Millisecond), o.Timeline())
						assert.GreaterOrEqual(t, o.Attempts[0].WantedDelay, asked, o.Timeline())
						assert.LessOrEqual(t, o.Attempts[0].WantedDelay, want, o.Timeline())
					}
					// The policy's own delays haven't changed.
					second := time.Second
					if what == "After" {
						second = 10 * time.Second
					}
					assert.InDelta(t, second, o.Attempts[1].ActualDelay, float64(1300*time.Millisecond), o.Timeline())
				})
			}
		}
	}
}

// What a sender writes into a message makes it wait for nothing.
func TestForgedRestOfADelay(t *testing.T) {
	t.Parallel()
	for name, annotations := range map[string]map[any]any{
		"annotations": {annotation.Older.Left: int64(3_600_000), annotation.Older.Asked: int64(7_200_000), annotation.Delay: int64(1000), annotation.Queue: "work"},
		"compact":     {annotation.History: `{"queue":"work","delay":1000,"left":3600000,"asked":7200000}`},
		"deaths":      {annotation.Older.Left: int64(3_600_000), "x-last-death-queue": "delay_1s", "x-last-death-reason": "expired", "x-first-death-queue": "delay_1s"},
	} {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
			t.Run(fmt.Sprint(name, " ", strategy), func(t *testing.T) {
				t.Parallel()
				m := client.NewMessage([]byte("x"))
				m.Annotations = annotations
				o := hopbacktest.Scenario{
					Policy: retry.Policy{Backoff: retry.Delays(time.Second), Strategy: strategy},
					Handler: client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
						if retry.Attempt(ctx) < 3 {
							return errors.New("again")
						}
						return nil
					}),
					Messages: []any{client.Copy(m)},
				}.Run(t).Message(0)
				o.WantAttempts(3).WantDelays(time.Second, time.Second)
				assert.Less(t, o.Ended.Sub(o.Attempts[0].Began), 10*time.Second, "%s", o.Timeline())
			})
		}
	}
}

// A delay of many delay queues is spent in the work queue, where that can hold a message. Elsewhere the
// number of delay queues is bounded, and the worker logs that the delay was cut short.
func TestALongDelayPassesFewQueues(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		version string
		queue   declare.QuorumQueue
		policy  retry.Policy
		holds   bool
	}{
		{"4.3.6", declare.QuorumQueue{Name: "work"}, retry.Policy{}, true},
		{"4.4.0", declare.QuorumQueue{Name: "work"}, retry.Policy{}, true},
		{"4.3.6", declare.QuorumQueue{Name: "work"}, retry.Policy{Strategy: retry.StrategyDeadLetter}, true},
		{"4.3.6", declare.QuorumQueue{Name: "work"}, retry.Policy{AnyDelay: &retry.Ladder{Unit: 100 * time.Millisecond, Levels: 4}}, true},
		{"4.3.6", declare.QuorumQueue{Name: "work", MessageTTL: 2 * time.Hour}, retry.Policy{}, false},
		{"4.0.5", declare.QuorumQueue{Name: "work"}, retry.Policy{}, false},
		{"4.0.5", declare.QuorumQueue{Name: "work"}, retry.Policy{Strategy: retry.StrategyDeadLetter}, false},
	} {
		for what, again := range map[string]func(time.Duration) error{
			"After":  func(d time.Duration) error { return retry.After(d, errors.New("busy")) },
			"Snooze": retry.Snooze,
		} {
			t.Run(fmt.Sprint(c.version, " ", c.policy.Strategy, " ", c.policy.AnyDelay != nil, " ", c.queue.MessageTTL, " ", what), func(t *testing.T) {
				t.Parallel()
				p := c.policy
				p.Backoff = retry.Delays(time.Second)
				calls, events := 0, 0
				o := hopbacktest.Scenario{
					Policy: p, Queue: c.queue, Broker: hopbacktest.Config{Version: c.version, MaxEvents: 10_000},
					Handler: client.HandlerFunc(func(context.Context, *client.Delivery) error {
						if calls++; calls == 1 {
							return again(time.Hour)
						}
						return nil
					}),
					Messages: []any{"x"},
					Disturb: func(b *hopbacktest.Broker) {
						time.Sleep(2 * time.Hour)
						for _, e := range b.Events() {
							if e.Kind == "delivered" && e.Queue == "work" {
								events++
							}
						}
					},
				}.Run(t).Message(0)
				require.Len(t, o.Attempts, 2)
				if c.holds {
					assert.LessOrEqual(t, events, 3)
					assert.InDelta(t, time.Hour, o.Attempts[0].ActualDelay, float64(time.Second))
					assert.GreaterOrEqual(t, o.Attempts[0].ActualDelay, time.Hour)
				} else {
					assert.LessOrEqual(t, events, 260)
					assert.InDelta(t, 256*time.Second, o.Attempts[0].ActualDelay, float64(10*time.Second))
				}
			})
		}
	}
}
