package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// forwards forwards each delivery m as m' to the queue.
func forwards(queue string) HandlerFunc {
	return func(_ context.Context, d *Delivery) error {
		return Forward{To: address.Queue(queue), Message: copyOf(d), Err: errors.New("boom")}
	}
}

func copyOf(d *Delivery) *Message {
	c := Copy(d.Message())
	c.Properties.MessageID = linktest.IDOf(d.Message()) + "'"
	return c
}

// outcomes are the events that tell whether a copy came before its original's end.
var outcomes = append([]string{"send", "answer"}, settlements...)

func TestForwardAcceptsTheOriginalOnlyAfterTheCopy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{}, forwards("later"))
		time.Sleep(time.Hour)
		assert.Equal(t, []string{"send m'"}, b.History(outcomes...), "the copy isn't confirmed")
		b.Answer(-1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, k.end())
		assert.Equal(t, []string{"send m'", "answer m' accepted", "accept m"}, b.History(outcomes...))
		assert.Equal(t, []string{"attach sender /queues/later"}, b.History("attach sender"))
	})
}

func TestForwardFreesTheHandlersSlotWhileTheBrokerConfirms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		b.Publish(linktest.Numbered("m", 64)...)
		k := startConsumer(b, ConsumerConfig{Concurrency: 1, Prefetch: 64}, forwards("later"))
		synctest.Wait()
		assert.Len(t, b.History("send"), 64)
		assert.Empty(t, b.History(settlements...))
		assert.Equal(t, []string{"credit 1", "credit 63"}, b.History("credit"), "what awaits its copy counts as prefetched")
		b.Answer(-1, &amqp.StateAccepted{})
		synctest.Wait()
		require.NoError(t, k.end())
		assert.Len(t, b.History("accept"), 64)
	})
}

func TestForwardThatIsNotTakenIsTriedAgainAndThenRequeued(t *testing.T) {
	unroutable := func(string, *Message) amqp.DeliveryState { return &amqp.StateReleased{} }
	full := func(string, *Message) amqp.DeliveryState { return &amqp.StateRejected{} }
	for _, c := range []struct {
		name    string
		verdict func(string, *Message) amqp.DeliveryState
		hook    func(string) error
	}{
		{"unroutable", unroutable, nil},
		{"refused", full, nil},
		{"modified", func(string, *Message) amqp.DeliveryState { return &amqp.StateModified{} }, nil},
		{"to a missing queue", nil, func(step string) error {
			if strings.HasPrefix(step, "attach sender") {
				return linktest.ErrMissing
			}
			return nil
		}},
		{"over the session limit", nil, func() func(string) error {
			var opened atomic.Int32
			return func(step string) error {
				if step == "open session" && opened.Add(1) > 1 {
					return &failure.Error{Op: "open session", Kind: failure.ErrSessionLimit}
				}
				return nil
			}
		}()},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Verdict, b.Hook = c.verdict, c.hook
				b.Publish("m")
				start := time.Now()
				k := startConsumer(b, ConsumerConfig{ForwardPatience: time.Minute}, forwards("later"))
				require.NoError(t, b.Await(within(t, time.Hour), func() bool {
					return len(b.Events) > 0 && strings.HasSuffix(b.Events[len(b.Events)-1], " m")
				}))
				took := time.Since(start)
				require.NoError(t, k.end())
				assert.Equal(t, []string{"requeue as failed m"}, b.History(settlements...))
				assert.LessOrEqual(t, took, time.Minute+2*testBackoff.Max)
				assert.Greater(t, took, 45*time.Second)
				if c.verdict != nil {
					assert.Greater(t, len(b.History("send")), 5, "tried again")
				}
			})
		})
	}
}

// A queue without a dead-letter exchange would drop what exceeds its delivery limit:
// there a copy is tried for as long as it takes, and nothing is counted.
func TestForwardThatIsNotTakenKeepsWhatTheQueueWouldDrop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		var taken atomic.Bool
		b.Verdict = func(string, *Message) amqp.DeliveryState {
			if taken.Load() {
				return &amqp.StateAccepted{}
			}
			return &amqp.StateReleased{}
		}
		b.Publish("m")
		k := startConsumerOf(b, ConsumerConfig{ForwardPatience: 30 * time.Second}, forwards("later"), false)
		time.Sleep(time.Hour)
		assert.Empty(t, b.History(settlements...))
		taken.Store(true)
		time.Sleep(time.Minute)
		require.NoError(t, k.end())
		assert.Equal(t, []string{"accept m"}, b.History(settlements...))
	})
}

