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
)

func TestAMessageWithoutAnAnswerHoldsUpNoOther(t *testing.T) {
	for _, stuck := range []int{1, 100} {
		t.Run(fmt.Sprint(stuck), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				silent := numbered("silent", stuck)
				b.verdict = withholding(silent...)
				s := startResender(b)
				held := sendAll(within(t, time.Hour), s, silent...)
				for _, id := range numbered("m", 50) {
					begin := time.Now()
					require.NoError(t, s.do(within(t, time.Minute), withID(id)))
					assert.Zero(t, time.Since(begin), id)
				}
				for _, a := range held {
					assert.Empty(t, a)
				}
				b.answer(-1, &amqp.StateReleased{})
				for _, a := range held {
					require.ErrorIs(t, <-a, ErrUnroutable)
				}
				require.NoError(t, s.close(within(t, time.Hour)))
			})
		})
	}
}

// What is sent again goes in the order of sending, however the answers to the rest
// have come.
func TestWhatIsSentAgainKeepsItsOrderWhenAnswersDoNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict = withhold
		s := startResender(b)
		ids := numbered("m", 60)
		answers := sendAll(within(t, time.Hour), s, ids...)
		time.Sleep(time.Second)
		third := func(id string) bool { return slices.Index(ids, id)%3 == 1 }
		b.answerOnly(third, &amqp.StateAccepted{})
		synctest.Wait()
		for i := 1; i < len(ids); i += 3 {
			require.NoError(t, <-answers[i])
		}
		b.accepting()
		b.kill(errFakeConn)
		var want []string
		for i, a := range answers {
			if i%3 != 1 {
				require.NoError(t, <-a)
				want = append(want, "send "+ids[i])
			}
		}
		assert.Equal(t, want, b.history("send")[len(ids):])
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

func TestMessageThatIsNotAnsweredGetsAnotherSession(t *testing.T) {
	const limit = 30 * time.Second
	// step returns a broker that answers "silent" on none but the given session; 0: never.
	begin := func(t *testing.T, answersOn int) *fakeBroker {
		b := newFakeBroker(t)
		b.overdue = limit
		b.verdict = func(_ string, m *amqp.Message) amqp.DeliveryState {
			opened := 0
			for _, e := range b.events {
				if e == "open session" {
					opened++
				}
			}
			if idOf(m) == "silent" && (answersOn == 0 || opened < answersOn) {
				return nil
			}
			return &amqp.StateAccepted{}
		}
		return b
	}

	t.Run("and is answered there", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			var told []stateEvent
			s := startSenderWith(b, senderConfig{resend: true, tell: func(e stateEvent) { told = append(told, e) }})
			start := time.Now()
			require.NoError(t, s.do(within(t, time.Hour), withID("silent")))
			took := time.Since(start)
			assert.GreaterOrEqual(t, took, limit)
			assert.LessOrEqual(t, took, limit+limit/4)
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, []string{"send silent", "send silent"}, b.history("send"))
			assert.Empty(t, b.history("give up"))
			var lost []stateEvent
			for _, e := range told {
				if e.Kind == eventLost {
					lost = append(lost, e)
				}
			}
			require.Len(t, lost, 1)
			require.ErrorIs(t, lost[0].Err, ErrConnectionLost)
			assert.ErrorContains(t, lost[0].Err, "has not answered a message for 30s")
			assert.Equal(t, 1, lost[0].Unsettled)
		})
	})
	t.Run("and then another connection", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 3)
			s := startResender(b)
			start := time.Now()
			require.NoError(t, s.do(within(t, time.Hour), withID("silent")))
			assert.LessOrEqual(t, time.Since(start), 3*limit)
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Len(t, b.history("send"), 3)
			assert.Len(t, b.history("give up"), 1)
		})
	})
	t.Run("but with NoResend it is unknown", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			s := startSender(b)
			err := s.do(within(t, time.Hour), withID("silent"))
			require.ErrorIs(t, err, ErrOutcomeUnknown)
			assert.ErrorContains(t, err, "has not answered")
			assert.False(t, SafeToRetry(err))
			require.NoError(t, s.do(within(t, time.Hour), withID("silent")), "the next session answers")
			require.NoError(t, s.close(within(t, time.Hour)))
		})
	})
	t.Run("though its caller has left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			s := startResender(b)
			for range 4 {
				require.ErrorIs(t, s.do(within(t, limit/4), withID("silent")), ErrOutcomeUnknown)
			}
			require.NoError(t, s.do(within(t, limit/2), withID("silent")), "on another session")
			require.NoError(t, s.close(within(t, time.Hour)))
		})
	})
	t.Run("unless the broker has an alarm", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 0)
			s := startResender(b)
			a := sendAll(within(t, 10*time.Hour), s, "silent")
			b.setAlarm(true)
			time.Sleep(time.Hour)
			assert.Len(t, b.history("open session"), 1)
			b.answer(-1, &amqp.StateAccepted{})
			require.NoError(t, <-a[0])
			b.setAlarm(false)
			require.NoError(t, s.close(within(t, time.Hour)))
		})
	})
	t.Run("also when the link takes no more", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := begin(t, 2)
			b.window = 3
			s := startResender(b)
			var answers []<-chan error
			for range 10 {
				answers = append(answers, sendAll(within(t, time.Hour), s, "silent")...)
			}
			for _, a := range answers {
				require.NoError(t, <-a)
			}
			require.NoError(t, s.close(within(t, time.Hour)))
		})
	})
}

