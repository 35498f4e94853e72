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
)

// testConsumer is a consumer at work on a fakeBroker.
type testConsumer struct {
	*consumer
	stop   context.CancelFunc // as the end of Consume's ctx
	result <-chan error
}

func startConsumer(b *fakeBroker, cfg ConsumerConfig, h HandlerFunc) *testConsumer {
	return startConsumerOf(b, cfg, h, true)
}

// startConsumerOf is the same for a queue that has a dead-letter exchange, or none.
func startConsumerOf(b *fakeBroker, cfg ConsumerConfig, h HandlerFunc, deadLetters bool) *testConsumer {
	cfg, err := cfg.withDefaults()
	require.NoError(b.t, err)
	k := newConsuming("q", "/queues/q", h, cfg, asked{}, nil, consumerDeps{
		sessions: b, backoff: testBackoff, log: cmp.Or(b.logger, quiet), tell: b.tell, overdue: cmp.Or(b.overdue, forEver),
		deadLetters: func(ctx context.Context, _ string) (bool, error) {
			err := b.asked(ctx)
			return err == nil && deadLetters, err
		}, singleActive: b.singleActive, now: b.now,
		consumerTimeout: func(ctx context.Context, _ string) (time.Duration, error) { return b.timeout, b.asked(ctx) },
	})
	ctx, stop := context.WithCancel(context.Background())
	b.t.Cleanup(stop)
	return &testConsumer{k.core, stop, async(func() error { return k.core.run(ctx) })}
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
		{"DeadLetter with an error that panics when it is looked into", DeadLetter{Reason: "bad-order", Err: (*nilCause)(nil)}, "dead-letter (bad-order) m"},
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
		{"Forward to no address", Forward{Message: withID("copy")}, "dead-letter (unforwardable) m"},
		{"Forward to an impossible address", Forward{To: address.Queue("\n"), Message: withID("copy"), Err: hostileError{func() string { panic("no text") }}}, "dead-letter (unforwardable) m"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.publish("m")
				k := startConsumer(b, ConsumerConfig{}, returns(c.result))
				synctest.Wait()
				require.NoError(t, k.end())
				assert.Equal(t, []string{c.want}, b.history(settlements...))
				assert.Empty(t, b.history("attach sender"))
			})
		})
	}
}

// settledWith is what a consumer settles a delivery with whose handler returns err.
func settledWith(t *testing.T, err error) (d disposition) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
		k := startConsumer(b, ConsumerConfig{}, returns(err))
		synctest.Wait()
		require.Len(t, b.history(settlements...), 1)
		d = b.last
		require.NoError(t, k.end())
	})
	return d
}

func TestConsumerCutsErrorTextsToWhatASettlementCanCarry(t *testing.T) {
	huge := hostileError{func() string { return strings.Repeat("\xff", 10<<20) }}
	settled := settledWith(t, DeadLetter{Reason: Reason(huge.Error()), Err: huge})
	for _, key := range []string{AnnotationReason, AnnotationError} {
		text := settled.annotations[key].(string)
		assert.True(t, utf8.ValidString(text), key)
		assert.LessOrEqual(t, len(text), ErrorTextLimit, key)
	}
	given := map[string]any{}
	for k, v := range settled.annotations {
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
				b := newFakeBroker(t)
				ids := numbered("m", 6)
				b.publish(ids...)
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
				assert.Len(t, b.history("accept"), 3)
				assert.Len(t, b.history("dead-letter (panicked)"), 3)
				require.NoError(t, k.end())
			})
		})
	}
}

func TestConsumerHandsOverTheDelivery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
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
				b := newFakeBroker(t)
				ids := numbered("m", 100)
				b.publish(ids...)
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
				assert.Len(t, b.history("accept"), 100)
				assert.Equal(t, int32(min(c.Concurrency, c.Prefetch)), most.Load())
				assert.Equal(t, c.Prefetch, b.mostOutstanding)

				batch := max(1, min(c.Prefetch/2, c.Prefetch-c.Concurrency))
				assert.LessOrEqual(t, len(b.history("credit")), 2+100/batch, "credit is given back in batches")
			})
		})
	}
}

