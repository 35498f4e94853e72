package retry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/brokerclock"
)

// failed is a message as it lies in the failed queue. deaths are pairs of a queue and a
// reason, the last death first.
func failed(key string, deaths ...string) *client.Message {
	m := client.NewMessage([]byte("body"))
	m.Annotations = amqp.Annotations{"x-routing-key": key, "x-exchange": "given_up_exchange"}
	var list []map[any]any
	for i := 0; i+1 < len(deaths); i += 2 {
		list = append(list, map[any]any{"queue": deaths[i], "reason": deaths[i+1], "exchange": "shop", "routing-keys": []string{"order.placed"}, "count": uint64(1)})
	}
	if list != nil {
		m.Annotations["x-opt-deaths"] = list
		m.Annotations["x-last-death-queue"], m.Annotations["x-last-death-reason"] = deaths[0], deaths[1]
	}
	return m
}

// decide runs Central on a message.
func (c centralCase) decide(m *client.Message) client.Outcome {
	if c.cfg.Queues == nil {
		c.cfg.Queues = []string{"orders", "emails"}
	}
	return c.outcome(m)
}

func (c centralCase) outcome(m *client.Message) client.Outcome {
	return client.OutcomeOf(Central(c.policy, c.cfg).Handle(cmp.Or(c.ctx, context.Background()), client.NewDelivery("failed_queue", m)))
}

type centralCase struct {
	policy Policy
	cfg    CentralConfig
	ctx    context.Context // nil: context.Background()
}

// forwarded wants a copy on its way to an address.
func forwarded(t *testing.T, o client.Outcome, to address.Address) *client.Message {
	t.Helper()
	f, ok := o.(client.Forward)
	require.True(t, ok, "%T %v", o, o)
	assert.Equal(t, to.String(), f.To.String())
	return f.Message
}

func TestCentralFindsTheWorkQueueThatAMessageFailedIn(t *testing.T) {
	t.Parallel()
	retried := func(queue string) address.Address { return address.Exchange("retry_exchange", "delay.10000."+queue) }
	for name, c := range map[string]struct {
		m  *client.Message
		to address.Address
	}{
		"by its death":                             {failed("orders", "orders", "rejected"), retried("orders")},
		"a fanout without a key":                   {failed("", "emails", "rejected"), retried("emails")},
		"a key that is another queue's name":       {failed("emails", "orders", "rejected"), retried("orders")},
		"by its key, past another queue":           {failed("orders", "errors", "expired"), retried("orders")},
		"by its first death, past another queue":   {failed("", "errors", "expired", "orders", "rejected"), retried("orders")},
		"published by a worker, with its key":      {failed("orders"), retried("orders")},
		"after an earlier retry":                   {failed("orders", "orders", "rejected", "delay_10s", "expired"), retried("orders")},
		"unknown":                                  {failed("", "others", "rejected"), address.Queue("failed_queue.dead")},
		"published by a worker, with another key":  {failed("others"), address.Queue("failed_queue.dead")},
		"nothing tells":                            {client.NewMessage([]byte("x")), address.Queue("failed_queue.dead")},
		"its own death in the failed queue":        {failed("failed_queue", "failed_queue", "rejected"), address.Queue("failed_queue.dead")},
		"a death in a wait is none of our workers": {failed("", "delay_10s", "expired"), address.Queue("failed_queue.dead")},
	} {
		t.Run(name, func(t *testing.T) {
			m := forwarded(t, centralCase{}.decide(c.m), c.to)
			if strings.HasSuffix(c.to.QueueName(), ".dead") {
				assert.Equal(t, ReasonUnknownQueue, DeadLetterOf(m).Reason)
				assert.NotEmpty(t, DeadLetterOf(m).Queue)
			}
		})
	}
	// A publisher can write these, and a worker that copies headers does.
	m := failed("orders")
	m.Annotations["x-last-death-queue"], m.Annotations["x-first-death-queue"], m.Annotations["x-opt-deaths"] = "emails", "emails", []any{map[any]any{"queue": "emails"}}
	forwarded(t, centralCase{}.decide(m), retried("orders"))
}

