package retry

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
)

// died is a message with a history that the broker wrote: queue, reason, exchange, key.
func died(annotations map[any]any, history ...[4]string) *client.Message {
	m := client.NewMessage(nil)
	m.Annotations = annotations
	if m.Annotations == nil {
		m.Annotations = map[any]any{}
	}
	var all []map[any]any
	for _, d := range history {
		all = append(all, map[any]any{"queue": d[0], "reason": d[1], "exchange": d[2], "routing-keys": []any{d[3]}})
	}
	if len(all) > 0 {
		m.Annotations["x-opt-deaths"] = all
		m.Annotations["x-last-death-queue"], m.Annotations["x-last-death-reason"] = all[0]["queue"], all[0]["reason"]
	}
	return m
}

func TestWhatShowsWhereAMessageFailed(t *testing.T) {
	t.Parallel()
	delayed := [4]string{"delay_10s", "expired", "retry_exchange", "delay.10000.or.ders"}
	for name, c := range map[string]struct {
		m     *client.Message
		in    string
		queue string
		want  bool
	}{
		"a death there":                       {died(nil, [4]string{"orders", "rejected", "shop", "a"}), "x", "orders", true},
		"an earlier death there":              {died(nil, [4]string{"failed_queue", "rejected", "", "orders"}, [4]string{"orders", "rejected", "shop", "a"}), "x", "orders", true},
		"its dead-letter queue":               {died(nil), "orders.dead", "orders", true},
		"another's dead-letter queue":         {died(nil), "orders.dead", "payments", false},
		"nothing":                             {died(map[any]any{annotation.Queue: "orders"}), "dlq", "orders", false},
		"on its way back to it":               {died(nil, delayed), "parking_queue", "or.ders", true},
		"on its way back to another":          {died(nil, delayed), "parking_queue", "ders", false},
		"the key of a work queue":             {died(nil, [4]string{"orders", "expired", "shop", "delay.10000.payments"}), "orders.dead", "payments", false},
		"a queue that only looks like it":     {died(nil, [4]string{"delay_10s", "expired", "shop", "delay.10000.payments"}), "x", "payments", false},
		"a rejection in a delay queue":        {died(nil, [4]string{"delay_10s", "rejected", "retry_exchange", "delay.10000.payments"}), "x", "payments", false},
		"on its way down the ladder":          {died(nil, [4]string{"retry_ladder_3", "expired", "retry_ladder_3", "0.1.0.1.or.ders"}), "parking_queue", "or.ders", true},
		"another's way down the ladder":       {died(nil, [4]string{"retry_ladder_3", "expired", "retry_ladder_3", "0.1.0.1.or.ders"}), "parking_queue", "payments", false},
		"no queue":                            {died(nil, [4]string{"q", "expired", "e", "k"}), "x", "", false},
		"a key that isn't one of a delay":     {died(nil, [4]string{"delay_10s", "expired", "retry_exchange", "payments"}), "x", "payments", false},
		"a history that a sender could write": {died(map[any]any{"x-opt-deaths": []any{map[string]any{"queue": "payments"}}}), "x", "payments", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, c.want, evidenceOf(Names{}).Failed(c.m, c.in, c.queue))
		})
	}
	own := Names{Prefix: "a.", DeadSuffix: "-dlq"}
	assert.True(t, evidenceOf(own).Failed(died(nil), "orders-dlq", "orders"))
	assert.False(t, evidenceOf(own).Failed(died(nil), "orders.dead", "orders"))
	assert.False(t, evidenceOf(own).Failed(died(nil, delayed), "a.parking_queue", "or.ders"))
}

func TestWhatShowsWhereAMessageWasPublished(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		history       [][4]string
		exchange, key string
		want          inside.Answer
	}{
		"recorded":                     {[][4]string{{"orders", "rejected", "shop", "a"}}, "shop", "a", inside.AnswerYes},
		"another key":                  {[][4]string{{"orders", "rejected", "shop", "a"}}, "shop", "b", inside.AnswerNo},
		"another exchange":             {[][4]string{{"orders", "rejected", "shop", "a"}}, "till", "a", inside.AnswerNo},
		"back from a delay":            {[][4]string{{"orders", "rejected", "requeue_exchange", "delay.1.orders"}}, "shop", "a", inside.AnswerUnknown},
		"back from the ladder":         {[][4]string{{"orders", "rejected", "retry_ladder_back", "0.1.orders"}}, "shop", "a", inside.AnswerUnknown},
		"moved by a replay":            {[][4]string{{"orders", "rejected", "replay_exchange", "orders"}}, "shop", "a", inside.AnswerUnknown},
		"replayed to its queue":        {[][4]string{{"orders", "rejected", "", "orders"}}, "shop", "a", inside.AnswerUnknown},
		"a death elsewhere":            {[][4]string{{"others", "rejected", "shop", "a"}}, "shop", "a", inside.AnswerUnknown},
		"no history":                   {nil, "shop", "a", inside.AnswerUnknown},
		"first one death, then others": {[][4]string{{"failed_queue", "rejected", "dead_letter_exchange", "orders"}, {"orders", "rejected", "shop", "a"}}, "shop", "a", inside.AnswerYes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, c.want, evidenceOf(Names{}).Published(died(nil, c.history...), "orders", c.exchange, c.key))
		})
	}
}

// What a message says about itself counts only where the broker's history agrees.
func TestDeathOfBelievesTheBrokerBeforeTheMessage(t *testing.T) {
	t.Parallel()
	expired := map[any]any{annotation.Queue: "payments", annotation.Retries: int64(1)}
	d := DeadLetterOf(died(expired, [4]string{"orders", "expired", "shop", "order.placed"}))
	assert.Equal(t, [2]string{"expired", "orders"}, [2]string{string(d.Reason), d.Queue})
	back := map[any]any{annotation.Queue: "orders", annotation.Retries: int64(1)}
	d = DeadLetterOf(died(back, [4]string{"delay_10s", "expired", "retry_exchange", "delay.10000.orders"}))
	assert.Equal(t, [2]string{"unroutable", "orders"}, [2]string{string(d.Reason), d.Queue})
	replayed := map[any]any{annotation.Queue: "payments", client.AnnotationReason: string(ReasonReplayed)}
	d = DeadLetterOf(died(replayed, [4]string{"orders", "rejected", "shop", "order.placed"}))
	assert.Equal(t, [2]string{"rejected", "orders"}, [2]string{string(d.Reason), d.Queue})
	moved := map[any]any{annotation.Queue: "orders", client.AnnotationReason: string(ReasonReplayed)}
	d = DeadLetterOf(died(moved, [4]string{"orders.dead", "rejected", "dead_letter_exchange", "orders"}, [4]string{"orders", "rejected", "shop", "order.placed"}))
	assert.Empty(t, d.Reason, "it is back in its queue")
}

func evidenceOf(n Names) inside.Names { return inside.NamesOf(With(Policy{Names: n})(nil)) }
