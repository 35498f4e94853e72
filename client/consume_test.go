package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// testConsumer is a consumer at work on a fakeBroker.
type testConsumer struct {
	*consumer
	stop   context.CancelFunc // as the end of Consume's ctx
	result <-chan error
}

func startConsumer(b *linktest.FakeBroker, cfg ConsumerConfig, h HandlerFunc) *testConsumer {
	return startConsumerOf(b, cfg, h, true)
}

// startConsumerOf is the same for a queue that has a dead-letter exchange, or none.
func startConsumerOf(b *linktest.FakeBroker, cfg ConsumerConfig, h HandlerFunc, deadLetters bool) *testConsumer {
	return startObserved(b, cfg, h, deadLetters, nil)
}

// startObserved is the same with a function that gets the consumer's events.
func startObserved(b *linktest.FakeBroker, cfg ConsumerConfig, h HandlerFunc, deadLetters bool, notify func(Event)) *testConsumer {
	cfg, err := cfg.withDefaults()
	require.NoError(b.T, err)
	k := newConsumer("q", "/queues/q", h, cfg, asked{}, nil, consumerDeps{
		Sessions: b, Backoff: testBackoff, Log: cmp.Or(b.Logger, quiet), Notify: notify, Overdue: cmp.Or(b.Overdue, linktest.ForEver),
		Queues: fakeQueue{b: b, dlx: deadLetters}, Now: b.Now,
	})
	ctx, stop := context.WithCancel(context.Background())
	b.T.Cleanup(stop)
	return &testConsumer{k, stop, async(func() error { return k.run(ctx) })}
}

// fakeQueue is what a broker says of a consumer's queue; nothing if there is no broker.
type fakeQueue struct {
	b     *linktest.FakeBroker
	dlx   bool   // it has a dead-letter exchange
	stock *stock // nil: peek gets no answer
}

var errNoAnswer = errors.New("the broker doesn't answer")

func (q fakeQueue) deadLetters(ctx context.Context, _ string) (bool, error) {
	if q.b == nil {
		return false, errNoAnswer
	}
	err := q.b.Asked(ctx)
	return err == nil && q.dlx, err
}

func (q fakeQueue) singleActive(ctx context.Context, queue string) (bool, error) {
	if q.b == nil || q.b.SingleActive == nil {
		return false, errNoAnswer
	}
	return q.b.SingleActive(ctx, queue)
}

func (q fakeQueue) consumerTimeout(ctx context.Context, _ string) (time.Duration, error) {
	if q.b == nil {
		return 0, errNoAnswer
	}
	return q.b.Timeout, q.b.Asked(ctx)
}

func (q fakeQueue) peek(ctx context.Context, queue string) (queuePeek, error) {
	if q.stock == nil {
		return queuePeek{}, errNoAnswer
	}
	return q.stock.peek(ctx, queue)
}

// end drains the consumer, and returns what Consume would.
func (c *testConsumer) end() error {
	c.stop()
	return <-c.result
}

func returns(err error) HandlerFunc { return func(context.Context, *Delivery) error { return err } }

// settlements are the events that end a delivery.
var settlements = []string{"accept", "release", "requeue", "dead-letter", "modify"}

type hostileError struct{ text func() string }

func (e hostileError) Error() string { return e.text() }

// nilCause is an error whose nil pointer can't be unwrapped.
type nilCause struct{ cause error }

func (e *nilCause) Error() string { return e.cause.Error() }
func (e *nilCause) Unwrap() error { return e.cause }

// ownCause is an error that unwraps to itself, and ownCauses one that joins itself.
type (
	ownCause  struct{}
	ownCauses struct{}
)

func (*ownCause) Error() string      { return "own cause" }
func (e *ownCause) Unwrap() error    { return e }
func (*ownCauses) Error() string     { return "own causes" }
func (e *ownCauses) Unwrap() []error { return []error{e, e} }

type (
	embedding struct {
		DeadLetter
	}
	embeddingPointer struct{ *Requeue }
	embeddingAny     struct{ Outcome }
)

