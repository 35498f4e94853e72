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

	"github.com/hopback/hopback/internal/link"
)

// testPause is the pause between two attempts to open a link.
var testPause = link.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}

func startSender(b *fakeBroker) *sender {
	return startSenderWith(b, senderConfig{})
}

// startResender starts one that sends again what is unanswered when a link is lost.
func startResender(b *fakeBroker) *sender {
	return startSenderWith(b, senderConfig{resend: true})
}

func startSenderWith(b *fakeBroker, cfg senderConfig) *sender {
	cfg.depth, cfg.pause, cfg.overdue = 256, testPause.Pause, cmp.Or(b.overdue, forEver)
	s := newSender("publish", "/queues/q", cfg, b)
	b.t.Cleanup(s.cut) // ends it when the test has failed midway
	return s
}

// send calls do for each id, in their order, and returns where the answers will be.
func sendAll(ctx context.Context, s *sender, ids ...string) []<-chan error {
	answers := make([]<-chan error, len(ids))
	for i, id := range ids {
		answers[i] = async(func() error { return s.do(ctx, withID(id)) })
		synctest.Wait()
	}
	return answers
}

func TestSenderSendsManyBeforeTheFirstAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict = withhold
		s := startSender(b)
		ids := numbered("m", 150)
		answers := sendAll(within(t, time.Hour), s, ids...)
		for i, id := range ids {
			assert.Equal(t, "send "+id, b.history("send")[i])
		}
		assert.Empty(t, b.history("answer"))

		b.answer(1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, <-answers[0])
		for _, a := range answers[1:] {
			assert.Empty(t, a, "only the first is answered")
		}
		b.answer(-1, &amqp.StateAccepted{})
		for _, a := range answers[1:] {
			require.NoError(t, <-a)
		}
		require.NoError(t, s.close(within(t, time.Hour)))
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
		{"released", &amqp.StateReleased{}, ErrUnroutable, "no queue is bound", true},
		{"rejected", &amqp.StateRejected{}, ErrRefused, "4.0", false},
		{"rejected with a reason", &amqp.StateRejected{Error: &amqp.Error{Condition: amqp.ErrCondResourceLimitExceeded, Description: "queue 'q' in vhost '/' exceeded maxlen"}}, ErrRefused, "exceeded maxlen", false},
		{"rejected with a condition alone", &amqp.StateRejected{Error: &amqp.Error{Condition: "amqp:strange"}}, ErrRefused, "amqp:strange", false},
		{"rejected as not found", &amqp.StateRejected{Error: &amqp.Error{Condition: amqp.ErrCondNotFound, Description: "no exchange 'x'"}}, ErrNotFound, "no exchange 'x'", true},
		{"modified", &amqp.StateModified{}, ErrOutcomeUnknown, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.verdict = func(string, *amqp.Message) amqp.DeliveryState { return c.state }
				s := startSender(b)
				err := s.do(within(t, time.Hour), withID("m"))
				require.ErrorIs(t, err, c.kind)
				assert.ErrorContains(t, err, c.text)
				assert.ErrorContains(t, err, "publish /queues/q")
				assert.Equal(t, c.safe, SafeToRetry(err))

				b.verdict = nil
				require.NoError(t, s.do(within(t, time.Hour), withID("next")), "the link lives on")
				require.NoError(t, s.close(within(t, time.Hour)))
				assert.Len(t, b.history("attach sender"), 1)
			})
		})
	}
}

