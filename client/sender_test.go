package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

	"github.com/hopback/hopback/internal/backoff"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// testPause is the pause between two attempts to open a link.
var testPause = backoff.Exponential{Min: 100 * time.Millisecond, Max: 10 * time.Second}

func startSender(b *linktest.FakeBroker) *sender {
	return startSenderWith(b, senderConfig{})
}

// startResender starts one that sends again what is unanswered when a link is lost.
func startResender(b *linktest.FakeBroker) *sender {
	return startSenderWith(b, senderConfig{Resend: true})
}

func startSenderWith(b *linktest.FakeBroker, cfg senderConfig) *sender {
	cfg.Depth, cfg.Pause, cfg.Overdue = 256, testPause.Pause, cmp.Or(b.Overdue, linktest.ForEver)
	s := newSender("publish", "/queues/q", cfg, b)
	b.T.Cleanup(s.Cut) // ends it when the test has failed midway
	return s
}

// sendAll calls do for each id, in their order, and returns where the answers will be.
func sendAll(ctx context.Context, s *sender, ids ...string) []<-chan error {
	answers := make([]<-chan error, len(ids))
	for i, id := range ids {
		answers[i] = async(func() error { return s.Do(ctx, linktest.WithID(id)) })
		synctest.Wait()
	}
	return answers
}

func TestSenderSendsManyBeforeTheFirstAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		s := startSender(b)
		ids := linktest.Numbered("m", 150)
		answers := sendAll(within(t, time.Hour), s, ids...)
		for i, id := range ids {
			assert.Equal(t, "send "+id, b.History("send")[i])
		}
		assert.Empty(t, b.History("answer"))

		b.Answer(1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, <-answers[0])
		for _, a := range answers[1:] {
			assert.Empty(t, a, "only the first is answered")
		}
		b.Answer(-1, &amqp.StateAccepted{})
		for _, a := range answers[1:] {
			require.NoError(t, <-a)
		}
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

func TestSenderTellsTheBrokersAnswersApart(t *testing.T) {
	for _, c := range []struct {
		name  string
		state amqp.DeliveryState
		kind  error
		text  string
		safe  bool
	}{
		{"released", &amqp.StateReleased{}, failure.ErrUnroutable, "no queue is bound", true},
		{"rejected", &amqp.StateRejected{}, failure.ErrRefused, "4.0", false},
		{"rejected with a reason", &amqp.StateRejected{Error: &amqp.Error{Condition: amqp.ErrCondResourceLimitExceeded, Description: "queue 'q' in vhost '/' exceeded maxlen"}}, failure.ErrRefused, "exceeded maxlen", false},
		{"rejected with a condition alone", &amqp.StateRejected{Error: &amqp.Error{Condition: "amqp:strange"}}, failure.ErrRefused, "amqp:strange", false},
		{"rejected as not found", &amqp.StateRejected{Error: &amqp.Error{Condition: amqp.ErrCondNotFound, Description: "no exchange 'x'"}}, failure.ErrNotFound, "no exchange 'x'", true},
		{"modified", &amqp.StateModified{}, failure.ErrOutcomeUnknown, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Verdict = func(string, *amqp.Message) amqp.DeliveryState { return c.state }
				s := startSender(b)
				err := s.Do(within(t, time.Hour), linktest.WithID("m"))
				require.ErrorIs(t, err, c.kind)
				assert.ErrorContains(t, err, c.text)
				assert.ErrorContains(t, err, "publish /queues/q")
				assert.Equal(t, c.safe, failure.SafeToRetry(err))

				b.Verdict = nil
				require.NoError(t, s.Do(within(t, time.Hour), linktest.WithID("next")), "the link lives on")
				require.NoError(t, s.Close(within(t, time.Hour)))
				assert.Len(t, b.History("attach sender"), 1)
			})
		})
	}
}

func TestSenderWhenTheLinkDiesOnlyWhatWasSentIsUnknown(t *testing.T) {
	for _, reason := range []error{linktest.ErrFakeLink, linktest.ErrFakeConn} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict, b.Window = linktest.Withhold, 5
			s := startSender(b)
			answers := sendAll(within(t, time.Hour), s, linktest.Numbered("m", 12)...)
			require.Len(t, b.History("send"), 5)

			b.Mu.Lock()
			b.Verdict = nil
			b.Mu.Unlock()
			b.Kill(reason)
			unknown := 0
			for _, a := range answers {
				if err := <-a; err != nil {
					require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
					assert.False(t, failure.SafeToRetry(err))
					unknown++
				}
			}
			assert.Equal(t, 5, unknown)
			assert.Equal(t, []string{"send m5", "send m6", "send m7", "send m8", "send m9", "send m10", "send m11"}, b.History("send")[5:])
			require.NoError(t, s.Close(within(t, time.Hour)))
			assert.Equal(t, 1, b.MostSessions)
		})
	}
}

