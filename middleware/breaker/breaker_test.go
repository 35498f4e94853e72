package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/breaker"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	quiet       = slog.New(slog.DiscardHandler)
	errDown     = errors.New("bank is down")
	errDeclined = errors.New("card declined")
)

// bank is what the handlers of these tests depend on.
type bank struct {
	mu      sync.Mutex
	answer  error
	takes   time.Duration
	calls   int
	running int
	most    int // calls at once
}

func (b *bank) set(answer error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.answer = answer
}

func (b *bank) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls
}

func (b *bank) atOnce() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most
}

func (b *bank) Handle(context.Context, *client.Delivery) error {
	b.mu.Lock()
	b.calls++
	b.running++
	b.most = max(b.most, b.running)
	b.mu.Unlock()
	time.Sleep(b.takes)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running--
	return b.answer
}

func message() *client.Delivery { return client.NewDelivery("orders", client.NewMessage(nil)) }

// fail has n calls fail, one after the other.
func fail(t *testing.T, h client.Handler, n int) {
	t.Helper()
	for range n {
		require.Equal(t, errDown, h.Handle(t.Context(), message()), "failures go on as they are")
	}
}

// recorder notes the changes, with their times.
type recorder struct {
	began time.Time
	mu    sync.Mutex
	lines []string
}

func newRecorder() *recorder { return &recorder{began: time.Now()} }

func (r *recorder) note(c breaker.Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	line := fmt.Sprintf("%v %v", time.Since(r.began).Round(time.Second), c.To)
	if c.To == "open" {
		line += fmt.Sprintf(" for %v: %v", c.OpenFor, c.Err)
	}
	r.lines = append(r.lines, line)
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lines
}

func begin(ctx context.Context, h client.Handler) <-chan error {
	c := make(chan error, 1)
	go func() { c <- h.Handle(ctx, message()) }()
	return c
}

func TestTheCircuitOpensProbesAndCloses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, r, control := &bank{answer: errDown}, newRecorder(), &client.Control{}
		h := breaker.With(breaker.Config{OnChange: r.note, Logger: quiet})(b)
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders", Control: control}))

		fail(t, h, 4)
		assert.False(t, control.Paused())
		fail(t, h, 1)
		assert.True(t, control.Paused(), "no later than the fifth failure is returned")

		fail(t, h, 4) // waits for each half-open circuit, and is its probe
		held := begin(t.Context(), h)
		synctest.Wait()
		assert.Equal(t, 9, b.count(), "no handler is called while it is open")
		b.set(nil)
		require.NoError(t, <-held)
		assert.False(t, control.Paused())
		for range 100 {
			require.NoError(t, h.Handle(t.Context(), message()))
		}
		b.set(errDown)
		fail(t, h, 5)
		synctest.Wait() // another goroutine may still be telling
		assert.Equal(t, []string{
			"0s open for 10s: bank is down",
			"10s half-open", "10s open for 20s: bank is down",
			"30s half-open", "30s open for 40s: bank is down",
			"1m10s half-open", "1m10s open for 1m20s: bank is down",
			"2m30s half-open", "2m30s open for 2m0s: bank is down", // no longer than MaxOpenFor
			"4m30s half-open", "4m30s closed",
			"4m30s open for 10s: bank is down", // again
		}, r.all())
	})
}

func TestOnlyFailuresInARowOpenTheCircuit(t *testing.T) {
	t.Parallel()
	b, control := &bank{}, &client.Control{}
	h := breaker.With(breaker.Config{Failures: 2, Logger: quiet})(b)
	require.NoError(t, client.Prepare(t.Context(), h, client.Start{Control: control}))
	for range 10 {
		b.set(errDown)
		fail(t, h, 1)
		b.set(nil)
		require.NoError(t, h.Handle(t.Context(), message()))
	}
	assert.False(t, control.Paused())
}

