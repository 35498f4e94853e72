package batch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/hopback/hopback/middleware/batch"
	"github.com/hopback/hopback/middleware/ordered"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errPoison = errors.New("poison")

func delivery(body string) *client.Delivery {
	return client.NewDelivery("orders", client.NewMessage([]byte(body)))
}

// handleAll has h handle messages with the bodies 0 to n-1 at once, a microsecond apart,
// and returns the results.
func handleAll(t *testing.T, h client.Handler, n int) []error {
	t.Helper()
	results := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		d := delivery(fmt.Sprint(i))
		wg.Go(func() { results[i] = h.Handle(client.WithDelivery(t.Context(), d), d) })
		time.Sleep(time.Microsecond)
	}
	wg.Wait()
	return results
}

// sizes notes the sizes of batches.
type sizes struct {
	mu  sync.Mutex
	all []int
}

func (s *sizes) add(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, n)
}

func TestABatchBeginsWhenItIsFullOrItsFirstMessageHasWaited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var got sizes
		var began []time.Duration
		start := time.Now()
		h := batch.JSON(batch.Config{Size: 10, Wait: time.Second}, func(_ context.Context, items []*batch.Item[int]) error {
			got.add(len(items))
			began = append(began, time.Since(start).Truncate(time.Millisecond))
			for i, item := range items {
				if i > 0 {
					assert.Equal(t, items[i-1].Value+1, item.Value, "in the order of arrival")
				}
			}
			return nil
		})
		for _, err := range handleAll(t, h, 25) {
			require.NoError(t, err)
		}
		assert.Equal(t, []int{10, 10, 5}, got.all)
		assert.Equal(t, []time.Duration{0, 0, time.Second}, began)
	})
}

func TestEachMessageHasItsOwnResult(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		failed := errors.New("the rest")
		h := batch.JSON(batch.Config{Size: 4}, func(_ context.Context, items []*batch.Item[int]) error {
			items[0].Fail(errPoison)
			items[1].Fail(nil)
			items[2].Fail(errPoison)
			items[2].Fail(client.Requeue{})
			return failed
		})
		assert.Equal(t, []error{errPoison, nil, client.Requeue{}, failed}, handleAll(t, h, 4))
	})
}

func TestAPanicFailsAllThatHaveNoResultYet(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(){"panic": func() { panic("broken") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				h := batch.JSON(batch.Config{Size: 3}, func(_ context.Context, items []*batch.Item[int]) error {
					items[0].Fail(nil)
					end()
					return nil
				})
				got := handleAll(t, h, 3)
				require.NoError(t, got[0])
				for _, err := range got[1:] {
					p, ok := errors.AsType[*client.PanicError](err)
					require.True(t, ok, "%v", err)
					assert.NotEmpty(t, p.Stack)
				}
				assert.Len(t, handleAll(t, h, 3), 3, "the next batch is handled")
			})
		})
	}
}

func TestSplitFindsTheMessageAtFault(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var got sizes
		h := batch.JSON(batch.Config{Size: 10, Split: true}, func(_ context.Context, items []*batch.Item[int]) error {
			got.add(len(items))
			for _, item := range items {
				switch item.Value {
				case 3:
					return errPoison
				case 5:
					panic("broken")
				}
			}
			return nil
		})
		for i, err := range handleAll(t, h, 10) {
			switch i {
			case 3:
				require.ErrorIs(t, err, errPoison)
			case 5:
				require.ErrorAs(t, err, new(*client.PanicError))
			default:
				require.NoError(t, err)
			}
		}
		assert.Equal(t, []int{10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, got.all)
	})
}

func TestWhatCanNotBeDecodedIsInNoBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := batch.JSON(batch.Config{Size: 2}, func(_ context.Context, items []*batch.Item[int]) error {
			assert.Len(t, items, 2)
			return nil
		})
		bad := delivery("no number")
		err := h.Handle(t.Context(), bad)
		dead, ok := errors.AsType[client.DeadLetter](err)
		require.True(t, ok)
		assert.Equal(t, client.ReasonUndecodable, dead.Reason)
		for _, err := range handleAll(t, h, 2) {
			require.NoError(t, err)
		}
	})
}

