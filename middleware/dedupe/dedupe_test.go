package dedupe_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	quiet  = slog.New(slog.DiscardHandler)
	errOdd = errors.New("odd")
)

func delivery(queue string, id any) *client.Delivery {
	m := client.NewMessage([]byte("body"))
	m.Properties.MessageID = id
	return client.NewDelivery(queue, m)
}

// worker is a handler that a test controls, and that counts.
type worker struct {
	calls atomic.Int32
	do    func(ctx context.Context, call int) error
}

func (w *worker) Handle(ctx context.Context, _ *client.Delivery) error {
	n := int(w.calls.Add(1))
	if w.do == nil {
		return nil
	}
	return w.do(ctx, n)
}

func TestACopyOfAHandledMessageIsAcceptedWithoutACall(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 1<<20)
	ids := []any{"1", uint64(1), amqp.UUID{1}, []byte("1"), []byte{0x31, 0x32}, "s:1", long, long + "y"}
	w := &worker{}
	var duplicates []any
	h := dedupe.With(dedupe.Config{OnDuplicate: func(d *client.Delivery) {
		duplicates = append(duplicates, d.Message().Properties.MessageID)
	}})(w)
	for round := range 3 {
		for i, id := range ids {
			require.NoError(t, h.Handle(t.Context(), delivery("orders", id)))
			if round == 0 {
				assert.EqualValues(t, i+1, w.calls.Load(), "%T is another id than those before", id)
			}
		}
	}
	assert.EqualValues(t, len(ids), w.calls.Load())
	assert.Equal(t, slices.Concat(ids, ids), duplicates)
}

func TestAMessageWithoutAnIDIsAlwaysHandled(t *testing.T) {
	t.Parallel()
	w := &worker{}
	h := dedupe.With(dedupe.Config{})(w)
	bare := client.NewDelivery("orders", &client.Message{Data: [][]byte{nil}})
	for _, d := range []*client.Delivery{bare, bare, delivery("orders", nil), delivery("orders", nil), delivery("orders", ""), delivery("orders", ""), delivery("orders", []byte{}), delivery("orders", []byte{})} {
		require.NoError(t, h.Handle(t.Context(), d))
	}
	assert.EqualValues(t, 8, w.calls.Load())
}

func TestEachQueueHandlesItsCopy(t *testing.T) {
	t.Parallel()
	w := &worker{}
	once := dedupe.With(dedupe.Config{})
	for _, queue := range []string{"a", "b", "a/s:1", "a/s:1/s:1"} {
		require.NoError(t, once(w).Handle(t.Context(), delivery(queue, "1")))
		require.NoError(t, once(w).Handle(t.Context(), delivery(queue, "1")), "another handler of the same Middleware")
	}
	assert.EqualValues(t, 4, w.calls.Load())
}

func TestAMessageWhoseHandlerFailedIsHandledAgain(t *testing.T) {
	t.Parallel()
	for _, failure := range []error{
		errOdd,
		client.Requeue{},
		client.Forward{Message: client.NewMessage(nil)}, // perhaps a retry, whose copy has the same id
		client.DeadLetter{Reason: "bad-order"},          // perhaps replayed, as the same message
		client.Modify{DeadLetter: true},
	} {
		w := &worker{do: func(_ context.Context, call int) error {
			if call <= 2 {
				return failure
			}
			return nil
		}}
		h := dedupe.With(dedupe.Config{})(w)
		for range 2 {
			assert.Equal(t, failure, h.Handle(t.Context(), delivery("orders", "1")))
		}
		for range 2 {
			assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
		}
		assert.EqualValues(t, 3, w.calls.Load())
	}
}

func TestHandledDecidesWhatIsDone(t *testing.T) {
	t.Parallel()
	w := &worker{do: func(context.Context, int) error { return client.DeadLetter{Reason: "bad-order"} }}
	h := dedupe.With(dedupe.Config{Handled: func(err error) bool {
		_, dead := client.OutcomeOf(err).(client.DeadLetter)
		return err == nil || dead
	}})(w)
	assert.Error(t, h.Handle(t.Context(), delivery("orders", "1")))
	assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
	assert.EqualValues(t, 1, w.calls.Load())
}

// begin handles d in the background.
func begin(ctx context.Context, h client.Handler, d *client.Delivery) <-chan error {
	c := make(chan error, 1)
	go func() { c <- h.Handle(ctx, d) }()
	return c
}

func pending(c <-chan error) bool {
	synctest.Wait()
	return len(c) == 0
}

func TestASecondCopyWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		first error
		calls int
	}{{"which succeeds", nil, 1}, {"which fails", errOdd, 2}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := &worker{do: func(_ context.Context, call int) error {
					if call == 1 {
						time.Sleep(10 * time.Minute) // ten times its lease
						return c.first
					}
					return nil
				}}
				h := dedupe.With(dedupe.Config{})(w)
				first := begin(t.Context(), h, delivery("orders", "1"))
				synctest.Wait()
				second := begin(t.Context(), h, delivery("orders", "1"))
				time.Sleep(10*time.Minute - time.Second)
				assert.True(t, pending(second))
				assert.EqualValues(t, 1, w.calls.Load())
				assert.NoError(t, h.Handle(t.Context(), delivery("orders", "2")), "others don't wait")
				time.Sleep(2 * time.Second)
				assert.Equal(t, c.first, <-first)
				assert.NoError(t, <-second)
				assert.EqualValues(t, c.calls+1, w.calls.Load())
			})
		})
	}
}

func TestACopyWhoseContextEndsWhileItWaitsGoesBackUncounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &worker{do: func(context.Context, int) error { time.Sleep(time.Minute); return nil }}
		h := dedupe.With(dedupe.Config{})(w)
		first := begin(t.Context(), h, delivery("orders", "1"))
		synctest.Wait()
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("grace is over")
		time.AfterFunc(5*time.Second, func() { cancel(why) })
		err := h.Handle(ctx, delivery("orders", "1"))
		assert.ErrorIs(t, err, why)
		assert.IsType(t, client.Requeue{}, err)
		assert.False(t, err.(client.Requeue).Failed)
		assert.NoError(t, <-first)
	})
}

func TestAHandlerThatNeverReturnsGivesItsClaimUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &worker{do: func(_ context.Context, call int) error {
			switch call {
			case 1:
				panic("boom")
			case 2:
				runtime.Goexit()
			}
			return nil
		}}
		h := dedupe.With(dedupe.Config{})(w)
		for range 2 {
			var wg sync.WaitGroup
			wg.Go(func() {
				defer func() { _ = recover() }()
				_ = h.Handle(t.Context(), delivery("orders", "1"))
			})
			wg.Wait()
		}
		began := time.Now()
		assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
		assert.Equal(t, began, time.Now(), "without waiting for a lease")
		assert.EqualValues(t, 3, w.calls.Load())
	})
}

func TestTheClaimOfADeadWorkerRunsOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := dedupe.NewMemory(0)
		w := &worker{}
		h := dedupe.With(dedupe.Config{Store: store, Lease: 30 * time.Second})(w)
		key, _ := dedupe.MessageID(delivery("orders", "1"))
		state, err := store.Claim(t.Context(), key, "a worker that dies", 30*time.Second)
		require.NoError(t, err)
		require.Equal(t, dedupe.StateClaimed, state)

		began := time.Now()
		require.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
		assert.EqualValues(t, 1, w.calls.Load())
		assert.GreaterOrEqual(t, time.Since(began), 30*time.Second)
		assert.Less(t, time.Since(began), 32*time.Second)
	})
}

func TestADoneMessageIsForgottenAfterItsTTLOrForLackOfRoom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &worker{}
		h := dedupe.With(dedupe.Config{Size: 2, TTL: time.Hour})(w)
		handle := func(id string, calls int32) {
			t.Helper()
			require.NoError(t, h.Handle(t.Context(), delivery("orders", id)))
			assert.Equal(t, calls, w.calls.Load())
		}
		handle("1", 1)
		time.Sleep(time.Hour - time.Second)
		handle("1", 1)
		time.Sleep(time.Second)
		handle("1", 2)
		handle("2", 3)
		handle("1", 3)
		handle("3", 4)
		handle("1", 4)
		handle("2", 5)
	})
}

// faulty is a Store that fails where a test asks for it.
type faulty struct {
	dedupe.Store
	fail atomic.Value // the method's name
	down error
}

func (f *faulty) bad(method string) error {
	if f.fail.Load() == method {
		return f.down
	}
	return nil
}

func (f *faulty) Claim(ctx context.Context, key, owner string, lease time.Duration) (dedupe.State, error) {
	if err := f.bad("Claim"); err != nil {
		return "", err
	}
	return f.Store.Claim(ctx, key, owner, lease)
}

func (f *faulty) Renew(ctx context.Context, key, owner string, lease time.Duration) (bool, error) {
	if err := f.bad("Renew"); err != nil {
		return false, err
	}
	return f.Store.Renew(ctx, key, owner, lease)
}

func (f *faulty) Done(ctx context.Context, key, owner string, ttl time.Duration) error {
	if err := f.bad("Done"); err != nil {
		return err
	}
	return f.Store.Done(ctx, key, owner, ttl)
}

func (f *faulty) Release(ctx context.Context, key, owner string) error {
	if err := f.bad("Release"); err != nil {
		return err
	}
	return f.Store.Release(ctx, key, owner)
}

