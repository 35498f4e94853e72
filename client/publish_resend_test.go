package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

// accepting makes the broker answer again.
func (b *fakeBroker) accepting() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.verdict, b.window = nil, 0
}

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

// However often links are lost while messages are sent again, each is missing
// nowhere and none overtakes another.
func TestOrderIsKeptOverAnyNumberOfReconnects(t *testing.T) {
	for seed := range uint64(15) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1)) // the broker's
			choice := rand.New(rand.NewPCG(seed, 2)) // the test's
			b := newFakeBroker(t)
			b.window = 1 + random.IntN(50)
			b.hook = func(step string) error {
				switch {
				case random.IntN(30) == 0 && strings.HasPrefix(step, "send"):
					reasons := []error{errFakeLink, errFakeConn, &amqp.LinkError{RemoteErr: &amqp.Error{Condition: "amqp:strange"}}}
					b.kill(reasons[random.IntN(len(reasons))])
				case random.IntN(3) == 0 && strings.HasPrefix(step, "attach"):
					return errFakeConn
				}
				return nil
			}
			b.verdict = withhold
			s := startResender(b)
			p := &Publisher[*Message]{core: &publisher{s: s}}
			ids := numbered("m", 200)
			var ms []*Message
			for _, id := range ids {
				ms = append(ms, withID(id))
			}
			done := async(func() error { return p.PublishAll(t.Context(), ms) })
			pause := time.Millisecond
			for waiting := true; waiting; {
				select {
				case err := <-done:
					require.NoError(t, err)
					waiting = false
				case <-time.After(pause):
					pause = min(2*pause, 50*time.Millisecond) // while it connects
					b.mu.Lock()
					n := len(b.withheld)
					b.mu.Unlock()
					if n > 0 {
						pause = time.Millisecond
						b.answer(1+choice.IntN(n), &amqp.StateAccepted{})
					}
				}
			}
			// What is answered is stored, in the order of sending; what isn't when the link
			// is lost has never arrived.
			var first []string
			known := map[string]bool{}
			for _, e := range b.history("answer") {
				if id := strings.Fields(e)[1]; !known[id] {
					known[id] = true
					first = append(first, id)
				}
			}
			require.Equal(t, ids, first, "seed %d", seed)
			require.NoError(t, s.close(within(t, time.Hour)))
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
		p := &Publisher[*Message]{core: &publisher{s: s}}
		require.NoError(t, p.Publish(t.Context(), withID("before")))
		_, blocked := p.Blocked()
		assert.False(t, blocked)

		b.setAlarm(true)
		begin := time.Now()
		patient := async(func() error { return p.Publish(within(t, time.Hour), withID("patient")) })
		err := p.Publish(within(t, time.Second), withID("hasty"))
		assert.Equal(t, time.Second, time.Since(begin))
		require.ErrorIs(t, err, ErrNotSent)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		since, blocked := p.Blocked()
		assert.True(t, blocked)
		assert.Equal(t, begin, since)

		// It is so on the next connection, too.
		b.kill(errFakeConn)
		time.Sleep(time.Minute)
		_, blocked = p.Blocked()
		assert.True(t, blocked)
		assert.Empty(t, patient)
		b.setAlarm(false)
		require.NoError(t, <-patient)
		_, blocked = p.Blocked()
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

func TestPublishAllTellsWhatBecameOfEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.verdict = func(_ string, m *Message) amqp.DeliveryState {
			switch idOf(m) {
			case "unroutable":
				return &amqp.StateReleased{}
			case "refused":
				return &amqp.StateRejected{}
			}
			return &amqp.StateAccepted{}
		}
		b.hook = func(step string) error {
			if step == "send large" {
				return unsent{&amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded}}
			}
			return nil
		}
		s := startResender(b)
		p := &Publisher[*Message]{core: &publisher{s: s}}
		require.NoError(t, p.PublishAll(t.Context(), nil))
		require.NoError(t, p.PublishAll(t.Context(), []*Message{withID("x"), withID("y")}))

		bad := withID("bad")
		bad.Data = nil
		edited := 0
		err := p.PublishAll(t.Context(), []*Message{withID("a"), withID("unroutable"), bad, nil, withID("refused"), withID("large"), withID("b")}, func(v, m *Message) {
			edited++
			assert.Equal(t, v.Properties.MessageID, m.Properties.MessageID, "an edit sees its value")
			assert.NotSame(t, v.Properties, m.Properties, "and changes the message, not the value")
		}, nil)
		var all *BatchError
		require.ErrorAs(t, err, &all)
		assert.Equal(t, 7, all.Of)
		var told []string
		for _, f := range all.Failed {
			told = append(told, fmt.Sprint(f.Index, " ", f.ID))
		}
		assert.Equal(t, []string{"1 unroutable", "2 bad", "3 <nil>", "4 refused", "5 large"}, told)
		assert.Equal(t, 6, edited)
		for _, kind := range []error{ErrUnroutable, ErrRefused, ErrTooLarge} {
			require.ErrorIs(t, err, kind)
		}
		assert.NotErrorIs(t, err, ErrOutcomeUnknown)
		assert.ErrorContains(t, err, "5 of 7 messages were not accepted, the first at index 1")
		assert.False(t, SafeToRetry(err), "two are stored")
		assert.True(t, SafeToRetry(all.Failed[0].Err))
		assert.Equal(t, []string{"send x", "send y", "send a", "send unroutable", "send refused", "send b"}, b.history("send"))

		err = p.PublishAll(t.Context(), []*Message{withID("unroutable"), withID("large")})
		assert.True(t, SafeToRetry(err), "nothing is stored")
		require.NoError(t, s.close(within(t, time.Hour)))
		err = p.PublishAll(t.Context(), []*Message{withID("late"), withID("later")})
		require.ErrorIs(t, err, ErrClosed)
		require.ErrorAs(t, err, &all)
		assert.Len(t, all.Failed, 2)
		assert.True(t, SafeToRetry(err))
	})
}

// A batch is bounded in bytes as single messages are, however many values it has.
func TestPublishAllHoldsNoMoreThanItsBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const kb = 1000
		b := newFakeBroker(t)
		b.verdict = withhold
		s := startSenderWith(b, senderConfig{resend: true, bytes: 10 * kb})
		p := &Publisher[*Message]{core: &publisher{s: s}}
		ms := make([]*Message, 50)
		encoded := 0
		for i := range ms {
			ms[i] = withID(fmt.Sprint(i))
			ms[i].Data = [][]byte{make([]byte, 2*kb-messageOverhead)}
		}
		ms[20].Data = [][]byte{make([]byte, 50*kb)} // larger than all there is
		done := async(func() error { return p.PublishAll(t.Context(), ms, func(_, _ *Message) { encoded++ }) })
		synctest.Wait()
		for answered := 0; answered < len(ms); answered++ {
			synctest.Wait()
			assert.LessOrEqual(t, encoded-answered, 6, "five are held, and one waits")
			b.answer(1, &amqp.StateAccepted{})
		}
		require.NoError(t, <-done)
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Zero(t, s.budget.used)
	})
}

func TestPublishAllTellsWhatIsCertainWhenItsContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.window = 100
		b.verdict = withhold
		s := startResender(b)
		p := &Publisher[*Message]{core: &publisher{s: s}}
		var ms []*Message
		for _, id := range numbered("m", 1000) {
			ms = append(ms, withID(id))
		}
		done := async(func() error { return p.PublishAll(within(t, time.Minute), ms) })
		synctest.Wait()
		b.answer(30, &amqp.StateAccepted{})
		begin := time.Now()
		err := <-done
		assert.Equal(t, time.Minute, time.Since(begin))
		var all *BatchError
		require.ErrorAs(t, err, &all)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Len(t, all.Failed, 970)
		for i, f := range all.Failed {
			require.Equal(t, 30+i, f.Index)
			// Sent are 30 + 100.
			if f.Index < 130 {
				require.ErrorIs(t, f.Err, ErrOutcomeUnknown, f.Index)
				require.Equal(t, fmt.Sprint("m", f.Index), f.ID)
			} else {
				require.ErrorIs(t, f.Err, ErrNotSent, f.Index)
				require.True(t, SafeToRetry(f.Err))
			}
		}
		b.accepting()
		b.answer(-1, &amqp.StateAccepted{})
		require.NoError(t, p.Publish(t.Context(), withID("next")))
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Len(t, b.history("send"), 131, "what was taken back isn't sent")
		assert.Zero(t, s.callers.Load())
	})
}

