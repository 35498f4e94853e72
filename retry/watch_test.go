package retry

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/clockstep"
	"github.com/hopback/hopback/internal/annotation"
)

// watched is a watch over a topology that the test makes up.
type watched struct {
	*watch
	began time.Time

	lock  sync.Mutex // checks run in other goroutines
	see   inspection
	peeks []time.Duration // since the first
	log   bytes.Buffer
}

// Write writes to the log.
func (w *watched) Write(b []byte) (int, error) {
	w.lock.Lock()
	defer w.lock.Unlock()
	return w.log.Write(b)
}

// sees has the checks find this.
func (w *watched) sees(in inspection) {
	w.lock.Lock()
	defer w.lock.Unlock()
	w.see = in
}

func (w *watched) text() string {
	w.lock.Lock()
	defer w.lock.Unlock()
	return w.log.String()
}

// checks are the times of the checks.
func (w *watched) checks() []time.Duration {
	w.lock.Lock()
	defer w.lock.Unlock()
	return slices.Clone(w.peeks)
}

func newWatched(t *testing.T) *watched {
	t.Helper()
	return newWatchedBy(t, time.Now)
}

func newWatchedBy(t *testing.T, now func() time.Time) *watched {
	t.Helper()
	w := &watched{began: time.Now()}
	w.watch = newWatch(slog.New(slog.NewTextHandler(w, nil)), "orders", now, func(context.Context) (inspection, error) {
		w.lock.Lock()
		defer w.lock.Unlock()
		w.peeks = append(w.peeks, time.Since(w.began))
		return w.see, nil
	})
	require.NoError(t, w.start(t.Context()))
	return w
}

// every calls fail each second for a while.
func (w *watched) every(total time.Duration, fail func()) {
	for end := time.Now().Add(total); time.Now().Before(end); time.Sleep(time.Second) {
		fail()
		synctest.Wait()
	}
}

func TestGuardsLookAgainOnlyWhileMessagesFail(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Len(t, w.checks(), 1, "nothing has failed")
		// Its own retries come back, or nobody knows that they don't.
		w.every(5*time.Minute-time.Second, func() { w.retrySent(time.Millisecond); w.due.Store(0) })
		assert.Len(t, w.checks(), 1+5)
		w.every(5*time.Minute-time.Second, func() { w.messageGivenUp() })
		assert.Len(t, w.checks(), 1+5+5)
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.Len(t, w.checks(), 1+5+5+1, "after the last failure")
	})
}

// A host's clock may be set back by hours.
func TestChecksRunWithAnyClock(t *testing.T) {
	t.Parallel()
	for _, by := range []time.Duration{-3 * time.Hour, 3 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var step time.Duration
			w := newWatchedBy(t, func() time.Time { return clockstep.Step(time.Now(), step) })
			step = by
			w.every(3*time.Minute-time.Second, func() { w.messageGivenUp() })
			assert.Len(t, w.checks(), 1+2, "%v", by)
		})
	}
}

func TestGuardsLookSoonWhenRetriesAreEarlyOrMissing(t *testing.T) {
	t.Parallel()
	message := func(last time.Time) *client.Message {
		m := client.NewMessage(nil)
		m.Annotations = map[any]any{annotation.Delay: int64(2000), annotation.Older.Last: last.UnixMilli()}
		return m
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		w.every(20*time.Second, func() { w.retrySent(2 * time.Second) })
		assert.Equal(t, []time.Duration{0, 10 * time.Second}, w.checks(), "none came back")

		w = newWatched(t)
		time.Sleep(peekSoon)
		w.retrySent(2 * time.Second)
		w.retryReturned(message(time.Now().Add(-2*time.Second)), time.Now())
		w.retrySent(2 * time.Second)
		synctest.Wait()
		assert.Len(t, w.checks(), 1, "on time")
		w.retryReturned(message(time.Now().Add(-100*time.Millisecond)), time.Now())
		w.retrySent(2 * time.Second)
		synctest.Wait()
		assert.Len(t, w.checks(), 2, "early")
		w.every(50*time.Second, func() {
			w.retryReturned(message(time.Now().Add(-100*time.Millisecond)), time.Now())
			w.retrySent(2 * time.Second)
		})
		assert.Len(t, w.checks(), 2, "it hurries once for nothing: the clocks may differ")
	})
}

func TestChangedTopologyIsLoggedOnceAndItsRepairToo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		bad := &GuardError{Guard: GuardDelayQueue, Queue: "delay_1s", Problem: "it drops messages", Remedy: remedyApply}
		w.sees(inspection{found: []*GuardError{bad}, losing: []error{bad, nil, bad}})
		w.every(3*time.Minute, func() { w.messageGivenUp() })
		assert.Equal(t, 1, strings.Count(w.text(), "found a fault while the consumer runs"))
		assert.Greater(t, len(w.checks()), 10, "it looks for the repair")
		for i, want := range []int{1, 1, 1} {
			got, err := w.usable(i)
			require.NoError(t, err)
			assert.Equal(t, want, got)
		}
		w.sees(inspection{found: []*GuardError{bad}, losing: []error{bad, bad, bad}})
		w.every(time.Minute, func() { w.messageGivenUp() })
		_, err := w.usable(1)
		require.ErrorIs(t, err, bad)
		w.sees(inspection{losing: []error{nil, nil, nil}})
		w.every(time.Minute, func() { w.messageGivenUp() })
		assert.Equal(t, 1, strings.Count(w.text(), "topology check: the faults are fixed"))
		got, err := w.usable(2)
		require.NoError(t, err)
		assert.Equal(t, 2, got)
	})
}

