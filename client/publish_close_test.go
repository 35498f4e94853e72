package client

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCloseEndsWhileMessagesWaitToBeSentAgain(t *testing.T) {
	start := func(t *testing.T) (*fakeBroker, *sender) {
		b := newFakeBroker(t)
		b.verdict = withhold
		b.hook = func(step string) error {
			if step == "open session" && len(b.history("link lost")) > 0 {
				return errFakeConn
			}
			return nil
		}
		return b, startResender(b)
	}
	t.Run("within its ctx", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, s := start(t)
			answers := sendAll(within(t, time.Hour), s, "a", "b")
			b.kill(errFakeConn)
			time.Sleep(time.Minute)
			begin := time.Now()
			require.ErrorIs(t, s.close(within(t, time.Minute)), ErrOutcomeUnknown)
			assert.Equal(t, time.Minute, time.Since(begin))
			for _, a := range answers {
				err := <-a
				require.ErrorIs(t, err, ErrOutcomeUnknown)
				require.ErrorIs(t, err, ErrClosed)
			}
		})
	})
	t.Run("with a ctx that has ended", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, s := start(t)
			answers := sendAll(within(t, time.Hour), s, "a")
			b.kill(errFakeConn)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			require.ErrorIs(t, s.close(ctx), ErrOutcomeUnknown)
			require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
		})
	})
	t.Run("once their callers have left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, s := start(t)
			answers := sendAll(within(t, time.Minute), s, "a")
			b.kill(errFakeConn)
			begin := time.Now()
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, time.Minute, time.Since(begin))
			require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
		})
	})
}

func TestMessagesWaitWhileTheBrokerHasAnAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.do(t.Context(), withID("before")))
		_, blocked := s.blocked()
		assert.False(t, blocked)

		b.setAlarm(true)
		begin := time.Now()
		patient := async(func() error { return s.do(within(t, time.Hour), withID("patient")) })
		err := s.do(within(t, time.Second), withID("hasty"))
		assert.Equal(t, time.Second, time.Since(begin))
		require.ErrorIs(t, err, ErrNotSent)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		since, blocked := s.blocked()
		assert.True(t, blocked)
		assert.Equal(t, begin, since)

		// It is so on the next connection, too.
		b.kill(errFakeConn)
		time.Sleep(time.Minute)
		_, blocked = s.blocked()
		assert.True(t, blocked)
		assert.Empty(t, patient)
		b.setAlarm(false)
		require.NoError(t, <-patient)
		_, blocked = s.blocked()
		assert.False(t, blocked)
		assert.Equal(t, []string{"send before", "send patient"}, b.history("send"))
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

func TestCloseEndsUnderAnAlarm(t *testing.T) {
	t.Run("at once with nothing to send", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			s := startResender(b)
			b.setAlarm(true)
			synctest.Wait()
			begin := time.Now()
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Zero(t, time.Since(begin))
		})
	})
	t.Run("within its ctx", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.verdict = withhold
			s := startResender(b)
			answers := sendAll(within(t, time.Hour), s, "sent")
			b.setAlarm(true)
			answers = append(answers, sendAll(within(t, time.Hour), s, "queued")...)
			begin := time.Now()
			require.ErrorIs(t, s.close(within(t, time.Minute)), ErrOutcomeUnknown)
			assert.Equal(t, time.Minute, time.Since(begin))
			require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
			err := <-answers[1]
			require.ErrorIs(t, err, ErrNotSent)
			require.ErrorIs(t, err, ErrClosed)
		})
	})
	t.Run("when the last caller leaves", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			s := startResender(b)
			synctest.Wait()
			b.setAlarm(true)
			answers := sendAll(within(t, time.Minute), s, "queued")
			begin := time.Now()
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, time.Minute, time.Since(begin))
			require.ErrorIs(t, <-answers[0], ErrNotSent)
		})
	})
	t.Run("with messages to send again", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.verdict = withhold
			s := startResender(b)
			answers := sendAll(within(t, time.Hour), s, "sent")
			b.setAlarm(true)
			b.kill(errFakeConn)
			time.Sleep(time.Minute) // the next session is up, and blocked
			require.Len(t, b.history("open session"), 2)
			require.ErrorIs(t, s.close(within(t, time.Minute)), ErrOutcomeUnknown)
			require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
			assert.Equal(t, []string{"send sent"}, b.history("send"))
		})
	})
}

func TestCloseEndsWhenTheBrokerDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict, b.window = withhold, 1
		silent := make(chan struct{})
		b.hook = func(step string) error {
			if strings.HasPrefix(step, "close") {
				<-silent
			}
			return nil
		}
		s := startResender(b)
		answers := sendAll(within(t, time.Hour), s, "sent")
		left := sendAll(within(t, time.Hour), s, "waits", "queued")
		begin := time.Now()
		require.ErrorIs(t, s.close(within(t, time.Minute)), ErrOutcomeUnknown)
		assert.Equal(t, time.Minute+lastAnswer, time.Since(begin))
		require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
		require.ErrorIs(t, <-left[0], ErrNotSent)
		require.ErrorIs(t, <-left[1], ErrNotSent)
		err := s.do(t.Context(), withID("late"))
		require.ErrorIs(t, err, ErrNotSent)
		require.ErrorIs(t, err, ErrClosed)
		b.kill(errFakeConn)
		close(silent)
		<-s.done
	})
}

