package retry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/refusal"
)

// returns is a handler that always returns err.
func returns(err error) client.HandlerFunc {
	return func(context.Context, *client.Delivery) error { return err }
}

// handle calls the decorated handler for m from the queue "orders".
func handle(t testing.TB, p Policy, m *client.Message, h client.HandlerFunc) error {
	t.Helper()
	return With(p)(h).Handle(t.Context(), client.NewDelivery("orders", m))
}

func TestOutcomesOfTheHandlerAreCarriedOutAsTheyAre(t *testing.T) {
	t.Parallel()
	forward := client.Forward{To: address.Queue("elsewhere"), Message: client.NewMessage(nil)}
	for name, c := range map[string]struct{ err, want error }{
		"nil":                {nil, nil},
		"Requeue":            {client.Requeue{}, client.Requeue{}},
		"Requeue as failed":  {client.Requeue{Failed: true, Err: errA}, client.Requeue{Failed: true, Err: errA}},
		"Modify":             {client.Modify{Failed: true}, client.Modify{Failed: true}},
		"Forward":            {forward, forward},
		"wrapped":            {fmt.Errorf("because: %w", client.Requeue{}), client.Requeue{}},
		"joined with errors": {errors.Join(errA, Permanent(errB), client.Requeue{}), client.Requeue{}},
		"by pointer":         {&client.Requeue{}, client.Requeue{}},
		"around a mark":      {client.Requeue{Err: Permanent(errA)}, client.Requeue{Err: Permanent(errA)}},
	} {
		assert.Equal(t, c.want, handle(t, Policy{}, client.NewMessage(nil), returns(c.err)), name)
	}
	got := handle(t, Policy{}, client.NewMessage(nil), returns((*client.DeadLetter)(nil)))
	assert.Equal(t, "requeue as failed: an error of type *client.DeadLetter whose methods panic", got.Error())
}

// However a handler dead-letters a message, the message gets its history, and
// loses the mark of an earlier retry: with one it would be retried forever.
func TestHandlersOwnDeadLetterTakesTheMarkOfARetryOff(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err    error
		reason string
	}{
		"with a reason":        {client.DeadLetter{Reason: "duplicate", Annotations: map[string]any{"x-opt-seen": int64(1)}}, "duplicate"},
		"without":              {client.DeadLetter{}, "rejected"},
		"by pointer":           {&client.DeadLetter{}, "rejected"},
		"wrapped pointer":      {fmt.Errorf("x: %w", &client.DeadLetter{}), "rejected"},
		"Modify":               {client.Modify{DeadLetter: true}, "rejected"},
		"Modify by pointer":    {&client.Modify{DeadLetter: true}, "rejected"},
		"Modify with a reason": {client.Modify{DeadLetter: true, Annotations: map[string]any{client.AnnotationReason: "own"}}, "own"},
	} {
		w := newWorld(t, mustTopology(t, Policy{Strategy: StrategyDeadLetter}, "orders"))
		m := &held{home: "orders", msg: client.NewMessage(nil)}
		m.msg.Annotations = map[any]any{client.AnnotationReason: reasonRetry, annotation.Delay: int64(10_000), annotation.Retries: int64(1)}
		require.True(t, w.carryOut("orders", m, handle(t, Policy{Strategy: StrategyDeadLetter}, m.msg, returns(c.err))), name)
		assert.Equal(t, map[string]int{"orders.dead": 1}, w.where(), name)
		assert.Equal(t, client.Reason(c.reason), DeadLetterOf(m.msg).Reason, name)
		assert.Equal(t, 1, DeadLetterOf(m.msg).Retries, name)
	}
}

// A message that has waited in another way than by DeadLetter can be rejected by
// a worker that knows nothing of marks, such as one in another language.
func TestForeignRejectionAfterAWaitIsADeath(t *testing.T) {
	t.Parallel()
	for _, strategy := range []Strategy{StrategyRepublish, StrategyNative} {
		p := Policy{Strategy: StrategyAuto}
		w := newWorld(t, mustTopology(t, p, "orders"))
		pl := planOf(t, p)
		pl.strategy = strategy
		m := &held{home: "orders", msg: client.NewMessage(nil)}
		// It was retried by DeadLetter before.
		m.msg.Annotations = map[any]any{client.AnnotationReason: reasonRetry, annotation.Delay: int64(10_000), annotation.Retries: int64(1)}
		h := worker(p, pl, []string{"orders"}, returns(errA))
		require.True(t, w.carryOut("orders", m, h.Handle(t.Context(), client.NewDelivery("orders", m.msg))))
		if strategy == StrategyRepublish {
			w.settle()
		}
		require.Equal(t, []*held{m}, w.take("orders"))
		w.die("orders", m, "rejected")
		assert.Equal(t, map[string]int{"orders.dead": 1}, w.where(), "%v", strategy)
		assert.Equal(t, ReasonRejected, DeadLetterOf(m.msg).Reason)
	}
}

