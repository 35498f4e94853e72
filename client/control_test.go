package client

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

func TestControlPausesAndResumes(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version, b.Requeues = version, true
				b.Publish(linktest.Numbered("m", 20)...)
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
				assert.Len(t, b.History("accept"), 6)
				if version == "4.0.5" {
					assert.Empty(t, b.History("release"), "it would count as a delivery")
				}
				resume()
				resume()
				time.Sleep(time.Minute)
				require.NoError(t, k.end())
				assert.Len(t, b.History("accept"), 20)
			})
		})
	}
}

func TestDrainOfAPausedConsumerEndsSoon(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version = version
				b.Publish(linktest.Numbered("m", 20)...)
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
				assert.Len(t, b.History("accept"), 2)
			})
		})
	}
}

// However limits change and links die: never more than Prefetch with the
// consumer, and every message is handled in the end.
func TestControlUnderChangesAndLostLinks(t *testing.T) {
	for round := range 20 {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Requeues = true
			b.Publish(linktest.Numbered("m", 200)...)
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
					b.Kill(linktest.ErrFakeLink)
				}
			}
			release()
			time.Sleep(time.Hour)
			start := time.Now()
			require.NoError(t, k.end())
			assert.Less(t, time.Since(start), time.Second)
			assert.LessOrEqual(t, b.MostOutstanding, 12)
			accepted := map[string]bool{}
			for _, e := range b.History("accept") {
				accepted[e] = true
			}
			assert.Len(t, accepted, 200)
			b.Mu.Lock()
			defer b.Mu.Unlock()
			assert.Empty(t, b.Ready)
		})
	}
}

func TestSuspectsOfACrashAreHandledAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		poisons := map[string]bool{"m3": true, "m7": true, "m8": true}
		b.Update(func() {
			for _, id := range linktest.Numbered("m", 20) {
				m := linktest.WithID(id)
				if poisons[id] {
					m.Header.DeliveryCount = 5
				}
				b.Ready = append(b.Ready, m)
			}
		})
		var running atomic.Int32
		k := startConsumer(b, ConsumerConfig{Concurrency: 5}, func(_ context.Context, d *Delivery) error {
			n := running.Add(1)
			defer running.Add(-1)
			if poisons[linktest.IDOf(d.Message())] {
				assert.Equal(t, int32(1), n, linktest.IDOf(d.Message()))
			}
			time.Sleep(time.Second)
			if poisons[linktest.IDOf(d.Message())] {
				assert.Equal(t, int32(1), running.Load(), linktest.IDOf(d.Message()))
			}
			return nil
		})
		time.Sleep(time.Hour)
		start := time.Now()
		require.NoError(t, k.end())
		assert.Less(t, time.Since(start), time.Second)
		assert.Len(t, b.History("accept"), 20)
	})
}

func TestDrainWithSuspectsLeavesNothingUnsettled(t *testing.T) {
	for round := range 200 {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Update(func() {
				for i, id := range linktest.Numbered("m", 12) {
					m := linktest.WithID(id)
					if i%3 > 0 {
						m.Header.DeliveryCount = 5
					}
					b.Ready = append(b.Ready, m)
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
			b.Mu.Lock()
			defer b.Mu.Unlock()
			for _, s := range b.Sessions {
				for _, r := range s.Receivers {
					assert.Empty(t, r.Unsettled)
				}
			}
		})
	}
}

func TestDrainGivesBackASuspectWhoseTurnJustCame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Update(func() {
			poison := linktest.WithID("suspect")
			poison.Header.DeliveryCount = 5
			b.Ready = append(b.Ready, linktest.WithID("m"), poison)
		})
		k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(context.Context, *Delivery) error {
			time.Sleep(2 * time.Second)
			return nil
		})
		time.Sleep(1500 * time.Millisecond)
		start := time.Now()
		require.NoError(t, k.end())
		assert.Equal(t, []string{"accept m", "release suspect"}, b.History(settlements...))
		assert.Less(t, time.Since(start), time.Second)
	})
}