func TestSenderCloseSendsAndAwaitsWhatIsQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict, b.window = withhold, 1
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "a", "b", "c")
		closed := async(func() error { return s.close(within(t, time.Hour)) })
		synctest.Wait()
		require.ErrorIs(t, s.do(within(t, time.Hour), withID("late")), ErrClosed)
		for range 3 {
			assert.Empty(t, closed)
			b.answer(1, &amqp.StateAccepted{})
			synctest.Wait()
		}
		require.NoError(t, <-closed)
		for _, a := range answers {
			require.NoError(t, <-a)
		}
		assert.Equal(t, []string{
			"open session", "attach sender /queues/q",
			"send a", "answer a accepted", "send b", "answer b accepted", "send c", "answer c accepted",
			"close sender /queues/q", "close session",
		}, b.history())
		require.NoError(t, s.close(within(t, time.Hour)), "closing twice is closing once")
	})
}

func TestSenderCloseSendsTheRestOnTheNextLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict, b.window = withhold, 1
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "a", "b", "c", "d")
		closed := async(func() error { return s.close(within(t, time.Hour)) })
		synctest.Wait()
		b.mu.Lock()
		b.verdict = nil
		b.mu.Unlock()
		b.kill(errFakeLink)
		require.NoError(t, <-closed)
		require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
		require.NoError(t, <-answers[1])
		require.NoError(t, <-answers[2])
		require.NoError(t, <-answers[3])
	})
}

func TestSenderCloseCutsOffWhenItsContextEnds(t *testing.T) {
	for _, c := range []struct {
		name   string
		window int
	}{{"while the broker withholds its answers", 0}, {"while the link takes no more", 1}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.verdict, b.window = withhold, c.window
				s := startSender(b)
				answers := sendAll(within(t, time.Hour), s, "a", "b", "c")
				start := time.Now()
				err := s.close(within(t, time.Minute))
				assert.Equal(t, time.Minute, time.Since(start))
				require.ErrorIs(t, err, ErrOutcomeUnknown)
				require.ErrorIs(t, <-answers[0], ErrOutcomeUnknown)
				for _, a := range answers[1:] {
					if c.window == 0 {
						require.ErrorIs(t, <-a, ErrOutcomeUnknown)
					} else {
						require.ErrorIs(t, <-a, ErrNotSent)
					}
				}
				assert.Equal(t, []string{"close sender /queues/q", "close session"}, b.history("close"))
			})
		})
	}
}

func TestSenderCloseWhileThereIsNoConnection(t *testing.T) {
	disconnected := func(t *testing.T) *sender {
		s := newSender("publish", "/queues/q", senderConfig{depth: 4, pause: testPause.Pause}, sessionsOf(func(ctx context.Context) (session, error) {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}))
		t.Cleanup(s.cut)
		return s
	}
	t.Run("with nothing to send it ends at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			synctest.Wait()
			start := time.Now()
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Zero(t, time.Since(start))
		})
	})
	t.Run("with a message it waits for the connection, within ctx", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			answers := sendAll(within(t, time.Hour), s, "m")
			start := time.Now()
			require.Error(t, s.close(within(t, time.Minute)))
			assert.Equal(t, time.Minute, time.Since(start))
			err := <-answers[0]
			require.ErrorIs(t, err, ErrNotSent)
			assert.True(t, SafeToRetry(err))
		})
	})
	t.Run("with a message that its caller takes back it ends then", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			answers := sendAll(within(t, 5*time.Second), s, "m", "n")
			start := time.Now()
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, 5*time.Second, time.Since(start))
			require.ErrorIs(t, <-answers[0], ErrNotSent)
		})
	})
	t.Run("with messages taken back earlier it ends at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			answers := sendAll(within(t, 5*time.Second), s, "m", "n")
			require.ErrorIs(t, <-answers[0], ErrNotSent)
			require.ErrorIs(t, <-answers[1], ErrNotSent)
			start := time.Now()
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Zero(t, time.Since(start))
		})
	})
	t.Run("in the pause between two attempts", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.hook = func(string) error { return errFakeConn }
			s := startSender(b)
			time.Sleep(time.Hour)
			start := time.Now()
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Less(t, time.Since(start), time.Millisecond)
		})
	})
}

func TestCloseTellsWhatPublishTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		b.setAlarm(true)
		answers := sendAll(within(t, time.Hour), s, "queued")
		err := s.close(within(t, time.Minute))
		told := <-answers[0]
		require.ErrorIs(t, told, ErrNotSent)
		require.ErrorIs(t, err, ErrNotSent)
		assert.NotErrorIs(t, err, ErrOutcomeUnknown)
		assert.True(t, SafeToRetry(err))
		assert.True(t, errors.Is(err, context.DeadlineExceeded))
	})
}

// What was answered was sent: a Close that comes right behind an answer, and has no time,
// knows it.
func TestCloseRightBehindAnAnswer(t *testing.T) {
	b := newFakeBroker(t)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	for range 2000 {
		s := startResender(b)
		require.NoError(t, s.do(t.Context(), withID("m")))
		require.NoError(t, s.close(over))
	}
}
