package client

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/annotation"

	"github.com/hopback/hopback/internal/link/linktest"
)

// tenth forwards every tenth message, whose number ends with 0, and accepts the others
// after a millisecond.
func tenth(ctx context.Context, d *Delivery) error {
	time.Sleep(time.Millisecond)
	if strings.HasSuffix(linktest.IDOf(d.Message()), "0") {
		return forwards("later")(ctx, d)
	}
	return nil
}

// stalls are ways in which an address takes nothing, and begins to again.
var stalls = map[string]func(b *linktest.FakeBroker) (end func()){
	"unroutable": func(b *linktest.FakeBroker) func() {
		b.Verdict = func(string, *Message) amqp.DeliveryState { return &amqp.StateReleased{} }
		return b.Accepting
	},
	"refused link": func(b *linktest.FakeBroker) func() {
		gone := true
		b.Hook = func(step string) error {
			b.Mu.Lock()
			defer b.Mu.Unlock()
			if gone && strings.HasPrefix(step, "attach sender") {
				return linktest.ErrMissing
			}
			return nil
		}
		return func() { b.Update(func() { gone = false }) }
	},
	"alarm": func(b *linktest.FakeBroker) func() {
		b.SetAlarm(true)
		return func() { b.SetAlarm(false) }
	},
	"no answer": func(b *linktest.FakeBroker) func() {
		b.Verdict = linktest.Withhold
		return func() {
			b.Accepting()
			b.Answer(-1, &amqp.StateAccepted{})
		}
	},
}

func TestAddressThatTakesNothingLeavesHealthyMessagesTheirWindow(t *testing.T) {
	for name, stall := range stalls {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const messages = 5_000
				b := linktest.NewFakeBroker(t)
				end := stall(b)
				b.Publish(linktest.Numbered("m", messages)...)
				start := time.Now()
				var mu sync.Mutex
				var heard []Event
				notify := func(e Event) {
					mu.Lock()
					defer mu.Unlock()
					if e.Kind == EventForwardStalled || e.Kind == EventForwardResumed {
						heard = append(heard, e)
					}
				}
				events := func() []Event {
					mu.Lock()
					defer mu.Unlock()
					return slices.Clone(heard)
				}
				peeked, n := 0, 0
				// accepted looks at what is new since it was called last.
				accepted := func() int {
					for ; peeked < len(b.Events); peeked++ {
						if strings.HasPrefix(b.Events[peeked], "accept ") {
							n++
						}
					}
					return n
				}
				k := startObserved(b, ConsumerConfig{Concurrency: 4, Prefetch: 64}, tenth, true, notify)
				require.NoError(t, b.Await(within(t, time.Minute), func() bool { return accepted() == messages*9/10 }))
				t.Log(time.Since(start))
				if name == "no answer" { // nobody can know for the first half second
					assert.Less(t, time.Since(start), 15*time.Second)
				} else {
					assert.Less(t, time.Since(start), 3*time.Second, "it takes 1.25 s at full speed")
				}
				time.Sleep(20 * time.Second)
				notified := events()
				require.Len(t, notified, 1, "once for the outage")
				assert.Equal(t, EventForwardStalled, notified[0].Kind)
				assert.Equal(t, "/queues/later", notified[0].Target)
				require.Error(t, notified[0].Err)
				attempts := len(b.History("send"))
				if name != "no answer" {
					assert.Less(t, attempts, 100, "they aren't tried one by one")
				}

				end()
				require.NoError(t, b.Await(within(t, time.Minute), func() bool { return accepted() == messages }))
				notified = events()
				require.Len(t, notified, 2)
				assert.Equal(t, EventForwardResumed, notified[1].Kind)
				assert.GreaterOrEqual(t, notified[1].Down, 20*time.Second)
				require.NoError(t, k.end())
				assert.Empty(t, b.History("requeue", "release", "dead-letter", "modify"))
				for id, n := range b.Stored {
					assert.Equal(t, 1, n, id)
				}
				assert.Len(t, b.Stored, messages/10)
			})
		})
	}
}

// Beyond what may wait aside, a broker that can gets messages back for later; with
// another, or a queue that can't, they are kept.
func TestForwardsThatFindNoRoomToWaitGoBackForLater(t *testing.T) {
	for _, c := range []struct {
		version string
		returns bool
	}{{"4.3.0", true}, {"4.0.5", false}} {
		t.Run(c.version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version = c.version
				b.Verdict = func(string, *Message) amqp.DeliveryState { return &amqp.StateReleased{} }
				const prefetch, more = 20, 500
				b.Publish(linktest.Numbered("m", maxAside+prefetch+more)...)
				k := startConsumer(b, ConsumerConfig{Concurrency: 8, Prefetch: prefetch, ForwardPatience: time.Hour}, forwards("later"))
				time.Sleep(time.Minute)
				returned := b.History("modify")
				if c.returns {
					assert.Len(t, returned, prefetch+more)
					for _, e := range returned {
						assert.Contains(t, e, annotation.DeliveryTime)
					}
				} else {
					assert.Empty(t, returned)
					b.Mu.Lock()
					most := b.MostOutstanding
					b.Mu.Unlock()
					assert.LessOrEqual(t, most, maxAside+prefetch)
				}
				b.Accepting()
				time.Sleep(10 * time.Minute)
				require.NoError(t, k.end())
				assert.Empty(t, b.History("requeue", "release", "dead-letter"))
				if !c.returns {
					assert.Len(t, b.History("accept"), maxAside+prefetch+more)
				}
			})
		})
	}
}