func TestDeadLettersThatDontArriveAreLogged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrives  func(given int) int // in the dead-letter queue, of what was given up
		readers  uint64
		notified bool
	}{
		"all":                {func(n int) int { return n }, 0, false},
		"others', too":       {func(n int) int { return 3 * n }, 0, false},
		"none":               {func(int) int { return 7 }, 0, true},
		"until it is full":   {func(n int) int { return min(n, 50) }, 0, true},
		"somebody reads":     {func(int) int { return 7 }, 1, false},
		"somebody takes all": {func(n int) int { return max(0, 100-n) }, 0, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWatched(t)
			var given atomic.Int64
			w.peek = func(context.Context) (inspection, error) {
				return inspection{dead: &declare.QueueInfo{Name: "orders.dead", Messages: uint64(c.arrives(int(given.Load()))), Consumers: c.readers}}, nil
			}
			w.every(4*time.Minute, func() { given.Add(1); w.messageGivenUp() })
			assert.Equal(t, c.notified, strings.Contains(w.text(), "don't arrive"), "%s: %s", name, w.text())
		})
	}
}

// What a policy does, AMQP doesn't show: the queue that is gone, and the delay that isn't kept.
func TestWhatAPolicyMayHaveDoneIsLogged(t *testing.T) {
	t.Parallel()
	early := func(w *watched) {
		m := client.NewMessage(nil)
		m.Annotations = map[any]any{
			annotation.Delay: int64(2000), annotation.Older.Last: time.Now().Add(-100 * time.Millisecond).UnixMilli(),
			annotation.Deaths: []map[any]any{{"queue": "delay_2s", "reason": "maxlen"}},
		}
		w.retryReturned(m, time.Now())
		w.retrySent(2 * time.Second)
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		w.every(3*time.Minute, func() { w.retrySent(time.Millisecond); w.due.Store(0) })
		assert.NotContains(t, w.text(), "policy")
		w.every(3*time.Minute, func() { early(w) })
		assert.Equal(t, 1, strings.Count(w.text(), "a retry came back early"), w.text())
		assert.Contains(t, w.text(), "delay_queue=delay_2s left_by=maxlen delay=2s came_after=100ms")
		w.every(3*time.Minute, func() { w.retrySent(time.Millisecond); w.due.Store(0) })
		w.every(3*time.Minute, func() { early(w) })
		assert.Equal(t, 2, strings.Count(w.text(), "a retry came back early"), "once for each time that it begins")

		w = newWatched(t)
		w.sees(inspection{found: []*GuardError{{Guard: GuardDelayQueue, Problem: "it holds messages for 1 s"}}})
		w.every(3*time.Minute, func() { early(w) })
		assert.NotContains(t, w.text(), "policy", "the reason is known")
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		gone := func() int { return strings.Count(w.text(), "the dead-letter queue is gone") }
		w.sees(inspection{gone: true})
		w.every(3*time.Minute, func() { w.messageGivenUp() })
		assert.Zero(t, gone(), "it has never existed: the queue may have another")
		for n := range 2 {
			w.sees(inspection{dead: &declare.QueueInfo{Name: "orders.dead", Consumers: 1}})
			w.every(3*time.Minute, func() { w.messageGivenUp() })
			w.sees(inspection{})
			w.every(3*time.Minute, func() { w.messageGivenUp() })
			assert.Equal(t, n, gone(), "the user may not look at it any more")
			w.sees(inspection{gone: true})
			w.every(3*time.Minute, func() { w.messageGivenUp() })
			assert.Equal(t, n+1, gone())
		}
	})
}

func TestLookThatFailsIsRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		var failed atomic.Int64
		w.peek = func(context.Context) (inspection, error) {
			failed.Add(1)
			return inspection{}, errors.New("alarm")
		}
		w.every(5*time.Minute-time.Second, func() { w.messageGivenUp() })
		assert.EqualValues(t, 4, failed.Load())
		assert.NotContains(t, w.text(), "ERROR")
	})
}

// The check after the last failure finds what has taken its retry.
func TestTheLastFailureIsFollowedByACheck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		w.retrySent(time.Second)
		synctest.Wait()
		assert.Len(t, w.checks(), 1, "the check is not due")
		w.sees(inspection{found: []*GuardError{{Guard: GuardDelayQueue, Queue: "delay_1s", Problem: "is missing", Remedy: "declare it"}}})
		time.Sleep(peekEvery + time.Second)
		synctest.Wait()
		assert.Len(t, w.checks(), 2)
		assert.Contains(t, w.text(), "delay_1s")
		assert.Contains(t, w.text(), "failures_since_last_check=1")
	})
}

// A message that fails while a check runs is followed by another one: this one may have read the topology before.
func TestAFailureDuringACheckIsFollowedByAnother(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		var checks atomic.Int64
		w.peek = func(context.Context) (inspection, error) {
			checks.Add(1)
			time.Sleep(10 * time.Second)
			return inspection{}, nil
		}
		time.Sleep(peekEvery)
		w.messageGivenUp()
		time.Sleep(5 * time.Second)
		w.messageGivenUp()
		time.Sleep(time.Hour)
		assert.EqualValues(t, 2, checks.Load())
	})
}

// A check that the broker doesn't answer is tried again, until the consumer ends.
func TestAFailedCheckIsRepeatedUntilTheConsumerEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWatched(t)
		var checks atomic.Int64
		w.peek = func(context.Context) (inspection, error) {
			checks.Add(1)
			return inspection{}, errors.New("no answer")
		}
		w.messageGivenUp()
		time.Sleep(5*peekEvery + time.Second)
		synctest.Wait()
		assert.EqualValues(t, 5, checks.Load())
		w.end()
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.EqualValues(t, 5, checks.Load())
	})
}
