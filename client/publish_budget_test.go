package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
				return unsent{err: errors.New("not encodable")}
			case strings.HasPrefix(step, "attach") && random.IntN(4) == 0:
				return errMissing
			}
			return nil
		}
		b.verdict = func(string, *amqp.Message) amqp.DeliveryState {
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
		m        *amqp.Message
		from, to int64
	}{
		"data":       {&amqp.Message{Data: [][]byte{make([]byte, 1000), make([]byte, 500)}}, 1500, 3000},
		"value":      {&amqp.Message{Value: strings.Repeat("v", 1000)}, 1000, 2000},
		"nested":     {&amqp.Message{Value: map[string]any{"a": []any{make([]byte, 1000), map[any]any{"b": make([]int64, 1000)}}}}, 9000, 10_000},
		"sequence":   {&amqp.Message{Sequence: [][]any{{make([]byte, 1000)}, {[]string{strings.Repeat("s", 1000)}}}}, 2000, 3000},
		"properties": {&amqp.Message{ApplicationProperties: map[string]any{"k": strings.Repeat("v", 1000)}, Annotations: amqp.Annotations{"x-a": make([]byte, 1000)}}, 2000, 3000},
	} {
		n := sizeOf(c.m)
		assert.GreaterOrEqual(t, n, c.from, name)
		assert.LessOrEqual(t, n, c.to, name)
	}
}