func TestCentralTellsWhyAMessageFailed(t *testing.T) {
	t.Parallel()
	var seen *Rejected
	see := Policy{RetryIf: func(err error) bool { seen, _ = errors.AsType[*Rejected](err); return true }}
	dead := address.Queue("orders.dead")

	forwarded(t, centralCase{policy: see}.decide(failed("orders", "orders", "rejected")), address.Exchange("retry_exchange", "delay.10000.orders"))
	assert.Equal(t, ReasonRejected, seen.Reason)
	assert.Contains(t, seen.Error(), "without giving a reason")

	m := failed("orders", "orders", "rejected")
	m.Annotations["x-reason"], m.Annotations["x-error"] = "timeout", "gateway timed out"
	m.ApplicationProperties = map[string]any{"x-error-type": "TimeoutError", "shop": "s1"}
	f := client.OutcomeOf(centralCase{policy: see}.decide(m)).(client.Forward)
	assert.Equal(t, Rejected{Reason: "timeout", Text: "gateway timed out", ErrorType: "TimeoutError", Queue: "orders", delivery: seen.delivery, forgets: seen.forgets}, *seen)
	assert.Equal(t, "s1", seen.Header("shop"))
	assert.Equal(t, "timeout", seen.Header("x-reason"))
	assert.Nil(t, seen.Header("none"))
	for _, key := range []string{"x-reason", "x-error"} {
		assert.NotContains(t, f.Message.Annotations, key, "it is about this failure only")
		assert.Contains(t, m.Annotations, key, "the original stays")
	}
	assert.NotContains(t, f.Message.ApplicationProperties, "x-error-type")
	assert.Contains(t, m.ApplicationProperties, "x-error-type")
	d := DeadLetterOf(f.Message)
	assert.Equal(t, "gateway timed out", d.Error)
	assert.Equal(t, "TimeoutError", d.ErrorType)
	assert.Equal(t, [3]string{"orders", "shop", "order.placed"}, [3]string{d.Queue, d.Exchange, d.RoutingKey})

	for reason, want := range map[string]client.Reason{"delivery_limit": ReasonDeliveryLimit, "expired": ReasonExpired, "maxlen": ReasonMaxLength} {
		m := failed("orders", "orders", reason)
		m.Annotations["x-reason"] = "stale"
		got := DeadLetterOf(forwarded(t, centralCase{policy: see}.decide(m), dead))
		assert.Equal(t, want, got.Reason, "no rule retries it")
		assert.NotEmpty(t, got.Error)
		p := Policy{Rules: []ErrorRule{{If: OnReason(want), Backoff: Delays(time.Minute)}}}
		forwarded(t, centralCase{policy: p}.decide(m), address.Exchange("retry_exchange", "delay.60000.orders"))
		p.Rules[0].Do = ActionDeadLetter
		assert.Equal(t, want, DeadLetterOf(forwarded(t, centralCase{policy: p}.decide(m), dead)).Reason)
		p.Rules[0].Do = ActionDiscard
		assert.Nil(t, centralCase{policy: p}.decide(m))
	}
	m.Annotations["x-error"] = strings.Repeat("ÿ", 5000) + "\xff"
	d = DeadLetterOf(client.OutcomeOf(centralCase{}.decide(m)).(client.Forward).Message)
	assert.LessOrEqual(t, len(d.Error), client.ErrorTextLimit)

	own := CentralConfig{ReasonKey: "why", TextKey: "message", TypeKey: "exception"}
	m = failed("orders", "orders", "rejected")
	m.ApplicationProperties = map[string]any{"why": "fatal", "message": "boom", "exception": "ValueError", "x-reason": "the sender's"}
	p := Policy{Rules: []ErrorRule{{If: OnReason("fatal"), Do: ActionDeadLetter}}}
	got := forwarded(t, centralCase{policy: p, cfg: own}.decide(m), dead)
	d = DeadLetterOf(got)
	assert.Equal(t, [3]string{"permanent", "boom", "ValueError"}, [3]string{string(d.Reason), d.Error, d.ErrorType})
	assert.Equal(t, m.ApplicationProperties, got.ApplicationProperties, "a dead letter is whole")
}

