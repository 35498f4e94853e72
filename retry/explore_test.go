package retry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/internal/annotation"
)

// retried is a small world: workers with the same policy handle the messages of one queue. Each attempt
// succeeds or fails, each delay is over in any order, a copy may be refused, and a worker may crash
// before and after each of its steps.
type retried struct {
	policy            Policy
	messages, workers int
	crashes, refusals int
	results           []error // of a handler
	late              float64 // how much longer than asked a delay may take, as a factor
	native            bool
	wrong             func(error) error // plants a fault in what the policy decides
	wrongOrder        bool              // a worker acknowledges a message before its copy is stored
}

// copied is what the test knows of one copy of a message.
type copied struct {
	root  int
	fails int           // failed attempts of this copy and those before it that count
	must  time.Duration // the delay that it has to wait
	since time.Time     // of its last failure
}

// at is a worker, and where it is with a message.
type at struct {
	m   *held // nil: it is acknowledged
	err error // what the decorator has returned
	// handled says that the handler was called, and waited is what the message had waited before.
	handled bool
	waited  time.Duration
	sent    bool // the copy is stored
	after   copied
}

// small is a run of a retried.
type small struct {
	retried
	r       *explore.Run
	w       *world
	known   map[*held]copied
	busy    []*at // the workers; nil: idle
	handler client.Handler
	result  error // of the next attempt
	handled bool
	done    map[int]bool // messages that were handled successfully
	crashed int
	began   time.Time
}

func (x retried) explore(t *testing.T, runs int) (explore.Report, error) {
	return explore.All(runs, func(r *explore.Run) (err error) {
		synctest.Test(t, func(t *testing.T) { err = x.run(t, r) })
		return err
	})
}

func (x retried) run(t *testing.T, r *explore.Run) error {
	s := &small{retried: x, r: r, w: newWorld(t, mustTopology(t, x.policy, "orders")), known: map[*held]copied{}, done: map[int]bool{}, began: time.Now()}
	s.busy = make([]*at, x.workers)
	s.handler = worker(x.policy, planOf(t, x.policy), []string{"orders"}, func(context.Context, *client.Delivery) error {
		s.handled = true
		return s.result
	})
	for i := range x.messages {
		m := &held{home: "orders", msg: client.NewMessage([]byte{'a' + byte(i)})}
		s.w.publish("", "orders", m)
		s.known[m] = copied{root: i}
	}
	for {
		if r.Seen(s.state) {
			return nil
		}
		can := s.can()
		if len(can) == 0 {
			return s.final()
		}
		if err := can[r.Pick(len(can))](); err != nil {
			return err
		}
		if err := s.check(); err != nil {
			return err
		}
	}
}

// name is a message in what a run says.
func (s *small) name(m *held) string { return string(rune('a' + s.known[m].root)) }

// ready is whether a queue delivers m by now.
func (s *small) ready(m *held) bool {
	return !millis(m.msg.Annotations[annotation.DeliveryTime]).After(time.Now())
}

// can returns what can happen.
func (s *small) can() (all []func() error) {
	idle := slices.Index(s.busy, nil) // they are alike
	if idle >= 0 {
		for _, m := range s.w.contents["orders"] {
			if !s.ready(m) {
				continue
			}
			for i := range s.results {
				all = append(all, func() error { return s.deliver(idle, m, s.results[i]) })
			}
		}
	}
	for i, a := range s.busy {
		if a == nil {
			continue
		}
		all = append(all, func() error { return s.step(i, false) })
		if _, forwards := client.OutcomeOf(a.err).(client.Forward); forwards && a.m != nil && !a.sent && s.refusals > 0 {
			all = append(all, func() error { return s.step(i, true) })
		}
		if s.crashes > 0 {
			all = append(all, func() error { return s.crash(i) })
		}
	}
	var names []string
	for name := range s.w.contents {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		if q := s.w.queues[name]; q.MessageTTL > 0 && len(s.w.contents[name]) > 0 {
			all = append(all, func() error { return s.expire(name) })
		}
	}
	if next := s.next(); !next.IsZero() {
		all = append(all, func() error {
			s.r.Say("time passes")
			time.Sleep(time.Until(next))
			return nil
		})
	}
	return all
}

