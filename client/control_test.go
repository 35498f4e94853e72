package client

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestControlPausesAndResumes(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.version, b.requeues = version, true
				b.publish(numbered("m", 20)...)
				var begun atomic.Int32
				c := &Control{}
				k := startConsumer(b, ConsumerConfig{Concurrency: 2, Control: c}, func(context.Context, *Delivery) error {
					begun.Add(1)
					time.Sleep(time.Second)
					return nil
				})
				time.Sleep(2500 * time.Millisecond)
				resume := c.Pause()
				assert.True(t, c.Paused())
				time.Sleep(time.Hour)
				assert.Equal(t, int32(6), begun.Load(), "those that had begun have ended, no other begins")
				assert.Len(t, b.history("accept"), 6)
				if version == "4.0.5" {
					assert.Empty(t, b.history("release"), "it would count as a delivery")
				}
				resume()
				resume()
				time.Sleep(time.Minute)
				require.NoError(t, k.end())
				assert.Len(t, b.history("accept"), 20)
			})
		})
	}
}

func TestDrainOfAPausedConsumerEndsSoon(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.version = version
				b.publish(numbered("m", 20)...)
				c := &Control{}
				k := startConsumer(b, ConsumerConfig{Control: c, Grace: time.Minute}, func(context.Context, *Delivery) error {
					time.Sleep(time.Second)
					return nil
				})
				time.Sleep(1500 * time.Millisecond)
				c.Pause()
				time.Sleep(time.Minute)
				start := time.Now()
				require.NoError(t, k.end())
				assert.LessOrEqual(t, time.Since(start), time.Minute, "Grace")
				assert.Len(t, b.history("accept"), 2)
			})
		})
	}
}

// However limits change and links die: never more than Prefetch with the
// consumer, and every message is handled in the end.
func TestControlUnderChangesAndLostLinks(t *testing.T) {
	for round := range 20 {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.requeues = true
			b.publish(numbered("m", 200)...)
			c := &Control{}
			k := startConsumer(b, ConsumerConfig{Concurrency: 4, Prefetch: 12, Control: c}, func(context.Context, *Delivery) error {
				time.Sleep(70 * time.Millisecond)
				return nil
			})
			release := func() {}
			for i := range 25 {
				time.Sleep(time.Duration(31+(i*round*17)%200) * time.Millisecond)
				next := c.Limit((i*7 + round) % 9)
				release()
				release = next
				if i%6 == round%6 {
					b.kill(errFakeLink)
				}
			}
			release()
			time.Sleep(time.Hour)
			start := time.Now()
			require.NoError(t, k.end())
			assert.Less(t, time.Since(start), time.Second)
			assert.LessOrEqual(t, b.mostOutstanding, 12)
			accepted := map[string]bool{}
			for _, e := range b.history("accept") {
				accepted[e] = true
			}
			assert.Len(t, accepted, 200)
			b.mu.Lock()
			defer b.mu.Unlock()
			assert.Empty(t, b.ready)
		})
	}
}

func TestSuspectsOfACrashAreHandledAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		suspects := map[string]bool{"m3": true, "m7": true, "m8": true}
		b.update(func() {
			for _, id := range numbered("m", 20) {
				m := withID(id)
				if suspects[id] {
					m.Header.DeliveryCount = 5
				}
				b.ready = append(b.ready, m)
			}
		})
		var running atomic.Int32
		k := startConsumer(b, ConsumerConfig{Concurrency: 5}, func(_ context.Context, d *Delivery) error {
			n := running.Add(1)
			defer running.Add(-1)
			if suspects[idOf(d.Message())] {
				assert.Equal(t, int32(1), n, idOf(d.Message()))
			}
			time.Sleep(time.Second)
			if suspects[idOf(d.Message())] {
				assert.Equal(t, int32(1), running.Load(), idOf(d.Message()))
			}
			return nil
		})
		time.Sleep(time.Hour)
		start := time.Now()
		require.NoError(t, k.end())
		assert.Less(t, time.Since(start), time.Second)
		assert.Len(t, b.history("accept"), 20)
	})
}

func TestDrainWithSuspectsLeavesNothingUnsettled(t *testing.T) {
	for round := range 200 {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.update(func() {
				for i, id := range numbered("m", 12) {
					m := withID(id)
					if i%3 > 0 {
						m.Header.DeliveryCount = 5
					}
					b.ready = append(b.ready, m)
				}
			})
			k := startConsumer(b, ConsumerConfig{Concurrency: 3}, func(context.Context, *Delivery) error {
				time.Sleep(10 * time.Millisecond)
				return nil
			})
			time.Sleep(time.Duration(round%20) * 5 * time.Millisecond) // often as a handler ends
			start := time.Now()
			require.NoError(t, k.end())
			assert.Less(t, time.Since(start), time.Second, "round %d: a delivery was left", round)
			b.mu.Lock()
			defer b.mu.Unlock()
			for _, s := range b.sessions {
				for _, r := range s.receivers {
					assert.Empty(t, r.unsettled)
				}
			}
		})
	}
}

func TestDrainGivesBackASuspectWhoseTurnJustCame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.update(func() {
			suspect := withID("suspect")
			suspect.Header.DeliveryCount = 5
			b.ready = append(b.ready, withID("m"), suspect)
		})
		k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(context.Context, *Delivery) error {
			time.Sleep(2 * time.Second)
			return nil
		})
		time.Sleep(1500 * time.Millisecond)
		start := time.Now()
		require.NoError(t, k.end())
		assert.Equal(t, []string{"accept m", "release suspect"}, b.history(settlements...))
		assert.Less(t, time.Since(start), time.Second)
	})
}
