package client

import (
	"context"
	"errors"
	"fmt"
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
)

// fakeOriginal is the delivery of a forward: it keeps what it is told.
type fakeOriginal struct {
	mu       sync.Mutex
	room     bool // it may wait aside
	goesBack bool // else it returns to its queue, where it may
	reported []error
	results  []error
	returned bool
}

func (o *fakeOriginal) report(err error, _ time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reported = append(o.reported, err)
}

func (o *fakeOriginal) setAside(mayReturn bool) (aside, returned bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.room {
		return true, false
	}
	o.returned = o.goesBack && mayReturn
	return false, o.returned
}

func (o *fakeOriginal) done(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.results = append(o.results, err)
}

// got is how the forward ended: nothing yet, or one result.
func (o *fakeOriginal) got() []error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.results)
}

// testForwarder is a forwarder under test, and what it was given.
type testForwarder struct {
	*forwarder
	t         *testing.T
	lost      chan struct{} // closed when the originals can't be settled any more
	originals map[string]*fakeOriginal
}

func startForwarder(t *testing.T, b *fakeBroker) *testForwarder {
	w := newForwarder(b, senderConfig{depth: 100, pause: testPause.Pause, overdue: forEver, copies: true})
	return &testForwarder{w, t, make(chan struct{}), map[string]*fakeOriginal{}}
}

// copy sends a message with this id to an address, within a minute.
func (w *testForwarder) copy(target, id string) *fakeOriginal {
	return w.copyFor(target, id, &fakeOriginal{room: true})
}

func (w *testForwarder) copyFor(target, id string, o *fakeOriginal) *fakeOriginal {
	w.originals[id] = o
	w.send(&forward{target: target, msg: withID(id), patience: time.Minute, abandoned: w.lost, original: o})
	return o
}

// end closes the forwarder, which reports nothing then.
func (w *testForwarder) end() {
	w.close()
	for id, o := range w.originals {
		assert.LessOrEqual(w.t, len(o.got()), 1, id)
	}
}

func TestForwarderReportsEachConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict = withhold
		w := startForwarder(t, b)
		for i, id := range numbered("m", 20) {
			w.copy(fmt.Sprint("/queues/", i%2), id)
		}
		synctest.Wait()
		assert.Len(t, b.history("send"), 20)
		for id, o := range w.originals {
			assert.Empty(t, o.got(), id)
		}
		b.answer(-1, &amqp.StateAccepted{})
		synctest.Wait()
		for id, o := range w.originals {
			assert.Equal(t, []error{nil}, o.got(), id)
			assert.Empty(t, o.reported, id)
		}
		w.end()
		assert.Len(t, b.history("open session"), 1)
		assert.Len(t, b.history("attach sender"), 2)
		assert.Empty(t, b.sessions)
	})
}

// One message after the other is tried while an address refuses all, and all that waited are
// sent once it accepts one.
func TestForwarderTriesAnAddressThatRefusesAllNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		b := newFakeBroker(t)
		var up atomic.Bool
		b.verdict = func(target string, _ *amqp.Message) amqp.DeliveryState {
			if target == "/queues/down" && !up.Load() {
				return &amqp.StateReleased{}
			}
			return &amqp.StateAccepted{}
		}
		w := startForwarder(t, b)
		for _, id := range numbered("down", 50) {
			w.copy("/queues/down", id)
		}
		time.Sleep(limit / 2)
		w.copy("/queues/up", "other")
		synctest.Wait()
		assert.Equal(t, []error{nil}, w.originals["other"].got(), "another address isn't affected")
		sent := len(b.history("send down"))
		assert.Less(t, sent, 75)
		time.Sleep(limit / 4)
		synctest.Wait()
		assert.Greater(t, len(b.history("send down")), sent, "it is tried again")
		up.Store(true)
		time.Sleep(limit / 5)
		synctest.Wait()
		for _, id := range numbered("down", 50) {
			assert.Equal(t, []error{nil}, w.originals[id].got(), id)
			assert.Equal(t, 1, b.stored[id], id)
		}
		w.end()
	})
}

func TestForwarderGivesUpAfterItsPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict = func(string, *amqp.Message) amqp.DeliveryState { return &amqp.StateReleased{} }
		w := startForwarder(t, b)
		kept := w.copy("/queues/q", "kept")
		back := w.copyFor("/queues/q", "back", &fakeOriginal{goesBack: true})
		synctest.Wait()
		assert.True(t, back.returned, "it needn't wait here")
		time.Sleep(50 * time.Second)
		synctest.Wait()
		assert.Empty(t, kept.got())
		time.Sleep(15 * time.Second)
		synctest.Wait()
		require.Len(t, kept.got(), 1)
		require.ErrorIs(t, kept.got()[0], ErrUnroutable)
		require.Len(t, kept.reported, 1, "the first failure")
		assert.Empty(t, back.got(), "it is nobody's any more")
		assert.Len(t, b.history("send back"), 1)
		w.end()
	})
}

func TestForwarderReportsAtOnceWhatNoAttemptCanSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.hook = func(step string) error {
			if step == "send large" {
				return unsent{err: &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded}}
			}
			return nil
		}
		w := startForwarder(t, b)
		large, small := w.copy("/queues/q", "large"), w.copy("/queues/q", "small")
		synctest.Wait()
		require.Len(t, large.got(), 1)
		require.ErrorIs(t, large.got()[0], ErrTooLarge)
		assert.Equal(t, []error{nil}, small.got())
		w.end()
	})
}

// A copy of a delivery that can't be settled any more would only be a duplicate.
func TestForwarderDropsWhatIsAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.setAlarm(true)
		w := startForwarder(t, b)
		for _, id := range numbered("m", 10) {
			w.copy("/queues/q", id)
		}
		time.Sleep(time.Second)
		close(w.lost)
		b.setAlarm(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Empty(t, b.history("send"))
		for id, o := range w.originals {
			assert.Empty(t, o.got(), id)
		}
		w.end()
	})
}

func TestForwarderKeepsABoundedNumberOfLinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		var open, most atomic.Int32
		b.hook = func(step string) error {
			switch {
			case strings.HasPrefix(step, "attach sender"):
				most.Store(max(most.Load(), open.Add(1)))
			case strings.HasPrefix(step, "close sender"):
				open.Add(-1)
			}
			return nil
		}
		w := startForwarder(t, b)
		for _, id := range numbered("m", 3*maxForwardLinks) {
			w.copy("/queues/"+id, id)
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		for id, o := range w.originals {
			assert.Equal(t, []error{nil}, o.got(), id)
		}
		w.end()
		assert.LessOrEqual(t, most.Load(), int32(maxForwardLinks+1))
		assert.Equal(t, 1, b.mostSessions)
	})
}

func TestForwarderChecksAnAddress(t *testing.T) {
	for name, refusal := range map[string]error{"accepted": nil, "refused": errMissing} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.hook = func(step string) error {
					if strings.HasPrefix(step, "attach sender") {
						return refusal
					}
					return nil
				}
				w := startForwarder(t, b)
				err := w.check(within(t, time.Minute), "/queues/q")
				assert.Equal(t, refusal != nil, errors.Is(err, ErrNotFound), err)
				w.end()
				synctest.Wait()
				assert.Empty(t, b.sessions)
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.hook = func(string) error { return errFakeConn }
		w := startForwarder(t, b)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, w.check(ctx, "/queues/q"), "nothing is known of it")
		w.end()
	})
}