func TestPanicIsADeath(t *testing.T) {
	t.Parallel()
	for name, h := range map[string]client.HandlerFunc{
		"text":           func(context.Context, *client.Delivery) error { panic("boo") },
		"error":          func(context.Context, *client.Delivery) error { panic(errA) },
		"error to retry": func(context.Context, *client.Delivery) error { panic(After(time.Second, errA)) },
		"outcome":        func(context.Context, *client.Delivery) error { panic(client.Requeue{}) },
		"nil":            func(context.Context, *client.Delivery) error { panic(nil) },
		"nil pointer":    func(context.Context, *client.Delivery) error { var p *Policy; return fmt.Errorf("%v", p.MaxRetries) },
		"inside an After": func(context.Context, *client.Delivery) error {
			return After(time.Second, func() error { panic("x") }())
		},
	} {
		dead, ok := handle(t, Policy{}, client.NewMessage(nil), h).(client.DeadLetter)
		require.True(t, ok, name)
		assert.Equal(t, client.ReasonPanicked, dead.Reason, name)
		var p *client.PanicError
		require.ErrorAs(t, dead.Err, &p, name)
		assert.Contains(t, string(p.Stack), "with_test.go", name)
		assert.NotEmpty(t, notified(dead.Annotations).Type, name)
	}
}

// What a policy's own functions, or an error's methods, panic with is no reason to
// take the worker's goroutine along either.
func TestPanicInThePolicyOrInAnErrorIsADeath(t *testing.T) {
	t.Parallel()
	boo := func(error) bool { panic("in the policy") }
	for name, c := range map[string]struct {
		policy Policy
		err    error
	}{
		"RetryIf": {Policy{RetryIf: boo}, errA},
		"a rule":  {Policy{Rules: []ErrorRule{{If: boo}}}, errA},
	} {
		dead, ok := handle(t, c.policy, client.NewMessage(nil), returns(c.err)).(client.DeadLetter)
		require.True(t, ok, name)
		assert.Equal(t, client.ReasonPanicked, dead.Reason, name)
		assert.Equal(t, "orders", dead.Annotations[annotation.Queue], name)
	}
}

type unwrapPanics struct{}

func (unwrapPanics) Error() string { return "don't look" }
func (unwrapPanics) Unwrap() error { panic("looked") }

// nilled has methods that don't expect a nil pointer.
type nilled struct{ err error }

func (e *nilled) Error() string   { return e.err.Error() }
func (e *nilled) Unwrap() error   { return e.err }
func (e *nilled) Is(t error) bool { return e.err == t }

type isPanics struct{}

func (isPanics) Error() string { return "don't ask" }
func (isPanics) Is(error) bool { panic("asked") }

type asPanics struct{}

func (asPanics) Error() string { return "don't ask" }
func (asPanics) As(any) bool   { panic("asked") }

type holdsItself struct{}

func (e *holdsItself) Error() string { return "round and round" }
func (e *holdsItself) Unwrap() error { return e }