func TestWhatTripsTheCircuit(t *testing.T) {
	t.Parallel()
	outage := func(err error) bool { return errors.Is(err, errDown) }
	for _, c := range []struct {
		name   string
		trips  func(error) bool
		answer error
		opens  bool
		resets bool // it counts as a success
	}{
		{"any error", nil, errDeclined, true, false},
		{"a wrapped error", nil, fmt.Errorf("pay: %w", errDown), true, false},
		{"a timeout", nil, context.DeadlineExceeded, true, false},
		{"a dead letter", nil, client.DeadLetter{Err: errDown}, false, true},
		{"a failed requeue", nil, client.Requeue{Failed: true, Err: errDown}, false, true},
		{"a requeue", nil, client.Requeue{}, false, false},
		{"a message that is bad", nil, fmt.Errorf("pay: %w", retry.Permanent(errDeclined)), false, true},
		{"a message that isn't wanted", nil, retry.Discard(errDeclined), false, true},
		{"a message that is too early", nil, retry.Snooze(time.Second), false, false},
		{"a busy service", nil, retry.After(time.Second, errDown), true, false},
		{"a requeue with a delay", nil, retry.After(time.Second, client.Requeue{}), false, false},
		{"an outage, by Trips", outage, retry.After(time.Second, errDown), true, false},
		{"an outage in an outcome, by Trips", outage, client.Requeue{Failed: true, Err: errDown}, true, false},
		{"no outage, by Trips", outage, errDeclined, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			control := &client.Control{}
			b := &bank{}
			h := breaker.With(breaker.Config{Failures: 2, Trips: c.trips, Logger: quiet})(b)
			require.NoError(t, client.Prepare(t.Context(), h, client.Start{Control: control}))
			b.set(c.answer)
			for range 2 {
				require.Equal(t, c.answer, h.Handle(t.Context(), message()))
			}
			assert.Equal(t, c.opens, control.Paused())
			if c.opens {
				return
			}
			b.set(errDown)
			require.Equal(t, errDown, h.Handle(t.Context(), message()))
			b.set(c.answer)
			require.Equal(t, c.answer, h.Handle(t.Context(), message()))
			b.set(errDown)
			require.Equal(t, errDown, h.Handle(t.Context(), message()))
			assert.Equal(t, !c.resets, control.Paused())
		})
	}
	t.Run("a handler whose ctx was cancelled", func(t *testing.T) {
		t.Parallel()
		control := &client.Control{}
		live, stop := context.WithCancel(context.Background())
		h := breaker.With(breaker.Config{Failures: 1, Logger: quiet})(client.HandlerFunc(func(context.Context, *client.Delivery) error { stop(); return errDown }))
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Control: control}))
		assert.Equal(t, errDown, h.Handle(live, message()))
		assert.False(t, control.Paused())
	})
}

func TestOneProbeAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bank{answer: errDown, takes: 5 * time.Second}
		h := breaker.With(breaker.Config{Failures: 1, Logger: quiet})(b)
		fail(t, h, 1) // 0:05
		const waiting = 20
		results := make([]<-chan error, waiting)
		for i := range results {
			results[i] = begin(t.Context(), h)
		}
		time.Sleep(12 * time.Second) // 0:17; the first probe began at 0:15
		assert.Equal(t, 2, b.count())
		time.Sleep(20 * time.Second) // 0:37; it failed at 0:20
		assert.Equal(t, 2, b.count())
		b.set(nil)
		time.Sleep(7 * time.Second) // 0:44; the second began at 0:40
		assert.Equal(t, 3, b.count())
		assert.Equal(t, 1, b.atOnce())
		failed := 0
		for _, c := range results {
			if err := <-c; err != nil {
				assert.Equal(t, errDown, err)
				failed++
			}
		}
		assert.Equal(t, 1, failed, "the first probe")
		assert.Equal(t, waiting+1, b.count())
	})
}

