package broker_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// suspend stops the process of a quorum queue of this broker, which answers nothing
// until resume is called: as a queue without a leader does.
func suspend(t *testing.T, s *suite.Site, queue string) (resume func()) {
	t.Helper()
	eval := func(do string) {
		s.EvalOK(t, fmt.Sprintf(
			`{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"%s">>, queue, <<"%s">>)), {Name, _} = amqqueue:get_pid(Q), sys:%s(Name).`, s.VHost, queue, do))
	}
	eval("suspend")
	resume = sync.OnceFunc(func() { eval("resume") })
	return resume
}

// A queue that doesn't answer doesn't block the answers of another queue: not when it is found
// out whether another session would help either, which on a broker's session waits
// for that queue.
func TestAQueueThatDoesNotAnswerBlocksNoOtherAnswer(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		var mu sync.Mutex
		var lost []client.Event
		conn, log := s.Connect(t, func(c *client.Config) {
			c.OnEvent = func(e client.Event) {
				mu.Lock()
				defer mu.Unlock()
				if e.Kind == client.EventLost {
					lost = append(lost, e)
				}
			}
		})
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "silent"}))
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "healthy"}))
		p := suite.Publisher[suite.Order](t, conn, address.Address{})
		suite.Publish(t, p, suite.Order{}, client.PublishTo(address.Queue("silent")))
		suite.Publish(t, p, suite.Order{}, client.PublishTo(address.Queue("healthy")))

		resume := suspend(t, s, "silent")
		defer resume()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		const stuck = 30
		answers := make(chan error, stuck)
		for i := range stuck {
			go func() { answers <- p.Publish(ctx, suite.Order{ID: i}, client.PublishTo(address.Queue("silent"))) }()
		}
		var slowest time.Duration
		sent := 0
		began := time.Now()
		for ; len(log.With("on another session either; check its queue")) == 0; sent++ { // 30 s, and as long for the probe
			require.Less(t, time.Since(began), 100*time.Second, "nothing is reported")
			at := time.Now()
			suite.Publish(t, p, suite.Order{ID: sent}, client.PublishTo(address.Queue("healthy")))
			slowest = max(slowest, time.Since(at))
			time.Sleep(10 * time.Millisecond)
		}
		assert.Less(t, slowest, suite.LateLimit, "a queue that does not answer is waited for 30 s")
		assert.Empty(t, answers)
		// Nor is the end of the probe's link and session answered, and that is no fault of
		// the connection: it lasts longer than any other answer may take.
		for began := time.Now(); time.Since(began) < 20*time.Second; sent++ {
			suite.Publish(t, p, suite.Order{ID: sent}, client.PublishTo(address.Queue("healthy")))
			time.Sleep(10 * time.Millisecond)
		}
		suite.Report(t, s, "%d messages to a healthy queue, next to %d to one that doesn't answer for %v: the slowest took %v", sent, stuck, time.Since(began).Round(time.Second), slowest)

		resume()
		for range stuck {
			require.NoError(t, suite.Await(t, answers, "an answer"))
		}
		mu.Lock()
		defer mu.Unlock()
		assert.Empty(t, lost, "no session and no connection was given up")
	})
}
