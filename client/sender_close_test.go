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

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

func TestCloseEndsWhileMessagesWaitToBeSentAgain(t *testing.T) {
	start := func(t *testing.T) (*linktest.FakeBroker, *sender) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		b.Hook = func(step string) error {
			if step == "open session" && len(b.History("link lost")) > 0 {
				return linktest.ErrFakeConn
			}
			return nil
		}
		return b, startResender(b)
	}
	t.Run("within its ctx", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, s := start(t)
			answers := sendAll(within(t, time.Hour), s, "a", "b")
			b.Kill(linktest.ErrFakeConn)
			time.Sleep(time.Minute)
			begin := time.Now()
			require.ErrorIs(t, s.Close(within(t, time.Minute)), failure.ErrOutcomeUnknown)
			assert.Equal(t, time.Minute, time.Since(begin))
			for _, a := range answers {
				err := <-a
				require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
				require.ErrorIs(t, err, failure.ErrClosed)
			}
		})
	})
	t.Run("with a ctx that has ended", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, s := start(t)
			answers := sendAll(within(t, time.Hour), s, "a")
			b.Kill(linktest.ErrFakeConn)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			require.ErrorIs(t, s.Close(ctx), failure.ErrOutcomeUnknown)
			require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
		})
	})
	t.Run("once their callers have left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b, s := start(t)
			answers := sendAll(within(t, time.Minute), s, "a")
			b.Kill(linktest.ErrFakeConn)
			begin := time.Now()
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, time.Minute, time.Since(begin))
			require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
		})
	})
}

func TestMessagesWaitWhileTheBrokerHasAnAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.Do(t.Context(), linktest.WithID("before")))
		_, blocked := s.Blocked()
		assert.False(t, blocked)

		b.SetAlarm(true)
		begin := time.Now()
		patient := async(func() error { return s.Do(within(t, time.Hour), linktest.WithID("patient")) })
		err := s.Do(within(t, time.Second), linktest.WithID("hasty"))
		assert.Equal(t, time.Second, time.Since(begin))
		require.ErrorIs(t, err, failure.ErrNotSent)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		since, blocked := s.Blocked()
		assert.True(t, blocked)
		assert.Equal(t, begin, since)

		// It is so on the next connection, too.
		b.Kill(linktest.ErrFakeConn)
		time.Sleep(time.Minute)
		_, blocked = s.Blocked()
		assert.True(t, blocked)
		assert.Empty(t, patient)
		b.SetAlarm(false)
		require.NoError(t, <-patient)
		_, blocked = s.Blocked()
		assert.False(t, blocked)
		assert.Equal(t, []string{"send before", "send patient"}, b.History("send"))
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

func TestCloseEndsUnderAnAlarm(t *testing.T) {
	t.Run("at once with nothing to send", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			s := startResender(b)
			b.SetAlarm(true)
			synctest.Wait()
			begin := time.Now()
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Zero(t, time.Since(begin))
		})
	})
	t.Run("within its ctx", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict = linktest.Withhold
			s := startResender(b)
			answers := sendAll(within(t, time.Hour), s, "sent")
			b.SetAlarm(true)
			answers = append(answers, sendAll(within(t, time.Hour), s, "queued")...)
			begin := time.Now()
			require.ErrorIs(t, s.Close(within(t, time.Minute)), failure.ErrOutcomeUnknown)
			assert.Equal(t, time.Minute, time.Since(begin))
			require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
			err := <-answers[1]
			require.ErrorIs(t, err, failure.ErrNotSent)
			require.ErrorIs(t, err, failure.ErrClosed)
		})
	})
	t.Run("when the last caller leaves", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			s := startResender(b)
			synctest.Wait()
			b.SetAlarm(true)
			answers := sendAll(within(t, time.Minute), s, "queued")
			begin := time.Now()
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, time.Minute, time.Since(begin))
			require.ErrorIs(t, <-answers[0], failure.ErrNotSent)
		})
	})
	t.Run("with messages to send again", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict = linktest.Withhold
			s := startResender(b)
			answers := sendAll(within(t, time.Hour), s, "sent")
			b.SetAlarm(true)
			b.Kill(linktest.ErrFakeConn)
			time.Sleep(time.Minute) // the next session is up, and blocked
			require.Len(t, b.History("open session"), 2)
			require.ErrorIs(t, s.Close(within(t, time.Minute)), failure.ErrOutcomeUnknown)
			require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
			assert.Equal(t, []string{"send sent"}, b.History("send"))
		})
	})
}

func TestCloseEndsWhenTheBrokerDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict, b.Window = linktest.Withhold, 1
		silent := make(chan struct{})
		b.Hook = func(step string) error {
			if strings.HasPrefix(step, "close") {
				<-silent
			}
			return nil
		}
		s := startResender(b)
		answers := sendAll(within(t, time.Hour), s, "sent")
		left := sendAll(within(t, time.Hour), s, "waits", "queued")
		begin := time.Now()
		require.ErrorIs(t, s.Close(within(t, time.Minute)), failure.ErrOutcomeUnknown)
		assert.Equal(t, time.Minute+lastAnswer, time.Since(begin))
		require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
		require.ErrorIs(t, <-left[0], failure.ErrNotSent)
		require.ErrorIs(t, <-left[1], failure.ErrNotSent)
		err := s.Do(t.Context(), linktest.WithID("late"))
		require.ErrorIs(t, err, failure.ErrNotSent)
		require.ErrorIs(t, err, failure.ErrClosed)
		b.Kill(linktest.ErrFakeConn)
		close(silent)
		<-s.done
	})
}

