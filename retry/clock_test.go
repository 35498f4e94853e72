package retry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// skewed is a quorum queue of RabbitMQ 4.3 whose clock is ahead of the worker's, and
// a worker that always fails. It must run in a bubble of testing/synctest.
type skewed struct {
	ahead    time.Duration
	mayAsk   bool
	ignores  bool          // the delivery time, as RabbitMQ 4.0 does
	busy     time.Duration // how late everything is that comes back
	notified []time.Duration

	delivered int

	h     client.Handler
	calls []time.Time
}

func newSkewed(t *testing.T, s *skewed, p Policy, fails func() error) {
	d := With(p)(client.HandlerFunc(func(context.Context, *client.Delivery) error {
		s.calls = append(s.calls, time.Now())
		return fails()
	})).(*decorator)
	start := client.Start{
		Queue:          "orders",
		BrokerTime:     func(context.Context) (time.Time, error) { return s.now(), nil },
		OnClockDiffers: func(ahead time.Duration) { s.notified = append(s.notified, ahead) },
	}
	if !s.mayAsk {
		start.BrokerTime = func(context.Context) (time.Time, error) { return time.Time{}, client.ErrUnauthorized }
	}
	require.NoError(t, d.Prepare(t.Context(), start))
	q := d.states.get(nil, "orders")
	q.strategy = StrategyNative
	if p.GiveUpAfter == 0 { // else it has
		q.clock.ask, q.clock.notify = start.BrokerTime, start.OnClockDiffers
		q.clock.learn(t.Context())
	}
	s.h = d
}

func (s *skewed) now() time.Time { return time.Now().Add(s.ahead).Round(0) }

// run hands a message to the worker until it is dead, and returns how it died, when
// it was handled, and how often it was delivered.
func (s *skewed) run(t *testing.T) (dead client.DeadLetter, calls []time.Time, deliveries int) {
	s.calls = nil
	m := client.NewMessage([]byte("body"))
	m.Annotations = map[any]any{}
	for deliveries = 1; deliveries < 1000; deliveries++ {
		switch o := s.h.Handle(context.Background(), client.NewDelivery("orders", m)).(type) {
		case client.DeadLetter:
			return o, s.calls, deliveries
		case client.Modify:
			for k, v := range o.Annotations {
				m.Annotations[k] = v
			}
			if !s.ignores {
				time.Sleep(millis(m.Annotations[annotation.DeliveryTime]).Sub(s.now()))
			}
			// The way there and back, shorter and longer.
			time.Sleep(time.Duration(1+s.delivered%3*40)*time.Millisecond + s.busy)
			s.delivered++
		case client.Forward:
			return client.DeadLetter{Err: o}, s.calls, deliveries
		default:
			t.Fatalf("%T", o)
		}
	}
	t.Fatal("a hot loop")
	return
}

var skews = []time.Duration{-time.Hour, -5 * time.Minute, -2 * time.Second, 0, time.Second, 2 * time.Second, 5 * time.Minute, time.Hour}

// However the clocks differ, a worker that may ask for the broker's time keeps each
// delay to a second, and each retry costs one delivery.
func TestNativeKeepsEachDelayWithAnyClocks(t *testing.T) {
	t.Parallel()
	for _, ahead := range skews {
		for _, jitter := range []Jitter{JitterNone, JitterEqual} {
			t.Run(fmt.Sprint(ahead, jitter), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					s := &skewed{ahead: ahead, mayAsk: true}
					p := Policy{Strategy: StrategyNative, MaxRetries: 5, Backoff: Delays(100*time.Millisecond, 2*time.Second, 2*time.Second, time.Minute), Jitter: jitter, GiveUpAfter: 24 * time.Hour}
					after := 0
					newSkewed(t, s, p, func() error {
						if after++; after == 3 {
							return After(7*time.Second, errA)
						}
						return errA
					})
					dead, calls, deliveries := s.run(t)
					assert.Equal(t, ReasonExhausted, dead.Reason)
					require.Len(t, calls, 6)
					assert.Equal(t, 6, deliveries)
					for i, d := range []time.Duration{100 * time.Millisecond, 2 * time.Second, 7 * time.Second, time.Minute, time.Minute} {
						had, low := calls[i+1].Sub(calls[i]), d
						if jitter == JitterEqual && i != 2 {
							low = d / 2
						}
						assert.GreaterOrEqual(t, had, low, "delay %d", i)
						assert.Less(t, had, d+time.Second, "delay %d", i)
					}
					// Times in the message are the broker's.
					assert.WithinDuration(t, s.now(), millis(notified(dead.Annotations).Last), time.Second)
					synctest.Wait()
					if ahead.Abs() > reportedSkew {
						require.Len(t, s.notified, 1)
						assert.InDelta(t, ahead, s.notified[0], float64(time.Second))
					} else {
						assert.Empty(t, s.notified)
					}
				})
			})
		}
	}
}

