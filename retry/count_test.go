package retry

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// hostileCounts are what a message may claim, and how it is read.
var hostileCounts = []struct {
	claim any
	count int
	text  bool
}{
	{nil, 0, false},
	{int8(3), 3, false},
	{int32(3), 3, false},
	{int64(3), 3, false},
	{uint8(3), 3, false},
	{uint64(3), 3, false},
	{float32(3), 3, false},
	{3.99, 3, false},
	{0.5, 0, false},
	{-1, 0, false},
	{int64(math.MinInt64), 0, false},
	{int64(math.MaxInt64), math.MaxInt32, false},
	{uint64(math.MaxUint64), math.MaxInt32, false},
	{math.NaN(), 0, false},
	{math.Inf(1), math.MaxInt32, false},
	{math.Inf(-1), 0, false},
	{"3", 3, true},
	{" 3 ", 3, true},
	{"+3", 3, true},
	{"3.0", 3, true},
	{"3e0", 3, true},
	{"-3", 0, true},
	{"1e999", math.MaxInt32, true},
	{"-1e999", 0, true},
	{"NaN", 0, true},
	{"Inf", math.MaxInt32, true},
	{"", 0, true},
	{"three", 0, true},
	{"3 apples", 0, true},
	{"99999999999999999999", math.MaxInt32, true},
	{strings.Repeat("9", 1<<20), 0, true},
	{"\xff", 0, true},
	{true, 0, false},
	{[]byte("3"), 0, false},
	{[]any{int64(3)}, 0, false},
	{map[string]any{"n": int64(3)}, 0, false},
	{time.Unix(3, 0), 0, false},
}

func TestHostileCountsAreReadAsACountOrAsNone(t *testing.T) {
	t.Parallel()
	for _, c := range hostileCounts {
		n, text := parseCount(c.claim)
		assert.Equal(t, c.count, n, "%.40v", c.claim)
		assert.Equal(t, c.text, text, "%.40v", c.claim)
		assert.Equal(t, c.count, Count(&client.Message{ApplicationProperties: map[string]any{CountProperty: c.claim}}))
		assert.Equal(t, c.count, Count(&client.Message{Annotations: map[any]any{annotation.Retries: c.claim}}))
		assert.Equal(t, c.count, Count(&client.Message{Annotations: map[any]any{CountProperty: c.claim}}))
	}
	assert.Zero(t, Count(nil))
}

// A count that can't be read must not restart a message's retries each time: what
// is written in its place is read the next time.
func TestWrittenCountIsReadBackAfterAnyValue(t *testing.T) {
	t.Parallel()
	for _, c := range hostileCounts {
		m := &client.Message{ApplicationProperties: map[string]any{CountProperty: c.claim}}
		setCount(m, CountProperty, c.count+1)
		assert.Equal(t, min(c.count+1, math.MaxInt32), Count(m), "%.40v", c.claim)
		_, text := m.ApplicationProperties[CountProperty].(string)
		assert.Equal(t, c.text, text, "the type that a worker in another language reads: %.40v", c.claim)
	}
}

func TestLargestOfTheCountersCounts(t *testing.T) {
	t.Parallel()
	m := &client.Message{ApplicationProperties: map[string]any{CountProperty: "2"}, Annotations: map[any]any{annotation.Retries: int64(5)}}
	assert.Equal(t, 5, Count(m))
	m.ApplicationProperties[CountProperty] = int32(7)
	assert.Equal(t, 7, Count(m))
	m.Annotations[CountProperty] = "8"
	assert.Equal(t, 8, Count(m))
}

// A worker over AMQP 0-9-1 that republishes has counted in a header, which is an annotation
// here. The copy has one counter, of the same type: with two, that worker would read the old
// one.
func TestHeaderOfAWorkerThatRepublishesCounts(t *testing.T) {
	t.Parallel()
	p := Policy{MaxRetries: 3, Backoff: Delays(time.Second)}
	for _, c := range []struct{ header, property, next any }{
		{int64(2), nil, int64(3)}, {"2", nil, "3"}, {int64(2), int64(1), int64(3)}, {int64(1), "2", "3"}, {"x", int64(2), int64(3)},
	} {
		m := sent()
		m.Annotations[CountProperty] = c.header
		if delete(m.ApplicationProperties, CountProperty); c.property != nil {
			m.ApplicationProperties[CountProperty] = c.property
		}
		f, ok := handle(t, p, m, returns(errA)).(client.Forward)
		if assert.True(t, ok, "%v", c) {
			assert.Equal(t, c.next, f.Message.ApplicationProperties[CountProperty], "%v", c)
			assert.NotContains(t, f.Message.Annotations, CountProperty, "%v", c)
			assert.IsType(t, client.DeadLetter{}, handle(t, p, f.Message, returns(errA)), "%v: that was the last retry", c)
		}
	}
}

func TestAttemptIsOneMoreThanTheRetries(t *testing.T) {
	t.Parallel()
	assert.Zero(t, Attempt(context.Background()))
	m := client.NewMessage(nil)
	ctx := client.WithDelivery(t.Context(), client.NewDelivery("q", m))
	assert.Equal(t, 1, Attempt(ctx))
	m.ApplicationProperties = map[string]any{CountProperty: int64(4)}
	assert.Equal(t, 5, Attempt(ctx))
}