// next is when the queue delivers the next message that it holds; zero: it holds none.
func (s *small) next() (next time.Time) {
	for _, m := range s.w.contents["orders"] {
		if due := millis(m.msg.Annotations[annotation.DeliveryTime]); !s.ready(m) && (next.IsZero() || due.Before(next)) {
			next = due
		}
	}
	return next
}

// deliver has a worker handle a message, whose attempt has that result.
func (s *small) deliver(i int, m *held, result error) error {
	k := s.known[m]
	s.w.contents["orders"] = slices.DeleteFunc(s.w.contents["orders"], func(other *held) bool { return other == m })
	s.handled, s.result = false, result
	err := s.handler.Handle(context.Background(), client.NewDelivery("orders", m.msg))
	if s.wrong != nil {
		err = s.wrong(err)
	}
	a := &at{m: m, err: err, handled: s.handled, waited: m.waited, after: k}
	s.busy[i] = a
	if !s.handled {
		s.r.Say("%s passes on after %v of %v", s.name(m), m.waited, k.must)
		return nil
	}
	s.r.Say("worker %d: attempt %d of %s: %v", i, k.fails+1, s.name(m), result)
	waited := m.waited
	if s.native {
		waited = time.Since(k.since)
	}
	switch {
	case Count(m.msg) != k.fails:
		return fmt.Errorf("%s has failed %d times, and counts %d", s.name(m), k.fails, Count(m.msg))
	case k.fails > s.policy.MaxRetries:
		return fmt.Errorf("attempt %d of %s, which may have %d", k.fails+1, s.name(m), s.policy.MaxRetries+1)
	case k.fails > 0 && waited < k.must:
		return fmt.Errorf("%s waited %v, and had to wait %v", s.name(m), waited, k.must)
	case k.fails > 0 && !s.native && float64(waited) > s.late*float64(k.must):
		return fmt.Errorf("%s waited %v, and had to wait %v", s.name(m), waited, k.must)
	}
	a.after.since = time.Now()
	a.after.must = s.policy.Backoff(min(k.fails+1, 2))
	var asked *retryAfter
	if errors.As(result, &asked) {
		a.after.must = asked.delay
	}
	if result != nil {
		a.after.fails++
	}
	return nil
}

// retryAfter marks the errors of this test that ask for a delay.
type retryAfter struct {
	error
	delay time.Duration
}

// step does the worker's next step with the message that it has.
func (s *small) step(i int, refused bool) error {
	a := s.busy[i]
	f, forwards := client.OutcomeOf(a.err).(client.Forward)
	switch {
	case forwards && !a.sent && s.wrongOrder && a.m != nil:
		s.r.Say("worker %d acknowledges %s", i, s.name(a.m))
		delete(s.known, a.m)
		a.m = nil
	case forwards && !a.sent && refused:
		s.r.Say("the copy of %s is refused", s.name(a.m))
		s.refusals--
		annotate(a.m, f.Annotations) // as the client does
		s.requeue(a.m)
		s.busy[i] = nil
	case forwards && !a.sent:
		m := &held{home: "orders", msg: f.Message}
		if !a.handled { // it passes on, and the rest of its delay is to come
			m.waited = a.waited
		}
		key := f.To.RoutingKey()
		if f.To.QueueName() != "" {
			key = f.To.QueueName()
		}
		if !s.w.publish(f.To.ExchangeName(), key, m) {
			return fmt.Errorf("no queue for %s", f.To)
		}
		s.known[m] = a.after
		a.sent = true
		s.r.Say("the copy of %s is stored", s.name(m))
		if a.m == nil {
			s.busy[i] = nil
		}
	default:
		m := a.m
		s.r.Say("worker %d settles %s: %v", i, s.name(m), a.err)
		if forwards || a.err == nil {
			if a.err == nil {
				s.done[s.known[m].root] = true
			}
			delete(s.known, m)
		} else {
			if a.handled {
				m.waited = 0
			}
			s.known[m] = a.after
			s.w.carryOut("orders", m, a.err)
			if got := s.w.contents["orders.dead"]; slices.Contains(got, m) {
				if err := s.dead(m); err != nil {
					return err
				}
			}
		}
		s.busy[i] = nil
	}
	return nil
}