func newFaulty(method string) *faulty {
	f := &faulty{Store: dedupe.NewMemory(0), down: errors.New("store is down")}
	f.fail.Store(method)
	return f
}

func TestWhenTheStoreIsDownMessagesFailOrAreHandledUnchecked(t *testing.T) {
	t.Parallel()
	f := newFaulty("Claim")
	w := &worker{}
	err := dedupe.With(dedupe.Config{Store: f})(w).Handle(t.Context(), delivery("orders", "1"))
	assert.ErrorIs(t, err, f.down)
	assert.NotErrorAs(t, err, new(client.Outcome), "a failure, which retry.With retries")
	assert.Zero(t, w.calls.Load())

	open := dedupe.With(dedupe.Config{Store: f, FailOpen: true, Logger: quiet})(w)
	for range 2 {
		assert.NoError(t, open.Handle(t.Context(), delivery("orders", "1")))
	}
	assert.EqualValues(t, 2, w.calls.Load())
}

func TestAStoreThatHangsIsNotWaitedForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		err := dedupe.With(dedupe.Config{Store: hanging{}})(&worker{}).Handle(t.Context(), delivery("orders", "1"))
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, 5*time.Second, time.Since(began))
	})
}

type hanging struct{ dedupe.Store }

func (hanging) Claim(ctx context.Context, _, _ string, _ time.Duration) (dedupe.State, error) {
	<-ctx.Done()
	return "", ctx.Err()
}

type silent struct{ dedupe.Store }

func (silent) Claim(context.Context, string, string, time.Duration) (dedupe.State, error) {
	return "", nil
}

func TestAStoreThatSaysNothingLosesNothing(t *testing.T) {
	t.Parallel()
	w := &worker{}
	assert.Error(t, dedupe.With(dedupe.Config{Store: silent{}})(w).Handle(t.Context(), delivery("orders", "1")))
	assert.Zero(t, w.calls.Load())
}

func TestAMarkThatCanNotBeWrittenDoesNotUndoTheWork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFaulty("Done")
		w := &worker{}
		h := dedupe.With(dedupe.Config{Store: f, Logger: quiet})(w)
		assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
		began := time.Now()
		assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
		assert.EqualValues(t, 2, w.calls.Load(), "it isn't known as done")
		assert.GreaterOrEqual(t, time.Since(began), time.Minute, "after the lease")
	})
}

func TestAClaimSurvivesAStoreThatIsDownForAShortTime(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		outage time.Duration
		calls  int32
	}{{"shorter than the lease", 30 * time.Second, 1}, {"longer than the lease", 2 * time.Minute, 2}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFaulty("Renew")
				time.AfterFunc(c.outage, func() { f.fail.Store("") })
				w := &worker{do: func(_ context.Context, call int) error {
					if call == 1 {
						time.Sleep(10 * time.Minute)
					}
					return nil
				}}
				h := dedupe.With(dedupe.Config{Store: f, Logger: quiet})(w)
				first := begin(t.Context(), h, delivery("orders", "1"))
				synctest.Wait()
				assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
				assert.NoError(t, <-first)
				assert.Equal(t, c.calls, w.calls.Load())
				assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")))
				assert.Equal(t, c.calls, w.calls.Load(), "done, no matter who had the claim")
			})
		})
	}
}

func TestBothSidesOfRetry(t *testing.T) {
	t.Parallel()
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second)}
	for _, c := range []struct {
		name  string
		chain func(once client.Middleware) client.Middleware
	}{
		{"dedupe inside", func(once client.Middleware) client.Middleware { return client.Chain(retry.With(policy), once) }},
		{"dedupe outside", func(once client.Middleware) client.Middleware { return client.Chain(once, retry.With(policy)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := &worker{do: func(_ context.Context, call int) error {
				if call <= 2 {
					return errOdd
				}
				return nil
			}}
			h := c.chain(dedupe.With(dedupe.Config{}))(w)
			m := delivery("orders", "1").Message()
			for pass := 1; pass <= 2; pass++ {
				forward, ok := client.OutcomeOf(h.Handle(t.Context(), client.NewDelivery("orders", m))).(client.Forward)
				require.True(t, ok)
				require.Equal(t, pass, retry.Count(forward.Message))
				m = forward.Message
			}
			assert.NoError(t, h.Handle(t.Context(), client.NewDelivery("orders", m)))
			assert.EqualValues(t, 3, w.calls.Load())
			assert.NoError(t, h.Handle(t.Context(), client.NewDelivery("orders", m)), "the last copy again")
			assert.NoError(t, h.Handle(t.Context(), delivery("orders", "1")), "the publisher's copy again")
			assert.EqualValues(t, 3, w.calls.Load())
		})
	}
}

