package topology_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// redeclare declares a delay queue again, with changes to its arguments and with its
// binding; nil removes an argument.
func redeclare(t *testing.T, s *suite.Site, conn *client.Conn, topology declare.Topology, queue string, changes map[string]any) {
	t.Helper()
	info, err := declare.Inspect(t.Context(), conn.Management(), queue)
	require.NoError(t, err)
	args := info.Arguments
	for k, v := range changes {
		if v == nil {
			delete(args, k)
		} else {
			args[k] = v
		}
	}
	unmake(t, s, "/queues/"+s.VHost+"/"+url.PathEscape(queue))
	s.DeclareQueue(t, queue, args)
	var bindings []declare.Binding
	for _, b := range topology.Bindings {
		if b.Queue == queue {
			bindings = append(bindings, b)
		}
	}
	suite.Apply(t, conn, declare.Topology{Bindings: bindings})
}

// delayFaults are delay queues that drop, keep or hasten what is sent to them.
var delayFaults = map[string]struct {
	changes map[string]any
	says    string
}{
	"without a dead-letter exchange": {map[string]any{"x-dead-letter-exchange": nil, "x-dead-letter-strategy": nil}, "so it drops messages that expire"},
	"without a ttl":                  {map[string]any{"x-message-ttl": nil}, `x-message-ttl is none, and should be "2000"`},
	"with another exchange":          {map[string]any{"x-dead-letter-exchange": "amq.fanout"}, `x-dead-letter-exchange is "amq.fanout", and should be `},
	"with another ttl":               {map[string]any{"x-message-ttl": 100}, `x-message-ttl is "100", and should be "2000"`},
	"with another routing key":       {map[string]any{"x-dead-letter-routing-key": "elsewhere"}, `x-dead-letter-routing-key is "elsewhere" (string), and should be none`},
	"with an expiry":                 {map[string]any{"x-expires": 60_000}, "it is deleted 60000 ms after its declaration"},
}

// A delay queue that would lose messages, keep them permanently, or return them at
// another time is refused when the consumer starts.
func TestGuardsRefuseADelayQueueThatLosesOrKeepsMessages(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
			policy := retry.Policy{Strategy: strategy, MaxRetries: 1, Backoff: retry.Delays(2 * time.Second)}
			queue := map[retry.Strategy]string{retry.StrategyRepublish: "delay_2s", retry.StrategyDeadLetter: "hold_2s"}[strategy]
			for name, fault := range delayFaults {
				t.Run(string(strategy)+" "+name, func(t *testing.T) {
					t.Parallel()
					s := suite.NewSite(t, s.Broker)
					conn, _ := s.Connect(t)
					topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
					require.NoError(t, err)
					suite.Apply(t, conn, topology)
					require.Empty(t, suite.Guarded(t, conn, "orders", policy))
					redeclare(t, s, conn, topology, queue, fault.changes)
					found := map[retry.Guard]*retry.GuardError{}
					for _, g := range suite.Guarded(t, conn, "orders", policy) {
						assert.Equal(t, queue, g.Queue)
						found[g.Guard] = g
					}
					require.Contains(t, found, retry.GuardDelayQueue, "%v", found)
					assert.Contains(t, found[retry.GuardDelayQueue].Problem, fault.says)
					assert.Contains(t, found[retry.GuardDelayQueue].Remedy, "apply retry.Topology")
				})
			}
		}
	})
}

// With the DeadLetter strategy a bounded dead-letter queue stops retries, too.
func TestGuardsRefuseABoundedDeadLetterQueue(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
			policy := retry.Policy{Strategy: strategy, MaxRetries: 1, Backoff: retry.Delays(2 * time.Second)}
			queue := string(strategy)
			topology, err := retry.Topology(policy, declare.QuorumQueue{Name: queue})
			require.NoError(t, err)
			suite.Apply(t, conn, topology)
			redeclare(t, s, conn, topology, queue+".dead", map[string]any{"x-max-length": 50})
			found := suite.Guarded(t, conn, queue, policy)
			if strategy == retry.StrategyRepublish {
				assert.Empty(t, found)
				continue
			}
			require.Len(t, found, 1)
			assert.Equal(t, retry.GuardMaxLength, found[0].Guard)
			assert.Equal(t, queue+".dead", found[0].Queue)
		}
	})
}

