package integration

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
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// centralConsumer is how the documentation runs Central.
var centralConsumer = client.ConsumerConfig{Prefetch: 1000, NoQuarantine: true}

// central declares what Central needs, and runs it.
func central(t *testing.T, conn *client.Conn, p retry.Policy, cfg retry.CentralConfig, work ...declare.QuorumQueue) (stop func() error) {
	t.Helper()
	topology, err := retry.CentralTopology(p, cfg, work...)
	require.NoError(t, err)
	apply(t, conn, topology)
	return runCentral(t, conn, p, cfg, work...)
}

func runCentral(t *testing.T, conn *client.Conn, p retry.Policy, cfg retry.CentralConfig, work ...declare.QuorumQueue) (stop func() error) {
	t.Helper()
	for _, q := range work {
		cfg.Queues = append(slices.Clone(cfg.Queues), q.Name)
	}
	failed := cfg.FailedQueue
	if failed == "" {
		failed = p.Names.Prefix + "failed_queue"
	}
	return consume(t, conn, failed, retry.Central(p, cfg), centralConsumer)
}

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

// byHand is a worker without hopback, which settles by itself.
func (p *peer) byHand(queue string, settle func(r *amqp.Receiver, m *amqp.Message) error) {
	p.t.Helper()
	r := p.receiver(queue, 1000)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	p.t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for n := 1; ; n++ {
			m, err := r.Receive(ctx, nil)
			if err != nil {
				return
			}
			if err := settle(r, m); err != nil {
				return
			}
			if n%100 == 0 {
				if err := r.IssueCredit(100); err != nil {
					return
				}
			}
		}
	}()
}

// Workers that only reject are retried by the policy as those with the decorator are: as
// often, as late, and into the same lanes.
func TestCentralRetriesByThePolicyWhatWorkersReject(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		ctx := context.Background()
		policy := retry.Policy{
			MaxRetries: 3, Backoff: retry.Delays(100*time.Millisecond, 200*time.Millisecond, 400*time.Millisecond), Worker: "w",
			Rules: []retry.ErrorRule{
				{If: retry.On(errFatal), Do: retry.ActionDeadLetter},
				{If: retry.OnReason("fatal"), Do: retry.ActionDeadLetter},
			},
		}
		bodies := []string{"ok:0", "once:1", "twice:2", "thrice:3", "always:9", "declined:fatal"}
		conn, _ := s.connect(t)
		p := s.peer(t)
		applyRetry(t, conn, policy, declare.QuorumQueue{Name: "decorated"})
		forms := map[string]func(*attempts){
			"decorated": func(a *attempts) {
				consume(t, conn, "decorated", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					return a.task(string(d.Message().GetData()))
				})), client.ConsumerConfig{})
			},
			"rejected": func(a *attempts) {
				s.peer(t).byHand("rejected", func(r *amqp.Receiver, m *amqp.Message) error {
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
				s.peer(t).byHand("modified", func(r *amqp.Receiver, m *amqp.Message) error {
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
		central(t, conn, policy, retry.CentralConfig{}, declare.QuorumQueue{Name: "rejected"}, declare.QuorumQueue{Name: "modified"})
		seen := map[string]*attempts{}
		for form, run := range forms {
			seen[form] = newAttempts()
			run(seen[form])
		}
		for form := range forms {
			for _, b := range bodies {
				p.put(form, amqp.NewMessage([]byte(b)))
			}
		}
		lanes := map[string]map[string]retry.Death{}
		for form := range forms {
			lanes[form] = map[string]retry.Death{}
			for _, m := range p.take(form+".dead", 2) {
				lanes[form][string(m.GetData())] = retry.DeathOf(m)
			}
		}
		var table strings.Builder
		for _, b := range bodies {
			want := map[string]int{"ok:0": 1, "once:1": 2, "twice:2": 3, "thrice:3": 4, "always:9": 4, "declined:fatal": 1}[b]
			fmt.Fprintf(&table, "\n%-14s", b)
			for _, form := range []string{"decorated", "rejected", "modified"} {
				var times []time.Time
				poll(t, form+" "+b, func() bool { times = seen[form].of(b); return len(times) >= want })
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
		report(t, s, "attempts and delays:%s", &table)
		for _, q := range []string{"decorated", "rejected", "modified", "failed_queue", "failed_queue.dead", "parking_queue"} {
			poll(t, q+" is empty", func() bool { return ready(t, conn, q) == 0 })
		}
	})
}

// What no worker has rejected is told apart, and dead unless a rule retries it. A message of
// a queue that isn't configured is kept, too, and told.
func TestCentralTellsDeathsApart(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		expired := make(chan struct{}, 10)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond), Rules: []retry.ErrorRule{{If: func(err error) bool {
			if !retry.OnReason(retry.ReasonExpired)(err) || !retry.OnHeader("again", true)(err) {
				return false
			}
			expired <- struct{}{}
			return true
		}}}}
		conn, log := s.connect(t)
		other := declare.QuorumQueue{Name: "others", DeadLetter: declare.DeadLetterTarget{Exchange: "dead_letter_exchange", RoutingKey: "orders-2024"}}
		central(t, conn, policy, retry.CentralConfig{}, declare.QuorumQueue{Name: "orders", DeliveryLimit: 1}, declare.QuorumQueue{Name: "late"})
		apply(t, conn, declare.Topology{Queues: []declare.Queue{other}, Bindings: []declare.Binding{{Source: "given_up_exchange", Queue: "failed_queue", Key: "orders-2024"}}})
		p := s.peer(t)
		ctx := context.Background()

		p.put("orders", amqp.NewMessage([]byte("killer")))
		r := p.receiver("orders", 2)
		for range 2 {
			require.NoError(t, r.ModifyMessage(ctx, p.next(r), &amqp.ModifyMessageOptions{DeliveryFailed: true}))
		}
		dead := p.take("orders.dead", 1)[0]
		d := retry.DeathOf(dead)
		assert.Equal(t, [3]string{"delivery-limit", "orders", "the message reached the delivery limit of its queue"}, [3]string{string(d.Reason), d.Queue, d.Error})
		assert.NotZero(t, dead.Header.DeliveryCount, "it was moved")

		expiring := func(again bool) *amqp.Message {
			m := amqp.NewMessage([]byte("late"))
			m.Header = &amqp.MessageHeader{Durable: true, TTL: 50 * time.Millisecond}
			m.ApplicationProperties = map[string]any{"again": again}
			return m
		}
		p.put("late", expiring(false))
		d = retry.DeathOf(p.take("late.dead", 1)[0])
		assert.Equal(t, [2]string{"expired", "late"}, [2]string{string(d.Reason), d.Queue})
		p.put("late", expiring(true))
		await(t, expired, "the message's death")
		m := p.take("late", 1)[0]
		assert.Equal(t, 1, retry.Count(m), "the rule retries it, without its ttl")

		p.put("others", amqp.NewMessage([]byte("lost?")))
		r = p.receiver("others", 1)
		require.NoError(t, r.RejectMessage(ctx, p.next(r), nil))
		m = p.take("failed_queue.dead", 1)[0]
		d = retry.DeathOf(m)
		assert.Equal(t, [3]string{"unknown-queue", "others", "lost?"}, [3]string{string(d.Reason), d.Queue, string(m.GetData())})
		poll(t, "it is told", func() bool { return len(log.with("isn't configured", "others")) == 1 })
		assert.Zero(t, ready(t, conn, "parking_queue"))
	})
}