// An error whose methods panic, or find no end, is a failure like any other.
func TestErrorThatCanNotBeReadIsAFailureLikeAnyOther(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{
		"nil pointer":         (*nilled)(nil),
		"wrapped nil pointer": fmt.Errorf("x: %w", error((*nilled)(nil))),
		"joined nil pointer":  errors.Join(errA, (*nilled)(nil)),
		"Unwrap panics":       unwrapPanics{},
		"Is panics":           isPanics{},
		"As panics":           asPanics{},
		"Error panics":        panics{},
		"without an end":      &holdsItself{},
	} {
		asked := 0
		peek := func(err error) bool {
			asked++
			return errors.Is(err, errB) || errors.As(err, new(*nilled))
		}
		policy := Policy{
			Strategy: StrategyDeadLetter, MaxRetries: 1, RetryIf: func(err error) bool { return !peek(err) },
			Rules: []ErrorRule{{If: peek, Do: ActionDiscard}, {If: On(errB), Do: ActionDiscard}},
		}
		m := client.NewMessage(nil)
		retried, ok := handle(t, policy, m, returns(err)).(client.Modify)
		require.True(t, ok, name)
		assert.Equal(t, reasonRetry, retried.Annotations[client.AnnotationReason], name)
		assert.NotEmpty(t, retried.Annotations[client.AnnotationError], name)
		assert.NotEqual(t, "*retry.unreadable", notified(retried.Annotations).Type, name)
		assert.Equal(t, 2, asked, name)
		m.ApplicationProperties = map[string]any{CountProperty: int64(1)}
		dead, ok := handle(t, policy, m, returns(err)).(client.DeadLetter)
		require.True(t, ok, name)
		assert.Equal(t, ReasonExhausted, dead.Reason, name)
		// Marks around it count.
		dead, ok = handle(t, Policy{}, m, returns(Permanent(err))).(client.DeadLetter)
		require.True(t, ok, name)
		assert.Equal(t, ReasonPermanent, dead.Reason, name)
	}
}

// After sets the delay, with any error inside it.
func TestAfterAroundAnOutcomeKeepsItsDelay(t *testing.T) {
	t.Parallel()
	for _, o := range []error{client.Requeue{}, &client.Requeue{Failed: true}, client.DeadLetter{}, fmt.Errorf("x: %w", client.Requeue{})} {
		f, ok := handle(t, Policy{}, client.NewMessage(nil), returns(After(time.Minute, o))).(client.Forward)
		require.True(t, ok, "%v", o)
		assert.Equal(t, address.Exchange("retry_exchange", "delay.60000.orders"), f.To)
		assert.Equal(t, 1, Count(f.Message))
	}
	// An outcome around it, or joined with it, counts.
	assert.IsType(t, client.Requeue{}, handle(t, Policy{}, client.NewMessage(nil), returns(client.Requeue{Err: After(time.Minute, nil)})))
	assert.IsType(t, client.Requeue{}, handle(t, Policy{}, client.NewMessage(nil), returns(errors.Join(After(time.Minute, nil), client.Requeue{}))))
}

func TestRecoverInsideLetsPanicsBeRetried(t *testing.T) {
	t.Parallel()
	h := client.Chain(With(Policy{}), client.Recover())(client.HandlerFunc(func(context.Context, *client.Delivery) error { panic(errA) }))
	err := h.Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil)))
	assert.IsType(t, client.Forward{}, err)
	assert.ErrorIs(t, err, errA)
}

func TestGoexitIsLeftToTheConsumer(t *testing.T) {
	t.Parallel()
	ended := make(chan bool)
	go func() {
		returned := false
		defer func() { ended <- returned }()
		_ = handle(t, Policy{Immediate: 5}, client.NewMessage(nil), func(context.Context, *client.Delivery) error {
			runtime.Goexit()
			return nil
		})
		returned = true
	}()
	assert.False(t, <-ended)
}

func TestShuttingDownUsesUpNoRetry(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	run := func(err error) error {
		return With(Policy{Immediate: 3})(returns(err)).Handle(ctx, client.NewDelivery("orders", client.NewMessage(nil)))
	}
	assert.Equal(t, client.Requeue{Err: context.Canceled}, run(context.Canceled))
	wrapped := fmt.Errorf("query: %w", context.Cause(ctx))
	assert.Equal(t, client.Requeue{Err: wrapped}, run(wrapped))
	assert.IsType(t, client.Forward{}, run(errA), "another failure is retried")
	assert.IsType(t, client.Forward{}, run(context.DeadlineExceeded))
	assert.NoError(t, run(nil))

	// While the ctx isn't canceled, the error is from another ctx.
	assert.IsType(t, client.Forward{}, handle(t, Policy{}, client.NewMessage(nil), returns(context.Canceled)))
}