// On RabbitMQ 4.4 anyone who may publish can make a queue hang that drops its oldest message: see
// TestPublishersForLaterHangAQueueThatDropsItsHead. A starting consumer names such queues, and starts: they worked before
// the broker was upgraded.
func TestGuardsNameQueuesThatPublishersCanHang(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyAuto} {
			policy := retry.Policy{Strategy: strategy, MaxRetries: 1, Backoff: retry.Delays(2 * time.Second), Waive: []retry.Guard{retry.GuardMaxLength, retry.GuardAtMostOnce}}
			for _, overflow := range []string{"drop-head", "reject-publish", ""} {
				queue := string(strategy) + "." + overflow
				work := declare.QuorumQueue{Name: queue}
				if strategy == retry.StrategyAuto {
					work.MessageTTL = time.Second // so that it doesn't choose native
				}
				topology, err := retry.Topology(policy, work)
				require.NoError(t, err)
				suite.Apply(t, conn, topology)
				named := []string{queue, queue + ".dead"}
				for _, bounded := range named {
					limits := map[string]any{"x-max-length": 50, "x-overflow": overflow}
					if overflow == "" { // RabbitMQ drops the oldest then
						limits["x-overflow"] = nil
					}
					redeclare(t, s, conn, topology, bounded, limits)
				}
				log := suite.NewLogbook(t)
				start := client.Start{Queue: queue, Broker: conn.Broker(), Management: conn.Management(), Log: slog.New(log)}
				require.NoError(t, client.Prepare(t.Context(), retry.With(policy)(suite.Nop), start))
				found := log.With("anyone who may publish to a queue can make it hang")
				if !s.HoldsPublished() || overflow == "reject-publish" {
					assert.Empty(t, found, queue)
					continue
				}
				require.Len(t, found, 2, queue)
				for _, name := range named {
					assert.Len(t, log.With("anyone who may publish to a queue can make it hang", "at="+name+" ", "reject-publish"), 1, name)
				}
			}
		}
	})
}

// RabbitMQ 4.3.6 hangs over a queue that drops its oldest messages and holds more delayed
// ones than it may; see TestAQueueWithMoreDelayedThanItMayHoldHangs in integration/differ.
func TestGuardsRefuseAWorkQueueThatWouldHang(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if !s.Newer() {
			t.Skip("4.0 has no StrategyNative")
		}
		conn, _ := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyNative, MaxRetries: 1, Backoff: retry.Delays(2 * time.Second)}
		for _, limit := range []string{"x-max-length", "x-max-length-bytes"} {
			for _, overflow := range []string{"drop-head", "reject-publish"} {
				queue := limit + "." + overflow
				suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: queue + ".other"})
				s.DeclareQueue(t, queue, map[string]any{
					"x-queue-type": "quorum", "x-dead-letter-exchange": "dead_letter_exchange", "x-dead-letter-routing-key": queue, limit: 50, "x-overflow": overflow,
				})
				found := slices.ContainsFunc(suite.Guarded(t, conn, queue, policy), func(g *retry.GuardError) bool {
					return g.Guard == retry.GuardMaxLength && g.Queue == queue && strings.Contains(g.Problem, "hangs")
				})
				assert.Equal(t, overflow == "drop-head", found, queue)
			}
		}
	})
}

// A classic queue can't carry what DeadLetter needs: no waiver helps.
func TestDeadLetterIsRefusedOnAClassicQueue(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyDeadLetter, MaxRetries: 1, Backoff: retry.Delays(time.Second), Waive: retry.AllGuards()}
		suite.ApplyRetry(t, conn, policy)
		s.DeclareQueue(t, "orders", map[string]any{
			"x-queue-type": "classic", "x-dead-letter-exchange": "dead_letter_exchange", "x-dead-letter-routing-key": "orders",
		})
		found := suite.Guarded(t, conn, "orders", policy)
		require.Len(t, found, 1)
		assert.Equal(t, retry.GuardStrategy, found[0].Guard)
		assert.Equal(t, "orders", found[0].Queue)
		assert.Contains(t, found[0].Problem, "needs a quorum queue")
	})
}

