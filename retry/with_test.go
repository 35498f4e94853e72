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
	assert.Equal(t, "requeue as failed: an error of type *client.DeadLetter that can't be read", got.Error())
}

// However a handler dead-letters a message, the message is told its history, and
// has no mark of an earlier retry any more: with one it would go round for ever.
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
		w := newWorld(t, mustTopology(t, Policy{Strategy: DeadLetter}, "orders"))
		m := &held{home: "orders", msg: client.NewMessage(nil)}
		m.msg.Annotations = map[any]any{client.AnnotationReason: reasonRetry, AnnotationDelay: int64(10_000), AnnotationRetries: int64(1)}
		require.True(t, w.carryOut("orders", m, handle(t, Policy{Strategy: DeadLetter}, m.msg, returns(c.err))), name)
		assert.Equal(t, map[string]int{"orders.dead": 1}, w.where(), name)
		assert.Equal(t, Lane(c.reason), Autopsy(m.msg).Lane, name)
		assert.Equal(t, 1, Autopsy(m.msg).Retries, name)
	}
}

// A message that has waited in another way than by DeadLetter can be rejected by
// a worker that knows nothing of marks, such as one in another language.
func TestForeignRejectionAfterAWaitIsADeath(t *testing.T) {
	t.Parallel()
	for _, strategy := range []Strategy{Republish, Native} {
		p := Policy{Strategy: Auto}
		w := newWorld(t, mustTopology(t, p, "orders"))
		pl := planOf(t, p)
		pl.strategy = strategy
		m := &held{home: "orders", msg: client.NewMessage(nil)}
		// It was retried by DeadLetter before.
		m.msg.Annotations = map[any]any{client.AnnotationReason: reasonRetry, AnnotationDelay: int64(10_000), AnnotationRetries: int64(1)}
		h := worker(p, pl, []string{"orders"}, returns(errA))
		require.True(t, w.carryOut("orders", m, h.Handle(t.Context(), client.NewDelivery("orders", m.msg))))
		if strategy == Republish {
			w.settle()
		}
		require.Equal(t, []*held{m}, w.take("orders"))
		w.die("orders", m, "rejected")
		assert.Equal(t, map[string]int{"orders.dead": 1}, w.where(), "%v", strategy)
		assert.Equal(t, LaneRejected, Autopsy(m.msg).Lane)
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
		assert.Contains(t, dead.Annotations, AnnotationErrorType, name)
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
		"a rule":  {Policy{Rules: []Rule{{If: boo}}}, errA},
		"Unwrap":  {Policy{}, unwrapPanics{}},
	} {
		dead, ok := handle(t, c.policy, client.NewMessage(nil), returns(c.err)).(client.DeadLetter)
		require.True(t, ok, name)
		assert.Equal(t, client.ReasonPanicked, dead.Reason, name)
		assert.Equal(t, "orders", dead.Annotations[AnnotationQueue], name)
	}
}

type unwrapPanics struct{}

func (unwrapPanics) Error() string { return "don't look" }
func (unwrapPanics) Unwrap() error { panic("looked") }

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
	assert.IsType(t, client.Forward{}, run(errA), "a failure of its own is retried")
	assert.IsType(t, client.Forward{}, run(context.DeadlineExceeded))
	assert.NoError(t, run(nil))

	// While the ctx goes on, a cancellation is some other one's.
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

func TestInvalidPolicyOrQueueStopsTheConsumerBeforeItBegins(t *testing.T) {
	t.Parallel()
	inner := prepared{returns(nil), make(chan client.Start, 1), nil}
	var bad *argument.Error
	h := With(Policy{MaxRetries: -7})(inner)
	require.ErrorAs(t, client.Prepare(t.Context(), h, client.Start{Queue: "orders"}), &bad)
	assert.Equal(t, "Policy.MaxRetries", bad.Name)
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
		"Snooze, DeadLetter": {Policy{Strategy: DeadLetter}, Snooze(time.Second), client.DeadLetter{}, client.ReasonUnforwardable},
		"Snooze, ladder":     {Policy{AnyDelay: &Ladder{}}, Snooze(time.Second), client.Forward{}, ""},
		"Snooze, Native":     {Policy{Strategy: Native}, Snooze(time.Second), client.Modify{}, ""},
		"Snooze, a rule's":   {Policy{Rules: []Rule{{If: On(errB), MaxRetries: 1}}}, Snooze(time.Second), client.Forward{}, ""},
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
	assert.Equal(t, "shop", c.Annotations[AnnotationExchange])
	assert.Equal(t, int64(2), c.Annotations[AnnotationRetries])
	for _, gone := range []string{"x-exchange", "x-opt-deaths", client.AnnotationKnownCount} {
		assert.NotContains(t, c.Annotations, gone)
	}
}

