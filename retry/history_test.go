package retry

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

func TestLaneTellsWhyAMessageIsDead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		annotations map[any]any
		want        client.Reason
		queue       string
	}{
		"alive":            {nil, "", ""},
		"waiting":          {map[any]any{client.AnnotationReason: reasonRetry, annotation.Retries: int64(1)}, "", ""},
		"given up":         {map[any]any{"x-last-death-reason": "rejected", client.AnnotationReason: "exhausted"}, ReasonExhausted, ""},
		"rejected":         {map[any]any{"x-last-death-reason": "rejected", "x-last-death-queue": "orders"}, ReasonRejected, "orders"},
		"rejected, marked": {map[any]any{"x-last-death-reason": "rejected", client.AnnotationReason: reasonRetry}, ReasonNoDelayQueue, ""},
		"rejected, waited": {map[any]any{"x-last-death-reason": "rejected", client.AnnotationReason: reasonWaits}, ReasonRejected, ""},
		"delivery limit":   {map[any]any{"x-last-death-reason": "delivery_limit", client.AnnotationReason: "exhausted"}, ReasonDeliveryLimit, ""},
		"expired":          {map[any]any{"x-last-death-reason": "expired", "x-last-death-queue": "orders", annotation.Queue: "orders"}, ReasonExpired, "orders"},
		"expired, retried": {map[any]any{"x-last-death-reason": "expired", "x-last-death-queue": "orders", annotation.Queue: "orders", annotation.Retries: int64(1)}, ReasonExpired, "orders"},
		"not brought back": {map[any]any{"x-last-death-reason": "expired", "x-last-death-queue": "delay_1s", annotation.Queue: "orders", annotation.Retries: int64(1)}, ReasonUnroutable, "orders"},
		"maxlen":           {map[any]any{"x-last-death-reason": "maxlen"}, ReasonMaxLength, ""},
		"unknown to us":    {map[any]any{"x-last-death-reason": "boredom"}, "", ""},
		"nonsense":         {map[any]any{"x-last-death-reason": 7, client.AnnotationReason: []any{}, annotation.Queue: 1.5}, "", ""},
		"reason no string": {map[any]any{"x-last-death-reason": "rejected", client.AnnotationReason: int64(1)}, ReasonRejected, ""},
	} {
		death := DeadLetterOf(&client.Message{Annotations: c.annotations})
		assert.Equal(t, c.want, death.Reason, name)
		assert.Equal(t, c.queue, death.Queue, name)
	}
	assert.Zero(t, DeadLetterOf(nil))
	assert.Zero(t, DeadLetterOf(&client.Message{}))
}

// notified is the history that a message has with these annotations.
func notified(annotations map[string]any) compactHistory {
	m := client.NewMessage(nil)
	m.Annotations = map[any]any{}
	for k, v := range annotations {
		m.Annotations[k] = v
	}
	return historyOf(m)
}

func counted(p past, n int) past {
	p.count = n
	return p
}

func TestHostileTimesAreNoTimes(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_790_000_000_123)
	for _, v := range []any{at.UnixMilli(), uint64(at.UnixMilli()), at} {
		assert.True(t, millis(v).Equal(at), "%T", v)
	}
	for _, v := range []any{
		nil, "1790000000123", 1.79e12, math.NaN(), true, []any{int64(1)}, int32(5), time.Duration(5),
		int64(0), int64(-1), int64(math.MinInt64), int64(math.MaxInt64), uint64(math.MaxUint64), time.Time{}, time.UnixMilli(math.MaxInt64), time.UnixMilli(-1),
	} {
		assert.True(t, millis(v).IsZero(), "%T %v", v, v)
	}
}

// hostile errors, all of them have broken a client somewhere.
type (
	panics         struct{}
	nilError       struct{ text string }
	ünïcödé[T any] struct{ _ T }
)

func (e *nilError) Error() string { return e.text }
func (panics) Error() string      { panic("in Error") }
func (ünïcödé[T]) Error() string  { return "unicode" }