// One queue without a leader must not cost the messages to others their session again
// and again, nor the connection.
func TestAQueueThatNeverAnswersIsNotForgottenButRests(t *testing.T) {
	const limit = 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.overdue = limit
		b.verdict = withholding("silent")
		s := startResender(b)
		silent := sendAll(within(t, time.Hour), s, "silent")
		for i := range 3600 / 2 {
			require.NoError(t, s.do(within(t, time.Minute), withID(fmt.Sprint(i))))
			time.Sleep(2 * time.Second)
		}
		require.ErrorIs(t, <-silent[0], ErrOutcomeUnknown)
		assert.Empty(t, b.history("give up"), "the connection works")
		// After 30 s, 1, 2, 4 and 8 minutes, and every 4 from then on.
		renewed := len(b.history("open session")) - 1
		assert.GreaterOrEqual(t, renewed, 10)
		assert.LessOrEqual(t, renewed, 18)
		for id, n := range b.stored {
			require.Equal(t, 1, n, id)
		}
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

// Those that the broker does answer are answered before the link is given up.
func TestGivingUpALinkLeavesTheAnsweredAlone(t *testing.T) {
	const limit = 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.overdue = limit
		b.verdict = withhold
		s := startSender(b) // so that what is cut off shows
		silent := sendAll(within(t, time.Hour), s, "silent")
		slow := func(id string) bool { return id != "silent" }
		results := make(chan error, 10_000)
		n := 0
		for end := time.Now().Add(2 * limit); time.Now().Before(end); n++ {
			id := fmt.Sprint("m", n)
			go func() { results <- s.do(t.Context(), withID(id)) }()
			time.Sleep(20 * time.Millisecond)
			b.answerOnly(slow, &amqp.StateAccepted{})
		}
		require.ErrorIs(t, <-silent[0], ErrOutcomeUnknown)
		b.accepting()
		for range n {
			require.NoError(t, <-results)
		}
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Len(t, b.history("open session"), 2)
	})
}

// A broker that ends its connections as soon as there is a link isn't flooded with them.
func TestLinkThatEndsEveryConnectionRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		stop := time.Now().Add(time.Hour)
		for time.Now().Before(stop) {
			time.Sleep(50 * time.Millisecond)
			b.kill(errFakeConn)
		}
		assert.Less(t, len(b.history("open session")), 1500)
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

func TestARefusedLinkHasSentNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		refusal := &amqp.Error{Condition: amqp.ErrCondPreconditionFailed, Description: "no"}
		b.verdict = withhold
		b.hook = func(step string) error {
			if step == "attach sender /queues/q" && len(b.history("link lost")) > 0 {
				return refusal
			}
			return nil
		}
		s := startResender(b)
		sent := sendAll(within(t, time.Hour), s, "sent")
		b.kill(errFakeLink)
		synctest.Wait()
		queued := s.do(within(t, time.Hour), withID("queued"))
		require.ErrorIs(t, queued, ErrRefused)
		assert.True(t, SafeToRetry(queued), "it was never sent")
		err := <-sent[0]
		require.ErrorIs(t, err, ErrOutcomeUnknown)
		require.ErrorIs(t, err, ErrRefused)
		assert.False(t, SafeToRetry(err))
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

func TestLinkThatWasLostWithItsConnectionBeginsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		for range 30 {
			time.Sleep(3 * time.Second)
			b.kill(errFakeConn)
			begin := time.Now()
			require.NoError(t, s.do(within(t, time.Minute), withID("p")))
			assert.Zero(t, time.Since(begin))
		}
		b.kill(errFakeLink) // without its connection
		begin := time.Now()
		require.NoError(t, s.do(within(t, time.Minute), withID("p")))
		assert.Positive(t, time.Since(begin))
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

// A message that a link never sent, for it was waiting for the window, isn't in doubt when the
// link is replaced since another has no answer. It is sent on the next, even with NoResend.
func TestGivingUpALinkLeavesTheUnsentCertain(t *testing.T) {
	const limit = 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.overdue, b.window = limit, 1
		b.verdict = withholding("silent")
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "silent", "waits")
		require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
		require.NoError(t, <-answers[1])
		assert.Equal(t, []string{"send silent", "send waits"}, b.history("send"))
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}