func TestImmediateRetriesComeBeforeEachDelayedOneAndDoNotCount(t *testing.T) {
	t.Parallel()
	calls := 0
	count := func(err error) client.HandlerFunc {
		return func(context.Context, *client.Delivery) error { calls++; return err }
	}
	for name, c := range map[string]struct {
		err   error
		count int64
		calls int
	}{
		"a failure":                  {errA, 0, 3},
		"a later one":                {errA, 3, 3},
		"the last":                   {errA, 5, 1}, // nothing comes after it that they would go before
		"a delay that was asked for": {After(time.Minute, errA), 0, 1},
		"too early":                  {Snooze(time.Minute), 0, 1},
		"permanent":                  {Permanent(errA), 0, 1},
		"an outcome":                 {client.Requeue{}, 0, 1},
		"discarded":                  {Discard(errA), 0, 1},
	} {
		calls = 0
		m := client.NewMessage(nil)
		m.ApplicationProperties = map[string]any{CountProperty: c.count}
		err := handle(t, Policy{Immediate: 2}, m, count(c.err))
		assert.Equal(t, c.calls, calls, name)
		if f, ok := err.(client.Forward); ok && !errors.Is(c.err, Snooze(0)) && name != "too early" {
			assert.Equal(t, int(c.count)+1, Count(f.Message), name)
		}
	}
	// One that succeeds in between is a success.
	calls = 0
	assert.NoError(t, handle(t, Policy{Immediate: 2}, client.NewMessage(nil), func(context.Context, *client.Delivery) error {
		if calls++; calls < 3 {
			return errA
		}
		return nil
	}))
}

type prepared struct {
	client.HandlerFunc
	starts chan client.Start
	err    error
}

func (p prepared) Prepare(_ context.Context, s client.Start) error {
	p.starts <- s
	return p.err
}

func TestPrepareIsPassedOnToTheHandlerWithin(t *testing.T) {
	t.Parallel()
	inner := prepared{returns(nil), make(chan client.Start, 1), errA}
	h := With(Policy{})(inner)
	assert.ErrorIs(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders"}), errA)
	assert.Equal(t, "orders", (<-inner.starts).Queue)
}

// gone is a broker without queues.
type gone struct{}

func (gone) Request(context.Context, string, string, any) (int, any, error) { return 404, nil, nil }

func TestPrepareAsksAnyStandInForTheBroker(t *testing.T) {
	t.Parallel()
	err := client.Prepare(t.Context(), With(Policy{})(returns(nil)), client.Start{Queue: "orders", Management: gone{}})
	assert.ErrorIs(t, err, declare.ErrNotFound)
}

func TestMiddlewareThatHidesPrepareStopsTheConsumer(t *testing.T) {
	t.Parallel()
	calls := 0
	inner := With(Policy{Strategy: StrategyAuto})(client.HandlerFunc(func(context.Context, *client.Delivery) error { calls++; return errA }))
	hiding := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error { return inner.Handle(ctx, d) })
	passing := client.Wrap(inner, hiding)
	d := client.NewDelivery("orders", client.NewMessage(nil))

	require.IsType(t, client.Forward{}, hiding.Handle(t.Context(), d), "a test, or a program that has no consumer")
	require.Equal(t, 1, calls)

	ctx, end := refusal.Context(t.Context())
	for range 2 {
		requeue, ok := hiding.Handle(ctx, d).(client.Requeue)
		require.True(t, ok)
		require.False(t, requeue.Failed, "the message isn't to blame")
	}
	assert.Equal(t, 1, calls)
	<-ctx.Done()
	var bad *argument.Error
	require.ErrorAs(t, end(nil), &bad)
	assert.ErrorContains(t, bad, "client.Wrap")

	ctx, end = refusal.Context(t.Context())
	require.NoError(t, client.Prepare(ctx, passing, client.Start{Queue: "orders"}))
	require.IsType(t, client.Forward{}, passing.Handle(ctx, d))
	require.NoError(t, ctx.Err())
	require.NoError(t, end(nil))
}