// What the handler says of a message that goes back is in the message then.
func TestForwardThatIsNotTakenTellsWhyInTheMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = func(string, *Message) amqp.DeliveryState { return &amqp.StateReleased{} }
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{ForwardPatience: time.Second}, returns(Forward{
			To: address.Queue("later"), Message: linktest.WithID("copy"), Err: errors.New("still down"),
			Annotations: map[string]any{"x-opt-first": int64(7)},
		}))
		require.NoError(t, b.Await(within(t, time.Hour), func() bool { return b.Last.Failed }))
		require.NoError(t, k.end())
		back := b.Last
		assert.True(t, back.Failed)
		assert.Equal(t, int64(7), back.Annotations["x-opt-first"])
		assert.Equal(t, string(ReasonUnforwardable), back.Annotations[AnnotationReason])
		assert.Contains(t, back.Annotations[AnnotationError], "still down")
		assert.Contains(t, back.Annotations[AnnotationError], failure.ErrUnroutable.Error())
	})
}

func TestForwardIsTakenInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		tries := 0
		b.Verdict = func(string, *Message) amqp.DeliveryState {
			if tries++; tries < 4 {
				return &amqp.StateReleased{}
			}
			return &amqp.StateAccepted{}
		}
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{}, forwards("later"))
		time.Sleep(time.Minute)
		require.NoError(t, k.end())
		assert.Equal(t, []string{
			"send m'", "answer m' released", "send m'", "answer m' released", "send m'", "answer m' released",
			"send m'", "answer m' accepted", "accept m",
		}, b.History(outcomes...))
	})
}

func TestForwardOfAMessageThatIsTooLargeIsDeadLettered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Hook = func(step string) error {
			if step == "send m'" {
				return linktest.Unsent{Err: &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded}}
			}
			return nil
		}
		b.Publish("m", "n")
		k := startConsumer(b, ConsumerConfig{}, forwards("later"))
		synctest.Wait()
		require.NoError(t, k.end())
		assert.ElementsMatch(t, []string{"dead-letter (unforwardable) m", "accept n"}, b.History(settlements...))
	})
}

func TestForwardWhoseLinkDiesIsSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		b.Publish("m", "n")
		k := startConsumer(b, ConsumerConfig{}, forwards("later"))
		synctest.Wait()
		b.Update(func() { b.Verdict = nil })
		b.KillSenders(linktest.ErrFakeLink)
		time.Sleep(time.Minute)
		require.NoError(t, k.end())
		assert.ElementsMatch(t, []string{"accept m", "accept n"}, b.History(settlements...))
		assert.Equal(t, map[string]int{"m'": 1, "n'": 1}, b.Stored)
	})
}

func TestForwardOfADeliveryWhoseLinkIsGoneIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = func(string, *Message) amqp.DeliveryState { return &amqp.StateReleased{} }
		b.Publish("m")
		calls := 0
		k := startConsumer(b, ConsumerConfig{}, func(ctx context.Context, d *Delivery) error {
			if calls++; calls == 1 {
				return forwards("later")(ctx, d)
			}
			return nil
		})
		synctest.Wait()
		b.Kill(linktest.ErrFakeLink)
		synctest.Wait()
		sent := len(b.History("send"))
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
		assert.Len(t, b.History("send"), sent, "a copy would only be a duplicate")
		assert.Equal(t, []string{"accept m"}, b.History(settlements...), "the second delivery's")
	})
}

func TestForwardsReceiptAfterItsLinkIsGoneSettlesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		b.Publish("m")
		hold := make(chan struct{})
		var calls atomic.Int32
		k := startConsumer(b, ConsumerConfig{}, func(ctx context.Context, d *Delivery) error {
			if calls.Add(1) == 1 {
				return forwards("later")(ctx, d)
			}
			<-hold
			return Requeue{}
		})
		synctest.Wait()
		b.Update(func() { // the consumer's session only
			b.Log("link lost")
			b.Sessions[0].End(linktest.ErrFakeLink)
		})
		time.Sleep(time.Minute)
		assert.Equal(t, int32(2), calls.Load())
		b.Answer(-1, &amqp.StateAccepted{})
		synctest.Wait()
		assert.Empty(t, b.History(settlements...))
		close(hold)
		synctest.Wait()
		require.NoError(t, k.end())
		assert.Equal(t, []string{"release m"}, b.History(settlements...))
	})
}