// Who may not ask learns from what comes back. The first message may come late, by no
// more than the clocks differ, never early, and has all of its retries; then it is
// known.
func TestNativeLearnsTheBrokersClockFromWhatComesBack(t *testing.T) {
	t.Parallel()
	for _, ahead := range skews {
		for _, delay := range []time.Duration{time.Second, 2 * time.Second, time.Minute} {
			t.Run(fmt.Sprint(ahead, delay), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					s := &skewed{ahead: ahead}
					newSkewed(t, s, Policy{Strategy: StrategyNative, MaxRetries: 5, Backoff: Delays(delay)}, func() error { return errA })
					dead, calls, deliveries := s.run(t)
					assert.Equal(t, ReasonExhausted, dead.Reason)
					assert.Len(t, calls, 6, "all retries")
					assert.LessOrEqual(t, deliveries, 6+maxEarly)
					for i := range 5 {
						had := calls[i+1].Sub(calls[i])
						assert.GreaterOrEqual(t, had, delay-earlyTolerance)
						assert.LessOrEqual(t, had, delay+ahead.Abs()+time.Second)
						if i > 0 {
							assert.Less(t, had, delay+lateTolerance+time.Second)
						}
					}
					dead, calls, deliveries = s.run(t)
					assert.Equal(t, ReasonExhausted, dead.Reason)
					require.Len(t, calls, 6)
					assert.Equal(t, 6, deliveries)
					for i := range 5 {
						had := calls[i+1].Sub(calls[i])
						assert.GreaterOrEqual(t, had, delay-earlyTolerance)
						assert.Less(t, had, delay+lateTolerance+time.Second)
					}
				})
			})
		}
	}
}

// A queue that is behind with its work looks like a broker whose clock is behind. The
// guess costs a few deliveries, and no retry.
func TestBusyQueueIsNotTakenForADifferentClockForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &skewed{busy: 30 * time.Second}
		newSkewed(t, s, Policy{Strategy: StrategyNative, MaxRetries: 5, Backoff: Delays(10 * time.Second)}, func() error { return errA })
		_, calls, _ := s.run(t)
		require.Len(t, calls, 6)
		for i := range 5 {
			assert.GreaterOrEqual(t, calls[i+1].Sub(calls[i]), 10*time.Second)
		}
		s.busy = 0
		_, calls, deliveries := s.run(t)
		require.Len(t, calls, 6)
		assert.LessOrEqual(t, deliveries, 6+4)
		for i := range 5 {
			assert.GreaterOrEqual(t, calls[i+1].Sub(calls[i]), 10*time.Second-earlyTolerance)
		}
	})
}

// The message that led to a guess was late because of the clocks, and a little because its queue was
// busy. So the next one comes a little early. The guess is corrected, not dropped.
func TestALittleDelayIsNoReasonToDropAGuess(t *testing.T) {
	t.Parallel()
	for _, busy := range []time.Duration{300 * time.Millisecond, 900 * time.Millisecond} {
		t.Run(busy.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &skewed{ahead: -5 * time.Second, busy: busy}
				newSkewed(t, s, Policy{Strategy: StrategyNative, MaxRetries: 8, Backoff: Delays(2 * time.Second)}, func() error {
					if len(s.calls) > 1 {
						s.busy = 0
					}
					return errA
				})
				_, calls, deliveries := s.run(t)
				require.Len(t, calls, 9)
				assert.LessOrEqual(t, deliveries, 9+2)
				for i := range 8 {
					had := calls[i+1].Sub(calls[i])
					assert.GreaterOrEqual(t, had, 2*time.Second-earlyTolerance)
					if i > 0 {
						assert.Less(t, had, 3*time.Second)
					}
				}
			})
		})
	}
}

// A broker that ignores the time, as one of 4.0 does that a connection was moved to,
// isn't asked forever: the message is republished.
func TestBrokerThatIgnoresTheTimeIsNoticed(t *testing.T) {
	t.Parallel()
	for _, mayAsk := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := &skewed{ignores: true, mayAsk: mayAsk}
			newSkewed(t, s, Policy{Strategy: StrategyNative, MaxRetries: 5, Backoff: Delays(2 * time.Second)}, func() error { return errA })
			ended, calls, deliveries := s.run(t)
			require.IsType(t, client.Forward{}, ended.Err)
			assert.Len(t, calls, 1, "no retry is used up")
			assert.Less(t, deliveries, 20, "fewer than the default delivery limit")
			_, _, deliveries = s.run(t)
			assert.Equal(t, 1, deliveries, "for a while it isn't tried again")
			// Once it holdsMessages the time again, all is well.
			time.Sleep(ignoredFor)
			s.ignores = false
			dead, calls, deliveries := s.run(t)
			assert.Equal(t, ReasonExhausted, dead.Reason)
			require.Len(t, calls, 6)
			assert.LessOrEqual(t, deliveries, 7)
			if mayAsk {
				for i := range 5 {
					assert.Less(t, calls[i+1].Sub(calls[i]), 3*time.Second)
				}
			}
		})
	}
}