func embedsItself() error {
	e := &embeddingAny{}
	e.Outcome = e
	return e
}

func TestConsumerCarriesOutOutcomes(t *testing.T) {
	boom := errors.New("boom")
	for _, c := range []struct {
		name   string
		result error
		want   string
	}{
		{"nil", nil, "accept m"},
		{"an error", boom, "requeue as failed m"},
		{"Requeue", Requeue{Err: boom}, "release m"},
		{"Requeue that failed", Requeue{Failed: true}, "requeue as failed m"},
		{"DeadLetter", DeadLetter{Reason: "bad-order", Err: boom}, "dead-letter (bad-order) m"},
		{"DeadLetter with an error that panics when it is read", DeadLetter{Reason: "bad-order", Err: (*nilCause)(nil)}, "dead-letter (bad-order) m"},
		{"Modify", Modify{Annotations: map[string]any{"x-opt-tenant": "a"}}, "modify map[x-opt-tenant:a] m"},
		{"Modify that dead-letters", Modify{DeadLetter: true, Annotations: map[string]any{AnnotationReason: "own"}}, "dead-letter (own) m"},
		{"Modify that poisons", Modify{Annotations: map[string]any{"x-opt-rate": 0.5}}, "requeue as failed m"},
		{"DeadLetter with annotations that poison", DeadLetter{Reason: "bad", Annotations: map[string]any{"x-opt-rate": nil}}, "dead-letter (bad) m"},
		{"a wrapped outcome", fmt.Errorf("wrapped: %w", DeadLetter{Reason: "bad-order"}), "dead-letter (bad-order) m"},
		{"the outermost of two outcomes", Requeue{Err: DeadLetter{Reason: "inner"}}, "release m"},
		{"a pointer to an outcome", &DeadLetter{Reason: "bad-order"}, "dead-letter (bad-order) m"},
		{"a pointer to Requeue", &Requeue{}, "release m"},
		{"a pointer to Modify", &Modify{Annotations: map[string]any{"x-opt-a": 1}}, "modify map[x-opt-a:1] m"},
		{"a wrapped pointer to an outcome", fmt.Errorf("wrapped: %w", &Requeue{}), "release m"},
		{"a type that embeds an outcome", embedding{DeadLetter: DeadLetter{Reason: "bad-order"}}, "dead-letter (bad-order) m"},
		{"a pointer to one", &embedding{DeadLetter: DeadLetter{Reason: "bad-order"}}, "dead-letter (bad-order) m"},
		{"a nil pointer to one", (*embedding)(nil), "requeue as failed m"},
		{"a type that embeds a pointer to an outcome", embeddingPointer{&Requeue{}}, "release m"},
		{"a type that embeds a nil pointer to an outcome", embeddingPointer{}, "requeue as failed m"},
		{"a type that embeds an Outcome", embeddingAny{Requeue{}}, "release m"},
		{"a type that embeds no Outcome", embeddingAny{}, "requeue as failed m"},
		{"a type that embeds itself", embedsItself(), "requeue as failed m"},
		{"a nil pointer to an outcome", (*DeadLetter)(nil), "requeue as failed m"},
		{"a nil pointer to Forward", (*Forward)(nil), "requeue as failed m"},
		{"a wrapped nil pointer to an outcome", fmt.Errorf("wrapped: %w", (*Requeue)(nil)), "requeue as failed m"},
		{"a nil pointer that can't be unwrapped", (*nilCause)(nil), "requeue as failed m"},
		{"an error that unwraps to itself", &ownCause{}, "requeue as failed m"},
		{"an error that joins itself", &ownCauses{}, "requeue as failed m"},
		{"DeadLetter of an error that unwraps to itself", DeadLetter{Reason: "bad", Err: &ownCause{}}, "dead-letter (bad) m"},
		{"an error whose text panics", hostileError{func() string { panic("no text") }}, "requeue as failed m"},
		{"DeadLetter of an error whose text panics", DeadLetter{Err: hostileError{func() string { panic("no text") }}}, "dead-letter (<nil>) m"},
		{"DeadLetter with a reason of invalid UTF-8", DeadLetter{Reason: "a\xff"}, "dead-letter (a?) m"},
		{"Forward without a message", Forward{To: address.Queue("to")}, "dead-letter (unforwardable) m"},
		{"Forward of a message without a body", Forward{To: address.Queue("to"), Message: &Message{}}, "dead-letter (unforwardable) m"},
		{"Forward to no address", Forward{Message: linktest.WithID("copy")}, "dead-letter (unforwardable) m"},
		{"Forward to an impossible address", Forward{To: address.Queue("\n"), Message: linktest.WithID("copy"), Err: hostileError{func() string { panic("no text") }}}, "dead-letter (unforwardable) m"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Publish("m")
				k := startConsumer(b, ConsumerConfig{}, returns(c.result))
				synctest.Wait()
				require.NoError(t, k.end())
				assert.Equal(t, []string{c.want}, b.History(settlements...))
				assert.Empty(t, b.History("attach sender"))
			})
		})
	}
}