// A worker with no more than it needs starts, and says what it couldn't check.
func TestWorkerWithTheLeastPermissionsStarts(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(200 * time.Millisecond)}
		suite.ApplyRetry(t, admin, policy, declare.QuorumQueue{Name: "orders"})
		conn, log := suite.ConnectTo(t, s.User(t, "^$", "^retry_exchange$", "^orders$"))
		attempts := make(chan int, 10)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
			attempts <- retry.Attempt(ctx)
			if retry.Attempt(ctx) == 1 {
				return errors.New("not yet")
			}
			return nil
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.Publisher[suite.Order](t, admin, address.Queue("orders")), suite.Order{ID: 1})
		assert.Equal(t, 1, suite.Await(t, attempts, "the first attempt"))
		assert.Equal(t, 2, suite.Await(t, attempts, "the second attempt"))

		logged := log.With("WARN hopback: topology check: skipped checks that the user has no permission for; grant the listed permissions to run them")
		if !s.Newer() {
			assert.Empty(t, logged, "4.0 answers everybody")
			return
		}
		require.Len(t, logged, 1)
		for _, text := range []string{
			"queue=orders", `["delay-queue" "at-most-once"] at queue "delay_200ms"`, `["delivery-limit"] at queue "orders.dead"`,
			`["delay-queue"] at binding "retry_exchange" to queue "delay_200ms"`,
			`configure, write, or read on queue "delay_200ms"`, `write on the destination and read on the source of binding "requeue_exchange" to queue "orders"`,
		} {
			assert.Contains(t, logged[0], text)
		}
		assert.NotContains(t, logged[0], `at queue "orders";`, "its own queue it may look at")
	})
}

// The permissions that the log names are enough, and each of them is needed: the
// facts behind it.
func TestWhoMayLookAtQueuesAndBindings(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		suite.ApplyRetry(t, admin, retry.Policy{}, declare.QuorumQueue{Name: "orders"})
		for _, c := range []struct {
			configure, write, read string
			queue, binding         bool
		}{
			{"^$", "^$", "^$", false, false},
			{"^orders$", "^$", "^$", true, false},
			{"^$", "^orders$", "^$", true, false},
			{"^$", "^$", "^orders$", true, false},
			{"^$", "^$", "^requeue_exchange$", false, false},
			{"^$", "^orders$", "^requeue_exchange$", true, true},
		} {
			conn, _ := suite.ConnectTo(t, s.User(t, c.configure, c.write, c.read))
			_, err := declare.Inspect(t.Context(), conn.Management(), "orders")
			assert.Equal(t, c.queue || !s.Newer(), err == nil, "%+v: %v", c, err)
			_, err = declare.Bindings(t.Context(), conn.Management(), declare.Binding{Source: "requeue_exchange", Queue: "orders", Key: "*.*.orders"})
			assert.Equal(t, c.binding || !s.Newer(), err == nil, "%+v: %v", c, err)
		}
	})
}

// A name that leaves no room for a routing key is fine where none is used.
func TestLongQueueNameIsFineWithoutRoutingKeys(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		queue := strings.Repeat("q", 250)
		for _, strategy := range []retry.Strategy{retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && !s.Newer() {
				continue
			}
			s := suite.NewSite(t, s.Broker)
			conn, _ := s.Connect(t)
			policy := retry.Policy{Strategy: strategy, MaxRetries: 1, Backoff: retry.Delays(200 * time.Millisecond)}
			suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: queue})
			attempts := make(chan int, 10)
			suite.Consume(t, conn, queue, retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
				attempts <- retry.Attempt(ctx)
				return errors.New("not yet")
			})), client.ConsumerConfig{})
			suite.Publish(t, suite.Publisher[suite.Order](t, conn, address.Queue(queue)), suite.Order{ID: 1})
			assert.Equal(t, 1, suite.Await(t, attempts, "the first attempt"))
			assert.Equal(t, 2, suite.Await(t, attempts, "the second attempt"))
			m := s.Peer(t).Take(queue+".dead", 1)[0]
			assert.Equal(t, retry.ReasonExhausted, retry.DeadLetterOf(m).Reason)
		}
		// With Republish it is refused at once, by the topology and by the consumer.
		_, err := retry.Topology(retry.Policy{}, declare.QuorumQueue{Name: queue})
		require.ErrorContains(t, err, "makes a routing key of")
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: queue}))
		err = conn.Consume(t.Context(), queue, retry.With(retry.Policy{Waive: retry.AllGuards()})(suite.Nop), client.ConsumerConfig{})
		require.ErrorContains(t, err, "makes a routing key of")
	})
}