func TestSenderTellsTheQueuedWhyTheLinkIsRefused(t *testing.T) {
	for _, c := range []struct {
		refusal error
		kind    error
	}{
		{linktest.ErrMissing, failure.ErrNotFound},
		{&amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: "access refused"}, failure.ErrUnauthorized},
		{&failure.Error{Op: "open session", Kind: failure.ErrSessionLimit}, failure.ErrSessionLimit},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			var open atomic.Bool
			b.Hook = func(step string) error {
				if strings.HasPrefix(step, "attach") && !open.Load() {
					return c.refusal
				}
				return nil
			}
			s := startSender(b)
			require.ErrorIs(t, <-s.First, c.kind)
			err := s.Do(within(t, time.Hour), linktest.WithID("m"))
			require.ErrorIs(t, err, c.kind)
			assert.NotErrorIs(t, err, failure.ErrConnectionLost)
			assert.True(t, failure.SafeToRetry(err), "nothing was sent")

			synctest.Wait() // what is queued during that time gets the same error
			open.Store(true)
			require.NoError(t, s.Do(within(t, time.Hour), linktest.WithID("later")))
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	}
}

// RabbitMQ 4.0 refuses a link when the token has expired, and ends the connection then.
func TestSenderOutlivesAnExpiredToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		var refusals atomic.Int64
		b.Hook = func(step string) error {
			if strings.HasPrefix(step, "attach") && refusals.Add(1) <= 3 {
				return &amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: "credential expired"}
			}
			return nil
		}
		s := startSender(b)
		require.NoError(t, s.Do(within(t, time.Hour), linktest.WithID("m")))
		assert.EqualValues(t, 4, refusals.Load())
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

func TestSenderComesBackWithoutLimitAndWithJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		var tries []time.Time
		b.Hook = func(step string) error {
			if step == "open session" && len(tries) < 200 {
				tries = append(tries, time.Now())
				return linktest.ErrFakeConn
			}
			return nil
		}
		s := startSender(b)
		require.NoError(t, s.Do(t.Context(), linktest.WithID("patient")), "it waits for the connection as long as it takes")
		require.NoError(t, s.Close(within(t, time.Hour)))

		distinct := map[time.Duration]bool{}
		for i, at := range tries[1:] {
			gap := at.Sub(tries[i])
			assert.LessOrEqual(t, gap, testPause.Max+time.Millisecond)
			distinct[gap] = true
		}
		assert.Greater(t, len(distinct), 150, "no two clients come back in step")
	})
}

func TestSenderNeverSendsWhatItsCallerTookBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict, b.Window = linktest.Withhold, 1
		s := startSender(b)
		first := sendAll(within(t, time.Hour), s, "sent", "stuck")
		queued := sendAll(within(t, time.Second), s, "queued")

		start := time.Now()
		err := <-queued[0]
		assert.Equal(t, time.Second, time.Since(start))
		require.ErrorIs(t, err, failure.ErrNotSent)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.True(t, failure.SafeToRetry(err))

		b.Window = 0
		b.Answer(-1, &amqp.StateAccepted{})
		synctest.Wait()
		b.Answer(-1, &amqp.StateAccepted{})
		require.NoError(t, <-first[0])
		require.NoError(t, <-first[1])
		require.NoError(t, s.Close(within(t, time.Hour)))
		assert.Equal(t, []string{"send sent", "send stuck"}, b.History("send"))
	})
}

func TestSenderWhoseCallerLeavesMidwayGoesOn(t *testing.T) {
	for _, c := range []struct {
		name   string
		window int // 1: "m" waits for the window as its caller leaves; 0: it is sent
		kind   error
	}{{"while it waits for the window", 1, failure.ErrNotSent}, {"after sending", 0, failure.ErrOutcomeUnknown}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Verdict, b.Window = linktest.Withhold, c.window
				s := startSender(b)
				first := sendAll(within(t, time.Hour), s, "first")
				m := sendAll(within(t, time.Second), s, "m")
				err := <-m[0]
				require.ErrorIs(t, err, c.kind)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				assert.Equal(t, c.kind == failure.ErrNotSent, failure.SafeToRetry(err))

				b.Mu.Lock()
				b.Verdict, b.Window = nil, 0
				b.Mu.Unlock()
				b.Answer(-1, &amqp.StateAccepted{})
				require.NoError(t, <-first[0])
				require.NoError(t, s.Do(within(t, time.Hour), linktest.WithID("next")))
				require.NoError(t, s.Close(within(t, time.Hour)))
				assert.Len(t, b.History("attach sender"), 1, "the link was left alone")
			})
		})
	}
}

func TestSenderRefusesAloneWhatCannotBeSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Hook = func(step string) error {
			switch step {
			case "send large":
				return linktest.Unsent{Err: &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded, Description: "encoded message size exceeds max of 16777216"}}
			case "send strange":
				return linktest.Unsent{Err: errors.New("marshal not implemented for chan int")}
			}
			return nil
		}
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "a", "large", "b", "strange", "c")
		require.NoError(t, <-answers[0])
		require.ErrorIs(t, <-answers[1], failure.ErrTooLarge)
		require.NoError(t, <-answers[2])
		err := <-answers[3]
		require.ErrorIs(t, err, failure.ErrNotSent)
		assert.ErrorContains(t, err, "chan int")
		require.NoError(t, <-answers[4])
		require.NoError(t, s.Close(within(t, time.Hour)))
		assert.Len(t, b.History("attach sender"), 1)
	})
}

func TestSenderThatEndsBeforeItsFirstAttemptSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		s := startSender(b)
		s.Cut() // before its goroutine has begun
		select {
		case err := <-s.First:
			if err != nil {
				require.ErrorIs(t, err, failure.ErrClosed)
			}
		case <-time.After(time.Hour):
			t.Error("a caller that waits for the first attempt waits without end")
		}
		<-s.done
	})
}

// Every caller gets exactly one answer, no matter what happens to links, and nil means
// that the broker has the message.
func TestSenderAnswersEveryCallerOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const callers = 1000
		b := linktest.NewFakeBroker(t)
		var mu sync.Mutex
		random := rand.New(rand.NewPCG(1, 2))
		chance := func(n int) bool {
			mu.Lock()
			defer mu.Unlock()
			return random.IntN(n) == 0
		}
		b.Window = 170
		b.Hook = func(step string) error {
			switch {
			case step == "open session" && chance(4):
				return linktest.ErrFakeConn
			case strings.HasPrefix(step, "attach") && chance(4):
				return linktest.ErrFakeConn
			case strings.HasPrefix(step, "send") && chance(40):
				return linktest.Unsent{Err: errors.New("not encodable")}
			case strings.HasPrefix(step, "send") && chance(60):
				b.KillSenders(linktest.ErrFakeLink)
			case strings.HasPrefix(step, "send") && chance(20):
				time.Sleep(time.Millisecond)
			}
			return nil
		}
		b.Verdict = func(string, *amqp.Message) amqp.DeliveryState {
			switch {
			case chance(20):
				return &amqp.StateReleased{}
			case chance(20):
				return &amqp.StateRejected{}
			case chance(2):
				return nil
			}
			return &amqp.StateAccepted{}
		}
		s := startSender(b)
		stop := make(chan struct{})
		answering := async(func() bool {
			for {
				select {
				case <-stop:
					return true
				case <-time.After(time.Millisecond):
					b.Answer(-1, &amqp.StateAccepted{})
				}
			}
		})
		var wg sync.WaitGroup
		results := make([]error, callers)
		for i := range callers {
			wg.Go(func() {
				ctx := t.Context()
				if i%5 == 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*time.Millisecond)
					defer cancel()
				}
				time.Sleep(time.Duration(i%50) * time.Millisecond)
				results[i] = s.Do(ctx, linktest.WithID(fmt.Sprint(i)))
			})
		}
		wg.Wait()
		require.NoError(t, s.Close(within(t, time.Hour)))
		close(stop)
		<-answering

		kinds := map[string]int{}
		sent := b.History("send")
		for i, err := range results {
			id := fmt.Sprint(i)
			attempts := slices.Index(sent, "send "+id)
			switch {
			case err == nil:
				kinds["accepted"]++
				assert.Equal(t, 1, b.Stored[id], "%s: nil means stored, once", id)
			case errors.Is(err, failure.ErrNotSent):
				kinds["not sent"]++
				assert.Equal(t, -1, attempts, "%s: %v", id, err)
			case errors.Is(err, failure.ErrOutcomeUnknown):
				kinds["unknown"]++
			case errors.Is(err, failure.ErrUnroutable), errors.Is(err, failure.ErrRefused):
				kinds["refused"]++
				assert.Zero(t, b.Stored[id], id)
			default:
				t.Errorf("%s: %v", id, err)
			}
		}
		for _, kind := range []string{"accepted", "not sent", "unknown", "refused"} {
			assert.NotZero(t, kinds[kind], kind)
		}
		t.Log(kinds)
	})
}