// settledWith is what a consumer settles a delivery with whose handler returns err.
func settledWith(t *testing.T, err error) (d link.Disposition) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{}, returns(err))
		synctest.Wait()
		require.Len(t, b.History(settlements...), 1)
		d = b.Last
		require.NoError(t, k.end())
	})
	return d
}

func TestConsumerCutsErrorTextsToWhatASettlementCanCarry(t *testing.T) {
	huge := hostileError{func() string { return strings.Repeat("\xff", 10<<20) }}
	settled := settledWith(t, DeadLetter{Reason: Reason(huge.Error()), Err: huge})
	for _, key := range []string{AnnotationReason, AnnotationError} {
		text := settled.Annotations[key].(string)
		assert.True(t, utf8.ValidString(text), key)
		assert.LessOrEqual(t, len(text), ErrorTextLimit, key)
	}
	given := map[string]any{}
	for k, v := range settled.Annotations {
		given[k.(string)] = v
	}
	assert.NoError(t, checkModified(given))
}

func TestConsumerSurvivesHandlersThatNeverReturn(t *testing.T) {
	for _, c := range []struct {
		name    string
		handler func()
	}{
		{"panic", func() { panic("boom") }},
		{"panic with an error whose text panics", func() { panic(hostileError{func() string { panic("again") }}) }},
		{"panic with nil", func() { panic(nil) }}, //nolint:govet // on purpose
		{"runtime.Goexit", runtime.Goexit},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				ids := linktest.Numbered("m", 6)
				b.Publish(ids...)
				var calls, running atomic.Int32
				k := startConsumer(b, ConsumerConfig{Concurrency: 2}, func(context.Context, *Delivery) error {
					assert.LessOrEqual(t, running.Add(1), int32(2))
					defer running.Add(-1)
					time.Sleep(time.Second)
					if calls.Add(1)%2 == 0 {
						c.handler()
					}
					return nil
				})
				time.Sleep(time.Minute)
				assert.Len(t, b.History("accept"), 3)
				assert.Len(t, b.History("dead-letter (panicked)"), 3)
				require.NoError(t, k.end())
			})
		})
	}
}

func TestConsumerHandsOverTheDelivery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{}, func(ctx context.Context, d *Delivery) error {
			same, ok := DeliveryFrom(ctx)
			assert.True(t, ok)
			assert.Same(t, d, same)
			assert.Equal(t, "q", d.Queue())
			assert.Equal(t, time.Now(), d.Received())
			return nil
		})
		synctest.Wait()
		require.NoError(t, k.end())
	})
}

