package broker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// A backlog raises an alarm, and all workers restart. The broker answers no request then, so the
// topology can't be checked. They start all the same, with each strategy, and handle the backlog. What
// fails is held until the alarm is over, and retried then.
func TestWorkersWithRetriesStartDuringAnAlarm(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		for _, alarm := range alarms {
			t.Run(alarm.name, func(t *testing.T) {
				s := suite.NewSite(t, s.Broker)
				const each, failing = 20, 5
				type worker struct {
					queue        string
					policy       retry.Policy
					first, again chan int
				}
				var workers []*worker
				admin, _ := s.Connect(t)
				for name, edit := range suite.Strategies(s) {
					w := &worker{queue: "work-" + name, first: make(chan int, 10*each), again: make(chan int, 10*each)}
					w.policy = retry.Policy{MaxRetries: 3, Backoff: retry.Delays(500 * time.Millisecond), Names: retry.Names{Prefix: name + "."}}
					edit(&w.policy)
					suite.ApplyRetry(t, admin, w.policy, declare.QuorumQueue{Name: w.queue})
					p := suite.Publisher[suite.Order](t, admin, address.Queue(w.queue))
					for i := range each {
						suite.Publish(t, p, suite.Order{ID: i})
					}
					workers = append(workers, w)
				}

				s.EvalOK(t, alarm.set)
				cleared := false
				clearAlarm := func() {
					if !cleared {
						cleared = true
						s.EvalOK(t, alarm.clear)
						suite.Poll(t, "the alarm is over", func() bool { return !alarmed(t, s) })
					}
				}
				defer clearAlarm()
				suite.Poll(t, "there is an alarm", func() bool { return alarmed(t, s) })

				conn, log := s.Connect(t)
				for _, w := range workers {
					suite.Consume(t, conn, w.queue, retry.With(w.policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
						if retry.Attempt(ctx) > 1 {
							w.again <- o.ID
							return nil
						}
						w.first <- o.ID
						if o.ID < failing {
							return errors.New("not yet")
						}
						return nil
					})), client.ConsumerConfig{Concurrency: 2, Prefetch: 3})
				}
				for _, w := range workers {
					for range each {
						suite.Await(t, w.first, w.queue+": an attempt")
					}
				}
				r, err := health.Check(health.Config{}, conn)
				require.NoError(t, err)
				assert.True(t, r.Ready, "%+v", r.Problems)
				require.Len(t, r.Problems, 1, "%+v", r.Problems)
				assert.Equal(t, "blocked", r.Problems[0].Kind)
				assert.Len(t, log.With("starts without the check"), len(workers))
				assert.True(t, alarmed(t, s), "all that was while the alarm lasted")
				for _, w := range workers {
					assert.Empty(t, w.again, w.queue)
				}

				clearAlarm()
				suite.Poll(t, "the checks are done", func() bool { return len(log.With("the check after the alarm found no fault")) == len(workers) })
				for _, w := range workers {
					for range failing {
						suite.Await(t, w.again, w.queue+": a retry")
					}
					suite.AssertEmpty(t, s, w.queue)
					suite.AssertEmpty(t, s, w.queue+".dead")
					assert.Empty(t, w.again, w.queue+": each once")
				}
				suite.Report(t, s, "%s alarm: %d strategies handled %d of %d messages before it was over", alarm.name, len(workers), each*len(workers), each*len(workers))
			})
		}
	})
}
