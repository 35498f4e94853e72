package schedule_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/schedule"
)

// Messages for any time of a day come once each, none early, and late by no more than the
// rounding, whichever way they take. HOPBACK_LONG=1 makes it 1,000,000.
func TestADayOfScheduledMessages(t *testing.T) {
	t.Parallel()
	messages := 500
	if os.Getenv("HOPBACK_LONG") != "" {
		messages = 1_000_000
	}
	began := time.Now()
	synctest.Test(t, func(t *testing.T) {
		w := newWorldThatIdles(t, 12*time.Hour, "4.3.6", "bound")
		w.apply(declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "unbound", DeadLetter: declare.Drop()}}})
		start := time.Now()
		var mu sync.Mutex
		came := make([]bool, messages)
		n, early, twice := 0, 0, 0
		var latest, sum time.Duration
		all := make(chan struct{})
		note := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			late := time.Since(time.UnixMilli(d.Annotation(annotation.Due).(int64)))
			i := int(d.Property("n").(int64))
			mu.Lock()
			defer mu.Unlock()
			if came[i] {
				twice++
				return nil
			}
			came[i] = true
			if late < 0 {
				early++
			}
			latest, sum = max(latest, late), sum+late
			if n++; n == messages {
				close(all)
			}
			return nil
		})
		w.consume("bound", note)
		w.consume("unbound", note)
		w.dispatch(schedule.DispatchConfig{})

		bound, unbound := newPublisher[int](w, address.Queue("bound")), newPublisher[int](w, address.Queue("unbound"))
		random := rand.New(rand.NewPCG(1, 2))
		number := func(n int, m *client.Message) { m.ApplicationProperties = map[string]any{"n": int64(n)} }
		at := func(int) schedule.When {
			return schedule.At(start.Add(time.Duration(random.Int64N(int64(day)))))
		}
		for i := 0; i < messages; {
			batch := make([]int, 0, 1000)
			for ; i < messages && len(batch) < cap(batch); i++ {
				batch = append(batch, i)
			}
			p := bound
			if i/1000%10 == 5 || i == messages {
				p = unbound // a tenth, or the last
			}
			_, err := p.PublishAll(t.Context(), batch, at, number)
			require.NoError(t, err)
		}
		<-all
		assert.Zero(t, early)
		assert.Zero(t, twice)
		assert.Less(t, latest, time.Second)
		assert.Less(t, time.Since(start), day+time.Second)
		assert.Zero(t, w.ready(lostQueue))
		fmt.Printf("REPORT %s: %d messages in a day: late by %v on average, %v at most\n", t.Name(), messages, (sum / time.Duration(messages)).Round(time.Millisecond), latest)
	})
	fmt.Printf("REPORT %s: it took %v\n", t.Name(), time.Since(began).Round(time.Millisecond))
}
