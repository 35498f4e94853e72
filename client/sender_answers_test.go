package client

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

func TestAMessageWithoutAnAnswerBlocksNoOther(t *testing.T) {
	for _, stuck := range []int{1, 100} {
		t.Run(fmt.Sprint(stuck), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				silent := linktest.Numbered("silent", stuck)
				b.Verdict = linktest.Withholding(silent...)
				s := startResender(b)
				held := sendAll(within(t, time.Hour), s, silent...)
				for _, id := range linktest.Numbered("m", 50) {
					begin := time.Now()
					require.NoError(t, s.Do(within(t, time.Minute), linktest.WithID(id)))
					assert.Zero(t, time.Since(begin), id)
				}
				for _, a := range held {
					assert.Empty(t, a)
				}
				b.Answer(-1, &amqp.StateReleased{})
				for _, a := range held {
					require.ErrorIs(t, <-a, failure.ErrUnroutable)
				}
				require.NoError(t, s.Close(within(t, time.Hour)))
			})
		})
	}
}

// What is sent again goes in the order of sending, however the answers to the rest
// have come.
func TestWhatIsSentAgainKeepsItsOrderWhenAnswersDoNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		s := startResender(b)
		ids := linktest.Numbered("m", 60)
		answers := sendAll(within(t, time.Hour), s, ids...)
		time.Sleep(time.Second)
		third := func(id string) bool { return slices.Index(ids, id)%3 == 1 }
		b.AnswerOnly(third, &amqp.StateAccepted{})
		synctest.Wait()
		for i := 1; i < len(ids); i += 3 {
			require.NoError(t, <-answers[i])
		}
		b.Accepting()
		b.Kill(linktest.ErrFakeConn)
		var want []string
		for i, a := range answers {
			if i%3 != 1 {
				require.NoError(t, <-a)
				want = append(want, "send "+ids[i])
			}
		}
		assert.Equal(t, want, b.History("send")[len(ids):])
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

func TestMessageThatIsNotAnsweredGetsAnotherSession(t *testing.T) {
	const limit = 30 * time.Second
	// step returns a broker that answers "silent" on none but the given session; 0: never.
	begin := func(t *testing.T, answersOn int) *linktest.FakeBroker {
		b := linktest.NewFakeBroker(t)
		b.Overdue = limit
		b.Verdict = func(_ string, m *amqp.Message) amqp.DeliveryState {
			opened := 0
			for _, e := range b.Events {
				if e == "open session" {
					opened++
				}
			}
			if linktest.IDOf(m) == "silent" && (answersOn == 0 || opened < answersOn) {
				return nil
			}
			return &amqp.StateAccepted{}
		}
		return b
	}

	t.Run("and is answered there", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			var notified []Event
			s := startSenderWith(b, senderConfig{Resend: true, Notify: func(e Event) { notified = append(notified, e) }})
			start := time.Now()
			require.NoError(t, s.Do(within(t, time.Hour), linktest.WithID("silent")))
			took := time.Since(start)
			assert.GreaterOrEqual(t, took, limit)
			assert.LessOrEqual(t, took, limit+limit/4)
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, []string{"send silent", "send silent"}, b.History("send"))
			assert.Empty(t, b.History("give up"))
			var lost []Event
			for _, e := range notified {
				if e.Kind == EventLost {
					lost = append(lost, e)
				}
			}
			require.Len(t, lost, 1)
			require.ErrorIs(t, lost[0].Err, failure.ErrConnectionLost)
			assert.ErrorContains(t, lost[0].Err, "has not answered a message for 30s")
			assert.Equal(t, 1, lost[0].Unsettled)
		})
	})
	t.Run("and then another connection", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 3)
			s := startResender(b)
			start := time.Now()
			require.NoError(t, s.Do(within(t, time.Hour), linktest.WithID("silent")))
			assert.LessOrEqual(t, time.Since(start), 3*limit)
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Len(t, b.History("send"), 3)
			assert.Len(t, b.History("give up"), 1)
		})
	})
	t.Run("but with NoResend it is unknown", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			s := startSender(b)
			err := s.Do(within(t, time.Hour), linktest.WithID("silent"))
			require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
			assert.ErrorContains(t, err, "has not answered")
			assert.False(t, failure.SafeToRetry(err))
			require.NoError(t, s.Do(within(t, time.Hour), linktest.WithID("silent")), "the next session answers")
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	})
	t.Run("though its caller has left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			s := startResender(b)
			for range 4 {
				require.ErrorIs(t, s.Do(within(t, limit/4), linktest.WithID("silent")), failure.ErrOutcomeUnknown)
			}
			require.NoError(t, s.Do(within(t, limit/2), linktest.WithID("silent")), "on another session")
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	})
	t.Run("unless the broker has an alarm", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 0)
			s := startResender(b)
			a := sendAll(within(t, 10*time.Hour), s, "silent")
			b.SetAlarm(true)
			time.Sleep(time.Hour)
			assert.Len(t, b.History("open session"), 1)
			b.Answer(-1, &amqp.StateAccepted{})
			require.NoError(t, <-a[0])
			b.SetAlarm(false)
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	})
	t.Run("also when the link takes no more", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			b.Window = 3
			s := startResender(b)
			var answers []<-chan error
			for range 10 {
				answers = append(answers, sendAll(within(t, time.Hour), s, "silent")...)
			}
			for _, a := range answers {
				require.NoError(t, <-a)
			}
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	})
}

