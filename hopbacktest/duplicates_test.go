package hopbacktest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/retry"
)

// withID returns a message with this message-id and body.
func withID(id, body string) *client.Message {
	m := client.NewMessage([]byte(body))
	m.Properties = &amqp.MessageProperties{MessageID: id}
	return m
}

// Messages that share a message-id have an outcome each, in the order of Run's messages, with every strategy
// and every end.
func TestRunWithMessagesThatShareAnID(t *testing.T) {
	withEach(t, func(t *testing.T, version string, s retry.Strategy) {
		policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(time.Minute, time.Hour), Strategy: s}
		twice := withID("o-1", "recovers")
		sent := []any{withID("o-1", "well"), twice, twice, withID("o-1", "dies"), withID("o-2", "alone"), withID("o-1", "unwanted"), "no ID", withID("o-1", "forwards")}
		r := hopbacktest.Scenario{Policy: policy, Messages: sent, Broker: hopbacktest.Config{Version: version}, Handler: client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			switch body, _ := client.Body(d.Message()); string(body) {
			case "recovers", "alone":
				if retry.Attempt(ctx) < 3 {
					return errDeclined
				}
			case "dies":
				return errDeclined
			case "unwanted":
				return retry.Discard(errDeclined)
			}
			return nil
		})}.Run(t)
		require.Len(t, r.Messages, len(sent))
		for i, want := range []struct {
			fate     string
			attempts int
		}{{"handled", 1}, {"handled", 3}, {"handled", 3}, {"dead-lettered", 3}, {"handled", 3}, {"discarded", 1}, {"handled", 1}, {"handled", 1}} {
			o := r.Message(i).WantFate(want.fate).WantAttempts(want.attempts)
			assert.Zero(t, o.Duplicates)
			if want.attempts == 3 {
				o.WantDelays(time.Minute, time.Hour)
			}
			for _, a := range o.Attempts {
				assert.NotContains(t, a.Annotations, "x-opt-hopbacktest-number")
			}
		}
		assert.Equal(t, retry.ReasonExhausted, r.Message(3).DeadLetter.Reason)
		assert.Same(t, r.Message(0), r.ByID("o-1"))
		assert.Same(t, r.Message(4), r.ByID("o-2"))
		assert.Equal(t, "7", r.Message(6).ID)
		assert.Contains(t, r.Timeline(), "message o-1 (number 4)")
		assert.Nil(t, twice.Annotations, "the test's message isn't changed")
	})
}

// A duplicate is dropped by dedupe, also if it comes while the message waits for its retry.
func TestRunWithDedupe(t *testing.T) {
	var mu sync.Mutex
	handled := map[string]int{}
	h := dedupe.With(dedupe.Config{})(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		if retry.Attempt(ctx) == 1 {
			return errDeclined
		}
		mu.Lock()
		defer mu.Unlock()
		body, _ := client.Body(d.Message())
		handled[string(body)]++
		return nil
	}))
	r := hopbacktest.Run(t, retry.Policy{Backoff: retry.Delays(time.Hour)}, h, withID("o-1", "a"), withID("o-2", "b"), withID("o-1", "a"), withID("o-1", "a"))
	r.Each(func(o *hopbacktest.Outcome) { o.WantHandled() })
	assert.Equal(t, map[string]int{"a": 1, "b": 1}, handled)
}

// settling runs a test with a broker in a bubble, a queue, and a function that starts a worker. wait is
// AwaitSettled with a deadline of a day.
func settling(t *testing.T, strategy hopback.Policy, f func(t *testing.T, b *hopbacktest.Broker, q *hopback.Queue[string], wait func() error)) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := hopback.Connect(t.Context(), b.URL(), hopback.Config{Dial: b.Dial, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer conn.Close(context.Background())
		q := &hopback.Queue[string]{Conn: conn, Name: "orders", Retry: strategy}
		require.NoError(t, q.Declare(t.Context()))
		f(t, b, q, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
			defer cancel()
			return b.AwaitSettled(ctx)
		})
	})
}

