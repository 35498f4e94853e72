package ordered_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/ordered"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errOdd = errors.New("odd")

func delivery(queue, group, id string) *client.Delivery {
	m := client.NewMessage([]byte(id))
	m.Properties.MessageID = id
	if group != "" {
		m.Properties.GroupID = new(group)
	}
	return client.NewDelivery(queue, m)
}

func idOf(d *client.Delivery) string { return d.Message().Properties.MessageID.(string) }

// worker notes what it handles, and fails the test if it has two of a group at once.
type worker struct {
	t    *testing.T
	do   func(ctx context.Context, d *client.Delivery) error
	mu   sync.Mutex
	done []string
	now  map[string]bool
	most int
}

func newWorker(t *testing.T, do func(ctx context.Context, d *client.Delivery) error) *worker {
	return &worker{t: t, do: do, now: map[string]bool{}}
}

func (w *worker) Handle(ctx context.Context, d *client.Delivery) error {
	key := d.Queue() + "/"
	if p := d.Message().Properties; p != nil && p.GroupID != nil {
		key += *p.GroupID
	}
	w.mu.Lock()
	if key != d.Queue()+"/" {
		assert.False(w.t, w.now[key], "two of %s at once", key)
	}
	w.now[key] = true
	w.most = max(w.most, len(w.now))
	w.done = append(w.done, idOf(d))
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.now, key)
		w.mu.Unlock()
	}()
	if w.do == nil {
		time.Sleep(time.Second)
		return nil
	}
	return w.do(ctx, d)
}

func (w *worker) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.done)
}

func begin(ctx context.Context, h client.Handler, d *client.Delivery) <-chan error {
	c := make(chan error, 1)
	go func() { c <- h.Handle(ctx, d) }()
	return c
}

func TestOneKeyAtATimeAndOthersMeanwhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorker(t, nil)
		h := ordered.With(ordered.Config{})(w)
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 5 {
			for _, queue := range []string{"orders", "mails"} {
				for _, group := range []string{"a", "b", "c"} {
					wg.Go(func() { assert.NoError(t, h.Handle(t.Context(), delivery(queue, group, fmt.Sprint(i)))) })
				}
			}
		}
		wg.Wait()
		assert.Equal(t, 5*time.Second, time.Since(began))
		assert.Equal(t, 6, w.most)
	})
}

func TestWithoutAKeyNothingWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorker(t, nil)
		h := ordered.With(ordered.Config{})(w)
		began := time.Now()
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() { assert.NoError(t, h.Handle(t.Context(), delivery("orders", "", fmt.Sprint(i)))) })
		}
		wg.Wait()
		assert.Equal(t, time.Second, time.Since(began))
	})
}

// Workers may bring them here in any order; the one received first is next.
func TestThoseThatWaitGoInTheOrderInWhichTheyWereReceived(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorker(t, nil)
			h := ordered.With(ordered.Config{Key: func(*client.Delivery) (string, bool) { return "all", true }})(w)
			first := begin(t.Context(), h, delivery("orders", "", "first"))
			synctest.Wait()
			const n = 30
			ds, want := make([]*client.Delivery, n), []string{"first"}
			for i := range ds {
				// Some in the same tick of the clock: there the tag tells.
				if i%3 == 0 {
					time.Sleep(time.Nanosecond)
				}
				ds[i] = delivery("orders", "", fmt.Sprintf("%02d", i))
				ds[i].Message().DeliveryTag = []byte{0, 0, byte(i / 10), byte(i % 10)}
				want = append(want, idOf(ds[i]))
			}
			var wg sync.WaitGroup
			for _, i := range rand.New(rand.NewPCG(seed, 3)).Perm(n) {
				wg.Go(func() { assert.NoError(t, h.Handle(t.Context(), ds[i])) })
				synctest.Wait()
			}
			wg.Wait()
			assert.NoError(t, <-first)
			assert.Equal(t, want, w.all())
		})
	}
}

