package schedule_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

var stores = map[string]func() schedule.Store{
	"dedupe": func() schedule.Store { return schedule.OnDedupe(dedupe.NewMemory(0)) },
}

// The table of docs/schedule.md for the ladder.
func TestCancelAtEachMomentOfAMessageInTheLadder(t *testing.T) {
	t.Parallel()
	for name, newStore := range stores {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { cancelAtEachMoment(t, newStore()) })
		})
	}
}

func cancelAtEachMoment(t *testing.T, store schedule.Store) {
	w := newWorld(t, "4.3.6")
	policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Minute)}
	work, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
	require.NoError(t, err)
	w.apply(work)
	bind, err := schedule.Topology(schedule.Names{}, "orders")
	require.NoError(t, err)
	w.apply(bind)
	bound := newPublisher[string](w, address.Queue("orders"))
	put := func(name string, edit ...func(*client.Message)) schedule.Scheduled {
		t.Helper()
		s, err := bound.Publish(t.Context(), schedule.After(time.Hour), name, append(edit, id(name))...)
		require.NoError(t, err)
		return s
	}
	cancel := func(s schedule.Scheduled, want bool) {
		t.Helper()
		is, err := schedule.Cancel(t.Context(), store, s)
		require.NoError(t, err)
		assert.Equal(t, want, is, s.ID)
	}
	viaDispatch := func(m *client.Message) { m.Header.Priority = 9 }
	var mu sync.Mutex
	handled := map[string]int{}
	dropped := map[string]int{}
	entered, leave := make(chan struct{}), make(chan struct{})
	with := schedule.With(schedule.Config{Store: store, OnCanceled: func(d *client.Delivery) {
		mu.Lock()
		defer mu.Unlock()
		dropped[d.Message().Properties.MessageID.(string)]++
	}})
	handler := retry.With(policy)(with(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		name := d.Message().Properties.MessageID.(string)
		mu.Lock()
		handled[name]++
		mu.Unlock()
		switch name {
		case "in its handler":
			close(entered)
			<-leave
		case "between retries":
			return errors.New("not yet")
		}
		return nil
	})))

	kept := put("kept")
	inLadder := put("in the ladder")
	inDispatch, inDispatchKnown := put("before dispatch", viaDispatch), put("before dispatch, unknown there", viaDispatch)
	inQueue := put("in its queue")
	running, between, done := put("in its handler"), put("between retries"), put("handled")
	cancel(inLadder, true)
	cancel(inLadder, true)
	cancel(schedule.Scheduled{ID: "never", Due: kept.Due}, true)
	_, err = bound.Publish(t.Context(), schedule.After(time.Hour), "marked before", id("never"))
	require.NoError(t, err)

	time.Sleep(time.Hour + time.Second)
	cancel(inQueue, false)
	cancel(inDispatch, false)
	stopDispatch := w.dispatch(schedule.DispatchConfig{Store: store})
	time.Sleep(time.Second)
	stopDispatch()
	cancel(inDispatchKnown, false)
	assert.Zero(t, w.ready(schedule.Names{}.DispatchQueue()))

	w.consume("orders", handler)
	<-entered
	time.Sleep(time.Second)
	cancel(running, false)
	cancel(between, false)
	cancel(done, false)
	close(leave)
	time.Sleep(time.Hour)

	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, map[string]int{"kept": 1, "in its handler": 1, "between retries": 1, "handled": 1}, handled)
	assert.Equal(t, map[string]int{
		"in the ladder": 1, "never": 1, "in its queue": 1, "between retries": 1,
		"before dispatch, unknown there": 1, // and the other didn't come here
	}, dropped)
	assert.Zero(t, w.ready("orders"))
	assert.Zero(t, w.ready("orders.dead"))
	assert.Zero(t, w.ready(lostQueue))
}