func TestErrorsOfTheStoreAreRetriedInsideOfRetry(t *testing.T) {
	t.Parallel()
	f := newFaulty("Claim")
	retries := retry.With(retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second)})
	err := retries(dedupe.With(dedupe.Config{Store: f})(&worker{})).Handle(t.Context(), delivery("orders", "1"))
	assert.IsType(t, client.Forward{}, client.OutcomeOf(err))
	err = dedupe.With(dedupe.Config{Store: f})(retries(&worker{})).Handle(t.Context(), delivery("orders", "1"))
	assert.Equal(t, client.Requeue{Failed: true, Err: err}, client.OutcomeOf(err))
}

func TestAConfigThatCanNotBeUsedStopsTheConsumer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		cfg  dedupe.Config
	}{
		{"dedupe.Config.Size", dedupe.Config{Size: -1}},
		{"dedupe.Config.Size", dedupe.Config{Size: 10, Store: dedupe.NewMemory(10)}},
		{"dedupe.Config.TTL", dedupe.Config{TTL: -1}},
		{"dedupe.Config.Lease", dedupe.Config{Lease: -1}},
		{"dedupe.Config.Lease", dedupe.Config{Lease: time.Millisecond}},
	} {
		w := &worker{}
		h := dedupe.With(c.cfg)(w)
		var bad *argument.Error
		require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{}), &bad)
		assert.Equal(t, c.name, bad.Path.String())
		assert.Equal(t, client.Requeue{Failed: true, Err: bad}, h.Handle(t.Context(), delivery("q", "1")), "where Prepare isn't called")
		assert.Zero(t, w.calls.Load())
	}
	require.ErrorAs(t, client.Prepare(t.Context(), dedupe.With(dedupe.Config{})(nil), client.Start{}), new(*argument.Error))
}

type preparing struct {
	worker
	err error
}

func (p *preparing) Prepare(context.Context, client.Start) error { return p.err }

func TestPrepareIsPassedOn(t *testing.T) {
	t.Parallel()
	p := &preparing{err: errOdd}
	assert.Equal(t, errOdd, client.Prepare(t.Context(), dedupe.With(dedupe.Config{})(p), client.Start{}))
}

// Many copies of many messages, some of whose handlers fail, at once: each is
// handled by one at a time, and once with success.
func TestConcurrentCopies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const messages, copies = 50, 8
		var mu sync.Mutex
		running, succeeded, calls := map[string]bool{}, map[string]int{}, map[string]int{}
		h := dedupe.With(dedupe.Config{})(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			id := d.Message().Properties.MessageID.(string)
			mu.Lock()
			assert.False(t, running[id], "%s twice at once", id)
			running[id] = true
			calls[id]++
			fail := calls[id] < len(id) // once or twice
			mu.Unlock()
			time.Sleep(time.Second)
			mu.Lock()
			defer mu.Unlock()
			running[id] = false
			if fail {
				return errOdd
			}
			succeeded[id]++
			return nil
		}))
		var wg sync.WaitGroup
		for i := range messages {
			for range copies {
				wg.Go(func() { _ = h.Handle(t.Context(), delivery("orders", fmt.Sprint(i))) })
			}
		}
		wg.Wait()
		for i := range messages {
			assert.Equal(t, 1, succeeded[fmt.Sprint(i)], i)
		}
	})
}

// Outside of retry.With, a Handled that is always true doesn't turn a retry into a duplicate: the retry
// copy, or the message that comes back, is handled.
func TestARetryIsNeverDone(t *testing.T) {
	t.Parallel()
	for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
		w := &worker{do: func(_ context.Context, call int) error {
			if call <= 2 {
				return errOdd
			}
			return nil
		}}
		duplicates := 0
		h := dedupe.With(dedupe.Config{Handled: func(error) bool { return true }, OnDuplicate: func(*client.Delivery) { duplicates++ }})(
			retry.With(retry.Policy{Strategy: strategy, Backoff: retry.Delays(time.Second)})(w))
		m := delivery("orders", "1").Message()
		for range 2 {
			switch o := client.OutcomeOf(h.Handle(t.Context(), client.NewDelivery("orders", m))).(type) {
			case client.Forward:
				m = o.Message
			case client.Modify:
				m = client.Copy(m)
				m.Annotations = map[any]any{}
				for k, v := range o.Annotations {
					m.Annotations[k] = v
				}
			default:
				require.Failf(t, "no retry", "%s: %#v", strategy, o)
			}
		}
		require.NoError(t, h.Handle(t.Context(), client.NewDelivery("orders", m)))
		assert.EqualValues(t, 3, w.calls.Load(), strategy)
		assert.Zero(t, duplicates, strategy)
		require.NoError(t, h.Handle(t.Context(), client.NewDelivery("orders", m)))
		assert.Equal(t, 1, duplicates, strategy)
	}
}