func TestInvalidPolicyOrQueueStopsTheConsumerBeforeItBegins(t *testing.T) {
	t.Parallel()
	inner := prepared{returns(nil), make(chan client.Start, 1), nil}
	var bad *argument.Error
	h := With(Policy{MaxRetries: -7})(inner)
	require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders"}), &bad)
	assert.Equal(t, "Policy.MaxRetries", bad.Path.String())
	// Should somebody call it all the same, nothing is lost.
	requeue, ok := h.Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil))).(client.Requeue)
	require.True(t, ok)
	assert.True(t, requeue.Failed)

	for _, queue := range []string{"orders.#", "", strings.Repeat("x", 250)} {
		h := With(Policy{})(inner)
		require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{Queue: queue}), &bad, "%.20q", queue)
		dead, ok := With(Policy{})(returns(errA)).Handle(t.Context(), client.NewDelivery(queue, client.NewMessage(nil))).(client.DeadLetter)
		require.True(t, ok, "%.20q", queue)
		assert.Equal(t, client.ReasonUnforwardable, dead.Reason)
		assert.ErrorIs(t, dead.Err, errA)
	}
	assert.Empty(t, inner.starts)
}

// Without retries there is no delay to wait for, unless the strategy holds a message
// for any delay.
func TestWithoutRetriesOnlySomeStrategiesCanWait(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		policy Policy
		err    error
		want   client.Outcome
		reason client.Reason
	}{
		"failure":            {Policy{}, errA, client.DeadLetter{}, ReasonExhausted},
		"After":              {Policy{}, After(time.Second, errA), client.DeadLetter{}, ReasonExhausted},
		"Snooze, Republish":  {Policy{}, Snooze(time.Second), client.DeadLetter{}, client.ReasonUnforwardable},
		"Snooze, DeadLetter": {Policy{Strategy: StrategyDeadLetter}, Snooze(time.Second), client.DeadLetter{}, client.ReasonUnforwardable},
		"Snooze, ladder":     {Policy{AnyDelay: &Ladder{}}, Snooze(time.Second), client.Forward{}, ""},
		"Snooze, Native":     {Policy{Strategy: StrategyNative}, Snooze(time.Second), client.Modify{}, ""},
		"Snooze, a rule's":   {Policy{Rules: []ErrorRule{{If: On(errB), MaxRetries: 1}}}, Snooze(time.Second), client.Forward{}, ""},
	} {
		c.policy.MaxRetries = NoRetries
		pl := planOf(t, c.policy)
		err := worker(c.policy, pl, []string{"orders"}, returns(c.err)).Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil)))
		require.IsType(t, c.want, err, name)
		if dead, ok := err.(client.DeadLetter); ok {
			assert.Equal(t, c.reason, dead.Reason, name)
		}
	}
}

func TestHandlerIsSharedByConsumersOfSeveralQueues(t *testing.T) {
	t.Parallel()
	h := With(Policy{})(returns(errA))
	var wg sync.WaitGroup
	for i := range 16 {
		queue := fmt.Sprint("queue", i%5)
		wg.Go(func() {
			if i%2 == 0 {
				assert.NoError(t, client.Prepare(t.Context(), h, client.Start{Queue: queue}))
			}
			for range 50 {
				f, ok := h.Handle(t.Context(), client.NewDelivery(queue, client.NewMessage(nil))).(client.Forward)
				if assert.True(t, ok) {
					assert.Equal(t, address.Exchange("retry_exchange", "delay.10000."+queue), f.To)
				}
			}
		})
	}
	wg.Wait()
}

// sent is a message with everything in it that a sender can set.
func sent() *client.Message {
	m := amqp.NewMessage([]byte("body"))
	m.Data = append(m.Data, []byte("of two"))
	m.Header = &client.Header{Priority: 7, TTL: time.Minute, DeliveryCount: 3, FirstAcquirer: true}
	m.Properties = &client.Properties{MessageID: amqp.UUID{1}, CorrelationID: uint64(5), UserID: []byte("u"), To: new("t"), Subject: new("s"), ReplyTo: new("r"),
		ContentType: new("ct"), ContentEncoding: new("ce"), AbsoluteExpiryTime: new(epoch), CreationTime: new(epoch), GroupID: new("g"), GroupSequence: new(uint32(3)), ReplyToGroupID: new("rg")}
	m.ApplicationProperties = map[string]any{"tenant": "acme", "weight": 2.5, "none": nil, "at": epoch, CountProperty: "1"}
	m.Annotations = map[any]any{"x-opt-tenant": "acme", "x-opt-list": []any{int64(1)}, "x-exchange": "shop", "x-routing-key": "k", "x-opt-deaths": []any{}, client.AnnotationKnownCount: int64(9)}
	m.DeliveryAnnotations = map[any]any{"x-d": "d"}
	m.Footer = map[any]any{"x-f": "f"}
	return m
}