// dead checks a dead letter.
func (s *small) dead(m *held) error {
	k, is := s.known[m], DeadLetterOf(m.msg)
	switch {
	case is.Retries != min(k.fails-1, s.policy.MaxRetries):
		return fmt.Errorf("%s has failed %d times, and its dead letter says %d retries", s.name(m), k.fails, is.Retries)
	case is.Reason == ReasonExhausted && k.fails != s.policy.MaxRetries+1:
		return fmt.Errorf("%s is exhausted after %d failures", s.name(m), k.fails)
	case is.Reason != ReasonExhausted && is.Reason != ReasonPermanent:
		return fmt.Errorf("%s is dead-lettered as %s", s.name(m), is.Reason)
	}
	return nil
}

func (s *small) requeue(m *held) {
	s.w.contents["orders"] = append([]*held{m}, s.w.contents["orders"]...)
}

// crash ends a worker. Another one starts in its place.
func (s *small) crash(i int) error {
	s.crashes--
	s.crashed++
	if a := s.busy[i]; a.m != nil {
		s.r.Say("worker %d crashes with %s; its copy is stored: %v", i, s.name(a.m), a.sent)
		s.requeue(a.m)
	}
	s.busy[i] = nil
	return nil
}

// expire ends the delay of the first message of a queue.
func (s *small) expire(name string) error {
	all := s.w.take(name)
	m := all[0]
	s.w.contents[name] = all[1:]
	m.waited += s.w.queues[name].MessageTTL
	if m.msg.Annotations == nil {
		m.msg.Annotations = map[any]any{}
	}
	deaths, _ := m.msg.Annotations[annotation.Deaths].([]map[any]any)
	m.msg.Annotations[annotation.Deaths] = append([]map[any]any{{"queue": name, "reason": "expired", "count": uint64(1)}}, deaths...)
	s.w.die(name, m, "expired")
	s.r.Say("%s has waited in %s", s.name(m), name)
	if m.stuck > 0 {
		return fmt.Errorf("%s is stuck in %s", s.name(m), name)
	}
	return nil
}

// copies returns where the copies of a message are, except for those that are only to be acknowledged,
// since another copy of them is stored.
func (s *small) copies(root int) (all []string) {
	for name, ms := range s.w.contents {
		for _, m := range ms {
			if s.known[m].root == root {
				all = append(all, name)
			}
		}
	}
	for _, a := range s.busy {
		if a != nil && !a.sent && a.after.root == root {
			all = append(all, "a worker")
		}
	}
	return all
}

// check is what holds in every state.
func (s *small) check() error {
	for root := range s.messages {
		switch n := len(s.copies(root)); {
		case n == 0 && !s.done[root]:
			return fmt.Errorf("%c is lost", 'a'+root)
		case n > 1+s.crashed:
			return fmt.Errorf("%c is there %d times after %d crashes: %v", 'a'+root, n, s.crashed, s.copies(root))
		}
	}
	return nil
}

// final is what holds when nothing can happen any more.
func (s *small) final() error {
	for root := range s.messages {
		all := s.copies(root)
		for _, name := range all {
			if name != "orders.dead" {
				return fmt.Errorf("%c stays in %s", 'a'+root, name)
			}
		}
		if len(all) > 1+s.crashed || len(all) > 0 && s.done[root] && s.crashed == 0 {
			return fmt.Errorf("%c was handled: %v, and is dead %d times after %d crashes", 'a'+root, s.done[root], len(all), s.crashed)
		}
	}
	return nil
}

// state is all that the rest of a run depends on.
func (s *small) state() string {
	one := func(m *held) string {
		if m == nil {
			return "-"
		}
		return fmt.Sprint(s.known[m], m.waited, m.msg.Annotations, m.msg.ApplicationProperties)
	}
	var all []string
	for name, ms := range s.w.contents {
		for i, m := range ms {
			if name == "orders" || name == "orders.dead" {
				i = 0 // any of them may be next
			}
			all = append(all, fmt.Sprint(name, i, one(m)))
		}
	}
	for _, a := range s.busy {
		if a != nil {
			all = append(all, fmt.Sprint("worker", a.sent, a.after, a.err, one(a.m)))
		}
	}
	slices.Sort(all)
	return fmt.Sprint(strings.Join(all, "\n"), s.crashes, s.refusals, s.done, time.Since(s.began))
}