func TestResultsOfCallsThatBeganBeforeAreOldNews(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRecorder()
		slow := make(chan error)
		var calls atomic.Int32
		h := breaker.With(breaker.Config{Failures: 1, OnChange: r.note, Logger: quiet})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			if calls.Add(1) <= 2 {
				return <-slow
			}
			return errDown
		}))
		first, second := begin(t.Context(), h), begin(t.Context(), h)
		synctest.Wait()
		assert.Equal(t, errDown, h.Handle(t.Context(), message()))
		slow <- nil
		slow <- errDown
		assert.ElementsMatch(t, []error{nil, errDown}, []error{<-first, <-second})
		synctest.Wait()
		assert.Equal(t, []string{"0s open for 10s: bank is down"}, r.all())
	})
}

func TestAProbeThatSaysNothingMakesRoomForTheNext(t *testing.T) {
	t.Parallel()
	for name, odd := range map[string]func() error{
		"panic":           func() error { panic("boom") },
		"runtime.Goexit":  func() error { runtime.Goexit(); return nil },
		"a plain requeue": func() error { return client.Requeue{} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				control := &client.Control{}
				var calls atomic.Int32
				h := breaker.With(breaker.Config{Failures: 1, Logger: quiet})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
					switch calls.Add(1) {
					case 1:
						return errDown
					case 2:
						time.Sleep(time.Second)
						return odd()
					}
					return nil
				}))
				require.NoError(t, client.Prepare(t.Context(), h, client.Start{Control: control}))
				assert.Equal(t, errDown, h.Handle(t.Context(), message()))
				var wg sync.WaitGroup
				for range 2 {
					wg.Go(func() {
						defer func() { _ = recover() }()
						_ = h.Handle(t.Context(), message())
					})
				}
				wg.Wait()
				assert.EqualValues(t, 3, calls.Load())
				assert.False(t, control.Paused())
			})
		})
	}
}

func TestADeliveryWhoseContextEndsWhileItIsHeldGoesBackUncounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bank{answer: errDown}
		h := breaker.With(breaker.Config{Failures: 1, Logger: quiet})(b)
		fail(t, h, 1)
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("grace is over")
		time.AfterFunc(3*time.Second, func() { cancel(why) })
		err := h.Handle(ctx, message())
		assert.Equal(t, client.Requeue{Err: why}, err)
		assert.Equal(t, 1, b.count())
	})
}

// Another client's consumer has no Control, and would be given a message again as
// soon as it has given it back.
func TestWithoutAControlDeliveriesAreHeld(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		version string
		until   time.Duration
		err     error
	}{
		{"4.3.6", 5 * time.Minute, client.Requeue{Err: breaker.ErrOpen}},
		{"4.0.5", time.Hour, nil},
		{"", time.Hour, nil},
	} {
		t.Run("on "+c.version, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := &bank{answer: errDown}
				h := breaker.With(breaker.Config{Failures: 1, OpenFor: time.Hour, Logger: quiet})(b)
				require.NoError(t, client.Prepare(t.Context(), h, client.Start{Broker: client.Broker{Version: c.version}}))
				fail(t, h, 1)
				b.set(nil)
				began := time.Now()
				assert.Equal(t, c.err, h.Handle(t.Context(), message()))
				assert.Equal(t, c.until, time.Since(began))
			})
		})
	}
}

func TestAllConsumersOfOneMiddlewarePause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bank{answer: errDown}
		bank := breaker.With(breaker.Config{Failures: 1, Logger: quiet})
		controls := []*client.Control{{}, {}, {}}
		handlers := make([]client.Handler, len(controls))
		prepare := func(i int) {
			handlers[i] = bank(b)
			require.NoError(t, client.Prepare(t.Context(), handlers[i], client.Start{Control: controls[i]}))
		}
		prepare(0)
		prepare(1)
		fail(t, handlers[0], 1)
		prepare(2) // starts while it is open
		prepare(2) // and once more, with the same Control
		for i, c := range controls {
			assert.True(t, c.Paused(), i)
		}
		b.set(nil)
		require.NoError(t, handlers[1].Handle(t.Context(), message()))
		for i, c := range controls {
			assert.False(t, c.Paused(), i)
		}
	})
}