// One queue without a leader must not cost the messages to others their session again
// and again, nor the connection.
func TestAQueueThatNeverAnswersIsNotForgottenButRests(t *testing.T) {
	const limit = 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Overdue = limit
		b.Verdict = linktest.Withholding("silent")
		s := startResender(b)
		silent := sendAll(within(t, time.Hour), s, "silent")
		for i := range 3600 / 2 {
			require.NoError(t, s.Do(within(t, time.Minute), linktest.WithID(fmt.Sprint(i))))
			time.Sleep(2 * time.Second)
		}
		require.ErrorIs(t, <-silent[0], failure.ErrOutcomeUnknown)
		assert.Empty(t, b.History("give up"), "the connection works")
		// After 30 s, 1, 2, 4 and 8 minutes, and every 4 from then on.
		renewed := len(b.History("open session")) - 1
		assert.GreaterOrEqual(t, renewed, 10)
		assert.LessOrEqual(t, renewed, 18)
		for id, n := range b.Stored {
			require.Equal(t, 1, n, id)
		}
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

// Those that the broker does answer are answered before the link is given up.
func TestGivingUpALinkLeavesTheAnsweredAlone(t *testing.T) {
	const limit = 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Overdue = limit
		b.Verdict = linktest.Withhold
		s := startSender(b) // so that what is cut off shows
		silent := sendAll(within(t, time.Hour), s, "silent")
		slow := func(id string) bool { return id != "silent" }
		results := make(chan error, 10_000)
		n := 0
		for end := time.Now().Add(2 * limit); time.Now().Before(end); n++ {
			id := fmt.Sprint("m", n)
			go func() { results <- s.Do(t.Context(), linktest.WithID(id)) }()
			time.Sleep(20 * time.Millisecond)
			b.AnswerOnly(slow, &amqp.StateAccepted{})
		}
		require.ErrorIs(t, <-silent[0], failure.ErrOutcomeUnknown)
		b.Accepting()
		for range n {
			require.NoError(t, <-results)
		}
		require.NoError(t, s.Close(within(t, time.Hour)))
		assert.Len(t, b.History("open session"), 2)
	})
}

// A broker that ends its connections as soon as there is a link isn't flooded with them.
func TestLinkThatEndsEveryConnectionRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		s := startResender(b)
		stop := time.Now().Add(time.Hour)
		for time.Now().Before(stop) {
			time.Sleep(50 * time.Millisecond)
			b.Kill(linktest.ErrFakeConn)
		}
		assert.Less(t, len(b.History("open session")), 1500)
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

func TestARefusedLinkHasSentNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		refusal := &amqp.Error{Condition: amqp.ErrCondPreconditionFailed, Description: "no"}
		b.Verdict = linktest.Withhold
		b.Hook = func(step string) error {
			if step == "attach sender /queues/q" && len(b.History("link lost")) > 0 {
				return refusal
			}
			return nil
		}
		s := startResender(b)
		sent := sendAll(within(t, time.Hour), s, "sent")
		b.Kill(linktest.ErrFakeLink)
		synctest.Wait()
		queued := s.Do(within(t, time.Hour), linktest.WithID("queued"))
		require.ErrorIs(t, queued, failure.ErrRefused)
		assert.True(t, failure.SafeToRetry(queued), "it was never sent")
		err := <-sent[0]
		require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
		require.ErrorIs(t, err, failure.ErrRefused)
		assert.False(t, failure.SafeToRetry(err))
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

func TestLinkThatWasLostWithItsConnectionBeginsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		s := startResender(b)
		for range 30 {
			time.Sleep(3 * time.Second)
			b.Kill(linktest.ErrFakeConn)
			begin := time.Now()
			require.NoError(t, s.Do(within(t, time.Minute), linktest.WithID("p")))
			assert.Zero(t, time.Since(begin))
		}
		b.Kill(linktest.ErrFakeLink) // without its connection
		begin := time.Now()
		require.NoError(t, s.Do(within(t, time.Minute), linktest.WithID("p")))
		assert.Positive(t, time.Since(begin))
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

// A message that a link never sent, for it was waiting for the window, isn't in doubt when the
// link is replaced since another has no answer. It is sent on the next, even with NoResend.
func TestGivingUpALinkLeavesTheUnsentCertain(t *testing.T) {
	const limit = 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Overdue, b.Window = limit, 1
		b.Verdict = linktest.Withholding("silent")
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "silent", "waits")
		require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
		require.NoError(t, <-answers[1])
		assert.Equal(t, []string{"send silent", "send waits"}, b.History("send"))
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}
