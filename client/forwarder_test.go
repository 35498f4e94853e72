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

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// fakeOriginal is the delivery of a forward: it records its calls.
type fakeOriginal struct {
	mu       sync.Mutex
	room     bool // it may wait aside
	goesBack bool // else it returns to its queue, where it may
	reported []error
	results  []error
	returned bool
}

func (o *fakeOriginal) Report(err error, _ time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reported = append(o.reported, err)
}

func (o *fakeOriginal) SetAside(mayReturn bool) (aside, returned bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.room {
		return true, false
	}
	o.returned = o.goesBack && mayReturn
	return false, o.returned
}

func (o *fakeOriginal) Done(err error) {
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

func startForwarder(t *testing.T, b *linktest.FakeBroker) *testForwarder {
	w := newForwarder(b, senderConfig{Depth: 100, Pause: testPause.Pause, Overdue: linktest.ForEver, Copies: true})
	return &testForwarder{w, t, make(chan struct{}), map[string]*fakeOriginal{}}
}

// copy sends a message with this id to an address, within a minute.
func (w *testForwarder) copy(target, id string) *fakeOriginal {
	return w.copyFor(target, id, &fakeOriginal{room: true})
}

func (w *testForwarder) copyFor(target, id string, o *fakeOriginal) *fakeOriginal {
	w.originals[id] = o
	w.Send(&pendingForward{Target: target, Msg: linktest.WithID(id), Patience: time.Minute, Abandoned: w.lost, forwardOriginal: o})
	return o
}

// end closes the forwarder, which reports nothing then.
func (w *testForwarder) end() {
	w.Close()
	for id, o := range w.originals {
		assert.LessOrEqual(w.t, len(o.got()), 1, id)
	}
}

func TestForwarderReportsEachConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		w := startForwarder(t, b)
		for i, id := range linktest.Numbered("m", 20) {
			w.copy(fmt.Sprint("/queues/", i%2), id)
		}
		synctest.Wait()
		assert.Len(t, b.History("send"), 20)
		for id, o := range w.originals {
			assert.Empty(t, o.got(), id)
		}
		b.Answer(-1, &amqp.StateAccepted{})
		synctest.Wait()
		for id, o := range w.originals {
			assert.Equal(t, []error{nil}, o.got(), id)
			assert.Empty(t, o.reported, id)
		}
		w.end()
		assert.Len(t, b.History("open session"), 1)
		assert.Len(t, b.History("attach sender"), 2)
		assert.Empty(t, b.Sessions)
	})
}

// One message after the other is tried while an address refuses all, and all that waited are
// sent once it accepts one.
func TestForwarderTriesAnAddressThatRefusesAllNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		b := linktest.NewFakeBroker(t)
		var up atomic.Bool
		b.Verdict = func(target string, _ *amqp.Message) amqp.DeliveryState {
			if target == "/queues/down" && !up.Load() {
				return &amqp.StateReleased{}
			}
			return &amqp.StateAccepted{}
		}
		w := startForwarder(t, b)
		for _, id := range linktest.Numbered("down", 50) {
			w.copy("/queues/down", id)
		}
		time.Sleep(limit / 2)
		w.copy("/queues/up", "other")
		synctest.Wait()
		assert.Equal(t, []error{nil}, w.originals["other"].got(), "another address isn't affected")
		sent := len(b.History("send down"))
		assert.Less(t, sent, 75)
		time.Sleep(limit / 4)
		synctest.Wait()
		assert.Greater(t, len(b.History("send down")), sent, "it is tried again")
		up.Store(true)
		time.Sleep(limit / 5)
		synctest.Wait()
		for _, id := range linktest.Numbered("down", 50) {
			assert.Equal(t, []error{nil}, w.originals[id].got(), id)
			assert.Equal(t, 1, b.Stored[id], id)
		}
		w.end()
	})
}

func TestForwarderGivesUpAfterItsPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = func(string, *amqp.Message) amqp.DeliveryState { return &amqp.StateReleased{} }
		w := startForwarder(t, b)
		kept := w.copy("/queues/q", "kept")
		back := w.copyFor("/queues/q", "back", &fakeOriginal{goesBack: true})
		synctest.Wait()
		assert.True(t, back.returned, "it doesn't have to wait here")
		time.Sleep(50 * time.Second)
		synctest.Wait()
		assert.Empty(t, kept.got())
		time.Sleep(15 * time.Second)
		synctest.Wait()
		require.Len(t, kept.got(), 1)
		require.ErrorIs(t, kept.got()[0], failure.ErrUnroutable)
		require.Len(t, kept.reported, 1, "the first failure")
		assert.Empty(t, back.got(), "it is nobody's any more")
		assert.Len(t, b.History("send back"), 1)
		w.end()
	})
}

func TestForwarderReportsAtOnceWhatNoAttemptCanSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Hook = func(step string) error {
			if step == "send large" {
				return linktest.Unsent{Err: &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded}}
			}
			return nil
		}
		w := startForwarder(t, b)
		large, small := w.copy("/queues/q", "large"), w.copy("/queues/q", "small")
		synctest.Wait()
		require.Len(t, large.got(), 1)
		require.ErrorIs(t, large.got()[0], failure.ErrTooLarge)
		assert.Equal(t, []error{nil}, small.got())
		w.end()
	})
}

// A copy of a delivery that can't be settled any more would only be a duplicate.
func TestForwarderDropsWhatIsAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.SetAlarm(true)
		w := startForwarder(t, b)
		for _, id := range linktest.Numbered("m", 10) {
			w.copy("/queues/q", id)
		}
		time.Sleep(time.Second)
		close(w.lost)
		b.SetAlarm(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Empty(t, b.History("send"))
		for id, o := range w.originals {
			assert.Empty(t, o.got(), id)
		}
		w.end()
	})
}

func TestForwarderKeepsABoundedNumberOfLinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		var open, most atomic.Int32
		b.Hook = func(step string) error {
			switch {
			case strings.HasPrefix(step, "attach sender"):
				most.Store(max(most.Load(), open.Add(1)))
			case strings.HasPrefix(step, "close sender"):
				open.Add(-1)
			}
			return nil
		}
		w := startForwarder(t, b)
		for _, id := range linktest.Numbered("m", 3*maxForwardLinks) {
			w.copy("/queues/"+id, id)
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		for id, o := range w.originals {
			assert.Equal(t, []error{nil}, o.got(), id)
		}
		w.end()
		assert.LessOrEqual(t, most.Load(), int32(maxForwardLinks+1))
		assert.Equal(t, 1, b.MostSessions)
	})
}

func TestForwarderChecksAnAddress(t *testing.T) {
	for name, refusal := range map[string]error{"accepted": nil, "refused": linktest.ErrMissing} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Hook = func(step string) error {
					if strings.HasPrefix(step, "attach sender") {
						return refusal
					}
					return nil
				}
				w := startForwarder(t, b)
				err := w.Check(within(t, time.Minute), "/queues/q")
				assert.Equal(t, refusal != nil, errors.Is(err, failure.ErrNotFound), err)
				w.end()
				synctest.Wait()
				assert.Empty(t, b.Sessions)
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Hook = func(string) error { return linktest.ErrFakeConn }
		w := startForwarder(t, b)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, w.Check(ctx, "/queues/q"), "nothing is known of it")
		w.end()
	})
}