// exiting ends the goroutine that decodes 1, and panics at 2.
type exiting struct{ client.JSONCodec }

func (c exiting) Decode(m *client.Message, v any) error {
	switch string(m.GetData()) {
	case "1":
		runtime.Goexit()
	case "2":
		panic("two")
	}
	return c.JSONCodec.Decode(m, v)
}

func TestACodecThatEndsItsGoroutineOrPanicsHarmsItsMessageAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := batch.Typed(exiting{}, batch.Config{Size: 4}, func(_ context.Context, items []*batch.Item[int]) error {
			assert.Len(t, items, 2)
			return nil
		})
		results := handleAll(t, h, 4)
		for i, reason := range []client.Reason{"", client.ReasonPanicked, client.ReasonUndecodable, ""} {
			dead, _ := results[i].(client.DeadLetter)
			assert.Equal(t, reason, dead.Reason, i)
			assert.Equal(t, reason == "", results[i] == nil, i)
		}
	})
}

func TestTheCtxIsOverWhenTheFunctionHasReturned(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var kept []context.Context
		h := batch.JSON(batch.Config{Size: 1}, func(ctx context.Context, items []*batch.Item[int]) error {
			kept = append(kept, ctx)
			if items[0].Value == 1 {
				assert.NoError(t, ctx.Err())
			}
			return nil
		})
		for _, body := range []string{"0", "1"} {
			require.NoError(t, h.Handle(t.Context(), delivery(body)))
		}
		for _, ctx := range kept {
			<-ctx.Done()
			assert.ErrorIs(t, ctx.Err(), context.Canceled)
			within, cancel := context.WithCancel(ctx)
			assert.ErrorIs(t, within.Err(), context.Canceled)
			cancel()
		}
	})
}

func TestParallelBatchesAndWhatWaitsForThem(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var got sizes
		var now, most atomic.Int32
		h := batch.JSON(batch.Config{Size: 5, Wait: time.Millisecond, Parallel: 2}, func(_ context.Context, items []*batch.Item[int]) error {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			got.add(len(items))
			time.Sleep(time.Second)
			return nil
		})
		start := time.Now()
		for _, err := range handleAll(t, h, 23) {
			require.NoError(t, err)
		}
		assert.Equal(t, []int{5, 5, 5, 5, 3}, got.all)
		assert.Equal(t, int32(2), most.Load())
		assert.Equal(t, 3*time.Second, time.Since(start).Truncate(time.Millisecond))
	})
}

func TestTheCtxEndsWhenThoseOfAllMessagesHave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		var attempts []int
		h := batch.JSON(batch.Config{Size: 2}, func(ctx context.Context, items []*batch.Item[int]) error {
			_, has := client.DeliveryFrom(ctx)
			assert.False(t, has, "the ctx is nobody's own")
			assert.Equal(t, "value", ctx.Value(key{}))
			for _, item := range items {
				attempts = append(attempts, retry.Attempt(item.Context()))
				d, _ := client.DeliveryFrom(item.Context())
				assert.Same(t, item.Delivery(), d)
			}
			<-ctx.Done()
			for _, item := range items {
				assert.True(t, item.Revoked())
			}
			assert.ErrorIs(t, context.Cause(ctx), client.ErrConsumerTimeout)
			return ctx.Err()
		})
		start := time.Now()
		var wg sync.WaitGroup
		for i := range 2 {
			ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, "value"))
			time.AfterFunc(time.Duration(i+1)*time.Second, func() { cancel(client.ErrConsumerTimeout) })
			d := delivery("1")
			wg.Go(func() { assert.ErrorIs(t, h.Handle(client.WithDelivery(ctx, d), d), context.Canceled) })
		}
		wg.Wait()
		assert.Equal(t, 2*time.Second, time.Since(start))
		assert.Equal(t, []int{1, 1}, attempts)
	})
}

