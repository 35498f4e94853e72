package desk

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

func TestDeathsAreBetweenTheRightAttempts(t *testing.T) {
	t.Parallel()
	type deaths = []annotation.DeadLettering
	rejected := func(n uint64) annotation.DeadLettering {
		return annotation.DeadLettering{Queue: "orders", Reason: "rejected", Count: n}
	}
	expired := func(queue string) annotation.DeadLettering {
		return annotation.DeadLettering{Queue: queue, Reason: "expired", Count: 1}
	}
	for name, c := range map[string]struct {
		delays []int // after each attempt
		deaths deaths
		want   string // attempts by number, and deaths
	}{
		"dead at once":               {[]int{0}, deaths{rejected(1)}, "1 orders"},
		"a copy":                     {[]int{1, 2, 0}, deaths{expired("delay_2s"), rejected(1)}, "1 2 delay_2s 3 orders"},
		"a ladder":                   {[]int{1, 3, 0}, deaths{expired("l1"), expired("l0"), rejected(1)}, "1 2 l1 l0 3 orders"},
		"moved":                      {[]int{1, 2, 0}, deaths{expired("hold_1s"), expired("hold_2s"), rejected(3)}, "1 hold_1s 2 hold_2s 3 orders"},
		"moved, one delay twice":     {[]int{1, 2, 2, 0}, deaths{expired("hold_1s"), expired("hold_2s"), rejected(4)}, "1 hold_1s 2 3 hold_2s 4 orders"},
		"moved after a copy":         {[]int{1, 2, 3, 0}, deaths{expired("delay_2s"), expired("hold_3s"), rejected(2)}, "1 2 delay_2s 3 hold_3s 4 orders"},
		"by Central":                 {[]int{1, 0}, deaths{expired("hold_1s"), rejected(2), {Queue: "failed_queue", Reason: "rejected", Count: 2}}, "1 hold_1s 2 orders failed_queue"},
		"it can't return":            {[]int{1, 2}, deaths{expired("delay_2s")}, "1 2 delay_2s"},
		"moved, and it can't return": {[]int{1, 2}, deaths{expired("hold_1s"), rejected(2), expired("hold_2s")}, "1 hold_1s 2 orders hold_2s"},
		"its worker died":            {[]int{1}, deaths{expired("delay_1s"), {Queue: "orders", Reason: "delivery_limit", Count: 1}}, "1 delay_1s orders"},
		"held by its queue":          {[]int{1, 2, 0}, deaths{rejected(1)}, "1 2 3 orders"},
		"it waited before it came":   {[]int{0}, deaths{expired("later"), rejected(1)}, "later 1 orders"},
		"no attempt":                 {nil, deaths{{Queue: "orders", Reason: "expired", Count: 1}}, "orders"},
		"a count that is a lie":      {[]int{1, 0}, deaths{expired("hold_1s"), expired("hold_2s"), rejected(1 << 63)}, "1 hold_1s hold_2s 2 orders"},
		"attempts are missing":       {[]int{3, 0}, deaths{expired("hold_1s"), expired("hold_2s"), expired("hold_3s"), rejected(4)}, "1 hold_1s hold_2s hold_3s 2 orders"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var attempts []retry.FailedAttempt
			for _, d := range c.delays {
				attempts = append(attempts, retry.FailedAttempt{Delay: time.Duration(d) * time.Second})
			}
			before, after := afterWhichAttempt(attempts, c.deaths, "orders")
			var got []string
			add := func(which []int) {
				for _, i := range which {
					got = append(got, c.deaths[i].Queue)
				}
			}
			add(before)
			for i := range attempts {
				got = append(got, fmt.Sprint(i+1))
				add(after[i])
			}
			assert.Equal(t, c.want, strings.Join(got, " "))
		})
	}
}