func TestConsumerKeepsToItsConcurrencyAndPrefetch(t *testing.T) {
	for _, c := range []ConsumerConfig{
		{Concurrency: 1, Prefetch: 1}, {Concurrency: 3, Prefetch: 10}, {Concurrency: 10, Prefetch: 4}, {Concurrency: 5, Prefetch: 5}, {Concurrency: 1, Prefetch: 64},
	} {
		t.Run(fmt.Sprintf("concurrency %d, prefetch %d", c.Concurrency, c.Prefetch), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				ids := linktest.Numbered("m", 100)
				b.Publish(ids...)
				var running, most atomic.Int32
				k := startConsumer(b, c, func(_ context.Context, d *Delivery) error {
					n := running.Add(1)
					defer running.Add(-1)
					for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
					}
					time.Sleep(time.Second)
					return nil
				})
				time.Sleep(10 * time.Minute)
				require.NoError(t, k.end())
				assert.Len(t, b.History("accept"), 100)
				assert.Equal(t, int32(min(c.Concurrency, c.Prefetch)), most.Load())
				assert.Equal(t, c.Prefetch, b.MostOutstanding)

				batch := max(1, min(c.Prefetch/2, c.Prefetch-c.Concurrency))
				assert.LessOrEqual(t, len(b.History("credit")), 2+100/batch, "credit is granted again in batches")
			})
		})
	}
}

func TestConsumerKeepsItsConcurrencyAcrossALostLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish(linktest.Numbered("m", 20)...)
		var running, most, calls atomic.Int32
		k := startConsumer(b, ConsumerConfig{Concurrency: 3}, func(context.Context, *Delivery) error {
			n := running.Add(1)
			defer running.Add(-1)
			for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
			}
			calls.Add(1)
			time.Sleep(time.Minute)
			return nil
		})
		for range 5 {
			time.Sleep(30 * time.Second)
			b.Kill(linktest.ErrFakeLink)
		}
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
		assert.Equal(t, int32(3), most.Load())
		assert.Len(t, b.History("accept"), 20)
		assert.Greater(t, calls.Load(), int32(20), "what a lost link left unsettled is delivered again")
	})
}

func TestConsumerNeverSettlesOnALaterLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		finish := make(chan struct{})
		calls := 0
		k := startConsumer(b, ConsumerConfig{}, func(_ context.Context, d *Delivery) error {
			if calls++; calls == 1 {
				<-finish
				return DeadLetter{Reason: "late"}
			}
			return nil
		})
		synctest.Wait()
		b.Kill(linktest.ErrFakeConn)
		time.Sleep(time.Minute)
		assert.Len(t, b.History("attach receiver"), 2)
		assert.Equal(t, 1, calls, "one slot, which the first still holds")
		close(finish)
		time.Sleep(time.Second)
		require.NoError(t, k.end())
		assert.Equal(t, []string{"accept m"}, b.History(settlements...), "the late outcome goes nowhere")
	})
}

func TestConsumerComesBackWhereverItsLinkDies(t *testing.T) {
	for _, step := range []string{"open session", "attach receiver", "credit", "settle m1", "drain", "close receiver"} {
		for _, reason := range []error{linktest.ErrFakeLink, linktest.ErrFakeConn} {
			t.Run(fmt.Sprintf("%s, %T", step, reason), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := linktest.NewFakeBroker(t)
					b.Publish("m0", "m1", "m2")
					died := false
					b.Hook = func(at string) error {
						if at != step || died {
							return nil
						}
						died = true
						b.Kill(reason)
						return reason
					}
					k := startConsumer(b, ConsumerConfig{}, returns(nil))
					time.Sleep(time.Minute)
					start := time.Now()
					require.NoError(t, k.end())
					assert.Less(t, time.Since(start), time.Minute)
					assert.True(t, died)
					got := b.History("accept")
					slices.Sort(got)
					assert.Equal(t, []string{"accept m0", "accept m1", "accept m2"}, slices.Compact(got))
					assert.Equal(t, len(b.History("open session")), len(b.History("close session")))
				})
			})
		}
	}
}

func TestConsumerAtItsStartReturnsWhatOnlyPeopleCanMend(t *testing.T) {
	for _, c := range []struct {
		refusals []error
		kind     error
	}{
		{[]error{linktest.ErrMissing}, failure.ErrNotFound},
		{[]error{&failure.Error{Op: "open session", Kind: failure.ErrSessionLimit}}, failure.ErrSessionLimit},
		{[]error{linktest.ErrFakeConn, linktest.ErrFakeLink, linktest.ErrMissing}, failure.ErrNotFound},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			refusals := c.refusals
			b.Hook = func(step string) error {
				if step != "attach receiver" || len(refusals) == 0 {
					return nil
				}
				err := refusals[0]
				refusals = refusals[1:]
				return err
			}
			k := startConsumer(b, ConsumerConfig{}, returns(nil))
			select {
			case err := <-k.result:
				require.ErrorIs(t, err, c.kind)
			case <-time.After(time.Hour):
				t.Error("it consumes, although it was told that it can't")
			}
		})
	}
}