func TestCopyHasAllThatTheSenderSetAndItsCounterInTheSendersType(t *testing.T) {
	t.Parallel()
	m := sent()
	before, err := sent().MarshalBinary()
	require.NoError(t, err)
	f, ok := handle(t, Policy{}, m, returns(errA)).(client.Forward)
	require.True(t, ok)
	after, err := m.MarshalBinary()
	require.NoError(t, err)
	assert.Len(t, after, len(before), "the received message is left alone")
	assert.Equal(t, sent(), m)

	c, want := f.Message, sent()
	require.NoError(t, client.Validate(c))
	assert.Equal(t, want.Properties, c.Properties)
	assert.Equal(t, want.Data, c.Data)
	assert.Equal(t, want.Footer, c.Footer)
	assert.Nil(t, c.DeliveryAnnotations)
	assert.Equal(t, &client.Header{Durable: true, Priority: 7}, c.Header, "no ttl: it would shorten the delay")
	want.ApplicationProperties[CountProperty] = "2"
	assert.Equal(t, want.ApplicationProperties, c.ApplicationProperties)
	assert.Equal(t, "acme", c.Annotations["x-opt-tenant"])
	assert.Equal(t, []any{int64(1)}, c.Annotations["x-opt-list"])
	assert.Equal(t, "shop", DeadLetterOf(c).Exchange)
	assert.Equal(t, 2, DeadLetterOf(c).Retries)
	for k := range keyValues {
		if k != annotation.History {
			assert.NotContains(t, c.Annotations, k, "the history is in one annotation")
		}
	}
	for _, gone := range []string{"x-exchange", "x-opt-deaths", client.AnnotationKnownCount} {
		assert.NotContains(t, c.Annotations, gone)
	}
}

// However often a message fails, it doesn't grow.
func TestMessageDoesNotGrowOverTwoThousandHops(t *testing.T) {
	t.Parallel()
	for name, set := range waits {
		synctest.Test(t, func(t *testing.T) {
			r := random(t)
			p := Policy{MaxRetries: 1000, Backoff: Delays(time.Second, time.Minute), Rules: []ErrorRule{{If: func(error) bool { return true }, Do: ActionRetryUncounted}}}
			if set(&p); p.AnyDelay != nil {
				p.AnyDelay = &Ladder{}
			}
			pl := planOf(t, p)
			if pl.strategy == StrategyAuto {
				pl.strategy = StrategyDeadLetter
			}
			texts := []error{errA, errors.New(strings.Repeat("x", 5000)), panics{}}
			var err error
			h := worker(p, pl, []string{"orders"}, func(context.Context, *client.Delivery) error { return err })
			m := sent()
			most := 0
			for step := range 2000 {
				err = pick(r, texts...)
				switch o := h.Handle(context.Background(), client.NewDelivery("orders", m)).(type) {
				case client.Forward:
					m = o.Message
				case client.Modify:
					for k, v := range o.Annotations {
						m.Annotations[k] = v
					}
				default:
					require.FailNow(t, "no retry", "%v", o)
				}
				time.Sleep(time.Hour)
				if step%100 == 99 {
					b, err := m.MarshalBinary()
					require.NoError(t, err)
					most = max(most, len(b))
				}
			}
			assert.Less(t, most, 3000, name)
		})
	}
}

func TestSnoozeIsNoFailureInTheHistory(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: StrategyNative, GiveUpAfter: time.Minute}
	h := worker(p, planOf(t, p), []string{"orders"}, returns(Snooze(time.Hour)))
	m := client.NewMessage(nil)
	fresh := h.Handle(t.Context(), client.NewDelivery("orders", m)).(client.Modify).Annotations
	assert.NotContains(t, fresh, client.AnnotationError)
	assert.Equal(t, compactHistory{Queue: "orders", Worker: notified(fresh).Worker, Delay: time.Hour.Milliseconds()}, notified(fresh))
	assert.Equal(t, int64(0), fresh[annotation.Retries])
	// So it can be snoozed beyond GiveUpAfter.
	m.Annotations = map[any]any{}
	for k, v := range fresh {
		if k != annotation.DeliveryTime {
			m.Annotations[k] = v
		}
	}
	assert.IsType(t, client.Modify{}, h.Handle(t.Context(), client.NewDelivery("orders", m)))
}