func TestConditionsOnRejectedMessages(t *testing.T) {
	t.Parallel()
	m := client.NewMessage(nil)
	m.ApplicationProperties = map[string]any{"n": int32(7), "kind": "vip", "yes": true, "list": []any{1}}
	m.Annotations = amqp.Annotations{"x-kind": "a", "kind": "other"}
	err := fmt.Errorf("wrapped: %w", &Rejected{Reason: "fatal", delivery: client.NewDelivery("failed_queue", m)})
	assert.True(t, OnReason("x", "fatal")(err))
	assert.False(t, OnReason("x")(err))
	assert.False(t, OnReason()(err))
	assert.True(t, OnHeader("n", 7)(err))
	assert.True(t, OnHeader("n", "7", 7.0)(err))
	assert.False(t, OnHeader("n", "7")(err))
	assert.True(t, OnHeader("kind", "vip")(err), "application properties go first")
	assert.True(t, OnHeader("x-kind", "a")(err))
	assert.True(t, OnHeader("yes", true)(err))
	assert.True(t, OnHeader("list")(err))
	assert.False(t, OnHeader("list", []any{1})(err), "only plain values are compared")
	assert.False(t, OnHeader("none")(err))
	for _, other := range []error{nil, errA, (*Rejected)(nil)} {
		assert.False(t, OnReason("fatal")(other))
		assert.False(t, OnHeader("n")(other))
	}
	assert.Equal(t, "rejected: fatal", (&Rejected{Reason: "fatal"}).Error())
	assert.Nil(t, (&Rejected{}).Header("x"))
}

func TestCentralCountsRetriesWhereverTheyAreWritten(t *testing.T) {
	t.Parallel()
	p := Policy{MaxRetries: 3, Backoff: Delays(time.Second, 2*time.Second, 3*time.Second)}
	cfg := CentralConfig{Counter: "count", CounterEnd: -1}
	for name, c := range map[string]struct {
		edit  func(*client.Message)
		count int // before
	}{
		"none":                    {func(*client.Message) {}, 0},
		"own":                     {func(m *client.Message) { m.ApplicationProperties[CountProperty] = int64(1) }, 1},
		"a text":                  {func(m *client.Message) { m.ApplicationProperties["count"] = "2" }, 2},
		"an annotation":           {func(m *client.Message) { m.Annotations[annotation.Retries] = int64(2) }, 2},
		"another system's":        {func(m *client.Message) { m.ApplicationProperties["count"] = int32(1) }, 1},
		"another's as annotation": {func(m *client.Message) { m.Annotations["count"] = int64(1) }, 1},
		"own as annotation":       {func(m *client.Message) { m.Annotations[CountProperty] = int64(2) }, 2},
		"its end starts again":    {func(m *client.Message) { m.ApplicationProperties["count"] = int64(-1) }, 0},
		"the largest counts": {func(m *client.Message) {
			m.ApplicationProperties["count"], m.ApplicationProperties[CountProperty] = int64(1), int64(2)
		}, 2},
		"used up": {func(m *client.Message) { m.ApplicationProperties["count"] = int64(3) }, 3},
		"huge":    {func(m *client.Message) { m.ApplicationProperties["count"] = "1e99" }, 1<<31 - 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := failed("orders", "orders", "rejected")
			m.ApplicationProperties = map[string]any{}
			c.edit(m)
			_, text := m.ApplicationProperties["count"].(string)
			o := centralCase{policy: p, cfg: cfg}.decide(m)
			if c.count >= 3 {
				got := forwarded(t, o, address.Queue("orders.dead"))
				assert.Equal(t, ReasonExhausted, DeadLetterOf(got).Reason)
				assert.Equal(t, c.count, DeadLetterOf(got).Retries)
				if text {
					assert.Equal(t, "-1", got.ApplicationProperties["count"])
				} else {
					assert.Equal(t, int64(-1), got.ApplicationProperties["count"])
				}
				return
			}
			got := forwarded(t, o, address.Exchange("retry_exchange", fmt.Sprintf("delay.%d000.orders", c.count+1)))
			assert.NotContains(t, got.Annotations, "count", "over AMQP 0-9-1 it would hide the new one")
			assert.NotContains(t, got.Annotations, CountProperty)
			assert.Equal(t, c.count+1, Count(got))
			if text {
				assert.Equal(t, fmt.Sprint(c.count+1), got.ApplicationProperties["count"])
			} else {
				assert.Equal(t, int64(c.count+1), got.ApplicationProperties["count"])
			}
		})
	}
	// Another system's headers exchange holds the messages.
	cfg.CounterExchange = "deadletter"
	m := failed("orders", "orders", "rejected")
	got := forwarded(t, centralCase{policy: p, cfg: cfg}.decide(m), address.Exchange("deadletter", "orders"))
	assert.Equal(t, int64(1), got.ApplicationProperties["count"])
	m.ApplicationProperties = map[string]any{"count": int64(3)}
	got = forwarded(t, centralCase{policy: p, cfg: cfg}.decide(m), address.Exchange("deadletter", "orders"))
	assert.Equal(t, int64(-1), got.ApplicationProperties["count"])
	assert.Equal(t, ReasonExhausted, DeadLetterOf(got).Reason)
}