func TestConsumerLaterSurvivesTheLossOfItsQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		attempts := 0
		b.Hook = func(step string) error {
			if step != "attach receiver" {
				return nil
			}
			if attempts++; attempts > 1 && attempts < 50 {
				return linktest.ErrMissing
			}
			return nil
		}
		k := startConsumer(b, ConsumerConfig{}, returns(nil))
		synctest.Wait()
		b.Kill(linktest.ErrFakeLink)
		time.Sleep(time.Hour)
		b.Publish("m")
		synctest.Wait()
		assert.Equal(t, []string{"accept m"}, b.History("accept"))
		require.NoError(t, k.end())
		assert.Equal(t, 50, attempts)
	})
}

func TestConsumerShutReturnsErrClosed(t *testing.T) {
	t.Run("while consuming, after its handlers have finished", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Publish("m")
			k := startConsumer(b, ConsumerConfig{}, func(context.Context, *Delivery) error {
				time.Sleep(10 * time.Second)
				return nil
			})
			synctest.Wait()
			require.NoError(t, k.Shut(within(t, time.Minute)))
			require.ErrorIs(t, <-k.result, failure.ErrClosed)
			assert.Equal(t, []string{"drain", "accept m", "close receiver", "close session"}, b.History("drain", "accept", "close"))
		})
	})
	t.Run("while reconnecting", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Hook = func(string) error { return linktest.ErrFakeConn }
			k := startConsumer(b, ConsumerConfig{}, returns(nil))
			time.Sleep(time.Hour)
			start := time.Now()
			require.NoError(t, k.Shut(within(t, time.Minute)))
			require.ErrorIs(t, <-k.result, failure.ErrClosed)
			assert.Zero(t, time.Since(start))
		})
	})
	t.Run("when its time is over, without waiting for handlers", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Publish("m")
			k := startConsumer(b, ConsumerConfig{Grace: time.Hour}, func(ctx context.Context, _ *Delivery) error {
				<-ctx.Done()
				time.Sleep(time.Minute)
				return nil
			})
			synctest.Wait()
			start := time.Now()
			require.Error(t, k.Shut(within(t, time.Second)))
			require.ErrorIs(t, <-k.result, failure.ErrClosed)
			assert.Less(t, time.Since(start), 2*time.Second)
			time.Sleep(time.Hour) // the handler
			assert.Empty(t, b.History(settlements...))
		})
	})
}

func TestConsumerWaitsForHandlersOfALostLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		down := make(chan struct{})
		b.Hook = func(string) error {
			if failure.IsClosed(down) {
				return linktest.ErrFakeConn
			}
			return nil
		}
		var ended atomic.Bool
		k := startConsumer(b, ConsumerConfig{}, func(ctx context.Context, _ *Delivery) error {
			time.Sleep(10 * time.Second)
			assert.NoError(t, ctx.Err(), "it has its grace")
			ended.Store(true)
			return nil
		})
		synctest.Wait()
		close(down)
		b.Kill(linktest.ErrFakeConn)
		time.Sleep(time.Second)
		require.NoError(t, k.end())
		assert.True(t, ended.Load(), "no handler runs after Consume has returned")
	})
}