// AwaitSettled waits for handlers, delays, and dead-lettering, to the moment.
func TestAwaitSettledIsExact(t *testing.T) {
	for _, strategy := range []retry.Strategy{retry.StrategyNative, retry.StrategyRepublish, retry.StrategyDeadLetter} {
		t.Run(string(strategy), func(t *testing.T) {
			settling(t, hopback.Policy{MaxRetries: 2, Backoff: hopback.Delays(time.Minute, time.Hour), Strategy: strategy}, func(t *testing.T, b *hopbacktest.Broker, q *hopback.Queue[string], wait func() error) {
				require.NoError(t, wait(), "nothing was published")
				require.NoError(t, q.Publish(t.Context(), "dies"))
				require.NoError(t, q.Publish(t.Context(), "well"))
				require.NoError(t, wait(), "no worker has started")
				began := time.Now()
				ctx, stop := context.WithCancel(t.Context())
				attempts, done := 0, make(chan error)
				go func() {
					done <- q.Consume(ctx, func(_ context.Context, order string) error {
						attempts++
						time.Sleep(7 * time.Second)
						if order == "dies" {
							return errors.New("declined")
						}
						return nil
					}, hopback.ConsumerConfig{Concurrency: 1})
				}()
				var others sync.WaitGroup
				others.Go(func() { assert.NoError(t, wait(), "several may wait") })
				require.NoError(t, wait())
				others.Wait()
				assert.Equal(t, 4, attempts)
				// One worker for both: the first message's retries are 7 s apart from the other's handler.
				assert.InDelta(t, float64(time.Hour+time.Minute+3*7*time.Second), float64(time.Since(began)), float64(7*time.Second+50*time.Millisecond))
				assert.Equal(t, 1, b.Queue("orders.dead").Counts().Ready)
				assert.Zero(t, b.Queue("orders").Counts().Messages)
				stop()
				require.NoError(t, <-done)
				require.NoError(t, wait(), "the worker stopped in order")
			})
		})
	}
}

// While a worker that lost its connection may come back, its messages aren't settled. If it doesn't, the error
// says what is left.
func TestAwaitSettledThroughAnOutage(t *testing.T) {
	settling(t, hopback.Policy{}, func(t *testing.T, b *hopbacktest.Broker, q *hopback.Queue[string], wait func() error) {
		ctx, stop := context.WithCancel(t.Context())
		handled, done := 0, make(chan error)
		go func() {
			done <- q.Consume(ctx, func(context.Context, string) error {
				time.Sleep(time.Second)
				handled++
				return nil
			}, hopback.ConsumerConfig{Concurrency: 1})
		}()
		for i := range 10 {
			require.NoError(t, q.Publish(t.Context(), fmt.Sprint(i)))
		}
		time.Sleep(3500 * time.Millisecond)
		b.Kill()
		go func() {
			time.Sleep(time.Minute)
			b.Restart()
		}()
		require.NoError(t, wait())
		assert.GreaterOrEqual(t, handled, 10)
		assert.Zero(t, b.Queue("orders").Counts().Messages)
		stop()
		require.NoError(t, <-done)
	})
}

func TestAwaitSettledSaysWhatIsLeft(t *testing.T) {
	settling(t, hopback.Policy{}, func(t *testing.T, b *hopbacktest.Broker, q *hopback.Queue[string], wait func() error) {
		ctx, stop := context.WithCancel(t.Context())
		done, release := make(chan error), make(chan struct{})
		go func() {
			done <- q.Consume(ctx, func(context.Context, string) error {
				<-release
				return nil
			}, hopback.ConsumerConfig{})
		}()
		require.NoError(t, q.Publish(t.Context(), "stuck"))
		err := wait()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorContains(t, err, `queue "orders" has 0 ready, 1 unacknowledged, 0 delayed, 0 being dead-lettered, and 1 consumers`)
		close(release)
		require.NoError(t, wait())
		stop()
		require.NoError(t, <-done)
		b.Kill()
		assert.ErrorContains(t, wait(), "the broker is stopped")
	})
}