// What a worker with the decorator has given up isn't retried, once the broker's history shows
// a retry before that: a sender may write the same annotations. Without it Central's rules
// decide. What a worker has only marked is retried.
func TestCentralAndTheDecoratorShareAQueue(t *testing.T) {
	t.Parallel()
	for _, reason := range []client.Reason{ReasonExhausted, ReasonPermanent, client.ReasonPanicked, "fraud"} {
		m := failed("orders", "orders", "rejected")
		m.Annotations[client.AnnotationReason], m.Annotations[client.AnnotationError] = string(reason), "a"
		m.Annotations[annotation.Queue], m.Annotations[annotation.Exchange] = "payments", "till"
		got := DeadLetterOf(forwarded(t, centralCase{}.decide(m), address.Exchange("retry_exchange", "delay.10000.orders")))
		assert.Equal(t, [3]string{"orders", "shop", "a"}, [3]string{got.Queue, got.Exchange, got.Error})
		rule := Policy{Rules: []ErrorRule{{If: OnReason(reason), Do: ActionDeadLetter}}}
		forwarded(t, centralCase{policy: rule}.decide(m), address.Queue("orders.dead"))
	}
	for _, reason := range []client.Reason{ReasonExhausted, ReasonPermanent, client.ReasonPanicked, "fraud"} {
		m := failed("orders", "orders", "rejected")
		list := m.Annotations["x-opt-deaths"].([]map[any]any)
		m.Annotations["x-opt-deaths"] = append(list, map[any]any{
			"queue": "delay_10s", "reason": "expired", "exchange": "retry_exchange", "routing-keys": []string{"delay.10000.orders"}, "count": uint64(1),
		})
		h := With(Policy{MaxRetries: NoRetries, Worker: "w"})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return errA }))
		o := client.OutcomeOf(h.Handle(context.Background(), client.NewDelivery("orders", client.NewMessage(nil)))).(client.DeadLetter)
		for k, v := range o.Annotations {
			m.Annotations[k] = v
		}
		m.Annotations[client.AnnotationReason], m.Annotations[client.AnnotationError] = string(reason), "a"
		want := DeadLetterOf(m)
		got := DeadLetterOf(forwarded(t, centralCase{}.decide(m), address.Queue("orders.dead")))
		want.Exchange, want.RoutingKey = "shop", "order.placed" // it had none
		assert.Equal(t, want, got)
		assert.Equal(t, reason, got.Reason)
		assert.Equal(t, "w", got.Worker)
	}
	for _, reason := range []client.Reason{reasonRetry, reasonWaits, client.ReasonUnforwardable, ""} {
		m := failed("orders", "orders", "rejected")
		m.Annotations[client.AnnotationReason], m.Annotations[annotation.Retries] = string(reason), int64(2)
		got := forwarded(t, centralCase{}.decide(m), address.Exchange("retry_exchange", "delay.300000.orders"))
		assert.Equal(t, 3, Count(got))
		assert.NotContains(t, got.Annotations, client.AnnotationReason)
	}
	// The broker's own deaths say nothing about an older reason.
	m := failed("orders", "orders", "delivery_limit")
	m.Annotations[client.AnnotationReason] = "exhausted"
	assert.Equal(t, ReasonDeliveryLimit, DeadLetterOf(forwarded(t, centralCase{}.decide(m), address.Queue("orders.dead"))).Reason)
}

func TestCentralGivesUpWhenAPolicyPanics(t *testing.T) {
	t.Parallel()
	p := Policy{RetryIf: func(error) bool { panic("no") }}
	d := DeadLetterOf(forwarded(t, centralCase{policy: p}.decide(failed("orders", "orders", "rejected")), address.Queue("orders.dead")))
	assert.Equal(t, client.ReasonPanicked, d.Reason)
	assert.Contains(t, d.Error, "no")
}