var (
	exploredPolicies = map[string]retried{
		"republish":             {policy: Policy{Strategy: StrategyRepublish, MaxRetries: 2, Backoff: Delays(time.Second, 10*time.Second)}, late: 1},
		"dead-letter":           {policy: Policy{Strategy: StrategyDeadLetter, MaxRetries: 2, Backoff: Delays(time.Second, 10*time.Second)}, late: 1},
		"native":                {policy: Policy{Strategy: StrategyNative, MaxRetries: 2, Backoff: Delays(time.Second, 10*time.Second)}, native: true},
		"ladder":                {policy: Policy{Strategy: StrategyRepublish, MaxRetries: 2, Backoff: Delays(5*time.Second, 11*time.Second), AnyDelay: &Ladder{Unit: time.Second, Levels: 4}}, late: 1},
		"chain":                 {policy: Policy{Strategy: StrategyRepublish, MaxRetries: 2, Backoff: Delays(time.Second, 10*time.Second)}, late: 1.1, results: []error{nil, &retryAfter{After(11*time.Second, errA), 11 * time.Second}}},
		"chain of dead letters": {policy: Policy{Strategy: StrategyDeadLetter, MaxRetries: 2, Backoff: Delays(time.Second, 10*time.Second)}, late: 1.1, results: []error{nil, &retryAfter{After(11*time.Second, errA), 11 * time.Second}}},
	}
)

func (e *retryAfter) Unwrap() error { return e.error }

func (x retried) with(messages, workers, crashes, refusals int) retried {
	if x.results == nil {
		x.results = []error{nil, errA, Permanent(errB)}
	}
	x.messages, x.workers, x.crashes, x.refusals = messages, workers, crashes, refusals
	return x
}

func TestExploreRetries(t *testing.T) {
	t.Parallel()
	for name, x := range exploredPolicies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			workers := 2
			if name == "chain" || name == "ladder" { // a message passes many queues
				workers = 1
			}
			messages := 1
			if name == "dead-letter" {
				messages = 2
			}
			x = x.with(messages, workers, 1, 1)
			if explore.Full() {
				x = x.with(2, 3, 1, 1)
			}
			report, err := x.explore(t, 2_000_000)
			require.NoError(t, err)
			assert.True(t, report.Complete)
			t.Logf("REPORT explore retries, %s: %s", name, report)
		})
	}
}

func TestExploreRetriesFindsPlantedFaults(t *testing.T) {
	t.Parallel()
	forwards := func(change func(client.Forward) client.Forward) func(error) error {
		return func(err error) error {
			if f, ok := err.(client.Forward); ok {
				return change(f)
			}
			return err
		}
	}
	for name, plant := range map[string]struct {
		of    string
		wrong func(error) error
		order bool
	}{
		"a message is acknowledged before its copy is stored": {of: "republish", order: true},
		"a copy doesn't count": {of: "republish", wrong: forwards(func(f client.Forward) client.Forward {
			delete(f.Message.ApplicationProperties, CountProperty)
			return f
		})},
		"a copy doesn't wait": {of: "republish", wrong: forwards(func(f client.Forward) client.Forward {
			f.To = address.Queue("orders")
			return f
		})},
		"a ladder is left too early": {of: "ladder", wrong: forwards(func(f client.Forward) client.Forward {
			f.To = address.Exchange(f.To.ExchangeName(), strings.Replace(f.To.RoutingKey(), "1.orders", "0.orders", 1))
			return f
		})},
		"a chain forgets the rest of its delay": {of: "chain", wrong: forwards(func(f client.Forward) client.Forward {
			text, _ := f.Message.Annotations[annotation.History].(string)
			f.Message.Annotations[annotation.History] = strings.Replace(text, `"left":`, `"right":`, 1)
			return f
		})},
		"a message whose copy was refused forgets the rest of its delay": {of: "chain", wrong: forwards(func(f client.Forward) client.Forward {
			f.Annotations = map[string]any{annotation.History: f.Message.Annotations[annotation.History]}
			return f
		})},
		"an exhausted message has the mark of a retry": {of: "dead-letter", wrong: func(err error) error {
			if d, ok := err.(client.DeadLetter); ok && d.Reason == ReasonExhausted {
				d.Reason = reasonRetry
				return d
			}
			return err
		}},
		"a queue isn't asked to hold a message": {of: "native", wrong: func(err error) error {
			if m, ok := err.(client.Modify); ok {
				delete(m.Annotations, annotation.DeliveryTime)
			}
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := exploredPolicies[plant.of].with(1, 1, 1, 1)
			x.wrong, x.wrongOrder = plant.wrong, plant.order
			_, err := x.explore(t, 100_000)
			require.Error(t, err)
			t.Log(err)
		})
	}
}
