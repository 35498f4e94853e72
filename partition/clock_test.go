package partition

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/inside"
)

// One worker writes when a delay began, and another compares. However long the way to the broker takes
// each of them, the delay isn't cut short.
func TestADelayIsNotCutShortByAnotherWorkersClock(t *testing.T) {
	const delay = time.Minute
	for name, way := range map[string][2]time.Duration{
		"the same":          {0, 0},
		"the first is slow": {40 * time.Millisecond, 0},
		"the next is slow":  {0, 40 * time.Millisecond},
		"both are slow":     {40 * time.Millisecond, 30 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var clocks [2]*clock
				for i := range clocks {
					clocks[i] = newClock(time.Now)
					go clocks[i].run(ctx, func(context.Context) (brokerclock.Reading, error) {
						r := brokerclock.Reading{Own: time.Now(), Late: way[i]}
						time.Sleep(way[i])
						r.Broker = time.Now().Add(time.Hour)
						return r, nil
					})
					<-clocks[i].ready
				}
				began := time.Now()
				last := clocks[0].now()
				time.Sleep(time.Second)
				waits := left(inside.Past{Last: last.Truncate(time.Millisecond), Delay: delay}, clocks[1].passed())
				time.Sleep(waits)
				assert.GreaterOrEqual(t, time.Since(began), delay)
				assert.Less(t, time.Since(began), delay+100*time.Millisecond)
			})
		})
	}
}

// While the connection is lost, nothing is handled by a worker's own clock; and a broker that was too busy to answer is
// asked again soon.
func TestTheBrokerIsAskedForItsTimeUntilItAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		began := time.Now()
		c := newClock(time.Now)
		go c.run(ctx, func(context.Context) (brokerclock.Reading, error) {
			switch r := (brokerclock.Reading{Own: time.Now(), Broker: time.Now().Add(time.Hour)}); {
			case time.Since(began) < time.Minute:
				return r, client.ErrConnectionLost
			case time.Since(began) < 2*time.Minute:
				return r, context.DeadlineExceeded
			default:
				return r, nil
			}
		})
		<-c.ready
		assert.Equal(t, time.Minute, time.Since(began))
		assert.Equal(t, time.Now(), c.now())
		time.Sleep(time.Minute + time.Second)
		assert.WithinDuration(t, time.Now().Add(time.Hour), c.now(), 0)
	})
}
