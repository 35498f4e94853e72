package client

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestUnansweredMessagesAreSentAgainFirstAndInOrder(t *testing.T) {
	for _, reason := range []error{errFakeLink, errFakeConn} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.verdict, b.window = withhold, 5
			s := startResender(b)
			ids := numbered("m", 12)
			answers := sendAll(within(t, time.Hour), s, ids...)
			require.Len(t, b.history("send"), 5)
			b.answer(2, &amqp.StateAccepted{}) // m5 and m6 are sent
			synctest.Wait()

			b.accepting()
			b.kill(reason)
			for _, a := range answers {
				require.NoError(t, <-a)
			}
			var want []string
			for _, id := range slices.Concat(ids[:7], ids[2:]) { // m7 was being written
				want = append(want, "send "+id)
			}
			assert.Equal(t, want, b.history("send"))
			for _, id := range ids {
				assert.Equal(t, 1, b.stored[id])
			}
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, 1, b.mostSessions)
		})
	}
}

// A message whose caller has been told that its outcome is unknown isn't sent again
// behind its back.
func TestWhatItsCallerGaveUpIsNotSentAgain(t *testing.T) {
	t.Run("after the link was lost", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.verdict, b.window = withhold, 2
			var up atomic.Bool
			b.hook = func(step string) error {
				if step == "open session" && len(b.history("link lost")) > 0 && !up.Load() {
					return errFakeConn
				}
				return nil
			}
			s := startResender(b)
			kept := sendAll(within(t, time.Hour), s, "kept")
			gone := sendAll(within(t, time.Minute), s, "sent", "written", "queued")
			b.kill(errFakeConn)
			begin := time.Now()
			for i, kind := range []error{ErrOutcomeUnknown, ErrNotSent, ErrNotSent} {
				err := <-gone[i]
				require.ErrorIs(t, err, kind, "%d", i)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				assert.Equal(t, kind == ErrNotSent, SafeToRetry(err))
			}
			assert.Equal(t, time.Minute, time.Since(begin))
			assert.Empty(t, kept[0], "the others wait on")
			b.accepting()
			up.Store(true)
			require.NoError(t, <-kept[0])
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, []string{"send kept", "send sent", "send kept"}, b.history("send"))
		})
	})
	t.Run("before the link was lost", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.verdict = withhold
			s := startResender(b)
			kept := sendAll(within(t, time.Hour), s, "kept")
			gone := sendAll(within(t, time.Minute), s, "gone")
			require.ErrorIs(t, <-gone[0], ErrOutcomeUnknown)
			b.accepting()
			b.kill(errFakeLink)
			require.NoError(t, <-kept[0])
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, []string{"send kept", "send gone", "send kept"}, b.history("send"))
		})
	})
}

func TestUnansweredMessagesAreToldWhyTheNextLinkIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict, b.window = withhold, 2
		b.hook = func(step string) error {
			if strings.HasPrefix(step, "attach") && len(b.history("link lost")) > 0 {
				return errMissing
			}
			return nil
		}
		s := startResender(b)
		answers := sendAll(within(t, time.Hour), s, "sent", "sent too", "waits", "queued")
		b.kill(errFakeLink)
		for _, a := range answers[:2] {
			err := <-a
			require.ErrorIs(t, err, ErrOutcomeUnknown)
			require.ErrorIs(t, err, ErrNotFound)
			assert.ErrorContains(t, err, "no queue 'q'")
			assert.False(t, SafeToRetry(err))
		}
		for _, a := range answers[2:] {
			err := <-a
			require.ErrorIs(t, err, ErrNotFound)
			assert.NotErrorIs(t, err, ErrOutcomeUnknown)
			assert.True(t, SafeToRetry(err))
		}
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

// What makes the broker end the link isn't sent for ever, and costs the innocent
// nothing.
func TestMessageThatEndsEveryLinkIsSingledOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict, b.window = withhold, 12
		b.hook = func(step string) error {
			if step == "send m4" {
				b.kill(&amqp.SessionError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondInternalError, Description: "crashed"}})
			}
			return nil
		}
		s := startResender(b)
		before := sendAll(within(t, time.Hour), s, numbered("m", 4)...)
		b.accepting()
		answers := append(before, sendAll(within(t, time.Hour), s, "m4", "m5", "m6")...)
		for i, a := range answers {
			err := <-a
			if i == 4 {
				require.ErrorIs(t, err, ErrOutcomeUnknown)
				assert.ErrorContains(t, err, "crashed")
				continue
			}
			require.NoError(t, err, "m%d", i)
		}
		assert.Len(t, b.history("link lost"), 1+maxBlamed)
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Len(t, b.stored, 6)
	})
}

// What callers take back before it is sent changes nothing in the order of the others.
func TestOrderIsKeptWhenCallersHaveTakenMessagesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict, b.window = withhold, 1
		s := startResender(b)
		patient := within(t, time.Hour)
		answers := sendAll(patient, s, "sent")
		for _, a := range sendAll(within(t, time.Second), s, numbered("hasty", 5)...) {
			defer func() { require.ErrorIs(t, <-a, ErrNotSent) }()
		}
		before, after := numbered("before", 20), numbered("after", 20)
		answers = append(answers, sendAll(patient, s, before...)...)
		time.Sleep(2 * time.Second)
		answers = append(answers, sendAll(patient, s, after...)...)
		b.accepting()
		b.kill(errFakeConn)
		for _, a := range answers {
			require.NoError(t, <-a)
		}
		want := []string{"send sent", "send sent"}
		for _, id := range slices.Concat(before, after) {
			want = append(want, "send "+id)
		}
		assert.Equal(t, want, b.history("send"))
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}