func TestConsumersThatEndedAreNotKept(t *testing.T) {
	t.Parallel()
	b := &bank{answer: errDown}
	h := breaker.With(breaker.Config{Failures: 1, Logger: quiet})(b)
	collected := make(chan struct{})
	func() {
		control := &client.Control{}
		runtime.AddCleanup(control, func(struct{}) { close(collected) }, struct{}{})
		require.NoError(t, client.Prepare(t.Context(), h, client.Start{Control: control}))
	}()
	timeout := time.After(30 * time.Second)
	for done := false; !done; {
		runtime.GC()
		select {
		case <-collected:
			done = true
		case <-timeout:
			t.Fatal("the Control is still there")
		default:
		}
	}
	fail(t, h, 1)
}

func TestChangesAreToldInOrderWhileHandlersGoOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b, r := &bank{answer: errDown}, newRecorder()
		unblock := make(chan struct{})
		first := true
		h := breaker.With(breaker.Config{Failures: 1, Logger: quiet, OnChange: func(c breaker.Change) {
			if first {
				first = false
				<-unblock
			}
			r.note(c)
		}})(b)
		opening := begin(t.Context(), h)
		synctest.Wait()
		b.set(nil)
		assert.NoError(t, h.Handle(t.Context(), message()), "ten seconds later, as the probe")
		assert.NoError(t, h.Handle(t.Context(), message()))
		assert.Empty(t, r.all())
		close(unblock)
		assert.Equal(t, errDown, <-opening)
		synctest.Wait()
		assert.Equal(t, []string{"10s open for 10s: bank is down", "10s half-open", "10s closed"}, r.all())
	})
}

func TestInsideOfRetryItGivesBackWithoutUsingUpARetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bank{answer: errDown}
		h := retry.With(retry.Policy{})(breaker.With(breaker.Config{Failures: 1, Logger: quiet})(b))
		assert.IsType(t, client.Forward{}, h.Handle(t.Context(), message()), "what trips it is retried")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		assert.Equal(t, client.Requeue{Err: context.DeadlineExceeded}, client.OutcomeOf(h.Handle(ctx, message())))
	})
}

func TestAConfigThatCanNotBeUsedStopsTheConsumer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		cfg  breaker.Config
	}{
		{"breaker.Config.Failures", breaker.Config{Failures: -1}},
		{"breaker.Config.OpenFor", breaker.Config{OpenFor: -1}},
		{"breaker.Config.MaxOpenFor", breaker.Config{MaxOpenFor: -1}},
		{"breaker.Config.MaxOpenFor", breaker.Config{OpenFor: time.Minute, MaxOpenFor: time.Second}},
	} {
		b := &bank{}
		h := breaker.With(c.cfg)(b)
		var bad *argument.Error
		require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{}), &bad)
		assert.Equal(t, c.name, bad.Path.String())
		assert.Equal(t, client.Requeue{Failed: true, Err: bad}, h.Handle(t.Context(), message()), "where Prepare isn't called")
		assert.Zero(t, b.count())
	}
	require.ErrorAs(t, client.Prepare(t.Context(), breaker.With(breaker.Config{})(nil), client.Start{}), new(*argument.Error))
	require.NoError(t, client.Prepare(t.Context(), breaker.With(breaker.Config{MaxOpenFor: time.Second})(&bank{}), client.Start{}), "OpenFor's default gives way")
}

type preparing struct{ bank }

func (p *preparing) Prepare(context.Context, client.Start) error { return errDown }

func TestPrepareIsPassedOn(t *testing.T) {
	t.Parallel()
	assert.Equal(t, errDown, client.Prepare(t.Context(), breaker.With(breaker.Config{})(&preparing{}), client.Start{}))
}