// A delay queue that is declared otherwise under a running worker is noticed, what
// would be lost there is not sent there any more, and its repair is noticed, too.
func TestDelayQueueRedeclaredUnderARunningWorkerIsNoticed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter} {
			for name, loses := range map[string]bool{"without a dead-letter exchange": true, "with another ttl": false} {
				t.Run(string(strategy)+" "+name, func(t *testing.T) {
					t.Parallel()
					s := suite.NewSite(t, s.Broker)
					policy := retry.Policy{Strategy: strategy, MaxRetries: 1, Backoff: retry.Delays(2 * time.Second)}
					queue := map[retry.Strategy]string{retry.StrategyRepublish: "delay_2s", retry.StrategyDeadLetter: "hold_2s"}[strategy]
					conn, log := s.Connect(t)
					topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
					require.NoError(t, err)
					suite.Apply(t, conn, topology)
					var again atomic.Int64
					suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, _ suite.Order) error {
						if retry.Attempt(ctx) > 1 {
							again.Add(1)
						}
						return errors.New("not yet")
					})), client.ConsumerConfig{})
					suite.AwaitConsumers(t, conn, "orders", 1)
					redeclare(t, s, conn, topology, queue, delayFaults[name].changes)
					p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
					fails := func(what string, until func() bool) {
						t.Helper()
						suite.Poll(t, what, func() bool {
							suite.Publish(t, p, suite.Order{})
							time.Sleep(50 * time.Millisecond) // a steady load
							return until()
						})
					}
					fails("the change is noticed", func() bool {
						return len(log.With("ERROR hopback: topology check: found a fault while the consumer runs; fix it as the error says", queue, delayFaults[name].says)) > 0
					})
					if loses {
						peer := s.Peer(t)
						n := suite.Ready(t, conn, "orders.dead")
						fails("what can't wait is dead-lettered", func() bool { return suite.Ready(t, conn, "orders.dead") > n })
						m := peer.Take("orders.dead", 1)[0]
						assert.Equal(t, client.ReasonUnforwardable, retry.DeadLetterOf(m).Reason)
						assert.Contains(t, retry.DeadLetterOf(m).Error, `topology check "delay-queue" failed at queue "`+queue+`"`)
						assert.Contains(t, retry.DeadLetterOf(m).Error, "not yet")
					}
					redeclare(t, s, conn, topology, queue, map[string]any{"x-message-ttl": 2000, "x-dead-letter-strategy": "at-least-once",
						"x-dead-letter-exchange": map[retry.Strategy]string{retry.StrategyRepublish: "requeue_exchange", retry.StrategyDeadLetter: "return_exchange"}[strategy]})
					fails("the repair is noticed", func() bool { return len(log.With("topology check: the faults are fixed")) > 0 })
					before := again.Load()
					fails("retries go on", func() bool { return again.Load() > before })
				})
			}
		}
	})
}

// A retry by the DeadLetter strategy that no delay queue takes ends in the
// dead-letter queue. It can be told there from what was given up, the log says why,
// and retries go on when the topology is whole again.
func TestDeadLetterWithoutItsDelayQueueIsToldApart(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for name, remove := range map[string][]string{
			"queue":   {"/queues/%s/hold_2s"},
			"binding": {"/bindings/%s/e/dead_letter_exchange/q/hold_2s/", "/bindings/%s/e/dead_letter_exchange.sort/q/hold_2s/"},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := suite.NewSite(t, s.Broker)
				policy := retry.Policy{Strategy: retry.StrategyDeadLetter, MaxRetries: 2, Backoff: retry.Delays(2 * time.Second)}
				conn, log := s.Connect(t)
				topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
				require.NoError(t, err)
				suite.Apply(t, conn, topology)
				var again atomic.Int64
				suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
					if retry.Attempt(ctx) > 1 {
						again.Add(1)
						return nil
					}
					return errors.New("not yet")
				})), client.ConsumerConfig{})
				suite.AwaitConsumers(t, conn, "orders", 1)
				for _, path := range remove {
					path = strings.ReplaceAll(path, "%s", s.VHost)
					if name == "binding" {
						var bindings []struct {
							Key string `json:"properties_key"`
						}
						s.HTTP(t, http.MethodGet, strings.TrimSuffix(path, "/"), nil, &bindings)
						require.Len(t, bindings, 1)
						path += url.PathEscape(bindings[0].Key)
					}
					unmake(t, s, path)
				}
				p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
				suite.Publish(t, p, suite.Order{ID: 1})
				m := s.Peer(t).Take("orders.dead", 1)[0]
				death := retry.DeadLetterOf(m)
				assert.Equal(t, retry.ReasonNoDelayQueue, death.Reason)
				assert.Equal(t, "not yet", death.Error)
				assert.Equal(t, "orders", death.Queue)
				fails := func(what string, until func() bool) {
					t.Helper()
					suite.Poll(t, what, func() bool {
						suite.Publish(t, p, suite.Order{})
						time.Sleep(50 * time.Millisecond) // a steady load
						return until()
					})
				}
				fails("the log tells", func() bool {
					return len(log.With("ERROR hopback: topology check: found a fault while the consumer runs; fix it as the error says", `topology check "delay-queue"`, "hold_2s")) > 0
				})
				suite.Apply(t, conn, topology)
				fails("retries go on", func() bool { return again.Load() > 0 })
				// What is dead says whether a replay helps.
				for _, m := range s.Peer(t).Take("orders.dead", suite.Ready(t, conn, "orders.dead")) {
					assert.Contains(t, []client.Reason{retry.ReasonNoDelayQueue, client.ReasonUnforwardable}, retry.DeadLetterOf(m).Reason)
				}
			})
		}
	})
}