type (
	u1 = ünïcödé[ünïcödé[ünïcödé[ünïcödé[int]]]]
	u2 = ünïcödé[ünïcödé[ünïcödé[ünïcödé[u1]]]]
)

func TestAnnotationsAreBoundedAndValidForAnyError(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{Worker: strings.Repeat("w", 255)})
	m := client.NewMessage(nil)
	m.Annotations = map[any]any{"x-exchange": strings.Repeat("x", 255), "x-routing-key": strings.Repeat("k", 1<<20)}
	for name, err := range map[string]error{
		"10 MB":               errors.New(strings.Repeat("ä", 5<<20)),
		"not UTF-8":           errors.New(strings.Repeat("\xff\xfe", 5000)),
		"cut in a character":  errors.New(strings.Repeat("a", client.ErrorTextLimit-1) + "é"),
		"panics":              panics{},
		"nil pointer":         (*nilError)(nil),
		"a large type":        u2{},
		"a large type, deep":  After(1, Permanent(ünïcödé[struct{ Ä u2 }]{})),
		"joined by the dozen": errors.Join(panics{}, u2{}, errors.New(strings.Repeat("x", 1<<20))),
	} {
		m.Annotations[annotation.Older.Last] = int64(math.MaxInt32)
		m.Annotations[annotation.Older.Attempts] = "[" + strings.Repeat(`[1790000000000,1,"`+strings.Repeat("e", 90)+`"],[1790000000000,1,"f"],`, 30) + "[1790000000000,1]]"
		h := pl.history(client.NewDelivery("q", m), err, counted(pastOf(m, ""), math.MaxInt32), epoch)
		size := 0
		for k, v := range h {
			size += len(k)
			switch v := v.(type) {
			case string:
				size += len(v)
				assert.True(t, utf8.ValidString(v), "%s: %s isn't valid UTF-8", name, k)
			case int64:
				size += 9
			default:
				t.Errorf("%s: %s is a %T, which can't be in a settlement", name, k, v)
			}
		}
		assert.Less(t, size, 4096, name)
		assert.NotEmpty(t, notified(h).Attempts, name)
	}
}

func TestErrorTypeIsThatBelowTheMarks(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "*errors.errorString", errorType(errDown))
	assert.Equal(t, "*errors.errorString", errorType(Permanent(After(time.Second, errDown))))
	assert.Equal(t, "*client.PanicError", errorType(Permanent(&client.PanicError{Value: "no"})))
	assert.Equal(t, "*client.Error", errorType(&client.Error{Op: "publish"}))
	assert.Equal(t, "retry.After", errorType(After(time.Second, nil)))
	assert.Equal(t, "*fmt.wrapError", errorType(fmt.Errorf("x: %w", errDown)))
	assert.Equal(t, "<nil>", errorType(nil))
}

func TestOriginIsKeptFromBeforeTheFirstRetry(t *testing.T) {
	t.Parallel()
	pl := planOf(t, Policy{})
	m := client.NewMessage(nil)
	m.Annotations = map[any]any{"x-exchange": "shop", "x-routing-key": "order.placed"}
	h := pl.history(client.NewDelivery("orders", m), errDown, counted(pastOf(m, ""), 1), epoch)
	assert.Equal(t, "shop", *notified(h).Exchange)
	assert.Equal(t, "order.placed", *notified(h).Key)
	// Later the broker's own say how it came through the delay queue.
	for k, v := range h {
		m.Annotations[k] = v
	}
	m.Annotations["x-exchange"], m.Annotations["x-routing-key"] = "requeue_exchange", "delay.1000.orders"
	h = pl.history(client.NewDelivery("orders", m), errDown, counted(pastOf(m, ""), 2), epoch.Add(time.Minute))
	assert.Equal(t, "shop", *notified(h).Exchange)
	assert.Equal(t, "order.placed", *notified(h).Key)
	assert.Equal(t, epoch.UnixMilli(), notified(h).First)
	assert.Equal(t, epoch.Add(time.Minute).UnixMilli(), notified(h).Last)
	// A forged one is not taken on.
	for _, forged := range []any{int64(7), "\xff", strings.Repeat("x", 1025), nil} {
		m.Annotations = map[any]any{annotation.Exchange: forged}
		h = pl.history(client.NewDelivery("orders", m), errDown, counted(pastOf(m, ""), 1), epoch)
		require.Nil(t, notified(h).Exchange)
	}
}

