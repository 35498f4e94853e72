package retry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// waits are all ways to wait.
var waits = map[string]func(*Policy){
	"republish":   func(p *Policy) { p.Strategy = StrategyRepublish },
	"dead-letter": func(p *Policy) { p.Strategy = StrategyDeadLetter },
	"native":      func(p *Policy) { p.Strategy = StrategyNative },
	"auto":        func(p *Policy) { p.Strategy = StrategyAuto },
	"ladder":      func(p *Policy) { p.AnyDelay = &Ladder{Unit: 100 * time.Millisecond, Levels: 10} },
}

// randomQueues are names of queues that are hard on topic bindings.
func randomQueues(r *rand.Rand) []string {
	var names []string
	for len(names) < 5 {
		words := make([]string, 1+r.IntN(4))
		for i := range words {
			words[i] = pick(r, "", "a", "b", "a*", "#b", "orders", "été", "日本", "delay", "1000", "0", "1", " ", "/", "%2F", "x+y", "retry_exchange")
		}
		name := strings.Join(words, ".")
		if strings.Trim(name, ".") != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

func workQueues(names []string) []declare.QuorumQueue {
	var work []declare.QuorumQueue
	for _, name := range names {
		work = append(work, declare.QuorumQueue{Name: name})
	}
	return work
}

// worker handles messages of a world by the decorator of a policy, which has been
// prepared as on a broker where the strategy can be used.
func worker(p Policy, pl *plan, queues []string, handle client.HandlerFunc) client.Handler {
	d := With(p)(handle).(*decorator)
	for _, q := range queues {
		d.states.put(pl.stateFor(q, pl.strategy))
	}
	return d
}

var errAgain = errors.New("again")

// A message that fails comes back to the queue that it failed in, and to no other,
// until it is given up; then it is in the dead-letter queue of that queue.
func TestRetriedMessageComesBackToItsOwnQueueOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testComesBack)
}

func testComesBack(t *testing.T) {
	r := random(t)
	for name, set := range waits {
		for range 25 {
			p := Policy{MaxRetries: 3, Backoff: Delays(100*time.Millisecond, time.Second, 2500*time.Millisecond)}
			set(&p)
			queues := randomQueues(r)
			topology, err := Topology(p, workQueues(queues)...)
			require.NoError(t, err, "%s %q", name, queues)
			w := newWorld(t, topology)
			pl := planOf(t, p)
			if pl.strategy == StrategyAuto {
				pl.strategy = pick(r, StrategyRepublish, StrategyDeadLetter, StrategyNative)
			}
			h := worker(p, pl, queues, func(context.Context, *client.Delivery) error { return errAgain })
			for i, q := range queues {
				m := &held{home: q, msg: client.NewMessage(fmt.Append(nil, i))}
				require.True(t, w.publish("", q, m))
			}
			for attempt := range 4 {
				for _, q := range queues {
					ms := w.take(q)
					require.Len(t, ms, 1, "%s: attempt %d of %q: %v", name, attempt, q, w.where())
					m := ms[0]
					require.Equal(t, q, m.home)
					require.Equal(t, attempt, Count(m.msg))
					err := h.Handle(t.Context(), client.NewDelivery(q, m.msg))
					require.True(t, w.carryOut(q, m, err), "%s: %v", name, err)
				}
				w.settle()
			}
			for _, q := range queues {
				dead := w.take(q + ".dead")
				require.Len(t, dead, 1, "%s: %q", name, q)
				assert.Equal(t, q, dead[0].home)
				death := DeadLetterOf(dead[0].msg)
				assert.Equal(t, ReasonExhausted, death.Reason)
				assert.Equal(t, q, death.Queue)
				assert.Equal(t, 3, death.Retries)
				if pl.strategy != StrategyNative {
					assert.GreaterOrEqual(t, dead[0].waited, 3600*time.Millisecond)
				}
			}
			w.empty()
		}
	}
}

// If any one thing is missing, no message vanishes: it comes back, is in the
// dead-letter queue, is parked, or stays where it is.
func TestNoMessageVanishesIfAnythingIsMissing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, testVanishes)
}