func TestSenderCloseSendsAndAwaitsWhatIsQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict, b.Window = linktest.Withhold, 1
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "a", "b", "c")
		closed := async(func() error { return s.Close(within(t, time.Hour)) })
		synctest.Wait()
		require.ErrorIs(t, s.Do(within(t, time.Hour), linktest.WithID("late")), failure.ErrClosed)
		for range 3 {
			assert.Empty(t, closed)
			b.Answer(1, &amqp.StateAccepted{})
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
		}, b.History())
		require.NoError(t, s.Close(within(t, time.Hour)), "closing twice is closing once")
	})
}

func TestSenderCloseSendsTheRestOnTheNextLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict, b.Window = linktest.Withhold, 1
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "a", "b", "c", "d")
		closed := async(func() error { return s.Close(within(t, time.Hour)) })
		synctest.Wait()
		b.Mu.Lock()
		b.Verdict = nil
		b.Mu.Unlock()
		b.Kill(linktest.ErrFakeLink)
		require.NoError(t, <-closed)
		require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
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
				b := linktest.NewFakeBroker(t)
				b.Verdict, b.Window = linktest.Withhold, c.window
				s := startSender(b)
				answers := sendAll(within(t, time.Hour), s, "a", "b", "c")
				start := time.Now()
				err := s.Close(within(t, time.Minute))
				assert.Equal(t, time.Minute, time.Since(start))
				require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
				require.ErrorIs(t, <-answers[0], failure.ErrOutcomeUnknown)
				for _, a := range answers[1:] {
					if c.window == 0 {
						require.ErrorIs(t, <-a, failure.ErrOutcomeUnknown)
					} else {
						require.ErrorIs(t, <-a, failure.ErrNotSent)
					}
				}
				assert.Equal(t, []string{"close sender /queues/q", "close session"}, b.History("close"))
			})
		})
	}
}

func TestSenderCloseWhileThereIsNoConnection(t *testing.T) {
	disconnected := func(t *testing.T) *sender {
		s := newSender("publish", "/queues/q", senderConfig{Depth: 4, Pause: testPause.Pause}, linktest.SessionsOf(func(ctx context.Context) (link.Session, error) {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}))
		t.Cleanup(s.Cut)
		return s
	}
	t.Run("with nothing to send it ends at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			synctest.Wait()
			start := time.Now()
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Zero(t, time.Since(start))
		})
	})
	t.Run("with a message it waits for the connection, within ctx", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			answers := sendAll(within(t, time.Hour), s, "m")
			start := time.Now()
			require.Error(t, s.Close(within(t, time.Minute)))
			assert.Equal(t, time.Minute, time.Since(start))
			err := <-answers[0]
			require.ErrorIs(t, err, failure.ErrNotSent)
			assert.True(t, failure.SafeToRetry(err))
		})
	})
	t.Run("with a message that its caller takes back it ends then", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			answers := sendAll(within(t, 5*time.Second), s, "m", "n")
			start := time.Now()
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, 5*time.Second, time.Since(start))
			require.ErrorIs(t, <-answers[0], failure.ErrNotSent)
		})
	})
	t.Run("with messages taken back earlier it ends at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := disconnected(t)
			answers := sendAll(within(t, 5*time.Second), s, "m", "n")
			require.ErrorIs(t, <-answers[0], failure.ErrNotSent)
			require.ErrorIs(t, <-answers[1], failure.ErrNotSent)
			start := time.Now()
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Zero(t, time.Since(start))
		})
	})
	t.Run("in the pause between two attempts", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Hook = func(string) error { return linktest.ErrFakeConn }
			s := startSender(b)
			time.Sleep(time.Hour)
			start := time.Now()
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Less(t, time.Since(start), time.Millisecond)
		})
	})
}

func TestCloseTellsWhatPublishTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		s := startResender(b)
		b.SetAlarm(true)
		answers := sendAll(within(t, time.Hour), s, "queued")
		err := s.Close(within(t, time.Minute))
		notified := <-answers[0]
		require.ErrorIs(t, notified, failure.ErrNotSent)
		require.ErrorIs(t, err, failure.ErrNotSent)
		assert.NotErrorIs(t, err, failure.ErrOutcomeUnknown)
		assert.True(t, failure.SafeToRetry(err))
		assert.True(t, errors.Is(err, context.DeadlineExceeded))
	})
}

// What was answered was sent: a Close that comes right behind an answer, and has no time,
// knows it.
func TestCloseRightBehindAnAnswer(t *testing.T) {
	b := linktest.NewFakeBroker(t)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	for range 2000 {
		s := startResender(b)
		require.NoError(t, s.Do(t.Context(), linktest.WithID("m")))
		require.NoError(t, s.Close(over))
	}
}
