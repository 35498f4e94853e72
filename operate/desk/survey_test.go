package desk

import (
	"cmp"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Delay queues come by their delay, not by the letters of their names.
func TestDelayQueuesComeInTheOrderOfTheirDelays(t *testing.T) {
	t.Parallel()
	var all []QueueSurvey
	for _, name := range []string{"delay_10s", "delay_1s", "delay_500ms", "delay_5s", "orders.delay_2s", "delay_ms", "delay_", "delay_60s"} {
		all = append(all, QueueSurvey{Name: name, Role: roleDelay})
	}
	slices.SortFunc(all, func(a, b QueueSurvey) int { return cmp.Or(compareDelays(a, b), cmp.Compare(a.Name, b.Name)) })
	var names []string
	for _, q := range all {
		names = append(names, q.Name)
	}
	assert.Equal(t, []string{"delay_", "delay_500ms", "delay_1s", "delay_5s", "delay_10s", "delay_60s", "delay_ms", "orders.delay_2s"}, names)
	assert.Zero(t, compareDelays(QueueSurvey{Name: "a_10s", Role: roleWork}, QueueSurvey{Name: "a_1s", Role: roleWork}), "work queues come by their names")
}