// A sender that forges a time of delivery affects only the waiting of that message,
// not that of the others in the queue.
func TestForgedDeliveryTimeTouchesNoOtherMessage(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: StrategyNative}
	h := worker(p, planOf(t, p), []string{"orders"}, returns(errA))
	forged := client.NewMessage(nil)
	forged.Annotations = map[any]any{annotation.DeliveryTime: time.Now().Add(time.Hour).UnixMilli(), annotation.Delay: time.Hour.Milliseconds()}
	for range 20 {
		waits, ok := h.Handle(t.Context(), client.NewDelivery("orders", forged)).(client.Modify)
		require.True(t, ok)
		assert.Equal(t, int64(0), waits.Annotations[annotation.Retries], "it waits for the time that it claims to have, and the handler isn't called")
	}
	now := time.Now()
	fresh := h.Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil))).(client.Modify)
	assert.Equal(t, int64(1), fresh.Annotations[annotation.Retries])
	assert.WithinDuration(t, now.Add(10*time.Second), time.UnixMilli(fresh.Annotations[annotation.DeliveryTime].(int64)), time.Second, "nobody's word for the broker's clock was taken")
}

// With DeadLetter the forged time stays in the message. It is heeded once, and in the
// queue's own way: there may be no topology for another.
func TestForgedDeliveryTimeIsHeededOnceByTheQueuesOwnStrategy(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: StrategyDeadLetter, MaxRetries: 2}
	w := newWorld(t, mustTopology(t, p, "orders"))
	attempts := 0
	h := worker(p, planOf(t, p), []string{"orders"}, func(context.Context, *client.Delivery) error { attempts++; return errA })
	m := &held{home: "orders", msg: client.NewMessage(nil)}
	m.msg.Annotations = map[any]any{annotation.DeliveryTime: time.Now().Add(time.Hour).UnixMilli(), annotation.Delay: time.Hour.Milliseconds()}
	for range 4 { // the one that was too early, and three attempts
		w.take("orders")
		require.True(t, w.carryOut("orders", m, h.Handle(t.Context(), client.NewDelivery("orders", m.msg))))
		for name := range w.queues { // as settle does, without waiting for the forged time
			for _, x := range w.take(name) {
				if w.queues[name].MessageTTL > 0 {
					w.die(name, x, "expired")
				} else {
					w.contents[name] = append(w.contents[name], x)
				}
			}
		}
	}
	assert.Equal(t, map[string]int{"orders.dead": 1}, w.where())
	assert.Equal(t, 3, attempts)
	assert.Equal(t, ReasonExhausted, DeadLetterOf(m.msg).Reason)
}

func TestNonsenseForADeliveryTimeIsHandledAtOnce(t *testing.T) {
	t.Parallel()
	for _, due := range []any{"soon", math.NaN(), int64(-1), int64(math.MaxInt64), time.Time{}, []any{}} {
		for _, delay := range []any{nil, "1000", int64(0), int64(-5), int64(math.MaxInt64), 1e9} {
			m := client.NewMessage(nil)
			m.Annotations = map[any]any{annotation.DeliveryTime: due, annotation.Delay: delay}
			assert.NoError(t, handle(t, Policy{}, m, returns(nil)), "%v %v", due, delay)
			m.Annotations[annotation.DeliveryTime] = time.Now().Add(time.Hour)
			assert.NoError(t, handle(t, Policy{}, m, returns(nil)), "%v", delay)
		}
	}
}

func TestAutoRepublishesWhatWouldExpireInTheQueue(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: StrategyAuto}
	pl := planOf(t, p)
	pl.strategy = StrategyNative
	h := worker(p, pl, []string{"orders"}, returns(errA))
	m := client.NewMessage(nil)
	assert.IsType(t, client.Modify{}, h.Handle(t.Context(), client.NewDelivery("orders", m)))
	m.Header.TTL = time.Second
	assert.IsType(t, client.Forward{}, h.Handle(t.Context(), client.NewDelivery("orders", m)))
}

