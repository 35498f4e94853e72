package retry

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// A copy tells in one annotation what the other strategies tell in a dozen, and the next
// failure, with any strategy, continues from there.
func TestHistoryOfACopyIsOneAnnotation(t *testing.T) {
	t.Parallel()
	republish := Policy{Strategy: StrategyRepublish, Backoff: Delays(time.Minute), MaxRetries: 5, Worker: "w 1"}
	m := client.NewMessage([]byte("body"))
	m.Annotations = map[any]any{"x-exchange": "", "x-routing-key": "orders \"1\"", "x-opt-tenant": "acme"}
	before := time.Now().UnixMilli()
	first := handle(t, republish, m, returns(errors.New("a \"b\"\\\n\x01\xff\u00fc"))).(client.Forward)
	require.NoError(t, client.Validate(first.Message))
	require.Len(t, first.Message.Annotations, 2)
	assert.Equal(t, "acme", first.Message.Annotations["x-opt-tenant"])
	text := first.Message.Annotations[annotation.History].(string)
	require.True(t, json.Valid([]byte(text)), text)
	assert.Equal(t, map[string]any{annotation.History: text}, first.Annotations, "the original that goes back tells it, too")
	d := DeadLetterOf(first.Message)
	assert.Equal(t, DeadLetter{
		Error: "a \"b\"\\\n\x01?\u00fc", ErrorType: "*errors.errorString", Retries: 1, FirstFailure: d.FirstFailure, LastFailure: d.FirstFailure,
		Queue: "orders", Exchange: "", RoutingKey: "orders \"1\"", Worker: "w 1",
	}, d)
	assert.GreaterOrEqual(t, d.FirstFailure.UnixMilli(), before)
	assert.Equal(t, int64(60_000), historyOf(first.Message).Delay)

	// The broker overwrites where the message came from.
	m = first.Message
	m.Annotations["x-exchange"], m.Annotations["x-routing-key"] = "requeue_exchange", "delay.60000.orders"
	time.Sleep(2 * time.Millisecond)
	second := handle(t, republish, m, returns(errA)).(client.Forward)
	require.Len(t, second.Message.Annotations, 2)
	again := DeadLetterOf(second.Message)
	assert.Equal(t, 2, again.Retries)
	assert.Equal(t, d.FirstFailure, again.FirstFailure)
	assert.True(t, again.LastFailure.After(d.LastFailure))
	assert.Equal(t, errA.Error(), again.Error)
	assert.Equal(t, d.RoutingKey, again.RoutingKey)

	// A snooze is no failure: the record of the last one stays.
	snoozed := handle(t, republish, second.Message, returns(Snooze(time.Minute))).(client.Forward)
	assert.Equal(t, again, DeadLetterOf(snoozed.Message))

	// Another strategy, or the end, tells it in annotations of their own, which go before.
	for name, h := range map[string]client.HandlerFunc{"retried": returns(errDown), "dead": returns(Permanent(errDown))} {
		p := republish
		p.Strategy = StrategyDeadLetter
		var a map[string]any
		switch o := handle(t, p, second.Message, h).(type) {
		case client.Modify:
			a = o.Annotations
		case client.DeadLetter:
			a = o.Annotations
		}
		assert.Equal(t, "", *notified(a).Exchange, name)
		assert.Equal(t, d.RoutingKey, *notified(a).Key, name)
		assert.Equal(t, d.FirstFailure.UnixMilli(), notified(a).First, name)
		m = client.Copy(second.Message)
		for k, v := range a {
			m.Annotations[k] = v
		}
		assert.Equal(t, errDown.Error(), DeadLetterOf(m).Error, name)
		back := handle(t, republish, m, returns(errA)).(client.Forward)
		assert.Len(t, back.Message.Annotations, 2, name)
		assert.Equal(t, errA.Error(), DeadLetterOf(back.Message).Error, name)
		assert.Equal(t, d.FirstFailure, DeadLetterOf(back.Message).FirstFailure, name)
		assert.Equal(t, d.FirstFailure.UnixMilli(), notified(back.Annotations).First)
		assert.Equal(t, errA.Error(), back.Annotations[client.AnnotationError])
		assert.NotContains(t, back.Annotations, annotation.Retries)
		fresh := evidenceOf(Names{}).Copy(m)
		assert.Equal(t, DeadLetter{RoutingKey: d.RoutingKey}, DeadLetterOf(fresh), name)
	}
	fresh := evidenceOf(Names{}).Copy(second.Message)
	assert.Equal(t, DeadLetter{RoutingKey: d.RoutingKey}, DeadLetterOf(fresh), "from the compact form alone")
	assert.NotContains(t, fresh.Annotations, annotation.History)
}