func TestCentralGivesUpInTime(t *testing.T) {
	t.Parallel()
	now := epoch
	p := Policy{GiveUpAfter: time.Minute, Backoff: Delays(10 * time.Second)}
	ctx := brokerclock.WithOwnClock(t.Context(), func() time.Time { return now })
	m := failed("orders", "orders", "rejected")
	for range 5 {
		got := forwarded(t, centralCase{policy: p, ctx: ctx}.decide(m), address.Exchange("retry_exchange", "delay.10000.orders"))
		next := failed("orders", "orders", "rejected", "delay_10s", "expired")
		next.ApplicationProperties = got.ApplicationProperties
		next.Annotations[annotation.History] = got.Annotations[annotation.History]
		m, now = next, now.Add(10*time.Second)
	}
	now = now.Add(time.Second)
	d := DeadLetterOf(forwarded(t, centralCase{policy: p, ctx: ctx}.decide(m), address.Queue("orders.dead")))
	assert.Equal(t, ReasonExhausted, d.Reason)
	assert.Equal(t, epoch.UnixMilli(), d.FirstFailure.UnixMilli())
	assert.Equal(t, [2]string{"shop", "order.placed"}, [2]string{d.Exchange, d.RoutingKey})
}

// A copy that is refused as too large is sent once more without its history.
func TestCentralSendsLargeMessagesWithoutTheirHistory(t *testing.T) {
	t.Parallel()
	m := failed("orders", "orders", "rejected")
	m.Data = [][]byte{make([]byte, 1<<20)}
	f := centralCase{policy: Policy{MaxRetries: NoRetries}}.decide(m).(client.Forward)
	e := f.Else.(client.Forward)
	assert.Equal(t, "orders.dead", e.To.QueueName())
	assert.Less(t, len(e.Message.Annotations), len(f.Message.Annotations))
	assert.Equal(t, ReasonExhausted, DeadLetterOf(e.Message).Reason)
	cfg := CentralConfig{Counter: "count", CounterExchange: "deadletter"}
	f = centralCase{cfg: cfg}.decide(m).(client.Forward)
	e = f.Else.(client.Forward)
	assert.Equal(t, f.To, e.To)
	assert.Equal(t, int64(1), e.Message.ApplicationProperties["count"])
}

func TestCentralConfigIsChecked(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("q", 245)
	for path, cfg := range map[string]CentralConfig{
		"CentralConfig.Queues":          {},
		"CentralConfig.Queues[1]":       {Queues: []string{"a", "a"}},
		"CentralConfig.Queues[0]":       {Queues: []string{"failed_queue"}},
		"CentralConfig.FailedQueue":     {Queues: []string{"a"}, FailedQueue: "\xff"},
		"CentralConfig.Counter":         {Queues: []string{"a"}, CounterEnd: -1},
		"CentralConfig.CounterExchange": {Queues: []string{"a"}, Counter: "c", CounterExchange: "\xff"},
		"CentralConfig.TextKey":         {Queues: []string{"a"}, TextKey: strings.Repeat("k", 256)},
	} {
		refused(t, Central(Policy{}, cfg).(client.Preparer).Prepare(t.Context(), client.Start{Queue: "failed_queue"}), path)
		_, err := CentralTopology(Policy{}, cfg)
		refused(t, err, path)
	}
	for _, queue := range []string{"", "a.*.b", "\xff", long} {
		refused(t, Central(Policy{}, CentralConfig{Queues: []string{"a", queue}}).(client.Preparer).Prepare(t.Context(), client.Start{Queue: "failed_queue"}), "CentralConfig.Queues[1]")
	}
	refused(t, Central(Policy{MaxRetries: -7}, CentralConfig{Queues: []string{"a"}}).(client.Preparer).Prepare(t.Context(), client.Start{}), "Policy.MaxRetries")
	refused(t, Central(Policy{}, CentralConfig{Queues: []string{"a"}}).(client.Preparer).Prepare(t.Context(), client.Start{Queue: "other"}), "queue")
	assert.NoError(t, Central(Policy{Strategy: StrategyNative}, CentralConfig{Queues: []string{"a"}}).(client.Preparer).Prepare(t.Context(), client.Start{Queue: "failed_queue"}))
	assert.Equal(t, client.Requeue{Failed: true, Err: errors.New("x")}.Failed, client.OutcomeOf(Central(Policy{}, CentralConfig{}).Handle(t.Context(), client.NewDelivery("q", client.NewMessage(nil)))).(client.Requeue).Failed)
	refused(t, TakeOver(t.Context(), nil, Policy{}, CentralConfig{}), "CentralConfig.Queues")
	refused(t, HandBack(t.Context(), nil, Policy{}, CentralConfig{Queues: []string{"a"}, Counter: "c", CounterExchange: "x"}), "CentralConfig.CounterExchange")
}