func testVanishes(t *testing.T) {
	queues := []string{"orders", "a.b", "b"}
	for name, set := range waits {
		p := Policy{MaxRetries: 2, Backoff: Delays(100*time.Millisecond, time.Second)}
		set(&p)
		whole, err := Topology(p, workQueues(queues)...)
		require.NoError(t, err)
		strategies := []Strategy{p.Strategy}
		if p.Strategy == StrategyAuto {
			strategies = []Strategy{StrategyRepublish, StrategyDeadLetter, StrategyNative}
		}
		for _, strategy := range strategies {
			for _, missing := range things(whole) {
				what := fmt.Sprintf("%s by %v without %v", name, strategy, missing)
				w := newWorld(t, whole)
				pl := planOf(t, p)
				pl.strategy = strategy
				h := worker(p, pl, queues, func(context.Context, *client.Delivery) error { return errAgain })
				for _, q := range queues {
					require.True(t, w.publish("", q, &held{home: q, msg: client.NewMessage([]byte(q))}))
				}
				w.remove(missing)
				total := w.total()
				for range 4 {
					for _, q := range queues {
						for _, m := range w.take(q) {
							if m.stuck > 0 {
								w.contents[q] = append(w.contents[q], m)
								continue
							}
							require.Equal(t, q, m.home, what)
							if !w.carryOut(q, m, h.Handle(t.Context(), client.NewDelivery(q, m.msg))) {
								w.contents[q] = append(w.contents[q], m)
							}
						}
					}
					w.settle()
					if b, ok := missing.(declare.Binding); ok && b.Source == pl.names.sortExchange() {
						// The same binding of the dead-letter exchange is there for older workers, so
						// each retry leaves a copy among the dead letters.
						require.GreaterOrEqual(t, w.total(), total, "%s: %v", what, w.where())
						continue
					}
					require.Equal(t, total, w.total(), "%s: %v", what, w.where())
				}
				for q, ms := range w.contents {
					for _, m := range ms {
						ok := q == m.home || q == m.home+".dead" || q == "parking_queue" || m.stuck > 0
						require.True(t, ok, "%s: a message of %q is in %q, by %q", what, m.home, q, m.path)
					}
				}
			}
		}
	}
}

func TestMessageWhoseWayBackIsGoneIsParked(t *testing.T) {
	t.Parallel()
	for name, set := range waits {
		p := Policy{MaxRetries: 2, Backoff: Delays(100 * time.Millisecond)}
		set(&p)
		if p.Strategy == StrategyNative {
			continue // it doesn't leave the queue
		}
		topology, err := Topology(p, workQueues([]string{"orders", "mails"})...)
		require.NoError(t, err)
		pl := planOf(t, p)
		if pl.strategy == StrategyAuto {
			pl.strategy = StrategyDeadLetter
		}
		for _, whole := range []bool{false, true} {
			w := newWorld(t, topology)
			h := worker(p, pl, []string{"orders"}, func(context.Context, *client.Delivery) error { return errAgain })
			m := &held{home: "orders", msg: client.NewMessage(nil)}
			require.True(t, w.carryOut("orders", m, h.Handle(t.Context(), client.NewDelivery("orders", m.msg))))
			if whole {
				delete(w.queues, "orders")
			}
			w.bindings = slices.DeleteFunc(w.bindings, func(b declare.Binding) bool { return b.Queue == "orders" })
			w.settle()
			assert.Equal(t, []*held{m}, w.take("parking_queue"), name)
			assert.Equal(t, ReasonUnroutable, DeadLetterOf(m.msg).Reason, name)
			assert.Equal(t, "orders", DeadLetterOf(m.msg).Queue, name)
			w.empty()
		}
	}
}

// things are what a topology has that could be missing.
func things(t declare.Topology) []any {
	var all []any
	for _, x := range t.Exchanges {
		all = append(all, x)
	}
	for _, q := range t.Queues {
		all = append(all, q)
	}
	for _, b := range t.Bindings {
		all = append(all, b)
	}
	return all
}

// remove takes out a thing, and what is bound to it. Messages in a queue go with it.
func (w *world) remove(thing any) {
	keep := func(declare.Binding) bool { return true }
	switch x := thing.(type) {
	case declare.Exchange:
		delete(w.exchanges, x.Name)
		keep = func(b declare.Binding) bool { return b.Source != x.Name && b.Exchange != x.Name }
	case declare.QuorumQueue:
		delete(w.queues, x.Name)
		delete(w.contents, x.Name)
		keep = func(b declare.Binding) bool { return b.Queue != x.Name }
	case declare.Binding:
		keep = func(b declare.Binding) bool { return fmt.Sprint(b) != fmt.Sprint(x) }
	}
	w.bindings = slices.DeleteFunc(w.bindings, func(b declare.Binding) bool { return !keep(b) })
}