// What can't be remembered is a stranger, and no fault.
func TestClockRemembersABoundedNumberOfWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &clock{own: time.Now}
		for range 3 * maxWaits {
			c.hold(time.Hour, 0, 0)
			time.Sleep(time.Millisecond)
		}
		assert.LessOrEqual(t, len(c.waits), maxWaits)
		time.Sleep(sweepEvery)
		c.hold(time.Hour, 0, 0)
		swept := c.full
		for range 100 {
			c.hold(time.Hour, 0, 0)
			time.Sleep(time.Millisecond)
		}
		assert.Equal(t, swept, c.full, "all waits are looked at once a second at most")
		time.Sleep(2 * time.Hour)
		c.hold(time.Hour, 0, 0)
		assert.LessOrEqual(t, len(c.waits), 1)
		left, _ := c.arrived(time.Now().Add(time.Minute), time.Minute, 5)
		assert.Equal(t, time.Minute, left)
	})
}

func TestBrokerIsAskedAgainWhenItsAnswerIsOld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		asked, fails := 0, false
		c := &clock{own: time.Now}
		c.ask = func(context.Context) (time.Time, error) {
			if asked++; fails {
				return time.Time{}, errors.New("no")
			}
			return time.Now().Add(time.Hour), nil
		}
		c.learn(t.Context())
		assert.WithinDuration(t, time.Now().Add(time.Hour), c.now(), 0)
		synctest.Wait()
		assert.Equal(t, 1, asked)
		time.Sleep(clockAge)
		fails = true
		c.now()
		synctest.Wait()
		assert.Equal(t, 2, asked)
		assert.WithinDuration(t, time.Now().Add(time.Hour), c.now(), time.Second, "which still holds if there is no other")
		synctest.Wait()
		assert.Equal(t, 2, asked, "not at once again")
	})
}

// stepped is a broker whose clock is set while messages wait. Its usual answer is cached.
type stepped struct {
	ahead  atomic.Int64 // a time.Duration
	asked  atomic.Int64 // past the cache
	cached atomic.Int64 // what the last of these answers was
	log    bytes.Buffer
	h      client.Handler
	called int
}

func newStepped(t *testing.T) *stepped {
	s := &stepped{}
	d := With(Policy{Strategy: StrategyNative, MaxRetries: 5, Backoff: Delays(5 * time.Second), GiveUpAfter: 24 * time.Hour})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
		s.called++
		return errA
	})).(*decorator)
	require.NoError(t, d.Prepare(t.Context(), client.Start{
		Queue: "orders", Log: slog.New(slog.NewTextHandler(&s.log, nil)),
		BrokerTime: func(context.Context) (time.Time, error) {
			return time.Now().Add(time.Duration(s.cached.Load())), nil
		},
		QueryBrokerTime: func(context.Context) (time.Time, error) {
			s.asked.Add(1)
			time.Sleep(10 * time.Millisecond)
			s.cached.Store(s.ahead.Load())
			return time.Now().Add(time.Duration(s.ahead.Load())), nil
		},
		OnClockDiffers: func(time.Duration) {},
	}))
	d.states.get(nil, "orders").strategy = StrategyNative
	s.h = d
	return s
}

// deliver hands m to the worker, and returns how long the queue then holds it.
func (s *stepped) deliver(t *testing.T, m *client.Message) time.Duration {
	o, ok := s.h.Handle(context.Background(), client.NewDelivery("orders", m)).(client.Modify)
	require.True(t, ok)
	if m.Annotations == nil {
		m.Annotations = map[any]any{}
	}
	for k, v := range o.Annotations {
		m.Annotations[k] = v
	}
	return millis(m.Annotations[annotation.DeliveryTime]).Sub(time.Now().Add(time.Duration(s.ahead.Load())))
}