func TestSenderWhenTheLinkDiesOnlyWhatWasSentIsUnknown(t *testing.T) {
	for _, reason := range []error{errFakeLink, errFakeConn} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.verdict, b.window = withhold, 5
			s := startSender(b)
			answers := sendAll(within(t, time.Hour), s, numbered("m", 12)...)
			require.Len(t, b.history("send"), 5)

			b.mu.Lock()
			b.verdict = nil
			b.mu.Unlock()
			b.kill(reason)
			unknown := 0
			for _, a := range answers {
				if err := <-a; err != nil {
					require.ErrorIs(t, err, ErrOutcomeUnknown)
					assert.False(t, SafeToRetry(err))
					unknown++
				}
			}
			assert.Equal(t, 5, unknown)
			assert.Equal(t, []string{"send m5", "send m6", "send m7", "send m8", "send m9", "send m10", "send m11"}, b.history("send")[5:])
			require.NoError(t, s.close(within(t, time.Hour)))
			assert.Equal(t, 1, b.mostSessions)
		})
	}
}

func TestSenderTellsTheQueuedWhyTheLinkIsRefused(t *testing.T) {
	for _, c := range []struct {
		refusal error
		kind    error
	}{
		{errMissing, ErrNotFound},
		{&amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: "access refused"}, ErrUnauthorized},
		{&Error{Op: "open session", Kind: ErrSessionLimit}, ErrSessionLimit},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			var open atomic.Bool
			b.hook = func(step string) error {
				if strings.HasPrefix(step, "attach") && !open.Load() {
					return c.refusal
				}
				return nil
			}
			s := startSender(b)
			require.ErrorIs(t, <-s.first, c.kind)
			err := s.do(within(t, time.Hour), withID("m"))
			require.ErrorIs(t, err, c.kind)
			assert.NotErrorIs(t, err, ErrConnectionLost)
			assert.True(t, SafeToRetry(err), "nothing was sent")

			synctest.Wait() // what is queued meanwhile is told the same
			open.Store(true)
			require.NoError(t, s.do(within(t, time.Hour), withID("later")))
			require.NoError(t, s.close(within(t, time.Hour)))
		})
	}
}

// RabbitMQ 4.0 refuses a link when the token has expired, and ends the connection then.
func TestSenderOutlivesAnExpiredToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		var refusals atomic.Int64
		b.hook = func(step string) error {
			if strings.HasPrefix(step, "attach") && refusals.Add(1) <= 3 {
				return &amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: "credential expired"}
			}
			return nil
		}
		s := startSender(b)
		require.NoError(t, s.do(within(t, time.Hour), withID("m")))
		assert.EqualValues(t, 4, refusals.Load())
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

func TestSenderComesBackWithoutLimitAndWithJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		var tries []time.Time
		b.hook = func(step string) error {
			if step == "open session" && len(tries) < 200 {
				tries = append(tries, time.Now())
				return errFakeConn
			}
			return nil
		}
		s := startSender(b)
		require.NoError(t, s.do(t.Context(), withID("patient")), "it waits for the connection as long as it takes")
		require.NoError(t, s.close(within(t, time.Hour)))

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
		b := newFakeBroker(t)
		b.verdict, b.window = withhold, 1
		s := startSender(b)
		first := sendAll(within(t, time.Hour), s, "sent", "stuck")
		queued := sendAll(within(t, time.Second), s, "queued")

		start := time.Now()
		err := <-queued[0]
		assert.Equal(t, time.Second, time.Since(start))
		require.ErrorIs(t, err, ErrNotSent)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.True(t, SafeToRetry(err))

		b.window = 0
		b.answer(-1, &amqp.StateAccepted{})
		synctest.Wait()
		b.answer(-1, &amqp.StateAccepted{})
		require.NoError(t, <-first[0])
		require.NoError(t, <-first[1])
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Equal(t, []string{"send sent", "send stuck"}, b.history("send"))
	})
}

