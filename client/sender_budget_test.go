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

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

func TestBudgetBoundsBytesAndServesInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const kb = 1000
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		s := startSenderWith(b, senderConfig{Resend: true, Bytes: 10 * kb})
		sized := func(id string, n int) <-chan error {
			m := linktest.WithID(id)
			m.Data = [][]byte{make([]byte, n-messageOverhead)}
			a := async(func() error { return s.Do(within(t, time.Hour), m) })
			synctest.Wait()
			return a
		}
		first := sized("4k", 4*kb)
		second := sized("5k", 5*kb)
		over := sized("50k", 50*kb) // larger than all there is
		small := sized("1k", 1*kb)  // there would be room for it, but it comes later
		assert.Equal(t, []string{"send 4k", "send 5k"}, b.History("send"))

		hasty := linktest.WithID("hasty")
		err := s.Do(within(t, time.Second), hasty)
		require.ErrorIs(t, err, failure.ErrNotSent)
		require.ErrorIs(t, err, context.DeadlineExceeded)

		b.Answer(1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, <-first)
		assert.Len(t, b.History("send"), 2, "the large one waits until it is alone")
		b.Answer(1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, <-second)
		assert.Equal(t, []string{"send 4k", "send 5k", "send 50k"}, b.History("send"))
		b.Answer(1, &amqp.StateReleased{})
		synctest.Wait()
		require.ErrorIs(t, <-over, failure.ErrUnroutable)
		assert.Equal(t, "send 1k", b.History("send")[3])

		// What is kept over a reconnect counts; what its caller takes back doesn't.
		gone := sized("9k", 9*kb)
		b.Kill(linktest.ErrFakeConn)
		synctest.Wait()
		more := sized("another 9k", 9*kb)
		assert.Empty(t, gone)
		b.Accepting()
		b.Answer(-1, &amqp.StateAccepted{}) // to what was sent again at once
		for _, a := range []<-chan error{small, gone, more} {
			require.NoError(t, <-a)
		}
		require.NoError(t, s.Close(within(t, time.Hour)))
		assert.Zero(t, s.budget.used)
		assert.Empty(t, s.budget.waiting)
	})
}

func TestBudgetComesBackHoweverAMessageEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(3, 4)) // the broker's
		choice := rand.New(rand.NewPCG(5, 6)) // the callers'
		b := linktest.NewFakeBroker(t)
		b.Window = 5
		b.Hook = func(step string) error {
			switch {
			case strings.HasPrefix(step, "send") && random.IntN(20) == 0:
				b.Kill(linktest.ErrFakeLink)
			case strings.HasPrefix(step, "send") && random.IntN(20) == 0:
				return linktest.Unsent{Err: errors.New("not encodable")}
			case strings.HasPrefix(step, "attach") && random.IntN(4) == 0:
				return linktest.ErrMissing
			}
			return nil
		}
		b.Verdict = func(string, *amqp.Message) amqp.DeliveryState {
			return []amqp.DeliveryState{nil, &amqp.StateReleased{}, &amqp.StateAccepted{}}[random.IntN(3)]
		}
		s := startSenderWith(b, senderConfig{Resend: true, Bytes: 40_000})
		var answers []<-chan error
		for i := range 500 {
			m := linktest.WithID(fmt.Sprint(i))
			m.Data = [][]byte{make([]byte, choice.IntN(2000)*choice.IntN(2)*choice.IntN(20))}
			ctx := within(t, time.Duration(choice.IntN(2000))*time.Millisecond)
			answers = append(answers, async(func() error { return s.Do(ctx, m) }))
			if i%10 == 0 {
				time.Sleep(time.Millisecond)
				b.Answer(-1, &amqp.StateAccepted{})
			}
		}
		for _, a := range answers {
			<-a
		}
		b.Accepting()
		b.Answer(-1, &amqp.StateAccepted{})
		require.NoError(t, s.Close(within(t, time.Hour)))
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