// The broker's clock is set forward: all that waits comes at once, and so would what waits for
// the rest of its delay, if its time went by the old clock.
func TestBrokersClockIsSetForward(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStepped(t)
		messages := make([]*client.Message, 20)
		for i := range messages {
			messages[i] = client.NewMessage(nil)
			assert.InDelta(t, 5*time.Second, s.deliver(t, messages[i]), float64(2*time.Millisecond))
			time.Sleep(time.Millisecond) // its own first failure
		}
		time.Sleep(2 * time.Second)
		s.ahead.Store(int64(time.Hour))
		for _, m := range messages {
			assert.InDelta(t, 3*time.Second, s.deliver(t, m), float64(100*time.Millisecond))
		}
		assert.Equal(t, len(messages), s.called, "none has waited for 5 s")
		assert.EqualValues(t, 1, s.asked.Load())
		assert.Equal(t, 1, strings.Count(s.log.String(), "the broker's clock changed"))
		assert.Contains(t, s.log.String(), "by=1h0m0s")
		time.Sleep(3 * time.Second)
		for _, m := range messages {
			assert.InDelta(t, 5*time.Second, s.deliver(t, m), float64(100*time.Millisecond))
		}
		assert.Equal(t, 2*len(messages), s.called)
		assert.EqualValues(t, 1, s.asked.Load())
	})
}

// The broker's clock is set back: what waits stays away for as long, and nothing that fails
// from then on does.
func TestBrokersClockIsSetBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStepped(t)
		s.deliver(t, client.NewMessage(nil))
		time.Sleep(2 * time.Second)
		s.ahead.Store(int64(-time.Hour))
		assert.Greater(t, s.deliver(t, client.NewMessage(nil)), time.Hour, "nobody can know yet")
		time.Sleep(5*time.Second + overdue)
		synctest.Wait()
		assert.EqualValues(t, 1, s.asked.Load())
		assert.Contains(t, s.log.String(), "by=-1h0m0s")
		m := client.NewMessage(nil)
		assert.InDelta(t, 5*time.Second, s.deliver(t, m), float64(100*time.Millisecond))
		time.Sleep(5 * time.Second)
		assert.InDelta(t, 5*time.Second, s.deliver(t, m), float64(100*time.Millisecond))
		assert.Equal(t, 4, s.called)
	})
}

// It is noticed even if no other message fails after that.
func TestBrokersClockIsSetBackAndNothingElseFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStepped(t)
		first, second := client.NewMessage(nil), client.NewMessage(nil)
		s.deliver(t, first)
		time.Sleep(3 * time.Second)
		s.deliver(t, second)
		time.Sleep(2 * time.Second)
		left, _ := s.h.(*decorator).states.get(nil, "orders").clock.arrived(millis(first.Annotations[annotation.DeliveryTime]), time.Second, historyOf(first).First)
		require.Zero(t, left, "it comes back, and succeeds")
		s.ahead.Store(int64(-time.Hour))
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.EqualValues(t, 1, s.asked.Load())
		assert.Contains(t, s.log.String(), "by=-1h0m0s")
	})
}

// Other workers of the queue get what this one has requeued. Then it asks now and then, and
// has nothing to report.
func TestMessagesThatOthersTakeAreNoStep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newStepped(t)
		for range 600 {
			s.deliver(t, client.NewMessage(nil))
			time.Sleep(time.Second)
		}
		assert.LessOrEqual(t, s.asked.Load(), int64(11))
		assert.NotContains(t, s.log.String(), "clock")
		time.Sleep(time.Minute) // a request in flight finishes in the bubble
	})
}

// A worker that started while the connection was lost, or while the broker was too busy to answer, asks again. Until then it
// doesn't treat a late message as a sign that the broker's clock is behind: messages come late then, too, and the
// retries of a guess that is wrong come early.
func TestALateMessageIsNoSignOfTheClockWhileTheBrokerMayStillTellItsTime(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{"lost": client.ErrConnectionLost, "no answer": context.DeadlineExceeded} {
		for _, ahead := range []time.Duration{0, time.Hour, -time.Hour} {
			t.Run(fmt.Sprint(name, ahead), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					const delay = 200 * time.Millisecond
					began, broker := time.Now(), func() time.Time { return time.Now().Add(ahead).Round(0) }
					asked := 0
					c := clock{own: time.Now, ask: func(context.Context) (time.Time, error) {
						if asked++; time.Since(began) < 20*time.Second {
							return time.Time{}, err
						}
						return broker(), nil
					}}
					c.learn(t.Context())
					due := c.hold(delay, 0, 0)
					time.Sleep(5 * time.Second) // the broker restarts
					left, early := c.arrived(millis(due), delay, 0)
					assert.Zero(t, left)
					assert.Zero(t, early)
					assert.GreaterOrEqual(t, c.hold(delay, 0, 0), time.Now().Add(delay).UnixMilli(), "it would come early")
					for time.Since(began) < time.Minute {
						c.now()
						time.Sleep(100 * time.Millisecond)
					}
					assert.WithinDuration(t, broker(), c.now(), time.Millisecond)
					assert.LessOrEqual(t, asked, 21, "not at once again")
				})
			})
		}
	}
}