func TestAFailureIsTriedAgainInPlaceWhileItsKeyWaits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		cfg      ordered.Config
		failures int // of m1
		want     []string
		err      error
		takes    time.Duration
	}{
		{"handed on", ordered.Config{}, 3, []string{"m1", "m2"}, errOdd, 0},
		{"until it succeeds", ordered.Config{Attempts: 5}, 3, []string{"m1", "m1", "m1", "m1", "m2"}, nil, 700 * time.Millisecond},
		{"until attempts are used up", ordered.Config{Attempts: 3}, 3, []string{"m1", "m1", "m1", "m2"}, errOdd, 300 * time.Millisecond},
		{"with other pauses", ordered.Config{Attempts: 5, Pause: time.Second, MaxPause: 2 * time.Second}, 4, []string{"m1", "m1", "m1", "m1", "m1", "m2"}, nil, 7 * time.Second},
		{"for as long as it takes", ordered.Config{Attempts: -1}, 100, append(slices.Repeat([]string{"m1"}, 101), "m2"), nil, 100*time.Millisecond*(1+2+4+8+16+32) + 94*5*time.Second},
		{"but not what RetryIf refuses", ordered.Config{Attempts: -1, RetryIf: func(err error) bool { return !errors.Is(err, errOdd) }}, 3, []string{"m1", "m2"}, errOdd, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				failed := 0
				w := newWorker(t, func(_ context.Context, d *client.Delivery) error {
					if idOf(d) == "m1" && failed < c.failures {
						failed++
						return errOdd
					}
					return nil
				})
				h := ordered.With(c.cfg)(w)
				began := time.Now()
				m1 := begin(t.Context(), h, delivery("orders", "a", "m1"))
				synctest.Wait()
				m2 := begin(t.Context(), h, delivery("orders", "a", "m2"))
				assert.Equal(t, c.err, <-m1)
				assert.NoError(t, <-m2)
				assert.Equal(t, c.want, w.all())
				assert.Equal(t, c.takes, time.Since(began))
			})
		})
	}
}

func TestAnOutcomeIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	for _, o := range []error{client.Requeue{}, client.DeadLetter{Err: errOdd}, client.Forward{}, fmt.Errorf("wrapped: %w", client.Modify{}),
		retry.Permanent(errOdd), retry.Discard(errOdd), retry.After(time.Second, errOdd), fmt.Errorf("wrapped: %w", retry.Snooze(time.Second))} {
		w := newWorker(t, func(context.Context, *client.Delivery) error { return o })
		assert.Equal(t, o, ordered.With(ordered.Config{Attempts: 5})(w).Handle(t.Context(), delivery("orders", "a", "m1")))
		assert.Len(t, w.all(), 1)
	}
}

func TestWhenAContextEndsTheDeliveryGoesBackUncountedAndTheKeyMovesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		why := errors.New("grace is over")
		w := newWorker(t, func(_ context.Context, d *client.Delivery) error {
			if idOf(d) == "m1" {
				return errOdd
			}
			time.Sleep(time.Second)
			return nil
		})
		h := ordered.With(ordered.Config{Attempts: -1})(w)
		ctx1, end1 := context.WithCancelCause(t.Context())
		ctx2, end2 := context.WithCancelCause(t.Context())
		m1 := begin(ctx1, h, delivery("orders", "a", "m1"))
		synctest.Wait()
		m2 := begin(ctx2, h, delivery("orders", "a", "m2"))
		synctest.Wait()
		m3 := begin(t.Context(), h, delivery("orders", "a", "m3"))
		synctest.Wait()
		end2(why)
		requeue, ok := (<-m2).(client.Requeue)
		require.True(t, ok)
		assert.False(t, requeue.Failed)
		assert.ErrorIs(t, requeue, why)
		end1(why)
		assert.Equal(t, client.Requeue{Err: errOdd}, <-m1, "between two attempts")
		assert.NoError(t, <-m3)
		assert.NotContains(t, w.all(), "m2")
	})
}