func TestConsumerNeverGrantsCreditAfterTheDrain(t *testing.T) {
	// The settling goroutine is stopped right before it gives credit back, as the
	// drain begins: in real time, since a mutex may be what it is stopped by.
	b := linktest.NewFakeBroker(t)
	b.Publish("m")
	granting, drained := make(chan struct{}), make(chan struct{})
	credits := 0
	b.Hook = func(step string) error {
		switch step {
		case "credit":
			if credits++; credits == 2 {
				close(granting)
				select {
				case <-drained:
				case <-time.After(20 * time.Millisecond):
				}
			}
		case "close receiver":
			close(drained)
		}
		return nil
	}
	k := startConsumer(b, ConsumerConfig{Prefetch: 1}, returns(nil))
	<-granting
	require.NoError(t, k.end())
	events := b.History()
	assert.Greater(t, slices.Index(events, "drain"), slices.Index(events, "accept m"))
	assert.Equal(t, []string{"credit 1", "credit 1", "drain"}, b.History("credit", "drain"))
}

// What no handler has begun goes back behind what handlers have, unless the queue has no
// single active consumer: a failed message must be back before those that come after it.
func TestDrainKeepsTheOrderThatLeavesDeliveryCountsAlone(t *testing.T) {
	single := func(is bool, err error) func(context.Context, string) (bool, error) {
		return func(context.Context, string) (bool, error) { return is, err }
	}
	unanswered := func(ctx context.Context, _ string) (bool, error) {
		<-ctx.Done()
		return false, ctx.Err()
	}
	late := []string{"m0 done", "accept m0", "m1 done", "requeue as failed m1", "release m2", "release m3", "release m4", "release m5"}
	soon := []string{"release m2", "release m3", "release m4", "release m5", "m0 done", "accept m0", "m1 done", "requeue as failed m1"}
	for name, c := range map[string]struct {
		version string
		single  func(context.Context, string) (bool, error)
		want    []string
	}{
		"single active consumer": {"4.3.0", single(true, nil), late},
		"shared queue":           {"4.3.0", single(false, nil), soon},
		"no answer":              {"4.3.0", unanswered, late},
		"an error":               {"4.3.0", single(false, linktest.ErrFakeConn), late},
		"RabbitMQ 4.0": {"4.0.5", single(true, nil), []string{
			"m0 done", "accept m0", "m1 done", "requeue as failed m1", "m2 done", "accept m2", "m3 done", "accept m3", "m4 done", "accept m4", "m5 done", "accept m5",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version, b.SingleActive = c.version, c.single
				b.Publish(linktest.Numbered("m", 6)...)
				k := startOrderedBy(b, ConsumerConfig{Concurrency: 2, Prefetch: 64}, func(_ context.Context, d *Delivery) error {
					time.Sleep(time.Duration(linktest.IDOf(d.Message())[1]-'0'+1) * time.Second)
					b.Note("%s done", linktest.IDOf(d.Message()))
					if linktest.IDOf(d.Message()) == "m1" {
						return errors.New("boom")
					}
					return nil
				}, func(d *Delivery) (string, bool) {
					return "the last two wait for", linktest.IDOf(d.Message()) == "m0" || linktest.IDOf(d.Message()) > "m3"
				})
				synctest.Wait()
				before := len(b.History())
				b.Note("stop")
				require.NoError(t, k.end())
				assert.Equal(t, slices.Concat([]string{"stop", "drain"}, c.want, []string{"close receiver", "close session"}), b.History()[before:])
			})
		})
	}
}

// A handler that ignores the end of its ctx has its message come back with the link, and
// so does all that is behind it.
func TestDrainThatGivesUpAHandlerReleasesNothingBeforeIt(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Version = version
			b.Publish(linktest.Numbered("m", 3)...)
			k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(context.Context, *Delivery) error {
				time.Sleep(time.Hour)
				return nil
			})
			synctest.Wait()
			start := time.Now()
			require.NoError(t, k.end())
			assert.Equal(t, time.Minute+lastGrace, time.Since(start))
			assert.Empty(t, b.History(settlements...))
			time.Sleep(2 * time.Hour)
		})
	}
}

func TestDrainTakesWhatArrivesWhileItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Hook = func(step string) error {
			if step == "drain" {
				b.Publish("late") // on its way as the drain begins
			}
			return nil
		}
		k := startConsumer(b, ConsumerConfig{}, func(context.Context, *Delivery) error {
			time.Sleep(time.Second)
			return nil
		})
		synctest.Wait()
		require.NoError(t, k.end())
		assert.Len(t, b.History("accept late", "release late"), 1, "settled before the link is closed")
	})
}

