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

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

func TestUnansweredMessagesAreSentAgainFirstAndInOrder(t *testing.T) {
	for _, reason := range []error{linktest.ErrFakeLink, linktest.ErrFakeConn} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict, b.Window = linktest.Withhold, 5
			s := startResender(b)
			ids := linktest.Numbered("m", 12)
			answers := sendAll(within(t, time.Hour), s, ids...)
			require.Len(t, b.History("send"), 5)
			b.Answer(2, &amqp.StateAccepted{}) // m5 and m6 are sent
			synctest.Wait()

			b.Accepting()
			b.Kill(reason)
			for _, a := range answers {
				require.NoError(t, <-a)
			}
			var want []string
			for _, id := range slices.Concat(ids[:7], ids[2:]) { // m7 was being written
				want = append(want, "send "+id)
			}
			assert.Equal(t, want, b.History("send"))
			for _, id := range ids {
				assert.Equal(t, 1, b.Stored[id])
			}
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, 1, b.MostSessions)
		})
	}
}

// A message whose caller has been told that its outcome is unknown isn't sent again
// behind its back.
func TestWhatItsCallerGaveUpIsNotSentAgain(t *testing.T) {
	t.Run("after the link was lost", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict, b.Window = linktest.Withhold, 2
			var up atomic.Bool
			b.Hook = func(step string) error {
				if step == "open session" && len(b.History("link lost")) > 0 && !up.Load() {
					return linktest.ErrFakeConn
				}
				return nil
			}
			s := startResender(b)
			kept := sendAll(within(t, time.Hour), s, "kept")
			gone := sendAll(within(t, time.Minute), s, "sent", "written", "queued")
			b.Kill(linktest.ErrFakeConn)
			begin := time.Now()
			for i, kind := range []error{failure.ErrOutcomeUnknown, failure.ErrNotSent, failure.ErrNotSent} {
				err := <-gone[i]
				require.ErrorIs(t, err, kind, "%d", i)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				assert.Equal(t, kind == failure.ErrNotSent, failure.SafeToRetry(err))
			}
			assert.Equal(t, time.Minute, time.Since(begin))
			assert.Empty(t, kept[0], "the others wait on")
			b.Accepting()
			up.Store(true)
			require.NoError(t, <-kept[0])
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, []string{"send kept", "send sent", "send kept"}, b.History("send"))
		})
	})
	t.Run("before the link was lost", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict = linktest.Withhold
			s := startResender(b)
			kept := sendAll(within(t, time.Hour), s, "kept")
			gone := sendAll(within(t, time.Minute), s, "gone")
			require.ErrorIs(t, <-gone[0], failure.ErrOutcomeUnknown)
			b.Accepting()
			b.Kill(linktest.ErrFakeLink)
			require.NoError(t, <-kept[0])
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, []string{"send kept", "send gone", "send kept"}, b.History("send"))
		})
	})
}

func TestUnansweredMessagesAreToldWhyTheNextLinkIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict, b.Window = linktest.Withhold, 2
		b.Hook = func(step string) error {
			if strings.HasPrefix(step, "attach") && len(b.History("link lost")) > 0 {
				return linktest.ErrMissing
			}
			return nil
		}
		s := startResender(b)
		answers := sendAll(within(t, time.Hour), s, "sent", "sent too", "waits", "queued")
		b.Kill(linktest.ErrFakeLink)
		for _, a := range answers[:2] {
			err := <-a
			require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
			require.ErrorIs(t, err, failure.ErrNotFound)
			assert.ErrorContains(t, err, "no queue 'q'")
			assert.False(t, failure.SafeToRetry(err))
		}
		for _, a := range answers[2:] {
			err := <-a
			require.ErrorIs(t, err, failure.ErrNotFound)
			assert.NotErrorIs(t, err, failure.ErrOutcomeUnknown)
			assert.True(t, failure.SafeToRetry(err))
		}
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

// What makes the broker end the link isn't sent without end, and costs the innocent nothing.
func TestMessageThatEndsEveryLinkIsSingledOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict, b.Window = linktest.Withhold, 12
		b.Hook = func(step string) error {
			if step == "send m4" {
				b.Kill(&amqp.SessionError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondInternalError, Description: "crashed"}})
			}
			return nil
		}
		s := startResender(b)
		before := sendAll(within(t, time.Hour), s, linktest.Numbered("m", 4)...)
		b.Accepting()
		answers := append(before, sendAll(within(t, time.Hour), s, "m4", "m5", "m6")...)
		for i, a := range answers {
			err := <-a
			if i == 4 {
				require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
				assert.ErrorContains(t, err, "crashed")
				continue
			}
			require.NoError(t, err, "m%d", i)
		}
		assert.Len(t, b.History("link lost"), 1+maxBlamed)
		require.NoError(t, s.Close(within(t, time.Hour)))
		assert.Len(t, b.Stored, 6)
	})
}

// What callers take back before it is sent changes nothing in the order of the others.
func TestOrderIsKeptWhenCallersHaveTakenMessagesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict, b.Window = linktest.Withhold, 1
		s := startResender(b)
		patient := within(t, time.Hour)
		answers := sendAll(patient, s, "sent")
		for _, a := range sendAll(within(t, time.Second), s, linktest.Numbered("hasty", 5)...) {
			defer func() { require.ErrorIs(t, <-a, failure.ErrNotSent) }()
		}
		before, after := linktest.Numbered("before", 20), linktest.Numbered("after", 20)
		answers = append(answers, sendAll(patient, s, before...)...)
		time.Sleep(2 * time.Second)
		answers = append(answers, sendAll(patient, s, after...)...)
		b.Accepting()
		b.Kill(linktest.ErrFakeConn)
		for _, a := range answers {
			require.NoError(t, <-a)
		}
		want := []string{"send sent", "send sent"}
		for _, id := range slices.Concat(before, after) {
			want = append(want, "send "+id)
		}
		assert.Equal(t, want, b.History("send"))
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}