// Of a batch that the broker doesn't let in, the rest needn't wait for an attempt to
// open the link each.
func TestPublishAllEndsWhenItsLinkIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.hook = func(step string) error {
			if strings.HasPrefix(step, "attach") {
				return errMissing
			}
			return nil
		}
		s := startResender(b)
		p := &Publisher[*Message]{core: &publisher{s: s}}
		require.ErrorIs(t, <-s.first, ErrNotFound)
		ms := make([]*Message, 5000)
		for i := range ms {
			ms[i] = withID(fmt.Sprint(i))
		}
		begin := time.Now()
		err := p.PublishAll(t.Context(), ms)
		assert.LessOrEqual(t, time.Since(begin), testBackoff.Max)
		var all *BatchError
		require.ErrorAs(t, err, &all)
		require.Len(t, all.Failed, len(ms))
		for _, f := range all.Failed {
			require.ErrorIs(t, f.Err, ErrNotFound)
		}
		assert.True(t, SafeToRetry(err))
		require.NoError(t, s.close(within(t, time.Hour)))
	})
}

func TestCloseWaitsForABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.window = 10
		b.verdict = withhold
		s := startResender(b)
		p := &Publisher[*Message]{core: &publisher{s: s}}
		var ms []*Message
		for _, id := range numbered("m", 1000) {
			ms = append(ms, withID(id))
		}
		done := async(func() error { return p.PublishAll(t.Context(), ms) })
		synctest.Wait()
		closed := async(func() error { return s.close(within(t, time.Hour)) })
		synctest.Wait()
		b.accepting()
		b.answer(-1, &amqp.StateAccepted{})
		require.NoError(t, <-done)
		require.NoError(t, <-closed)
		assert.Len(t, b.stored, 1000)
	})
}

func TestBudgetBoundsBytesAndServesInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const kb = 1000
		b := newFakeBroker(t)
		b.verdict = withhold
		s := startSenderWith(b, senderConfig{resend: true, bytes: 10 * kb})
		sized := func(id string, n int) <-chan error {
			m := withID(id)
			m.Data = [][]byte{make([]byte, n-messageOverhead)}
			a := async(func() error { return s.do(within(t, time.Hour), m) })
			synctest.Wait()
			return a
		}
		first := sized("4k", 4*kb)
		second := sized("5k", 5*kb)
		over := sized("50k", 50*kb) // larger than all there is
		small := sized("1k", 1*kb)  // there would be room for it, but it comes later
		assert.Equal(t, []string{"send 4k", "send 5k"}, b.history("send"))

		hasty := withID("hasty")
		err := s.do(within(t, time.Second), hasty)
		require.ErrorIs(t, err, ErrNotSent)
		require.ErrorIs(t, err, context.DeadlineExceeded)

		b.answer(1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, <-first)
		assert.Len(t, b.history("send"), 2, "the large one waits until it is alone")
		b.answer(1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, <-second)
		assert.Equal(t, []string{"send 4k", "send 5k", "send 50k"}, b.history("send"))
		b.answer(1, &amqp.StateReleased{})
		synctest.Wait()
		require.ErrorIs(t, <-over, ErrUnroutable)
		assert.Equal(t, "send 1k", b.history("send")[3])

		// What is kept over a reconnect counts; what its caller takes back doesn't.
		gone := sized("9k", 9*kb)
		b.kill(errFakeConn)
		synctest.Wait()
		more := sized("another 9k", 9*kb)
		assert.Empty(t, gone)
		b.accepting()
		b.answer(-1, &amqp.StateAccepted{}) // to what was sent again at once
		for _, a := range []<-chan error{small, gone, more} {
			require.NoError(t, <-a)
		}
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Zero(t, s.budget.used)
		assert.Empty(t, s.budget.waiting)
	})
}

func TestBudgetComesBackHoweverAMessageEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(3, 4)) // the broker's
		choice := rand.New(rand.NewPCG(5, 6)) // the callers'
		b := newFakeBroker(t)
		b.window = 5
		b.hook = func(step string) error {
			switch {
			case strings.HasPrefix(step, "send") && random.IntN(20) == 0:
				b.kill(errFakeLink)
			case strings.HasPrefix(step, "send") && random.IntN(20) == 0:
				return unsent{errors.New("not encodable")}
			case strings.HasPrefix(step, "attach") && random.IntN(4) == 0:
				return errMissing
			}
			return nil
		}
		b.verdict = func(string, *Message) amqp.DeliveryState {
			return []amqp.DeliveryState{nil, &amqp.StateReleased{}, &amqp.StateAccepted{}}[random.IntN(3)]
		}
		s := startSenderWith(b, senderConfig{resend: true, bytes: 40_000})
		var answers []<-chan error
		for i := range 500 {
			m := withID(fmt.Sprint(i))
			m.Data = [][]byte{make([]byte, choice.IntN(2000)*choice.IntN(2)*choice.IntN(20))}
			ctx := within(t, time.Duration(choice.IntN(2000))*time.Millisecond)
			answers = append(answers, async(func() error { return s.do(ctx, m) }))
			if i%10 == 0 {
				time.Sleep(time.Millisecond)
				b.answer(-1, &amqp.StateAccepted{})
			}
		}
		for _, a := range answers {
			<-a
		}
		b.accepting()
		b.answer(-1, &amqp.StateAccepted{})
		require.NoError(t, s.close(within(t, time.Hour)))
		assert.Zero(t, s.budget.used)
		assert.Empty(t, s.budget.waiting)
	})
}

func TestSizesAreEstimated(t *testing.T) {
	for name, c := range map[string]struct {
		m        *Message
		from, to int64
	}{
		"data":       {&Message{Data: [][]byte{make([]byte, 1000), make([]byte, 500)}}, 1500, 3000},
		"value":      {&Message{Value: strings.Repeat("v", 1000)}, 1000, 2000},
		"nested":     {&Message{Value: map[string]any{"a": []any{make([]byte, 1000), map[any]any{"b": make([]int64, 1000)}}}}, 9000, 10_000},
		"sequence":   {&Message{Sequence: [][]any{{make([]byte, 1000)}, {[]string{strings.Repeat("s", 1000)}}}}, 2000, 3000},
		"properties": {&Message{ApplicationProperties: map[string]any{"k": strings.Repeat("v", 1000)}, Annotations: amqp.Annotations{"x-a": make([]byte, 1000)}}, 2000, 3000},
	} {
		n := sizeOf(c.m)
		assert.GreaterOrEqual(t, n, c.from, name)
		assert.LessOrEqual(t, n, c.to, name)
	}
}

// A caller finds the link lost while the flight's goroutine takes a message from the queue.
// Both messages go out on the next link.
func TestAMessageTakenFromTheQueueAsTheLinkIsLostIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.do(within(t, time.Minute), withID("first")))
		b.hook = func(step string) error {
			if step == "send a" || step == "send b" {
				return errFakeLink
			}
			return nil
		}
		sess, err := b.open(t.Context())
		require.NoError(t, err)
		link, err := sess.sender(t.Context(), "/queues/q")
		require.NoError(t, err)
		f := newFlight(s, sess, newFlightLink(link))
		a := &outgoing{msg: withID("a"), to: answerFunc(func(error) {})}
		queued := &outgoing{msg: withID("b"), to: answerFunc(func(error) {})}
		require.True(t, f.try(a))
		f.put(queued)
		assert.True(t, f.closed())
		f.land()
		assert.Equal(t, []*outgoing{a, queued}, s.again)
		s.again = nil
		closeSession(sess)
		require.NoError(t, s.close(within(t, time.Minute)))
	})
}

// A message that no link has taken, since the link turned out to be lost, wasn't sent.
func TestAMessageThatALostLinkDidNotTakeIsNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		s := startResender(b)
		require.NoError(t, s.do(within(t, time.Minute), withID("first")))
		var back atomic.Bool
		b.hook = func(step string) error {
			if !back.Load() && (step == "send a" || step == "open session") {
				return errFakeLink
			}
			return nil
		}
		require.ErrorIs(t, s.do(within(t, time.Second), withID("a")), ErrNotSent)
		back.Store(true)
		require.NoError(t, s.do(within(t, time.Minute), withID("b")))
		assert.Equal(t, []string{"send first", "send b"}, b.history("send"))
		require.NoError(t, s.close(within(t, time.Minute)))
	})
}
