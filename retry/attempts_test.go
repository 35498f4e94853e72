package retry

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// next returns the message of an outcome after it comes back or is dead-lettered.
func next(t *testing.T, m *client.Message, o error) *client.Message {
	t.Helper()
	switch o := o.(type) {
	case client.Forward:
		return o.Message
	case client.Modify:
		m = client.Copy(m)
		if m.Annotations == nil {
			m.Annotations = map[any]any{}
		}
		for k, v := range o.Annotations {
			m.Annotations[k] = v
		}
		return m
	case client.DeadLetter:
		a := map[string]any{client.AnnotationReason: string(o.Reason)}
		for k, v := range o.Annotations {
			a[k] = v
		}
		return next(t, m, client.Modify{Annotations: a})
	}
	t.Fatalf("%T", o)
	return nil
}

// Each strategy records all attempts, and they go on recording when a message comes from
// another strategy.
func TestAttemptsAreRecordedByEachStrategy(t *testing.T) {
	t.Parallel()
	for _, order := range [][]Strategy{
		{StrategyRepublish}, {StrategyDeadLetter}, {StrategyNative},
		{StrategyRepublish, StrategyDeadLetter, StrategyNative}, {StrategyNative, StrategyRepublish, StrategyDeadLetter},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := client.NewMessage([]byte("body"))
			assert.Empty(t, AttemptsOf(m))
			var want []FailedAttempt
			for i, text := range []string{"down", "down", "timeout", "down", "down"} {
				p := Policy{Strategy: order[i%len(order)], MaxRetries: 4, Backoff: Delays(time.Second, time.Minute)}
				pl := planOf(t, p)
				h := worker(p, pl, []string{"orders"}, returns(errors.New(text)))
				f := FailedAttempt{At: time.Now().Round(0), Error: text}
				if i < 4 {
					f.Delay = pl.delays[i]
				}
				want = append(want, f)
				m = next(t, m, h.Handle(t.Context(), client.NewDelivery("orders", m)))
				assert.EqualExportedValues(t, stamps(want), stamps(AttemptsOf(m)), "%v", order)
				time.Sleep(f.Delay)
				if i == 2 { // it waits without a failure, for its own time
					h := worker(p, pl, []string{"orders"}, returns(Snooze(time.Minute)))
					m = next(t, m, h.Handle(t.Context(), client.NewDelivery("orders", m)))
					assert.Equal(t, stamps(want), stamps(AttemptsOf(m)), "%v", order)
					time.Sleep(time.Minute)
				}
			}
			assert.Equal(t, ReasonExhausted, client.Reason(m.Annotations[client.AnnotationReason].(string)))
			assert.Empty(t, AttemptsOf(evidenceOf(Names{}).Copy(m)), "a replay begins without attempts")
		})
	}
}

// stamps makes times comparable.
func stamps(all []FailedAttempt) []string {
	var s []string
	for _, f := range all {
		s = append(s, fmt.Sprint(f.At.UnixMilli(), f.Delay, f.Error))
	}
	return s
}

// However often a message fails, and with any errors, the list is bounded. What is left
// out is the oldest.
func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testAttemptsAreBounded)
}

func testAttemptsAreBounded(t *testing.T) {
	for _, strategy := range []Strategy{StrategyRepublish, StrategyDeadLetter} {
		m := client.NewMessage(nil)
		for i := range 100 {
			time.Sleep(time.Second)
			text := fmt.Sprint(i, strings.Repeat("\x01\"\u00fc\xff", 400))
			p := Policy{Strategy: strategy, MaxRetries: 200, Backoff: Delays(time.Second)}
			m = next(t, m, handle(t, p, m, returns(errors.New(text))))
			list := readCompact(m.Annotations[annotation.History].(string)).Attempts
			assert.LessOrEqual(t, len(list), maxAttemptsBytes)
			all := AttemptsOf(m)
			require.NotEmpty(t, all)
			require.LessOrEqual(t, len(all), maxAttempts+1)
			for j, f := range all {
				assert.True(t, strings.HasPrefix(f.Error, fmt.Sprint(i-len(all)+1+j)), "%.5q", f.Error)
				assert.True(t, utf8.ValidString(f.Error))
				assert.LessOrEqual(t, len(f.Error), maxAttemptText)
			}
		}
		assert.Greater(t, len(AttemptsOf(m)), 3)
		for range 100 { // the same error takes little space
			time.Sleep(time.Second)
			m = next(t, m, handle(t, Policy{Strategy: strategy, MaxRetries: 1000, Backoff: Delays(time.Second)}, m, returns(errA)))
		}
		assert.Len(t, AttemptsOf(m), maxAttempts+1)
	}
}

// A list that somebody made up does no harm, and the next failure writes a good one.
func TestHostileAttempts(t *testing.T) {
	t.Parallel()
	good := FailedAttempt{At: time.UnixMilli(1_790_000_000_000), Delay: time.Second, Error: "x"}
	for list, want := range map[string][]FailedAttempt{
		"":     nil,
		"{":    nil,
		"{}":   nil,
		"7":    nil,
		"[7]":  nil,
		"[[]]": nil,
		"null": nil,
		"[null,[1790000000000,1000,\"x\"],[-1,5],[\"a\",1],[1790000000000],[1790000000000,{}],[1790000000000,1,7]]": {good},
		"[[1790000000000,1000,\"x\",{\"more\":[]}]]":                                                                {good},
		"[[1790000000000,-1000,\"x\"]]":                                                                             {{At: good.At, Error: "x"}},
		"[[1790000000000,9223372036854775807,\"x\"]]":                                                               {{At: good.At, Delay: maxDelay, Error: "x"}},
		"[" + strings.Repeat(" ", 4*maxAttemptsBytes) + "[1790000000000,1000,\"x\"]]":                               nil,
		"[" + strings.Repeat("[", 3000):                                                                             nil,
	} {
		for key, value := range map[string]string{annotation.Older.Attempts: list, annotation.History: `{"attempts":` + list + `}`} {
			m := client.NewMessage(nil)
			m.Annotations = map[any]any{key: value}
			got := AttemptsOf(m)
			assert.Equal(t, stamps(want), stamps(got), "%s %.80q", key, list)
			m.Annotations[annotation.Older.Last] = good.At.UnixMilli() + 5
			dead := next(t, m, handle(t, Policy{MaxRetries: NoRetries}, m, returns(errA)))
			assert.Len(t, AttemptsOf(dead), len(want)+2)
		}
	}
	assert.Empty(t, AttemptsOf(nil))
	m := client.NewMessage(nil)
	m.Annotations = map[any]any{annotation.Older.Attempts: []any{"x"}, annotation.Older.Last: "now"}
	assert.Empty(t, AttemptsOf(m))
	m.Annotations = map[any]any{annotation.Older.Attempts: "[" + strings.Repeat("[1790000000000,1],", 200) + "[1790000000000,1]]"}
	assert.Len(t, AttemptsOf(m), maxAttempts)
}
