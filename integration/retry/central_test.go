package retry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// attempts has the times of each message's attempts, by body.
type attempts struct {
	mu    sync.Mutex
	times map[string][]time.Time
}

func newAttempts() *attempts { return &attempts{times: map[string][]time.Time{}} }

// next notes an attempt, and returns its number.
func (a *attempts) next(body string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times[body] = append(a.times[body], time.Now())
	return len(a.times[body])
}

func (a *attempts) of(body string) []time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.times[body])
}

// errNotYet is why a message is not handled yet.
var errNotYet = errors.New("not yet")

// errFatal is why one never will be.
var errFatal = errors.New("declined")

// task is what a worker does with a message: "name:n" fails n times, "name:fatal" for good.
func (a *attempts) task(body string) error {
	attempt := a.next(body)
	_, what, _ := strings.Cut(body, ":")
	if what == "fatal" {
		return errFatal
	}
	var fails int
	_, _ = fmt.Sscanf(what, "%d", &fails)
	if attempt <= fails {
		return errNotYet
	}
	return nil
}

// Workers that only reject are retried by the policy as those with the decorator are: as
// often, as late, and into the same lanes.
func TestCentralRetriesByThePolicyWhatWorkersReject(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		ctx := context.Background()
		policy := retry.Policy{
			MaxRetries: 3, Backoff: retry.Delays(100*time.Millisecond, 200*time.Millisecond, 400*time.Millisecond), Worker: "w",
			Rules: []retry.ErrorRule{
				{If: retry.On(errFatal), Do: retry.ActionDeadLetter},
				{If: retry.OnReason("fatal"), Do: retry.ActionDeadLetter},
			},
		}
		bodies := []string{"ok:0", "once:1", "twice:2", "three times:3", "always:9", "declined:fatal"}
		conn, _ := s.Connect(t)
		p := s.Peer(t)
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "decorated"})
		forms := map[string]func(*attempts){
			"decorated": func(a *attempts) {
				suite.Consume(t, conn, "decorated", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					return a.task(string(d.Message().GetData()))
				})), client.ConsumerConfig{})
			},
			"rejected": func(a *attempts) {
				s.Peer(t).ByHand("rejected", func(r *amqp.Receiver, m *amqp.Message) error {
					switch a.task(string(m.GetData())) {
					case nil:
						return r.AcceptMessage(ctx, m)
					case errFatal: // all that it can say about it is nothing
						return r.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{UndeliverableHere: true, Annotations: amqp.Annotations{"x-reason": "fatal"}})
					}
					return r.RejectMessage(ctx, m, nil)
				})
			},
			"modified": func(a *attempts) {
				s.Peer(t).ByHand("modified", func(r *amqp.Receiver, m *amqp.Message) error {
					switch err := a.task(string(m.GetData())); err {
					case nil:
						return r.AcceptMessage(ctx, m)
					case errFatal:
						return r.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{UndeliverableHere: true, Annotations: amqp.Annotations{"x-reason": "fatal", "x-error": err.Error()}})
					default:
						return r.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{UndeliverableHere: true, DeliveryFailed: true, Annotations: amqp.Annotations{"x-error": err.Error(), "x-error-type": "*errors.errorString"}})
					}
				})
			},
		}
		suite.Central(t, conn, policy, retry.CentralConfig{}, declare.QuorumQueue{Name: "rejected"}, declare.QuorumQueue{Name: "modified"})
		seen := map[string]*attempts{}
		for form, run := range forms {
			seen[form] = newAttempts()
			run(seen[form])
		}
		for form := range forms {
			for _, b := range bodies {
				p.Put(form, amqp.NewMessage([]byte(b)))
			}
		}
		lanes := map[string]map[string]retry.DeadLetter{}
		for form := range forms {
			lanes[form] = map[string]retry.DeadLetter{}
			for _, m := range p.Take(form+".dead", 2) {
				lanes[form][string(m.GetData())] = retry.DeadLetterOf(m)
			}
		}
		var table strings.Builder
		for _, b := range bodies {
			want := map[string]int{"ok:0": 1, "once:1": 2, "twice:2": 3, "three times:3": 4, "always:9": 4, "declined:fatal": 1}[b]
			fmt.Fprintf(&table, "\n%-14s", b)
			for _, form := range []string{"decorated", "rejected", "modified"} {
				var times []time.Time
				suite.Poll(t, form+" "+b, func() bool { times = seen[form].of(b); return len(times) >= want })
				assert.Len(t, times, want, "%s %s", form, b)
				fmt.Fprintf(&table, " | %-9s %d", form, len(times))
				for i := 1; i < len(times); i++ {
					asked, had := []time.Duration{100, 200, 400}[i-1]*time.Millisecond, times[i].Sub(times[i-1])
					assert.GreaterOrEqual(t, had, asked-2*time.Millisecond, "%s %s", form, b)
					fmt.Fprintf(&table, " %v", had.Round(time.Millisecond))
				}
				lane := lanes[form][b]
				switch b {
				case "always:9":
					assert.Equal(t, retry.ReasonExhausted, lane.Reason, form)
					assert.Equal(t, 3, lane.Retries, form)
				case "declined:fatal":
					assert.Equal(t, retry.ReasonPermanent, lane.Reason, form)
					assert.Zero(t, lane.Retries, form)
				default:
					continue
				}
				fmt.Fprintf(&table, " %s", lane.Reason)
				assert.Equal(t, form, lane.Queue)
				assert.Equal(t, "w", lane.Worker)
				assert.Empty(t, lane.Exchange, "the default exchange")
				assert.Equal(t, form, lane.RoutingKey)
				assert.False(t, lane.FirstFailure.IsZero())
				assert.False(t, lane.LastFailure.IsZero())
				if form != "rejected" {
					assert.Equal(t, map[string]string{"always:9": errNotYet.Error(), "declined:fatal": errFatal.Error()}[b], lane.Error, form)
				}
			}
		}
		suite.Report(t, s, "attempts and delays:%s", &table)
		for _, q := range []string{"decorated", "rejected", "modified", "failed_queue", "failed_queue.dead", "parking_queue"} {
			suite.Poll(t, q+" is empty", func() bool { return suite.Ready(t, conn, q) == 0 })
		}
	})
}