// Central moves messages, so a worker gets each one as it was published. On a topology of an
// earlier release, where the failed queue has another exit, it copies them until TakeOver has
// removed that. A message at its delivery limit is copied, since its delivery count would go along.
func TestCentralMovesWhereTheTopologyAllowsIt(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		ctx := context.Background()
		conn, log := s.connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(50 * time.Millisecond), Rules: []retry.ErrorRule{{If: retry.OnReason(retry.ReasonDeliveryLimit), Do: retry.ActionRetry}}}
		work := declare.QuorumQueue{Name: "orders", DeliveryLimit: 1}
		topology, err := retry.CentralTopology(policy, retry.CentralConfig{}, work)
		require.NoError(t, err)
		topology.Bindings = append(topology.Bindings, declare.Binding{Source: "given_up_exchange", Queue: "failed_queue.dead", Key: "failed_queue"})
		apply(t, conn, topology)
		p := s.peer(t)
		r := p.receiver("orders", 20)
		// again rejects a message, and returns it when it comes back.
		again := func(fail func(m *amqp.Message) error) *amqp.Message {
			m := amqp.NewMessage([]byte("m"))
			m.ApplicationProperties = map[string]any{"tenant": "acme"}
			p.put("orders", m)
			require.NoError(t, fail(p.next(r)))
			back := p.next(r)
			assert.Equal(t, "acme", back.ApplicationProperties["tenant"])
			require.NoError(t, r.AcceptMessage(ctx, back))
			return back
		}
		reject := func(m *amqp.Message) error { return r.RejectMessage(ctx, m, nil) }
		stop := runCentral(t, conn, policy, retry.CentralConfig{}, work)
		back := again(reject)
		assert.EqualValues(t, 1, back.ApplicationProperties[retry.CountProperty], "a copy")
		require.NoError(t, stop())
		assert.NotEmpty(t, log.with("Central copies messages", "take-over"))

		require.NoError(t, retry.TakeOver(t.Context(), conn.Management(), policy, retry.CentralConfig{Queues: []string{"orders"}}))
		runCentral(t, conn, policy, retry.CentralConfig{}, work)
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
					m = p.next(r)
				}
			}
			return nil
		})
		assert.EqualValues(t, 1, back.ApplicationProperties[retry.CountProperty], "a copy")
		assert.Zero(t, back.Header.DeliveryCount)
		assert.Zero(t, ready(t, conn, "failed_queue.dead")+ready(t, conn, "parking_queue"))
	})
}