// A panic and the policy's time count from the failure that the compact form tells.
func TestCompactHistoryOutlivesTheHandlersChanges(t *testing.T) {
	t.Parallel()
	first := time.Now().Add(-time.Hour).UnixMilli()
	b, err := json.Marshal(map[string]any{"first": first})
	require.NoError(t, err)
	m := func() *client.Message {
		m := client.NewMessage(nil)
		m.Annotations = map[any]any{annotation.History: string(b)}
		return m
	}
	p := Policy{Strategy: StrategyRepublish, MaxRetries: 3, Backoff: Delays(time.Minute), GiveUpAfter: time.Hour}
	for what, result := range map[string]error{"failed": errA, "panicked": nil, "permanent": Permanent(errA), "its own": client.DeadLetter{}} {
		h := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			clear(d.Message().Annotations)
			if result == nil {
				panic("changed")
			}
			return result
		})
		var died client.DeadLetter
		require.ErrorAs(t, handle(t, p, m(), h), &died, what)
		assert.Equal(t, first, notified(died.Annotations).First, what)
	}
}

func TestCompactHistoryThatIsNone(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: StrategyRepublish, MaxRetries: 3, Backoff: Delays(time.Minute)}
	for _, hostile := range []any{
		"", "{", "null", "[]", "7", `"x"`, "\xff", strings.Repeat("[", 20_000), strings.Repeat(" ", 1<<20) + "{}", int64(1), nil, []any{"{}"},
		`{"first":"x","last":{},"queue":7,"error":[],"exchange":1,"key":{}}`, `{"first":-1,"last":99999999999999999}`, `{"first":1e400}`,
	} {
		m := client.NewMessage(nil)
		m.Annotations = map[any]any{annotation.History: hostile, "x-exchange": "shop"}
		assert.Equal(t, DeadLetter{}, DeadLetterOf(m), "%.20v", hostile)
		f := handle(t, p, m, returns(errA)).(client.Forward)
		assert.Equal(t, "shop", DeadLetterOf(f.Message).Exchange)
		assert.NotPanics(t, func() { evidenceOf(Names{}).Copy(m) })
	}
	long := strings.Repeat("k", maxOrigin+1)
	m := client.NewMessage(nil)
	m.Annotations = map[any]any{annotation.History: `{"key":"` + long + `"}`}
	f := handle(t, p, m, returns(errA)).(client.Forward)
	assert.Empty(t, DeadLetterOf(f.Message).RoutingKey, "it doesn't travel on")
	assert.NotContains(t, evidenceOf(Names{}).Copy(m).Annotations, annotation.RoutingKey)
}

func FuzzCompactHistory(f *testing.F) {
	f.Add("orders", "failed", `a "b" \`, "k\x00\n")
	f.Fuzz(func(t *testing.T, queue, text, exchange, key string) {
		for _, s := range []*string{&queue, &text, &exchange, &key} {
			*s = strings.ToValidUTF8(*s, "?")
		}
		a := account{queue: queue, text: text, kind: "*e", worker: "w", first: 1, last: 2, origin: [2]origin{{known: true, text: exchange}, {known: true, text: key}}}
		a.message = &client.Message{}
		compact := a.compact(time.Second, false)
		if len(compact) > maxCompact {
			return
		}
		require.Equal(t, compactHistory{
			Queue: queue, Error: text, Type: "*e", Worker: "w", First: 1, Last: 2, Delay: 1000, Exchange: &exchange, Key: &key,
		}, readCompact(compact))
		_ = DeadLetterOf(&client.Message{Annotations: map[any]any{annotation.History: text}})
	})
}