func (w *world) total() int {
	n := 0
	for _, ms := range w.contents {
		n += len(ms)
	}
	return n
}

// Everything that holds or passes on a message does so at least once, and anything that
// brings one back knows where to leave it otherwise.
func TestTopologyHandsOnAtLeastOnceEverywhere(t *testing.T) {
	t.Parallel()
	for name, set := range waits {
		var p Policy
		set(&p)
		p.Backoff, p.ReplayByMove = Delays(time.Second), len(name)%2 == 0
		topology, err := Topology(p, workQueues([]string{"orders"})...)
		require.NoError(t, err)
		behind := map[string]bool{}
		for _, q := range topology.Queues {
			q := q.(declare.QuorumQueue)
			assert.True(t, q.DeadLetter.IsDrop() || !q.DeadLetter.AtMostOnce, "%s: %s", name, q.Name)
			assert.Zero(t, q.MaxLength+q.MaxLengthBytes, "%s: %s", name, q.Name)
			behind[q.DeadLetter.Exchange] = true
			if strings.HasSuffix(q.Name, ".dead") || q.Name == "parking_queue" {
				assert.Equal(t, declare.Unlimited, q.DeliveryLimit, "%s: %s", name, q.Name)
			}
		}
		for _, x := range topology.Exchanges {
			if behind[x.Name] && x.Type != declare.ExchangeFanout && !strings.HasPrefix(x.Name, "retry_ladder_") {
				assert.NotEmpty(t, x.AlternateExchange, "%s: %s", name, x.Name)
			}
		}
	}
}

// Teams apply topologies of different policies to the same virtual host: what they
// share must be declared in the same way.
func TestTopologiesOfDifferentPoliciesGoTogether(t *testing.T) {
	t.Parallel()
	r := random(t)
	for range 25 {
		var all []declare.Topology
		for i := range 4 {
			p := randomPolicy(r)
			if p.AnyDelay != nil {
				p.AnyDelay = &Ladder{}
			}
			topology, err := Topology(p, declare.QuorumQueue{Name: fmt.Sprint("team", i)})
			require.NoError(t, err)
			all = append(all, topology)
		}
		_, err := declare.Merge(all...)
		require.NoError(t, err)
	}
}

func TestWorkQueueWithItsOwnDeadLetteringKeepsIt(t *testing.T) {
	t.Parallel()
	own := declare.QuorumQueue{Name: "orders", DeadLetter: declare.DeadLetterTarget{Exchange: "theirs"}}
	for name, set := range waits {
		var p Policy
		set(&p)
		p.Backoff = Delays(time.Second)
		topology, err := Topology(p, own)
		if name == "dead-letter" {
			var bad *argument.Error
			require.ErrorAs(t, err, &bad)
			continue
		}
		require.NoError(t, err, name)
		for _, q := range topology.Queues {
			q := q.(declare.QuorumQueue)
			assert.NotEqual(t, "orders.dead", q.Name, name)
			if q.Name == "orders" {
				assert.Equal(t, own.DeadLetter, q.DeadLetter, name)
			}
		}
	}
}

func TestTopologyRefusesWorkQueuesThatCollide(t *testing.T) {
	t.Parallel()
	for name, queues := range map[string][]string{
		"a dead-letter queue that is a work queue": {"orders", "orders.dead"},
		"a delay queue":               {"delay_10s"},
		"the parking queue":           {"parking_queue"},
		"a wildcard":                  {"orders.*"},
		"another wildcard":            {"#"},
		"an empty name":               {""},
		"a broker's own name":         {"amq.orders"},
		"a name too long for the key": {strings.Repeat("x", 250)},
	} {
		_, err := Topology(Policy{}, workQueues(queues)...)
		assert.ErrorAs(t, err, new(*argument.Error), name)
	}
}

func mustTopology(t testing.TB, p Policy, queues ...string) declare.Topology {
	t.Helper()
	topology, err := Topology(p, workQueues(queues)...)
	require.NoError(t, err)
	return topology
}
