package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// doAll sends messages, and returns those that weren't accepted.
func doAll(ctx context.Context, s *sender, ms ...*amqp.Message) []BatchFailure {
	return s.DoAll(ctx, len(ms), func(i int) (*amqp.Message, error) { return ms[i], nil }, func(int, error) {})
}

// However often links are lost while messages are sent again, each is missing
// nowhere and none overtakes another.
func TestOrderIsKeptOverAnyNumberOfReconnects(t *testing.T) {
	for seed := range uint64(15) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1)) // the broker's
			choice := rand.New(rand.NewPCG(seed, 2)) // the test's
			b := linktest.NewFakeBroker(t)
			b.Window = 1 + random.IntN(50)
			b.Hook = func(step string) error {
				switch {
				case random.IntN(30) == 0 && strings.HasPrefix(step, "send"):
					reasons := []error{linktest.ErrFakeLink, linktest.ErrFakeConn, &amqp.LinkError{RemoteErr: &amqp.Error{Condition: "amqp:strange"}}}
					b.Kill(reasons[random.IntN(len(reasons))])
				case random.IntN(3) == 0 && strings.HasPrefix(step, "attach"):
					return linktest.ErrFakeConn
				}
				return nil
			}
			b.Verdict = linktest.Withhold
			s := startResender(b)
			ids := linktest.Numbered("m", 200)
			var ms []*amqp.Message
			for _, id := range ids {
				ms = append(ms, linktest.WithID(id))
			}
			done := async(func() []BatchFailure { return doAll(t.Context(), s, ms...) })
			pause := time.Millisecond
			for waiting := true; waiting; {
				select {
				case failed := <-done:
					require.Empty(t, failed)
					waiting = false
				case <-time.After(pause):
					pause = min(2*pause, 50*time.Millisecond) // while it connects
					b.Mu.Lock()
					n := len(b.Withheld)
					b.Mu.Unlock()
					if n > 0 {
						pause = time.Millisecond
						b.Answer(1+choice.IntN(n), &amqp.StateAccepted{})
					}
				}
			}
			// What is answered is stored, in the order of sending; what isn't when the link
			// is lost has never arrived.
			var first []string
			known := map[string]bool{}
			for _, e := range b.History("answer") {
				if id := strings.Fields(e)[1]; !known[id] {
					known[id] = true
					first = append(first, id)
				}
			}
			require.Equal(t, ids, first, "seed %d", seed)
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	}
}

func TestBatchReportsWhatBecameOfEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = func(_ string, m *amqp.Message) amqp.DeliveryState {
			switch linktest.IDOf(m) {
			case "unroutable":
				return &amqp.StateReleased{}
			case "refused":
				return &amqp.StateRejected{}
			}
			return &amqp.StateAccepted{}
		}
		b.Hook = func(step string) error {
			if step == "send large" {
				return linktest.Unsent{Err: &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded}}
			}
			return nil
		}
		s := startResender(b)
		require.Empty(t, doAll(t.Context(), s, linktest.WithID("x"), linktest.WithID("y")))

		bad := errors.New("it can't be encoded")
		ms := []*amqp.Message{linktest.WithID("a"), linktest.WithID("unroutable"), linktest.WithID("bad"), nil, linktest.WithID("refused"), linktest.WithID("large"), linktest.WithID("b")}
		var mu sync.Mutex
		results := map[int][]error{}
		failed := s.DoAll(t.Context(), len(ms), func(i int) (*amqp.Message, error) {
			if i == 2 || i == 3 {
				return ms[i], bad
			}
			return ms[i], nil
		}, func(i int, err error) {
			mu.Lock()
			defer mu.Unlock()
			results[i] = append(results[i], err)
		})
		want := []struct {
			index int
			id    any
			kind  error
		}{{1, "unroutable", failure.ErrUnroutable}, {2, "bad", bad}, {3, nil, bad}, {4, "refused", failure.ErrRefused}, {5, "large", failure.ErrTooLarge}}
		require.Len(t, failed, len(want))
		for i, f := range failed {
			assert.Equal(t, want[i].index, f.Index)
			assert.Equal(t, want[i].id, f.ID)
			require.ErrorIs(t, f.Err, want[i].kind)
			assert.Equal(t, []error{f.Err}, results[f.Index])
		}
		require.Len(t, results, len(ms))
		assert.Equal(t, []error{nil}, results[0])
		assert.Equal(t, []string{"send x", "send y", "send a", "send unroutable", "send refused", "send b"}, b.History("send"))

		require.NoError(t, s.Close(within(t, time.Hour)))
		failed = doAll(t.Context(), s, linktest.WithID("late"), linktest.WithID("later"))
		require.Len(t, failed, 2)
		for _, f := range failed {
			require.ErrorIs(t, f.Err, failure.ErrClosed)
			assert.True(t, failure.SafeToRetry(f.Err))
		}
	})
}