func TestDrainWaitsForForwards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{}, forwards("later"))
		synctest.Wait()
		before := len(b.History())
		k.stop()
		time.Sleep(10 * time.Second)
		b.Answer(-1, &amqp.StateAccepted{})
		require.NoError(t, <-k.result)
		assert.Equal(t, []string{
			"drain", "answer m' accepted", "accept m",
			"close sender /queues/later", "close session", "close receiver", "close session",
		}, b.History()[before:])
	})
}

func TestDrainGivesUpForwardsThatAreNotConfirmed(t *testing.T) {
	for _, c := range []struct {
		name   string
		window int
	}{{"whose answer is withheld", 0}, {"that the link doesn't take", 1}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Verdict, b.Window = linktest.Withhold, c.window
				b.Publish("m", "n", "o")
				k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, forwards("later"))
				synctest.Wait()
				start := time.Now()
				require.NoError(t, k.end())
				assert.Equal(t, time.Minute+lastGrace, time.Since(start))
				b.Answer(-1, &amqp.StateAccepted{})
				time.Sleep(time.Hour)
				assert.Empty(t, b.History(settlements...), "the originals stay with the broker")
				assert.Empty(t, b.Sessions)
			})
		})
	}
}

func TestForwardsToManyAddressesTakeOneSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		const addresses = 5 * maxForwardLinks
		b.Publish(linktest.Numbered("m", addresses)...)
		var most, n atomic.Int32
		b.Hook = func(step string) error {
			switch {
			case strings.HasPrefix(step, "attach sender"):
				most.Store(max(most.Load(), n.Add(1)))
			case strings.HasPrefix(step, "close sender"):
				n.Add(-1)
			}
			return nil
		}
		k := startConsumer(b, ConsumerConfig{}, func(_ context.Context, d *Delivery) error {
			time.Sleep(100 * time.Millisecond)
			return Forward{To: address.Queue("to-" + linktest.IDOf(d.Message())), Message: copyOf(d)}
		})
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
		assert.Len(t, b.History("accept"), addresses)
		assert.Equal(t, 2, b.MostSessions, "the consumer's and the forwards'")
		assert.LessOrEqual(t, most.Load(), int32(maxForwardLinks+1))
	})
}

func TestForwardsToABadAddressLeaveTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Hook = func(step string) error {
			if step == "attach sender /queues/bad" {
				return linktest.ErrMissing
			}
			return nil
		}
		b.Publish(linktest.Numbered("m", 40)...)
		k := startConsumer(b, ConsumerConfig{}, func(_ context.Context, d *Delivery) error {
			to := "bad"
			if id := linktest.IDOf(d.Message()); id != "m0" {
				to = "good-" + id
				time.Sleep(time.Second)
			}
			return Forward{To: address.Queue(to), Message: copyOf(d)}
		})
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
		assert.Len(t, b.History("accept"), 39)
		assert.Equal(t, []string{"requeue as failed m0"}, b.History("requeue"))
		assert.Equal(t, 2, b.MostSessions)
		assert.Len(t, b.History("attach sender /queues/good"), 39, "none lost its link")
	})
}