// A mark outlives the time when its message is due, and then goes.
func TestAMarkIsForgottenInTheEnd(t *testing.T) {
	t.Parallel()
	for name, newStore := range stores {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				store := newStore()
				due := time.Now().Add(day)
				for i := range 2000 {
					_, err := schedule.Cancel(t.Context(), store, schedule.Scheduled{ID: strconv.Itoa(i), Due: due})
					require.NoError(t, err)
				}
				time.Sleep(day + schedule.Keep - time.Second)
				for _, is := range []bool{true, false} {
					canceled, err := store.Canceled(t.Context(), "1999")
					require.NoError(t, err)
					assert.Equal(t, is, canceled)
					time.Sleep(2 * time.Second)
				}
			})
		})
	}
}

// failing is a Store that fails n times.
type failing struct {
	schedule.Store
	n int
}

var errDown = errors.New("the store is down")

func (f *failing) Canceled(ctx context.Context, id string) (bool, error) {
	if f.n--; f.n >= 0 {
		return false, errDown
	}
	return f.Store.Canceled(ctx, id)
}

func (f *failing) Cancel(context.Context, string, time.Time) error { return errDown }

// Without an answer of the Store no scheduled message is handled or dispatched, and none is
// lost. Others aren't asked about.
func TestAStoreThatFailsHoldsScheduledMessagesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		down := &failing{schedule.OnDedupe(dedupe.NewMemory(0)), 3}
		calls := 0
		h := schedule.With(schedule.Config{Store: down})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			calls++
			return nil
		}))
		scheduled := client.NewMessage(nil)
		scheduled.Annotations = map[any]any{annotation.Due: int64(1)}
		require.ErrorIs(t, h.Handle(t.Context(), client.NewDelivery("q", scheduled)), errDown)
		require.NoError(t, h.Handle(t.Context(), client.NewDelivery("q", client.NewMessage(nil))))
		assert.Equal(t, 1, calls)
		_, err := schedule.Cancel(t.Context(), down, schedule.Scheduled{ID: "a", Due: time.Now()})
		require.ErrorIs(t, err, errDown)

		w := newWorld(t, "4.0.5")
		w.apply(declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		_, err = newPublisher[int](w, address.Queue("orders")).Publish(t.Context(), schedule.After(0), 1)
		require.NoError(t, err)
		w.dispatch(schedule.DispatchConfig{Store: down})
		time.Sleep(time.Minute)
		assert.Equal(t, 1, w.ready("orders"))
	})
}

func TestCancelRefusesWhatCanNotBe(t *testing.T) {
	t.Parallel()
	good := schedule.Scheduled{ID: "a", Due: time.Now()}
	store := schedule.OnDedupe(dedupe.NewMemory(0))
	for text, try := range map[string]func() (bool, error){
		"store is nil": func() (bool, error) { return schedule.Cancel(t.Context(), nil, good) },
		"Scheduled.ID": func() (bool, error) {
			return schedule.Cancel(t.Context(), store, schedule.Scheduled{Due: good.Due})
		},
		"Due is the zero time": func() (bool, error) {
			return schedule.Cancel(t.Context(), store, schedule.Scheduled{ID: "a"})
		},
		"more than 366 days": func() (bool, error) {
			return schedule.Cancel(t.Context(), store, schedule.Scheduled{ID: "a", Due: good.Due.AddDate(3, 0, 0)})
		},
	} {
		_, err := try()
		refused(t, err, text)
	}
	_, err := schedule.Cancel(t.Context(), schedule.OnDedupe(nil), good)
	require.Error(t, err)
	refused(t, client.Prepare(t.Context(), schedule.With(schedule.Config{})(client.HandlerFunc(nil)), client.Start{}), "Store")
	refused(t, client.Prepare(t.Context(), schedule.With(schedule.Config{Store: store})(nil), client.Start{}), "handler")
	require.Error(t, schedule.With(schedule.Config{})(nil).Handle(t.Context(), client.NewDelivery("q", client.NewMessage(nil))))
}