// A message that no worker has rejected gets another reason, and is dead-lettered unless a rule
// retries it. A message of a queue that isn't configured is kept, too, and reported.
func TestCentralTellsDeathsApart(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		expired := make(chan struct{}, 10)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond), Rules: []retry.ErrorRule{{If: func(err error) bool {
			if !retry.OnReason(retry.ReasonExpired)(err) || !retry.OnHeader("again", true)(err) {
				return false
			}
			expired <- struct{}{}
			return true
		}}}}
		conn, log := s.Connect(t)
		other := declare.QuorumQueue{Name: "others", DeadLetter: declare.DeadLetterTarget{Exchange: "dead_letter_exchange", RoutingKey: "orders-2024"}}
		suite.Central(t, conn, policy, retry.CentralConfig{}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 1}, declare.QuorumQueue{Name: "late"})
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{other}, Bindings: []declare.Binding{{Source: "given_up_exchange", Queue: "failed_queue", Key: "orders-2024"}}})
		p := s.Peer(t)
		ctx := context.Background()

		p.Put("orders", amqp.NewMessage([]byte("killer")))
		r := p.Receiver("orders", 2)
		for range 2 {
			require.NoError(t, r.ModifyMessage(ctx, p.Next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		dead := p.Take("orders.dead", 1)[0]
		d := retry.DeadLetterOf(dead)
		assert.Equal(t, [3]string{"delivery-limit", "orders", "the message reached the delivery limit of its queue"}, [3]string{string(d.Reason), d.Queue, d.Error})
		assert.NotZero(t, dead.Header.DeliveryCount, "it was moved")

		expiring := func(again bool) *amqp.Message {
			m := amqp.NewMessage([]byte("late"))
			m.Header = &amqp.MessageHeader{Durable: true, TTL: 50 * time.Millisecond}
			m.ApplicationProperties = map[string]any{"again": again}
			return m
		}
		p.Put("late", expiring(false))
		d = retry.DeadLetterOf(p.Take("late.dead", 1)[0])
		assert.Equal(t, [2]string{"expired", "late"}, [2]string{string(d.Reason), d.Queue})
		p.Put("late", expiring(true))
		suite.Await(t, expired, "the message's death")
		m := p.Take("late", 1)[0]
		assert.Equal(t, 1, retry.Count(m), "the rule retries it, without its ttl")

		p.Put("others", amqp.NewMessage([]byte("lost?")))
		r = p.Receiver("others", 1)
		require.NoError(t, r.RejectMessage(ctx, p.Next(r), nil))
		m = p.Take("failed_queue.dead", 1)[0]
		d = retry.DeadLetterOf(m)
		assert.Equal(t, [3]string{"unknown-queue", "others", "lost?"}, [3]string{string(d.Reason), d.Queue, string(m.GetData())})
		suite.Poll(t, "it is reported", func() bool { return len(log.With("isn't in CentralConfig.Queues", "others")) == 1 })
		assert.Zero(t, suite.Ready(t, conn, "parking_queue"))
	})
}