func TestConsumerKeepsItsConcurrencyAcrossALostLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish(numbered("m", 20)...)
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
			b.kill(errFakeLink)
		}
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
		assert.Equal(t, int32(3), most.Load())
		assert.Len(t, b.history("accept"), 20)
		assert.Greater(t, calls.Load(), int32(20), "what a lost link left unsettled is delivered again")
	})
}

func TestConsumerNeverSettlesOnALaterLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
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
		b.kill(errFakeConn)
		time.Sleep(time.Minute)
		assert.Len(t, b.history("attach receiver"), 2)
		assert.Equal(t, 1, calls, "one slot, which the first still holds")
		close(finish)
		time.Sleep(time.Second)
		require.NoError(t, k.end())
		assert.Equal(t, []string{"accept m"}, b.history(settlements...), "the late outcome goes nowhere")
	})
}

func TestConsumerComesBackWhereverItsLinkDies(t *testing.T) {
	for _, step := range []string{"open session", "attach receiver", "credit", "settle m1", "drain", "close receiver"} {
		for _, reason := range []error{errFakeLink, errFakeConn} {
			t.Run(fmt.Sprintf("%s, %T", step, reason), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := newFakeBroker(t)
					b.publish("m0", "m1", "m2")
					died := false
					b.hook = func(at string) error {
						if at != step || died {
							return nil
						}
						died = true
						b.kill(reason)
						return reason
					}
					k := startConsumer(b, ConsumerConfig{}, returns(nil))
					time.Sleep(time.Minute)
					start := time.Now()
					require.NoError(t, k.end())
					assert.Less(t, time.Since(start), time.Minute)
					assert.True(t, died)
					got := b.history("accept")
					slices.Sort(got)
					assert.Equal(t, []string{"accept m0", "accept m1", "accept m2"}, slices.Compact(got))
					assert.Equal(t, len(b.history("open session")), len(b.history("close session")))
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
		{[]error{errMissing}, ErrNotFound},
		{[]error{&Error{Op: "open session", Kind: ErrSessionLimit}}, ErrSessionLimit},
		{[]error{errFakeConn, errFakeLink, errMissing}, ErrNotFound},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			refusals := c.refusals
			b.hook = func(step string) error {
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
		b := newFakeBroker(t)
		attempts := 0
		b.hook = func(step string) error {
			if step != "attach receiver" {
				return nil
			}
			if attempts++; attempts > 1 && attempts < 50 {
				return errMissing
			}
			return nil
		}
		k := startConsumer(b, ConsumerConfig{}, returns(nil))
		synctest.Wait()
		b.kill(errFakeLink)
		time.Sleep(time.Hour)
		b.publish("m")
		synctest.Wait()
		assert.Equal(t, []string{"accept m"}, b.history("accept"))
		require.NoError(t, k.end())
		assert.Equal(t, 50, attempts)
	})
}

func TestConsumerShutReturnsErrClosed(t *testing.T) {
	t.Run("while consuming, after its handlers have finished", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.publish("m")
			k := startConsumer(b, ConsumerConfig{}, func(context.Context, *Delivery) error {
				time.Sleep(10 * time.Second)
				return nil
			})
			synctest.Wait()
			require.NoError(t, k.shut(within(t, time.Minute)))
			require.ErrorIs(t, <-k.result, ErrClosed)
			assert.Equal(t, []string{"drain", "accept m", "close receiver", "close session"}, b.history("drain", "accept", "close"))
		})
	})
	t.Run("while reconnecting", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.hook = func(string) error { return errFakeConn }
			k := startConsumer(b, ConsumerConfig{}, returns(nil))
			time.Sleep(time.Hour)
			start := time.Now()
			require.NoError(t, k.shut(within(t, time.Minute)))
			require.ErrorIs(t, <-k.result, ErrClosed)
			assert.Zero(t, time.Since(start))
		})
	})
	t.Run("when its time is over, without waiting for handlers", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.publish("m")
			k := startConsumer(b, ConsumerConfig{Grace: time.Hour}, func(ctx context.Context, _ *Delivery) error {
				<-ctx.Done()
				time.Sleep(time.Minute)
				return nil
			})
			synctest.Wait()
			start := time.Now()
			require.Error(t, k.shut(within(t, time.Second)))
			require.ErrorIs(t, <-k.result, ErrClosed)
			assert.Less(t, time.Since(start), 2*time.Second)
			time.Sleep(time.Hour) // the handler
			assert.Empty(t, b.history(settlements...))
		})
	})
}

func TestConsumerWaitsForHandlersOfALostLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
		down := make(chan struct{})
		b.hook = func(string) error {
			if isClosed(down) {
				return errFakeConn
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
		b.kill(errFakeConn)
		time.Sleep(time.Second)
		require.NoError(t, k.end())
		assert.True(t, ended.Load(), "no handler runs after Consume has returned")
	})
}

func TestConsumerNeverGrantsCreditAfterTheDrain(t *testing.T) {
	// The settling goroutine is stopped right before it gives credit back, as the
	// drain begins: in real time, since a mutex may be what it is stopped by.
	b := newFakeBroker(t)
	b.publish("m")
	granting, drained := make(chan struct{}), make(chan struct{})
	credits := 0
	b.hook = func(step string) error {
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
	events := b.history()
	assert.Greater(t, slices.Index(events, "drain"), slices.Index(events, "accept m"))
	assert.Equal(t, []string{"credit 1", "credit 1", "drain"}, b.history("credit", "drain"))
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
		"an error":               {"4.3.0", single(false, errFakeConn), late},
		"RabbitMQ 4.0": {"4.0.5", single(true, nil), []string{
			"m0 done", "accept m0", "m1 done", "requeue as failed m1", "m2 done", "accept m2", "m3 done", "accept m3", "m4 done", "accept m4", "m5 done", "accept m5",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker(t)
				b.version, b.singleActive = c.version, c.single
				b.publish(numbered("m", 6)...)
				k := startOrderedBy(b, ConsumerConfig{Concurrency: 2, Prefetch: 64}, func(_ context.Context, d *Delivery) error {
					time.Sleep(time.Duration(idOf(d.Message())[1]-'0'+1) * time.Second)
					b.note("%s done", idOf(d.Message()))
					if idOf(d.Message()) == "m1" {
						return errors.New("boom")
					}
					return nil
				}, func(d *Delivery) (string, bool) {
					return "the last two wait for", idOf(d.Message()) == "m0" || idOf(d.Message()) > "m3"
				})
				synctest.Wait()
				before := len(b.history())
				b.note("stop")
				require.NoError(t, k.end())
				assert.Equal(t, slices.Concat([]string{"stop", "drain"}, c.want, []string{"close receiver", "close session"}), b.history()[before:])
			})
		})
	}
}

// A handler that ignores the end of its ctx has its message come back with the link, and
// so does all that is behind it.
func TestDrainThatGivesUpAHandlerReleasesNothingBeforeIt(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.version = version
			b.publish(numbered("m", 3)...)
			k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(context.Context, *Delivery) error {
				time.Sleep(time.Hour)
				return nil
			})
			synctest.Wait()
			start := time.Now()
			require.NoError(t, k.end())
			assert.Equal(t, time.Minute+lastGrace, time.Since(start))
			assert.Empty(t, b.history(settlements...))
			time.Sleep(2 * time.Hour)
		})
	}
}

func TestDrainTakesWhatArrivesWhileItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.hook = func(step string) error {
			if step == "drain" {
				b.publish("late") // on its way as the drain begins
			}
			return nil
		}
		k := startConsumer(b, ConsumerConfig{}, func(context.Context, *Delivery) error {
			time.Sleep(time.Second)
			return nil
		})
		synctest.Wait()
		require.NoError(t, k.end())
		assert.Len(t, b.history("accept late", "release late"), 1, "settled before the link is closed")
	})
}

func TestDrainEndsHandlersWhenGraceIsOver(t *testing.T) {
	for _, version := range []string{"4.3.0", "4.0.5"} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			b.version = version
			b.publish("m0", "m1")
			start := time.Now()
			k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(ctx context.Context, _ *Delivery) error {
				<-ctx.Done()
				assert.Equal(t, time.Minute, time.Since(start))
				assert.ErrorIs(t, context.Cause(ctx), context.Canceled)
				return Requeue{}
			})
			synctest.Wait()
			require.NoError(t, k.end())
			assert.ElementsMatch(t, []string{"release m0", "release m1"}, b.history(settlements...), "begun or not")
			assert.Equal(t, time.Minute, time.Since(start))
		})
	}
}

func TestDrainLeavesAHandlerThatIgnoresItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
		k := startConsumer(b, ConsumerConfig{Grace: time.Minute}, func(context.Context, *Delivery) error {
			time.Sleep(time.Hour)
			return nil
		})
		synctest.Wait()
		start := time.Now()
		require.NoError(t, k.end())
		assert.Equal(t, time.Minute+lastGrace, time.Since(start))
		time.Sleep(2 * time.Hour)
		assert.Empty(t, b.history(settlements...), "the link is gone: the broker delivers it again")
	})
}

func TestDrainThatTheBrokerDoesNotAnswerGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
		b.hook = func(step string) error {
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
		assert.Equal(t, []string{"accept m"}, b.history(settlements...))
	})
}

func TestHandlersContextOutlivesConsumes(t *testing.T) {
	type key struct{}
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		b.publish("m")
		cfg, err := ConsumerConfig{}.withDefaults()
		require.NoError(t, err)
		k := newConsuming("q", "/queues/q", HandlerFunc(func(ctx context.Context, _ *Delivery) error {
			time.Sleep(time.Second)
			assert.NoError(t, ctx.Err())
			assert.Equal(t, "value", ctx.Value(key{}))
			return nil
		}), cfg, asked{}, nil, consumerDeps{sessions: b, backoff: testBackoff, log: quiet, tell: b.tell, overdue: cmp.Or(b.overdue, forEver)})
		ctx, cancel := context.WithCancel(context.WithValue(context.Background(), key{}, "value"))
		result := async(func() error { return k.core.run(ctx) })
		synctest.Wait()
		cancel()
		require.NoError(t, <-result)
		assert.Equal(t, []string{"accept m"}, b.history(settlements...))
	})
}

// However links die and whenever Consume ends: each message is accepted at least
// once or still in the queue, and never settled on a link that it didn't come in on.
func TestConsumerLosesNothing(t *testing.T) {
	for round := range 20 {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker(t)
			ids := numbered("m", 100)
			b.publish(ids...)
			var mu sync.Mutex
			handled := map[string]int{}
			k := startConsumer(b, ConsumerConfig{Concurrency: 4, Prefetch: 10}, func(_ context.Context, d *Delivery) error {
				mu.Lock()
				n := len(handled)
				handled[idOf(d.Message())]++
				mu.Unlock()
				time.Sleep(time.Duration(n%7) * 100 * time.Millisecond)
				return nil
			})
			for i := range 3 + round {
				time.Sleep(time.Duration(137*(i+round)) * time.Millisecond)
				b.kill([]error{errFakeLink, errFakeConn}[i%2])
			}
			time.Sleep(time.Hour)
			require.NoError(t, k.end())
			assert.Len(t, handled, 100)
			b.mu.Lock()
			defer b.mu.Unlock()
			assert.Empty(t, b.ready)
		})
	}
}