// However often a message fails, it doesn't grow.
func TestMessageDoesNotGrowOverTenThousandHops(t *testing.T) {
	t.Parallel()
	for name, set := range waits {
		synctest.Test(t, func(t *testing.T) {
			r := random(t)
			p := Policy{MaxRetries: 1000, Backoff: Delays(time.Second, time.Minute), Rules: []Rule{{If: func(error) bool { return true }, Do: RetryUncounted}}}
			if set(&p); p.AnyDelay != nil {
				p.AnyDelay = &Ladder{}
			}
			pl := planOf(t, p)
			if pl.strategy == Auto {
				pl.strategy = DeadLetter
			}
			texts := []error{errA, errors.New(strings.Repeat("x", 5000)), panics{}}
			var err error
			h := worker(p, pl, []string{"orders"}, func(context.Context, *client.Delivery) error { return err })
			m := sent()
			most := 0
			for hop := range 10_000 {
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
				if hop%1000 == 0 {
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
	p := Policy{Strategy: Native, GiveUpAfter: time.Minute}
	h := worker(p, planOf(t, p), []string{"orders"}, returns(Snooze(time.Hour)))
	m := client.NewMessage(nil)
	fresh := h.Handle(t.Context(), client.NewDelivery("orders", m)).(client.Modify).Annotations
	for _, key := range []string{AnnotationFirstFailure, AnnotationLastFailure, client.AnnotationError, AnnotationErrorType} {
		assert.NotContains(t, fresh, key)
	}
	assert.Equal(t, int64(0), fresh[AnnotationRetries])
	// So it can be snoozed beyond GiveUpAfter.
	m.Annotations = map[any]any{}
	for k, v := range fresh {
		if k != AnnotationDeliveryTime {
			m.Annotations[k] = v
		}
	}
	assert.IsType(t, client.Modify{}, h.Handle(t.Context(), client.NewDelivery("orders", m)))
}

// A sender that forges a time of delivery spoils the waiting of its own message at
// most, not that of the others in the queue.
func TestForgedDeliveryTimeTouchesNoOtherMessage(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: Native}
	h := worker(p, planOf(t, p), []string{"orders"}, returns(errA))
	forged := client.NewMessage(nil)
	forged.Annotations = map[any]any{AnnotationDeliveryTime: time.Now().Add(time.Hour).UnixMilli(), AnnotationDelay: time.Hour.Milliseconds()}
	assert.IsType(t, client.Forward{}, h.Handle(t.Context(), client.NewDelivery("orders", forged)))
	assert.IsType(t, client.Modify{}, h.Handle(t.Context(), client.NewDelivery("orders", client.NewMessage(nil))))
}

// With DeadLetter the forged time stays in the message. It is heeded once, and in the
// queue's own way: there may be no topology for another.
func TestForgedDeliveryTimeIsHeededOnceByTheQueuesOwnStrategy(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: DeadLetter, MaxRetries: 2}
	w := newWorld(t, mustTopology(t, p, "orders"))
	attempts := 0
	h := worker(p, planOf(t, p), []string{"orders"}, func(context.Context, *client.Delivery) error { attempts++; return errA })
	m := &held{home: "orders", msg: client.NewMessage(nil)}
	m.msg.Annotations = map[any]any{AnnotationDeliveryTime: time.Now().Add(time.Hour).UnixMilli(), AnnotationDelay: time.Hour.Milliseconds()}
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
	assert.Equal(t, Lane(ReasonExhausted), Autopsy(m.msg).Lane)
}

func TestNonsenseForADeliveryTimeIsHandledAtOnce(t *testing.T) {
	t.Parallel()
	for _, due := range []any{"soon", math.NaN(), int64(-1), int64(math.MaxInt64), time.Time{}, []any{}} {
		for _, delay := range []any{nil, "1000", int64(0), int64(-5), int64(math.MaxInt64), 1e9} {
			m := client.NewMessage(nil)
			m.Annotations = map[any]any{AnnotationDeliveryTime: due, AnnotationDelay: delay}
			assert.NoError(t, handle(t, Policy{}, m, returns(nil)), "%v %v", due, delay)
			m.Annotations[AnnotationDeliveryTime] = time.Now().Add(time.Hour)
			assert.NoError(t, handle(t, Policy{}, m, returns(nil)), "%v", delay)
		}
	}
}

func TestAutoRepublishesWhatWouldExpireInTheQueue(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: Auto}
	pl := planOf(t, p)
	pl.strategy = Native
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