// The topology has the same queues and exchanges as that for the decorator, with the same
// arguments, so that a queue can move.
func TestCentralTopologyMovesBindingsAndNothingElse(t *testing.T) {
	t.Parallel()
	for _, strategy := range []Strategy{StrategyRepublish, StrategyAuto, StrategyNative, StrategyDeadLetter} {
		p := Policy{Strategy: strategy, Names: Names{Prefix: "a."}}
		work := []declare.QuorumQueue{{Name: "orders", DeliveryLimit: 5}, {Name: "emails"}}
		of, err := Topology(p, work...)
		require.NoError(t, err)
		central, err := CentralTopology(p, CentralConfig{Queues: []string{"old"}}, work...)
		require.NoError(t, err)
		_, err = declare.Merge(of, central)
		assert.NoError(t, err, "no queue or exchange differs")
		moved := 0
		for _, b := range of.Bindings {
			if b.Source == "a.given_up_exchange" && b.Key == strings.TrimSuffix(b.Queue, ".dead") {
				assert.NotContains(t, central.Bindings, b)
				assert.Contains(t, central.Bindings, declare.Binding{Source: b.Source, Queue: "a.failed_queue", Key: b.Key})
				moved++
				continue
			}
			assert.Contains(t, central.Bindings, b)
		}
		assert.Equal(t, 2, moved)
		names := map[string]bool{}
		for _, q := range central.Queues {
			names[q.Address().QueueName()] = true
		}
		assert.True(t, names["a.delay_10s"] && names["a.failed_queue"] && names["a.failed_queue.dead"] && names["old.dead"])
		assert.False(t, names["old"], "it exists")
		assert.Contains(t, central.Bindings, declare.Binding{Source: "a.requeue_exchange", Queue: "old", Key: "*.*.old"})
	}
	foreign, err := CentralTopology(Policy{}, CentralConfig{Queues: []string{"a"}, FailedQueue: "failed", Counter: "count", CounterExchange: "deadletter"})
	require.NoError(t, err)
	assert.Empty(t, foreign)
	policies, err := CentralPolicies(Policy{}, CentralConfig{Queues: []string{"a.b"}})
	require.NoError(t, err)
	require.Len(t, policies, 2)
	assert.Equal(t, `^a\.b$`, policies[0].Pattern)
	assert.Equal(t, map[string]any{"dead-letter-exchange": "dead_letter_exchange", "dead-letter-routing-key": "a.b", "dead-letter-strategy": "at-least-once", "overflow": "reject-publish"}, policies[0].Definition)
	assert.Len(t, policies[1].Definition, 2)
}

func FuzzCentralReadsAnything(f *testing.F) {
	f.Add("orders", "orders", "rejected", "exhausted", "1")
	f.Add("\xff", "", "maxlen", "retry", "-1")
	f.Fuzz(func(t *testing.T, key, queue, reason, own, count string) {
		m := failed(key, queue, reason)
		m.Annotations[client.AnnotationReason], m.Annotations["x-reason"], m.Annotations["x-error"] = own, own, reason
		m.ApplicationProperties = map[string]any{"count": count}
		c := centralCase{cfg: CentralConfig{Queues: []string{"orders"}, Counter: "count", CounterEnd: -1}}
		o, ok := c.decide(m).(client.Forward)
		if !ok {
			t.Fatalf("%T: nothing else than a copy keeps it", c.decide(m))
		}
		if err := o.To.Validate(); err != nil {
			t.Fatal(err)
		}
		if Count(o.Message) < 0 {
			t.Fatal("a count below zero")
		}
	})
}

// refused wants an *argument.Error that leads to a path.
func refused(t *testing.T, err error, path string) {
	t.Helper()
	require.Error(t, err)
	assert.Contains(t, err.Error(), path)
}