// Central moves messages, so a worker gets each one as published. On a topology of an
// earlier release, where the failed queue has another exit, it copies them until TakeOver has
// removed that. A message at its delivery limit is copied, since its delivery count would go along.
func TestCentralMovesWhereTheTopologyAllowsIt(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		ctx := context.Background()
		conn, log := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond), Rules: []retry.ErrorRule{{If: retry.OnReason(retry.ReasonDeliveryLimit), Do: retry.ActionRetry}}}
		work := declare.QuorumQueue{Name: "orders", DeliveryLimit: 1}
		topology, err := retry.CentralTopology(policy, retry.CentralConfig{}, work)
		require.NoError(t, err)
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "given_up_exchange", Queue: "failed_queue.dead", Key: "failed_queue"})
		suite.Apply(t, conn, topology)
		p := s.Peer(t)
		r := p.Receiver("orders", 20)
		// again rejects a message, and returns it when it comes back.
		again := func(fail func(m *amqp.Message) error) *amqp.Message {
			m := amqp.NewMessage([]byte("m"))
			m.ApplicationProperties = map[string]any{"tenant": "acme"}
			p.Put("orders", m)
			require.NoError(t, fail(p.Next(r)))
			back := p.Next(r)
			assert.Equal(t, "acme", back.ApplicationProperties["tenant"])
			require.NoError(t, r.AcceptMessage(ctx, back))
			return back
		}
		reject := func(m *amqp.Message) error { return r.RejectMessage(ctx, m, nil) }
		stop := suite.RunCentral(t, conn, policy, retry.CentralConfig{}, work)
		back := again(reject)
		assert.EqualValues(t, 1, back.ApplicationProperties[retry.CountProperty], "a copy")
		require.NoError(t, stop())
		assert.NotEmpty(t, log.With("Central copies the messages", "take-over"))

		require.NoError(t, retry.TakeOver(t.Context(), conn.Management(), policy, retry.CentralConfig{Queues: []string{"orders"}}))
		// A queue of an application that has nothing to do with it, and faults.
		s.DeclareQueue(t, "others", map[string]any{"x-queue-type": "classic"})
		suite.RunCentral(t, conn, policy, retry.CentralConfig{HTTP: s.API(t)}, work)
		back = again(reject)
		assert.NotContains(t, back.ApplicationProperties, retry.CountProperty, "moved")
		assert.EqualValues(t, 1, back.Annotations[annotation.Retries])
		assert.Len(t, back.Annotations["x-opt-deaths"], 3, "the broker's record grows")
		back = again(func(m *amqp.Message) error {
			for range 2 {
				if err := r.ModifyMessage(ctx, m, &amqp.ModifyMessageOptions{DeliveryFailed: true}); err != nil {
					return err
				}
				if m.Header.DeliveryCount == 0 {
					m = p.Next(r)
				}
			}
			return nil
		})
		assert.EqualValues(t, 1, back.ApplicationProperties[retry.CountProperty], "a copy")
		assert.Zero(t, back.Header.DeliveryCount)
		assert.Zero(t, suite.Ready(t, conn, "failed_queue.dead")+suite.Ready(t, conn, "parking_queue"))
	})
}