// The time in a message that goes back is the broker's, however far off this host's clock
// is. While it isn't known, nothing goes back.
func TestForwardsGoBackForLaterByTheBrokersClock(t *testing.T) {
	for _, ahead := range []time.Duration{-time.Hour, -40 * time.Second, 0, 40 * time.Second, time.Hour} {
		t.Run(ahead.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Verdict = func(string, *Message) amqp.DeliveryState { return &amqp.StateReleased{} }
				known := false
				b.Now = func() (time.Time, bool) {
					b.Mu.Lock()
					defer b.Mu.Unlock()
					return time.Now().Add(ahead), known
				}
				const prefetch = 20
				b.Publish(linktest.Numbered("m", maxAside+prefetch)...)
				k := startConsumer(b, ConsumerConfig{Concurrency: 8, Prefetch: prefetch, ForwardPatience: time.Hour}, forwards("later"))
				time.Sleep(time.Minute)
				assert.Empty(t, b.History("modify"), "the broker's time isn't known")
				began := time.Now()
				b.Update(func() { known = true })
				require.NoError(t, b.Await(within(t, time.Minute), func() bool { return b.Last.Annotations != nil }))
				b.Mu.Lock()
				at := time.UnixMilli(b.Last.Annotations[annotation.DeliveryTime].(int64))
				b.Mu.Unlock()
				assert.WithinDuration(t, began.Add(ahead+returnFor), at, 2*time.Second)
				require.NoError(t, k.end())
			})
		})
	}
}

// A queue that delivers at once what was to come later isn't given anything back again.
// What is soon is a matter of the broker's clock.
func TestAQueueThatReturnsAtOnceGetsNothingBack(t *testing.T) {
	for _, ahead := range []time.Duration{-time.Hour, 0, time.Hour} {
		brokersTime := time.Now().Add(ahead)
		now := func() (time.Time, bool) { return brokersTime, true }
		unknown := func() (time.Time, bool) { return time.Time{}, false }
		r := &lateReturns{}
		early := linktest.WithID("m")
		early.Annotations = amqp.Annotations{annotation.DeliveryTime: brokersTime.Add(returnFor).UnixMilli()}
		assert.False(t, r.Notice(early, now), "not ours")
		r.Any.Store(true)
		due := linktest.WithID("m")
		due.Annotations = amqp.Annotations{annotation.DeliveryTime: brokersTime.UnixMilli()}
		assert.False(t, r.Notice(due, now))
		assert.False(t, r.Notice(early, unknown))
		assert.True(t, r.Notice(early, now))
		assert.False(t, r.Notice(early, now), "it is reported once")
		assert.True(t, r.Ignored.Load())
	}
}

func TestPatienceGrowsWithFailedDeliveries(t *testing.T) {
	total := time.Duration(0)
	for n := range uint32(20) {
		total += patienceFor(30*time.Second, n)
	}
	assert.Greater(t, total, 7*time.Hour, "before a delivery limit of 20 ends it")
	assert.Equal(t, 30*time.Second, patienceFor(30*time.Second, 0))
	assert.LessOrEqual(t, patienceFor(30*time.Second, 1<<31), time.Hour)
	assert.Equal(t, 5*time.Hour, patienceFor(5*time.Hour, 3))
}

// If an address refuses one message only, others to that address keep flowing.
func TestOneRefusedForwardStallsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = func(_ string, m *Message) amqp.DeliveryState {
			if linktest.IDOf(m) == "bad'" {
				return &amqp.StateRejected{}
			}
			return &amqp.StateAccepted{}
		}
		b.Publish("bad")
		k := startConsumer(b, ConsumerConfig{}, forwards("later"))
		for range 60 {
			b.Publish("good")
			time.Sleep(600 * time.Millisecond)
			b.Mu.Lock()
			assert.Empty(t, b.Ready)
			b.Mu.Unlock()
		}
		require.NoError(t, k.end())
		assert.Len(t, b.History("accept good"), 60)
		assert.GreaterOrEqual(t, len(b.History("requeue as failed bad")), 1)
	})
}

// An alarm's time isn't the address's: it counts toward no forward's patience, whether or
// not the queue is already known to have a dead-letter exchange.
func TestAnAlarmUsesUpNoPatience(t *testing.T) {
	for name, before := range map[string]bool{"a forward had stalled before": true, "none had": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				var log strings.Builder
				b.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))
				k := startConsumer(b, ConsumerConfig{Concurrency: 4, Prefetch: 64, ForwardPatience: 5 * time.Second}, forwards("later"))
				if before {
					b.Update(func() { b.Verdict = func(string, *Message) amqp.DeliveryState { return &amqp.StateReleased{} } })
					b.Publish("early")
					require.NoError(t, b.Await(within(t, time.Minute), func() bool { return b.Last.Failed }))
					b.Accepting()
				}
				early, errorsBefore := b.History("requeue as failed"), strings.Count(log.String(), "ERROR")
				b.Publish(linktest.Numbered("m", 20)...)
				synctest.Wait()
				b.SetAlarm(true)
				b.Publish(linktest.Numbered("n", 100)...)
				time.Sleep(10 * time.Minute)
				b.SetAlarm(false)
				require.NoError(t, b.Await(within(t, time.Minute), func() bool { return len(b.Stored) == 120 }))
				require.NoError(t, k.end())
				assert.Equal(t, errorsBefore, strings.Count(log.String(), "ERROR"), "it is nobody's error")
				assert.Len(t, b.History("requeue as failed"), len(early))
				assert.Empty(t, b.History("release", "dead-letter", "modify"))
			})
		})
	}
}