// A batch is bounded in bytes as single messages are, however many values it has.
func TestBatchHoldsNoMoreThanItsBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const kb = 1000
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		s := startSenderWith(b, senderConfig{Resend: true, Bytes: 10 * kb})
		ms := make([]*amqp.Message, 50)
		encoded := 0
		for i := range ms {
			ms[i] = linktest.WithID(fmt.Sprint(i))
			ms[i].Data = [][]byte{make([]byte, 2*kb-messageOverhead)}
		}
		ms[20].Data = [][]byte{make([]byte, 50*kb)} // larger than all there is
		done := async(func() []BatchFailure {
			return s.DoAll(t.Context(), len(ms), func(i int) (*amqp.Message, error) {
				encoded++
				return ms[i], nil
			}, func(int, error) {})
		})
		synctest.Wait()
		for answered := 0; answered < len(ms); answered++ {
			synctest.Wait()
			assert.LessOrEqual(t, encoded-answered, 6, "five are held, and one waits")
			b.Answer(1, &amqp.StateAccepted{})
		}
		require.Empty(t, <-done)
		require.NoError(t, s.Close(within(t, time.Hour)))
		assert.Zero(t, s.budget.used)
	})
}

func TestBatchReportsWhatIsCertainWhenItsContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Window = 100
		b.Verdict = linktest.Withhold
		s := startResender(b)
		var ms []*amqp.Message
		for _, id := range linktest.Numbered("m", 1000) {
			ms = append(ms, linktest.WithID(id))
		}
		done := async(func() []BatchFailure { return doAll(within(t, time.Minute), s, ms...) })
		synctest.Wait()
		b.Answer(30, &amqp.StateAccepted{})
		begin := time.Now()
		failed := <-done
		assert.Equal(t, time.Minute, time.Since(begin))
		require.Len(t, failed, 970)
		for i, f := range failed {
			require.Equal(t, 30+i, f.Index)
			require.ErrorIs(t, f.Err, context.DeadlineExceeded)
			// Sent are 30 + 100.
			if f.Index < 130 {
				require.ErrorIs(t, f.Err, failure.ErrOutcomeUnknown, f.Index)
				require.Equal(t, fmt.Sprint("m", f.Index), f.ID)
			} else {
				require.ErrorIs(t, f.Err, failure.ErrNotSent, f.Index)
				require.True(t, failure.SafeToRetry(f.Err))
			}
		}
		b.Accepting()
		b.Answer(-1, &amqp.StateAccepted{})
		require.NoError(t, s.Do(t.Context(), linktest.WithID("next")))
		require.NoError(t, s.Close(within(t, time.Hour)))
		assert.Len(t, b.History("send"), 131, "what was taken back isn't sent")
		assert.Zero(t, s.callers.Load())
	})
}

// Of a batch that the broker doesn't let in, the rest doesn't wait for one attempt to open the link per message.
func TestBatchEndsWhenItsLinkIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Hook = func(step string) error {
			if strings.HasPrefix(step, "attach") {
				return linktest.ErrMissing
			}
			return nil
		}
		s := startResender(b)
		require.ErrorIs(t, <-s.First, failure.ErrNotFound)
		ms := make([]*amqp.Message, 5000)
		for i := range ms {
			ms[i] = linktest.WithID(fmt.Sprint(i))
		}
		begin := time.Now()
		failed := doAll(t.Context(), s, ms...)
		assert.LessOrEqual(t, time.Since(begin), testPause.Max)
		require.Len(t, failed, len(ms))
		for _, f := range failed {
			require.ErrorIs(t, f.Err, failure.ErrNotFound)
			require.True(t, failure.SafeToRetry(f.Err))
		}
		require.NoError(t, s.Close(within(t, time.Hour)))
	})
}

func TestCloseWaitsForABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Window = 10
		b.Verdict = linktest.Withhold
		s := startResender(b)
		var ms []*amqp.Message
		for _, id := range linktest.Numbered("m", 1000) {
			ms = append(ms, linktest.WithID(id))
		}
		done := async(func() []BatchFailure { return doAll(t.Context(), s, ms...) })
		synctest.Wait()
		closed := async(func() error { return s.Close(within(t, time.Hour)) })
		synctest.Wait()
		b.Accepting()
		b.Answer(-1, &amqp.StateAccepted{})
		require.Empty(t, <-done)
		require.NoError(t, <-closed)
		assert.Len(t, b.Stored, 1000)
	})
}

// Answers that come while the batch is withdrawn share nothing with it unguarded. The race detector
// is the check: make test runs it.
func TestAnswersComeWhileABatchIsWithdrawn(t *testing.T) {
	for range 30 {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict = linktest.Withhold
			s := startResender(b)
			var ms []*amqp.Message
			for _, id := range linktest.Numbered("m", 100) {
				ms = append(ms, linktest.WithID(id))
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := async(func() []BatchFailure { return doAll(ctx, s, ms...) })
			synctest.Wait() // all were sent
			go cancel()
			b.Answer(len(ms), &amqp.StateAccepted{})
			for _, f := range <-done {
				assert.NotNil(t, f.ID)
			}
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	}
}