func TestErrorsOfThisPackageSayWhatTheyAre(t *testing.T) {
	t.Parallel()
	assert.NoError(t, Permanent(nil))
	assert.EqualError(t, After(time.Second, nil), "retry after 1s")
	assert.EqualError(t, After(-time.Second, nil), "retry after 0s")
	assert.EqualError(t, Discard(nil), "discarded")
	for _, err := range []error{Permanent(errA), After(time.Second, errA), Discard(errA)} {
		assert.ErrorIs(t, err, errA)
		assert.True(t, bytes.HasSuffix([]byte(err.Error()), []byte("a")))
	}
}

// A handler that empties or swaps the maps of its message is retried as often as any
// other, and for as long.
func TestRetriesCountHoweverTheHandlerChangesTheMessage(t *testing.T) {
	t.Parallel()
	for _, strategy := range []Strategy{StrategyRepublish, StrategyDeadLetter, StrategyNative} {
		for name, change := range map[string]func(m *client.Message){
			"emptied": func(m *client.Message) { clear(m.ApplicationProperties); clear(m.Annotations) },
			"removed": func(m *client.Message) { m.ApplicationProperties, m.Annotations, m.Header = nil, nil, nil },
			"forged": func(m *client.Message) {
				m.ApplicationProperties[CountProperty] = int64(-1)
				m.Annotations[annotation.Retries] = "none"
			},
			"all of it": func(m *client.Message) { *m = client.Message{} },
		} {
			t.Run(string(strategy)+" "+name, func(t *testing.T) {
				t.Parallel()
				first := time.Now().Add(-time.Hour).UnixMilli()
				message := func(count int) *client.Message {
					m := client.NewMessage([]byte("body"))
					m.ApplicationProperties = map[string]any{CountProperty: int64(count), "own": 1}
					m.Annotations = map[any]any{annotation.Retries: int64(count), annotation.Older.First: first}
					return m
				}
				p := Policy{Strategy: strategy, Backoff: Delays(time.Minute), MaxRetries: 3}
				h := func(result error) client.HandlerFunc {
					return func(_ context.Context, d *client.Delivery) error {
						change(d.Message())
						if result == nil {
							panic("changed")
						}
						return result
					}
				}
				var died client.DeadLetter
				require.ErrorAs(t, handle(t, p, message(3), h(errA)), &died)
				assert.Equal(t, ReasonExhausted, died.Reason)
				p.GiveUpAfter = time.Hour
				for what, err := range map[string]error{
					"out of time": handle(t, p, message(0), h(errA)),
					"permanent":   handle(t, p, message(0), h(Permanent(errA))),
					"its own":     handle(t, p, message(0), h(client.DeadLetter{})),
					"a panic":     handle(t, p, message(0), h(nil)),
				} {
					require.ErrorAs(t, err, &died, what)
					assert.Equal(t, first, notified(died.Annotations).First, what)
				}
				p.GiveUpAfter = 0
				var annotations map[any]any
				switch o := handle(t, p, message(2), h(errA)).(type) {
				case client.Modify:
					annotations = map[any]any{annotation.Retries: o.Annotations[annotation.Retries], annotation.Older.First: notified(o.Annotations).First}
				case client.Forward:
					assert.Equal(t, 3, Count(o.Message))
					annotations = map[any]any{annotation.Retries: int64(Count(o.Message)), annotation.Older.First: historyOf(o.Message).First}
				default:
					t.Fatalf("%T", o)
				}
				assert.Equal(t, int64(3), annotations[annotation.Retries])
				assert.Equal(t, first, annotations[annotation.Older.First])
			})
		}
	}
}

// A retry.With within another one would have a policy without effect. It is refused when the consumer
// starts, regardless of what is between them; next to each other they are fine.
func TestNestedPoliciesAreRefused(t *testing.T) {
	t.Parallel()
	h := client.Handler(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
	with, between := With(Policy{}), func(h client.Handler) client.Handler { return client.Wrap(h, h.Handle) }
	start := client.Start{Queue: "orders"}
	for name, nested := range map[string]client.Handler{
		"directly":  with(with(h)),
		"a wrapper": between(with(between(with(h)))),
		"Central":   with(Central(Policy{}, CentralConfig{Queues: []string{"orders"}, FailedQueue: "failed"})),
	} {
		require.ErrorAs(t, client.Prepare(t.Context(), nested, start), new(*argument.Error), name)
	}
	require.NoError(t, client.Prepare(t.Context(), between(with(between(h))), start))
}