// However links die and the broker answers: a message is in the queue, or accepted
// and its copy stored. Never both gone.
func TestForwardsLoseNothing(t *testing.T) {
	for round := range 10 {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			ids := linktest.Numbered("m", 60)
			b.Publish(ids...)
			sends := 0
			b.Verdict = func(string, *Message) amqp.DeliveryState {
				switch sends++; (sends + round) % 7 {
				case 0:
					return &amqp.StateReleased{}
				case 1:
					return &amqp.StateRejected{}
				case 2:
					return nil
				}
				return &amqp.StateAccepted{}
			}
			k := startConsumer(b, ConsumerConfig{Concurrency: 4, Prefetch: 10}, func(ctx context.Context, d *Delivery) error {
				time.Sleep(50 * time.Millisecond)
				return forwards(fmt.Sprintf("later-%d", len(linktest.IDOf(d.Message()))))(ctx, d)
			})
			for i := range 30 {
				time.Sleep(time.Duration(100+37*i) * time.Millisecond)
				switch (i + round) % 4 {
				case 0:
					b.Kill(linktest.ErrFakeConn)
				case 1:
					b.KillSenders(linktest.ErrFakeLink)
				default:
					b.Answer(-1, &amqp.StateAccepted{})
				}
			}
			b.Update(func() { b.Verdict = nil })
			b.Answer(-1, &amqp.StateAccepted{})
			time.Sleep(time.Hour)
			require.NoError(t, k.end())

			gone := map[string]bool{}
			for _, e := range b.History("accept") {
				gone[strings.TrimPrefix(e, "accept ")] = true
			}
			for _, id := range ids {
				assert.True(t, gone[id], id)
				assert.Positive(t, b.Stored[id+"'"], "%s was accepted, and its copy isn't stored", id)
			}
			copied := map[string]bool{}
			for _, e := range b.History("answer", "accept m") {
				if id, ok := strings.CutPrefix(e, "accept "); ok {
					assert.True(t, copied[id], "%s was accepted before its copy", id)
				} else if id, ok := strings.CutSuffix(e, "' accepted"); ok {
					copied[strings.TrimPrefix(id, "answer ")] = true
				}
			}
		})
	}
}

// The link that a Preparer asks for is tried before the first delivery. A missing permission is
// the error of Consume; what else is in the way may pass.
func TestForwardingLinkIsOpenedAtTheStart(t *testing.T) {
	refused := &amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: "write access to exchange 'x' in vhost '/' refused for user 'u'"}
	for name, refusal := range map[string]*amqp.Error{"allowed": nil, "forbidden": refused, "missing": linktest.ErrMissing} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				gone := atomic.Bool{}
				gone.Store(true)
				b.Hook = func(step string) error {
					if strings.HasPrefix(step, "attach sender") && refusal != nil && gone.Load() {
						return refusal
					}
					return nil
				}
				b.Publish("m")
				cfg, err := ConsumerConfig{}.withDefaults()
				require.NoError(t, err)
				k := newConsumer("q", "/queues/q", forwards("later"), cfg, asked{forwards: []address.Address{address.Queue("later")}}, nil, consumerDeps{Sessions: b, Queues: fakeQueue{}, Backoff: testBackoff, Log: quiet, Overdue: linktest.ForEver})
				ctx, stop := context.WithCancel(t.Context())
				result := async(func() error { return k.run(ctx) })
				synctest.Wait()
				if refusal == refused {
					err := <-result
					require.ErrorIs(t, err, failure.ErrUnauthorized)
					assert.ErrorContains(t, err, "write access to exchange 'x'")
					assert.Empty(t, b.History("attach receiver"))
					assert.Empty(t, b.Sessions)
					stop()
					return
				}
				gone.Store(false)
				require.NoError(t, b.Await(within(t, time.Minute), func() bool { return len(b.Stored) == 1 }))
				stop()
				require.NoError(t, <-result)
				if refusal == nil {
					assert.Equal(t, []string{"attach sender /queues/later", "attach receiver", "attach sender /queues/later"}, b.History("attach"))
				}
				assert.Equal(t, []string{"accept m"}, b.History(settlements...))
			})
		})
	}
}

// The start doesn't outlast its ctx, however long the broker takes for the link.
func TestForwardingLinkAtTheStartEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		answer := make(chan struct{})
		b.Hook = func(step string) error {
			if strings.HasPrefix(step, "attach sender") {
				<-answer
			}
			return nil
		}
		cfg, err := ConsumerConfig{}.withDefaults()
		require.NoError(t, err)
		k := newConsumer("q", "/queues/q", forwards("later"), cfg, asked{forwards: []address.Address{address.Queue("later")}}, nil, consumerDeps{Sessions: b, Queues: fakeQueue{}, Backoff: testBackoff, Log: quiet, Overdue: linktest.ForEver})
		ctx, stop := context.WithTimeout(t.Context(), 6*time.Second)
		defer stop()
		time.AfterFunc(10*time.Second, func() { close(answer) }) // as the limits of the real links do
		start := time.Now()
		require.NoError(t, k.run(ctx))
		assert.Equal(t, 6*time.Second, time.Since(start))
		time.Sleep(10 * time.Second)
	})
}