func TestSenderWhoseCallerLeavesMidwayGoesOn(t *testing.T) {
	for _, c := range []struct {
		name   string
		window int // 1: "m" waits for the window as its caller leaves; 0: it is sent
		kind   error
	}{{"while it waits for the window", 1, ErrNotSent}, {"after sending", 0, ErrOutcomeUnknown}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.verdict, b.window = withhold, c.window
				s := startSender(b)
				first := sendAll(within(t, time.Hour), s, "first")
				m := sendAll(within(t, time.Second), s, "m")
				err := <-m[0]
				require.ErrorIs(t, err, c.kind)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				assert.Equal(t, c.kind == ErrNotSent, SafeToRetry(err))

				b.mu.Lock()
				b.verdict, b.window = nil, 0
				b.mu.Unlock()
				b.answer(-1, &amqp.StateAccepted{})
				require.NoError(t, <-first[0])
				require.NoError(t, s.do(within(t, time.Hour), withID("next")))
				require.NoError(t, s.close(within(t, time.Hour)))
				assert.Len(t, b.history("attach sender"), 1, "the link was left alone")
			})
		})
	}
}

func TestSenderRefusesAloneWhatCannotBeSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.hook = func(step string) error {
			switch step {
			case "send large":
				return unsent{err: &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded, Description: "encoded message size exceeds max of 16777216"}}
			case "send strange":
				return unsent{err: errors.New("marshal not implemented for chan int")}
			}
			return nil
		}
		s := startSender(b)
		answers := sendAll(within(t, time.Hour), s, "a", "large", "b", "strange", "c")
		require.NoError(t, <-answers[0])
		require.ErrorIs(t, <-answers[1], ErrTooLarge)
		require.NoError(t, <-answers[2])
		err := <-answers[3]
		require.ErrorIs(t, err, ErrNotSent)
		assert.ErrorContains(t, err, "chan int")
		require.NoError(t, <-answers[4])
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Len(t, b.history("attach sender"), 1)
	})
}

func TestSenderThatEndsBeforeItsFirstAttemptSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startSender(b)
		s.cut() // before its goroutine has begun
		select {
		case err := <-s.first:
			if err != nil {
				require.ErrorIs(t, err, ErrClosed)
			}
		case <-time.After(time.Hour):
			t.Error("whoever waits for the first attempt waits for ever")
		}
		<-s.done
	})
}

// Every caller gets exactly one answer, whatever happens to links, and nil means
// that the broker has the message.
func TestSenderAnswersEveryCallerOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const callers = 1000
		b := newFakeBroker(t)
		var mu sync.Mutex
		random := rand.New(rand.NewPCG(1, 2))
		chance := func(n int) bool {
			mu.Lock()
			defer mu.Unlock()
			return random.IntN(n) == 0
		}
		b.window = 170
		b.hook = func(step string) error {
			switch {
			case step == "open session" && chance(4):
				return errFakeConn
			case strings.HasPrefix(step, "attach") && chance(4):
				return errFakeConn
			case strings.HasPrefix(step, "send") && chance(40):
				return unsent{err: errors.New("not encodable")}
			case strings.HasPrefix(step, "send") && chance(60):
				b.killSenders(errFakeLink)
			case strings.HasPrefix(step, "send") && chance(20):
				time.Sleep(time.Millisecond)
			}
			return nil
		}
		b.verdict = func(string, *amqp.Message) amqp.DeliveryState {
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
					b.answer(-1, &amqp.StateAccepted{})
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
				results[i] = s.do(ctx, withID(fmt.Sprint(i)))
			})
		}
		wg.Wait()
		require.NoError(t, s.close(within(t, time.Hour)))
		close(stop)
		<-answering

		kinds := map[string]int{}
		sent := b.history("send")
		for i, err := range results {
			id := fmt.Sprint(i)
			attempts := slices.Index(sent, "send "+id)
			switch {
			case err == nil:
				kinds["accepted"]++
				assert.Equal(t, 1, b.stored[id], "%s: nil means stored, once", id)
			case errors.Is(err, ErrNotSent):
				kinds["not sent"]++
				assert.Equal(t, -1, attempts, "%s: %v", id, err)
			case errors.Is(err, ErrOutcomeUnknown):
				kinds["unknown"]++
			case errors.Is(err, ErrUnroutable), errors.Is(err, ErrRefused):
				kinds["refused"]++
				assert.Zero(t, b.stored[id], id)
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