func TestWhatIsTakenBackBeforeItsBatchIsNotInIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := batch.JSON(batch.Config{Wait: time.Minute}, func(_ context.Context, items []*batch.Item[int]) error {
			assert.Len(t, items, 1)
			assert.Equal(t, 2, items[0].Value)
			assert.False(t, items[0].Revoked())
			return nil
		})
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(client.ErrConsumerTimeout) })
		var wg sync.WaitGroup
		wg.Go(func() {
			err := h.Handle(ctx, delivery("1"))
			requeue, ok := errors.AsType[client.Requeue](err)
			assert.True(t, ok)
			assert.False(t, requeue.Failed)
			assert.ErrorIs(t, err, client.ErrConsumerTimeout)
		})
		synctest.Wait()
		wg.Go(func() { assert.NoError(t, h.Handle(t.Context(), delivery("2"))) })
		wg.Wait()
	})
}

// A Requeue that isn't counted would redeliver the message without end.
func TestATimeoutAroundTheBatchIsAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := client.Timeout(time.Second)(batch.JSON(batch.Config{Wait: time.Minute}, func(context.Context, []*batch.Item[int]) error { return nil }))
		err := h.Handle(t.Context(), delivery("1"))
		require.ErrorIs(t, err, client.ErrHandlerTimeout)
		assert.NotErrorAs(t, err, new(client.Requeue))

		h = client.Timeout(time.Second)(batch.JSON(batch.Config{Size: 1}, func(ctx context.Context, _ []*batch.Item[int]) error {
			<-ctx.Done()
			return ctx.Err()
		}))
		err = h.Handle(t.Context(), delivery("1"))
		require.ErrorIs(t, err, client.ErrHandlerTimeout)
	})
}

func TestNoBatchHasTwoOfAKeyThatIsInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var seen []int
		h := ordered.With(ordered.Config{Key: func(d *client.Delivery) (string, bool) {
			var v int
			_ = json.Unmarshal(d.Message().Data[0], &v)
			return fmt.Sprint(v % 2), true
		}})(batch.JSON(batch.Config{Size: 10, Wait: time.Second}, func(_ context.Context, items []*batch.Item[int]) error {
			assert.Len(t, items, 2)
			assert.NotEqual(t, items[0].Value%2, items[1].Value%2)
			for _, item := range items {
				seen = append(seen, item.Value)
			}
			return nil
		}))
		for _, err := range handleAll(t, h, 6) {
			require.NoError(t, err)
		}
		assert.ElementsMatch(t, []int{0, 1, 2, 3, 4, 5}, seen)
	})
}

func TestBatchesAskForAsManyHandlersAsTheyNeed(t *testing.T) {
	t.Parallel()
	asked := 0
	h := batch.JSON(batch.Config{Size: 20, Parallel: 3}, func(context.Context, []*batch.Item[int]) error { return nil })
	refused := errors.New("refused")
	require.ErrorIs(t, client.Prepare(t.Context(), retry.With(retry.Policy{})(h), client.Start{Queue: "orders", Handlers: func(int) error { return refused }}), refused)
	require.NoError(t, client.Prepare(t.Context(), h, client.Start{Handlers: func(n int) error { asked = n; return nil }}))
	assert.Equal(t, 60, asked)
	require.NoError(t, client.Prepare(t.Context(), h, client.Start{}), "another client's consumer")
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	ok := func(context.Context, []*batch.Item[int]) error { return nil }
	for want, h := range map[string]client.Handler{
		"Size":     batch.JSON(batch.Config{Size: -1}, ok),
		"Parallel": batch.JSON(batch.Config{Size: 1000, Parallel: 101}, ok),
		"Wait":     batch.JSON(batch.Config{Wait: -1}, ok),
		"handle":   batch.JSON[int](batch.Config{}, nil),
		"codec":    batch.Typed(nil, batch.Config{}, ok),
		"value":    batch.JSON(batch.Config{}, func(context.Context, []*batch.Item[chan int]) error { return nil }),
	} {
		err := client.Prepare(t.Context(), h, client.Start{})
		bad, is := errors.AsType[*argument.Error](err)
		require.True(t, is, "%s: %v", want, err)
		assert.Contains(t, bad.Error(), want)
		result := h.Handle(t.Context(), delivery("1"))
		requeue, is := errors.AsType[client.Requeue](result)
		assert.True(t, is && requeue.Failed, "%v", result)
	}
}