// Contexts that end just as turns come must not lose a turn: then a key would be stuck permanently.
func TestNoTurnIsLost(t *testing.T) {
	t.Parallel()
	w := newWorker(t, func(context.Context, *client.Delivery) error { return nil })
	h := ordered.With(ordered.Config{})(w)
	var wg sync.WaitGroup
	for i := range 2000 {
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() {
			defer cancel()
			_ = h.Handle(ctx, delivery("orders", "a", fmt.Sprint(i)))
		})
		wg.Go(cancel)
	}
	wg.Wait()
	assert.NoError(t, h.Handle(t.Context(), delivery("orders", "a", "last")))
	assert.Equal(t, "last", w.all()[len(w.all())-1])
}

func TestAHandlerThatNeverReturnsEndsItsTurn(t *testing.T) {
	t.Parallel()
	for name, odd := range map[string]func(){"panic": func() { panic("boom") }, "runtime.Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorker(t, func(_ context.Context, d *client.Delivery) error {
					if idOf(d) == "m1" {
						time.Sleep(time.Second)
						odd()
					}
					return nil
				})
				h := ordered.With(ordered.Config{})(w)
				go func() {
					defer func() { _ = recover() }()
					_ = h.Handle(t.Context(), delivery("orders", "a", "m1"))
				}()
				synctest.Wait()
				assert.NoError(t, h.Handle(t.Context(), delivery("orders", "a", "m2")))
			})
		})
	}
}

func TestInsideOfRetryAttemptsComeFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorker(t, func(context.Context, *client.Delivery) error { return errOdd })
		h := client.Chain(retry.With(retry.Policy{}), ordered.With(ordered.Config{Attempts: 3}))(w)
		assert.IsType(t, client.Forward{}, h.Handle(t.Context(), delivery("orders", "a", "m1")))
		assert.Len(t, w.all(), 3)
	})
}

func TestAConfigThatCanNotBeUsedStopsTheConsumer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		cfg  ordered.Config
	}{
		{"ordered.Config.Pause", ordered.Config{Pause: -1}},
		{"ordered.Config.MaxPause", ordered.Config{MaxPause: -1}},
		{"ordered.Config.MaxPause", ordered.Config{Pause: time.Minute, MaxPause: time.Second}},
	} {
		w := newWorker(t, nil)
		h := ordered.With(c.cfg)(w)
		var bad *argument.Error
		require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{}), &bad)
		assert.Equal(t, c.name, bad.Path.String())
		assert.Equal(t, client.Requeue{Failed: true, Err: bad}, h.Handle(t.Context(), delivery("q", "a", "1")), "where Prepare isn't called")
		assert.Empty(t, w.all())
	}
	require.ErrorAs(t, client.Prepare(t.Context(), ordered.With(ordered.Config{})(nil), client.Start{}), new(*argument.Error))
	require.NoError(t, client.Prepare(t.Context(), ordered.With(ordered.Config{MaxPause: time.Millisecond})(newWorker(t, nil)), client.Start{}), "Pause's default gives way")
}

func TestTheConsumerIsAskedToHandOverInOrder(t *testing.T) {
	t.Parallel()
	var key func(*client.Delivery) (string, bool)
	start := client.Start{Order: func(k func(*client.Delivery) (string, bool)) { key = k }}
	require.NoError(t, client.Prepare(t.Context(), ordered.With(ordered.Config{})(newWorker(t, nil)), start))
	group, ok := key(delivery("orders", "a", "m1"))
	assert.Equal(t, "a", group)
	assert.True(t, ok)
}

type preparing struct{ *worker }

func (preparing) Prepare(context.Context, client.Start) error { return errOdd }

func TestPrepareIsPassedOn(t *testing.T) {
	t.Parallel()
	assert.Equal(t, errOdd, client.Prepare(t.Context(), ordered.With(ordered.Config{})(preparing{newWorker(t, nil)}), client.Start{}))
}