// A dead-letter queue that a policy has bounded, which AMQP doesn't show, takes no
// more when it is full. Then the work queue's dead-letter worker stands still, and
// with it the retries of the DeadLetter strategy. The consumer says so, Verify finds
// the policy, and nothing is lost. Republish, which doesn't need that worker for
// retries, continues.
func TestFullDeadLetterQueueIsTold(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		for _, strategy := range []retry.Strategy{retry.StrategyDeadLetter, retry.StrategyRepublish} {
			t.Run(string(strategy), func(t *testing.T) {
				t.Parallel()
				const bad = 400
				s := suite.NewSite(t, s.Broker)
				policy := retry.Policy{Strategy: strategy, MaxRetries: 2, Backoff: retry.Delays(time.Second)}
				conn, log := s.Connect(t)
				topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
				require.NoError(t, err)
				suite.Apply(t, conn, topology)
				s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/small", map[string]any{
					"pattern": `^orders\.dead$`, "apply-to": "queues", "definition": map[string]any{"max-length": 50, "overflow": "reject-publish"},
				}, nil)
				v, err := suite.Verified(t.Context(), check.Sources{HTTP: s.API(t)}, topology)
				require.NoError(t, err)
				require.Len(t, v.Findings, 1, "%s", v)
				assert.Equal(t, "max-length", v.Findings[0].Rule)
				assert.Equal(t, "orders.dead", v.Findings[0].Resource.Name)
				assert.Contains(t, v.Findings[0].Problem, `x-max-length by the policy "small"`)
				assert.Contains(t, v.Findings[0].Problem, `block all others in queue "orders", including messages that wait for a retry`)

				var handled, again, fresh atomic.Int64
				suite.Consume(t, conn, "orders", retry.With(policy)(client.JSON(func(ctx context.Context, o suite.Order) error {
					handled.Add(1)
					switch {
					case o.ID < bad:
						return retry.Permanent(errors.New("bad"))
					case retry.Attempt(ctx) > 1:
						again.Add(1)
						return nil
					case o.ID%2 == 0:
						fresh.Add(1)
						return nil
					}
					return errors.New("not yet")
				})), client.ConsumerConfig{Concurrency: 16})
				p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
				var all []suite.Order
				for i := range bad {
					all = append(all, suite.Order{ID: i})
				}
				err = p.PublishAll(t.Context(), all)
				require.NoError(t, err)
				suite.Poll(t, "all are given up", func() bool { return handled.Load() >= bad })
				stuck := func() bool {
					return len(log.With("ERROR hopback: dead letters don't arrive", "dead_letter_queue=orders.dead")) > 0
				}
				n := bad
				for deadline := time.Now().Add(3 * suite.Patience); !stuck() && time.Now().Before(deadline); {
					suite.Publish(t, p, suite.Order{ID: n})
					n++
					time.Sleep(50 * time.Millisecond) // a steady load
					if strategy == retry.StrategyRepublish && again.Load() > 20 {
						break
					}
				}
				if strategy == retry.StrategyDeadLetter {
					assert.True(t, stuck(), "it was told")
				} else {
					assert.Greater(t, again.Load(), int64(20), "retries go on")
				}
				suite.Poll(t, "healthy messages go on", func() bool { return fresh.Load() == int64((n-bad+1)/2) })
				suite.Report(t, s, "%v, dead-letter queue full: %d of %d retried messages handled again, %d of %d healthy ones", strategy, again.Load(), (n-bad)/2, fresh.Load(), (n-bad+1)/2)
				// Nothing is lost: what isn't handled is in a queue.
				suite.Poll(t, "every message is accounted for", func() bool {
					var queues []struct {
						Messages int `json:"messages"`
						DLX      int `json:"messages_dlx"`
					}
					s.HTTP(t, http.MethodGet, "/queues/"+s.VHost, nil, &queues)
					total := 0
					for _, q := range queues {
						total += q.Messages
					}
					return total+int(fresh.Load()+again.Load()) == n
				})
			})
		}
	})
}