func TestDrainEndsHandlersWhenGraceIsOver(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Version = version
			b.Publish("m0", "m1")
			start := time.Now()
			k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(ctx context.Context, _ *Delivery) error {
				<-ctx.Done()
				assert.Equal(t, time.Minute, time.Since(start))
				assert.ErrorIs(t, context.Cause(ctx), context.Canceled)
				return Requeue{}
			})
			synctest.Wait()
			require.NoError(t, k.end())
			assert.ElementsMatch(t, []string{"release m0", "release m1"}, b.History(settlements...), "begun or not")
			assert.Equal(t, time.Minute, time.Since(start))
		})
	}
}

func TestDrainLeavesAHandlerThatIgnoresItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(context.Context, *Delivery) error {
			time.Sleep(time.Hour)
			return nil
		})
		synctest.Wait()
		start := time.Now()
		require.NoError(t, k.end())
		assert.Equal(t, time.Minute+lastGrace, time.Since(start))
		time.Sleep(2 * time.Hour)
		assert.Empty(t, b.History(settlements...), "the link is gone: the broker delivers it again")
	})
}

func TestDrainThatTheBrokerDoesNotAnswerGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		b.Hook = func(step string) error {
			if step == "drain" {
				time.Sleep(drainTimeout)
				return context.DeadlineExceeded
			}
			return nil
		}
		k := startConsumer(b, ConsumerConfig{}, func(context.Context, *Delivery) error {
			time.Sleep(time.Second)
			return nil
		})
		synctest.Wait()
		start := time.Now()
		require.NoError(t, k.end())
		assert.Equal(t, drainTimeout, time.Since(start))
		assert.Equal(t, []string{"accept m"}, b.History(settlements...))
	})
}

func TestHandlersContextOutlivesConsumes(t *testing.T) {
	type key struct{}
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m")
		cfg, err := ConsumerConfig{}.withDefaults()
		require.NoError(t, err)
		k := newConsumer("q", "/queues/q", HandlerFunc(func(ctx context.Context, _ *Delivery) error {
			time.Sleep(time.Second)
			assert.NoError(t, ctx.Err())
			assert.Equal(t, "value", ctx.Value(key{}))
			return nil
		}), cfg, asked{}, nil, consumerDeps{Sessions: b, Queues: fakeQueue{}, Backoff: testBackoff, Log: quiet, Overdue: cmp.Or(b.Overdue, linktest.ForEver)})
		ctx, cancel := context.WithCancel(context.WithValue(context.Background(), key{}, "value"))
		result := async(func() error { return k.run(ctx) })
		synctest.Wait()
		cancel()
		require.NoError(t, <-result)
		assert.Equal(t, []string{"accept m"}, b.History(settlements...))
	})
}

// However links die and whenever Consume ends: each message is accepted at least
// once or still in the queue, and never settled on a link that it didn't come in on.
func TestConsumerLosesNothing(t *testing.T) {
	for round := range 20 {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			ids := linktest.Numbered("m", 100)
			b.Publish(ids...)
			var mu sync.Mutex
			handled := map[string]int{}
			k := startConsumer(b, ConsumerConfig{Concurrency: 4, Prefetch: 10}, func(_ context.Context, d *Delivery) error {
				mu.Lock()
				n := len(handled)
				handled[linktest.IDOf(d.Message())]++
				mu.Unlock()
				time.Sleep(time.Duration(n%7) * 100 * time.Millisecond)
				return nil
			})
			for i := range 3 + round {
				time.Sleep(time.Duration(137*(i+round)) * time.Millisecond)
				b.Kill([]error{linktest.ErrFakeLink, linktest.ErrFakeConn}[i%2])
			}
			time.Sleep(time.Hour)
			require.NoError(t, k.end())
			assert.Len(t, handled, 100)
			b.Mu.Lock()
			defer b.Mu.Unlock()
			assert.Empty(t, b.Ready)
		})
	}
}