// A record of another queue isn't read: counts and the time of the first failure start over. What other
// systems count without naming a queue is read in each.
func TestARecordBelongsToAQueue(t *testing.T) {
	t.Parallel()
	pl, err := Policy{}.plan()
	require.NoError(t, err)
	failed := func(queue string, m *client.Message, n int) *client.Message {
		c := client.Copy(m)
		for k, v := range pl.history(client.NewDelivery(queue, m), errDown, counted(pastOf(m, queue).read(), n), epoch) {
			if c.Annotations == nil {
				c.Annotations = map[any]any{}
			}
			c.Annotations[k] = v
		}
		return c
	}
	m := client.NewMessage(nil)
	m.ApplicationProperties = map[string]any{CountProperty: "3"}
	assert.Equal(t, 3, pastOf(m, "b").read().count, "another system's")

	m = failed("a", m, 3)
	was := pastOf(m, "a").read()
	assert.Equal(t, 3, was.count)
	assert.True(t, epoch.Equal(was.first))
	was = pastOf(m, "b").read()
	assert.Zero(t, was.count)
	assert.Zero(t, was.first)
	assert.Equal(t, was, was.read(), "once is enough")

	m = failed("b", m, 1)
	assert.Equal(t, 1, pastOf(m, "b").read().count, "the property can't be reset, and doesn't count")
	assert.Equal(t, 1, Count(m))
	m.ApplicationProperties[CountProperty] = "5"
	assert.Equal(t, 2, pastOf(m, "b").read().count, "another worker of b's has counted since")
	for _, hostile := range []string{`{"base":-5}`, `{"base":99999999999999999999}`, `{"base":"x"}`, `{"base":1e300}`} {
		m.Annotations = map[any]any{annotation.History: hostile}
		assert.Equal(t, 5, Count(m), hostile)
	}
}

// Only what a delay has brought back for the queue of the record keeps its count in another queue.
func TestReturnedIsWhatADelayBroughtBack(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]bool{
		"delay.1000.orders": true, "orders": true, // by copies, and by StrategyDeadLetter
		"new.orders": false, // published to the queue new.orders itself
		"invoices":   false, "": false,
	} {
		assert.Equal(t, want, past{in: "new.orders", named: "orders", key: key}.returned(), key)
	}
}

// A message came to this queue as a copy of another queue's. If the copy for its retry can't be stored, it is
// requeued with the annotations of the forward, and hasn't been retried.
func TestAMessageWhoseCopyIsRefusedKeepsItsCount(t *testing.T) {
	t.Parallel()
	p := Policy{Strategy: StrategyRepublish, MaxRetries: 3, Backoff: Delays(time.Second)}
	m := client.NewMessage(nil)
	m.ApplicationProperties = map[string]any{CountProperty: "3"}
	m.Annotations = map[any]any{annotation.History: `{"queue":"before"}`}
	require.Zero(t, pastOf(m, "orders").read().count)
	h := worker(p, planOf(t, p), []string{"orders"}, returns(errA))
	for range 3 {
		f, ok := h.Handle(t.Context(), client.NewDelivery("orders", m)).(client.Forward)
		require.True(t, ok, "it has retries left")
		assert.Equal(t, 1, Count(f.Message))
		annotate(&held{msg: m}, f.Annotations)
		assert.Zero(t, pastOf(m, "orders").read().count)
	}
}
