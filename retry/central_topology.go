package retry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/refusal"
)

// GuardFailedQueue is a check of [Central] alone. It finds one of these faults:
//
//   - Messages that the workers of a work queue reject don't reach the failed queue.
//   - They reach the dead-letter queue as well, so each one is a dead letter and is retried at
//     the same time.
//   - The failed queue has no dead-letter exchange, so the broker would drop the rare message
//     that can't be copied.
const GuardFailedQueue Guard = "failed-queue"

// CentralTopology returns the topology for [Central] and the work queues: everything [Topology]
// returns, with given_up_exchange bound to the failed queue instead of the dead-letter queues,
// and in addition:
//
//	given_up_exchange  direct   routes by the work queue's name to
//	failed_queue       queue    without a delivery limit; dead-letters through given_up_exchange to
//	failed_exchange    headers  routes what Central moves: by the delay to hold_<n>s, then back
//	                            to the work queue; or to a dead-letter queue
//	failed_queue.dead  queue    for messages of unknown work queues
//
// The arguments of the work queues are the same as in Topology. So a live queue can change from
// Topology to CentralTopology and back: apply the topology, then call [TakeOver] or [HandBack],
// which change the bindings. Policy.Strategy is the strategy of workers that use [With]. Invalid
// input is an *argument.Error.
//
//   - With [Policy.AnyDelay], [CentralConfig.Counter], or another [CentralConfig.FailedQueue],
//     Central copies messages, and the topology has no failed_exchange.
//   - Queues of cfg that aren't among work must exist already. They get a dead-letter queue and
//     bindings, and their arguments don't change: see [CentralPolicies].
//   - With [CentralConfig.CounterExchange], all of this exists already, and the topology has the
//     work queues only.
func CentralTopology(p Policy, cfg CentralConfig, work ...declare.QuorumQueue) (declare.Topology, error) {
	pl, err := newCentralPlan(p, cfg, work)
	if err != nil {
		return declare.Topology{}, err
	}
	cfg = pl.cfg
	if cfg.CounterExchange != "" {
		var t declare.Topology
		for _, q := range work {
			t.Queues = append(t.Queues, q)
		}
		return t, t.Validate()
	}
	n := pl.names
	t := join(pl.ends(), pl.waiting(pl.strategy))
	if cfg.FailedQueue == n.FailedQueue {
		t.Queues = append(t.Queues, declare.QuorumQueue{
			// A failed message keeps its delivery count.
			Name: cfg.FailedQueue, DeliveryLimit: declare.Unlimited,
			DeadLetter: declare.DeadLetterTarget{Exchange: n.GivenUpExchange, RoutingKey: cfg.FailedQueue},
		})
	}
	t.Queues = append(t.Queues, pl.deadLetterQueue(cfg.FailedQueue))
	if pl.canMove() {
		exits := pl.failedExits()
		exits.Exchanges = pl.failedExchanges()
		t = join(t, exits)
	} else {
		t.Bindings = append(t.Bindings, pl.copiedExit())
	}
	for i, q := range work {
		w, err := pl.workQueue(argument.Root("work").Index(i), pl.strategy, q)
		if err != nil {
			return declare.Topology{}, err
		}
		if !q.DeadLetter.IsZero() {
			w.Queues = append(w.Queues, pl.deadLetterQueue(q.Name))
		}
		t = join(t, pl.routed(q.Name, w))
	}
	for i, name := range cfg.Queues {
		if slices.ContainsFunc(work, func(q declare.QuorumQueue) bool { return q.Name == name }) {
			continue
		}
		w, err := pl.workQueue(centralPath.Field("Queues").Index(i), pl.strategy, declare.QuorumQueue{Name: name})
		if err != nil {
			return declare.Topology{}, err
		}
		w.Queues = slices.DeleteFunc(w.Queues, func(q declare.Queue) bool { return q.Address().QueueName() == name })
		t = join(t, pl.routed(name, w))
	}
	return t, t.Validate()
}

// newCentralPlan makes the plan for a topology. Its strategy is one that has delay queues for
// copies.
func newCentralPlan(p Policy, cfg CentralConfig, work []declare.QuorumQueue) (c centralPlan, err error) {
	if err := p.Validate(); err != nil {
		return c, err
	}
	cfg.Queues = slices.Clone(cfg.Queues)
	for _, q := range work {
		if !slices.Contains(cfg.Queues, q.Name) {
			cfg.Queues = append(cfg.Queues, q.Name)
		}
	}
	switch p.Strategy {
	case StrategyDeadLetter, StrategyAuto:
		p.Strategy = StrategyAuto
	default:
		p.Strategy = StrategyRepublish
	}
	pl, err := p.plan()
	if err != nil {
		return c, err
	}
	cfg, err = cfg.withDefaults(&pl)
	return centralPlan{&pl, cfg}, err
}

// routed is t, of a work queue, with the way to the failed queue, and the way back where Central moves.
func (c centralPlan) routed(queue string, t declare.Topology) declare.Topology {
	t = c.toFailed(queue, t)
	if c.canMove() {
		t = join(t, c.failedReturns(queue))
	}
	return t
}

// toFailed binds the failed queue to a work queue's dead letters.
func (c centralPlan) toFailed(queue string, t declare.Topology) declare.Topology {
	dead, failed := c.deadBinding(queue), c.failedBinding(queue)
	t.Bindings = slices.DeleteFunc(t.Bindings, func(b declare.Binding) bool { return b.Source == dead.Source && b.Queue == dead.Queue })
	t.Bindings = append(t.Bindings, failed)
	return t
}

func (c centralPlan) deadBinding(queue string) declare.Binding {
	return declare.Binding{Source: c.names.GivenUpExchange, Queue: c.names.DeadLetterQueue(queue), Key: queue}
}

func (c centralPlan) failedBinding(queue string) declare.Binding {
	return declare.Binding{Source: c.names.GivenUpExchange, Queue: c.cfg.FailedQueue, Key: queue}
}

// TakeOver binds the failed queue to the dead letters of the work queues, and unbinds the
// dead-letter queues. Call it after applying [CentralTopology], to switch live queues to
// [Central]. Workers keep running.
//
//   - For a moment both bindings exist. No message is lost, and one that is dead-lettered then is
//     in both queues.
//   - It also removes the binding of an older CentralTopology that keeps Central from moving
//     messages.
func TakeOver(ctx context.Context, r declare.Requester, p Policy, cfg CentralConfig) error {
	return turn(ctx, r, p, cfg, centralPlan.takenOf, centralPlan.copiedOf)
}

// HandBack undoes [TakeOver]: dead letters of the work queues go to the dead-letter queues again.
// Keep Central running until the failed queue is empty.
func HandBack(ctx context.Context, r declare.Requester, p Policy, cfg CentralConfig) error {
	return turn(ctx, r, p, cfg, centralPlan.deadOf, centralPlan.failedOf)
}

func (c centralPlan) failedOf() (t declare.Topology) {
	for _, q := range c.cfg.Queues {
		t.Bindings = append(t.Bindings, c.failedBinding(q))
	}
	return t
}

func (c centralPlan) deadOf() (t declare.Topology) {
	for _, q := range c.cfg.Queues {
		t.Bindings = append(t.Bindings, c.deadBinding(q))
	}
	return t
}

// takenOf is failedOf, with what leads out of the failed queue where Central moves messages.
func (c centralPlan) takenOf() declare.Topology {
	t := c.failedOf()
	if c.canMove() {
		t.Bindings = append(t.Bindings, declare.Binding{Source: c.names.GivenUpExchange, Exchange: c.names.FailedExchange, Key: c.cfg.FailedQueue})
	}
	return t
}

// copiedOf is deadOf, with what led out of the failed queue before Central moved messages.
func (c centralPlan) copiedOf() declare.Topology {
	t := c.deadOf()
	if c.canMove() {
		t.Bindings = append(t.Bindings, c.copiedExit())
	}
	return t
}

// turn adds the bindings of one topology, and then removes those of the other.
func turn(ctx context.Context, r declare.Requester, p Policy, cfg CentralConfig, open, shut func(centralPlan) declare.Topology) error {
	pl, err := newCentralPlan(p, cfg, nil)
	if err != nil {
		return err
	}
	if pl.cfg.CounterExchange != "" {
		return argument.At(centralPath.Field("CounterExchange"), argument.CodeConflict, pl.cfg.CounterExchange, "is set, so another system's exchange routes the messages",
			"start Central instead of the other system's process; to undo that, stop Central")
	}
	if _, err := declare.Apply(ctx, r, open(pl)); err != nil {
		return err
	}
	_, err = declare.Delete(ctx, r, shut(pl))
	return err
}

// CentralPolicies returns the RabbitMQ policies that make existing queues dead-letter to the
// failed queue: one for each quorum queue of cfg, and one for a classic queue of that name. Use
// it for queues whose arguments you can't change. The error is an *argument.Error.
//
//   - A queue's own arguments take precedence over a policy.
//   - RabbitMQ applies one policy to a queue. If yours already has one, merge these definitions
//     into it.
//   - Classic queues dead-letter at most once.
func CentralPolicies(p Policy, cfg CentralConfig) ([]declare.Policy, error) {
	pl, err := newCentralPlan(p, cfg, nil)
	if err != nil {
		return nil, err
	}
	var all []declare.Policy
	for _, q := range pl.cfg.Queues {
		classic := declare.Policy{
			Name: "hopback-" + q + "-classic", Pattern: "^" + regexp.QuoteMeta(q) + "$", ApplyTo: "classic_queues", Priority: 10,
			Definition: map[string]any{"dead-letter-exchange": pl.names.DeadLetterExchange, "dead-letter-routing-key": q},
		}
		quorum := classic
		quorum.Name, quorum.ApplyTo = "hopback-"+q, "quorum_queues"
		quorum.Definition = map[string]any{
			"dead-letter-exchange": pl.names.DeadLetterExchange, "dead-letter-routing-key": q,
			"dead-letter-strategy": "at-least-once", "overflow": "reject-publish",
		}
		all = append(all, quorum, classic)
	}
	return all, nil
}

// guards runs the checks of every work queue, a few at a time, and joins their findings.
func (c *central) guards(ctx context.Context, s client.Start) (map[string]*watch, error) {
	watches := map[string]*watch{}
	if s.Management == nil {
		return watches, nil
	}
	var mu sync.Mutex
	var errs []error
	slots := make(chan struct{}, 8)
	var wg sync.WaitGroup
	for _, name := range c.cfg.Queues {
		w := newWatch(s.Log, name, brokerclock.OwnClock(ctx), func(ctx context.Context) (inspection, error) { return c.inspect(ctx, s, name) })
		refusal.Of(ctx).OnEnd(w.end)
		w.oneWay = true
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			err := w.start(ctx)
			mu.Lock()
			defer mu.Unlock()
			watches[name], errs = w, append(errs, err)
		})
	}
	wg.Wait()
	slices.SortFunc(errs, func(a, b error) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	return watches, errors.Join(append(errs, c.failedQueueGuard(ctx, s))...)
}

// inspect runs the checks of a work queue.
func (c *central) inspect(ctx context.Context, start client.Start, queue string) (inspection, error) {
	pl := c.plan()
	own := c.cfg.CounterExchange != ""
	t := declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: queue, DeadLetter: declare.Drop()}}}
	if !own {
		t = pl.toFailed(queue, pl.way(queue, StrategyRepublish))
		t.Bindings = append(t.Bindings, pl.deadBinding(queue)) // which should be missing
	}
	s, whole := c.virtualHost(ctx, logOf(start))
	if !whole {
		var err error
		if s, err = check.Read(ctx, check.Sources{AMQP: start.Management}, t); err != nil {
			return inspection{}, err
		}
	}
	g := guardCheck{
		plan: pl.plan, queue: queue, strategy: StrategyRepublish, in: inspection{losing: make([]error, len(pl.levels)), copies: errUnchecked},
		at: map[string]*GuardError{}, seen: map[string]declare.QueueInfo{},
	}
	for _, q := range s.Queues {
		g.seen[q.Name] = q
	}
	work, found := g.seen[queue]
	if !found {
		if !slices.ContainsFunc(s.Refused, func(u check.UnreadResource) bool { return u.Resource.Name == queue }) {
			g.add(GuardFailedQueue, queue, "it doesn't exist", "declare it with retry.CentralTopology, or leave it out of CentralConfig.Queues")
		}
		return g.in, nil
	}
	work.Arguments = s.Effective(work)
	g.work(work)
	g.in.copies = c.notMoving(ctx, start, queue)
	if own {
		return g.in, nil
	}
	c.arrives(&g, s, work)
	s.Version = cmp.Or(s.Version, start.Broker.Version)
	// The HTTP API shows all queues of the virtual host. Those of others don't matter.
	findings := check.VerifyOwn(s.Assume(t), t).Findings
	g.in.unsorted = slices.ContainsFunc(findings, g.lacksSort)
	for _, f := range findings {
		switch {
		case f.Rule == "unseen":
			g.unseen(f)
		case f.Resource.Kind == "binding" && strings.Contains(f.Resource.Name, fmt.Sprintf("to queue %.64q", c.cfg.FailedQueue)):
		case f.Resource.Kind == "queue" && f.Resource.Name == queue && f.Rule == "different":
		default:
			g.finding(f)
		}
	}
	return g.in, nil
}

// hostAge is how long a result of the HTTP API is valid, so that all work queues are checked with
// one read.
const hostAge = 5 * time.Second

// virtualHost returns everything that the HTTP API shows, if it can be read.
func (c *central) virtualHost(ctx context.Context, log *slog.Logger) (s check.Snapshot, whole bool) {
	if c.cfg.HTTP == nil {
		return s, false
	}
	c.hostMu.Lock()
	defer c.hostMu.Unlock()
	if time.Since(c.hostAt) < hostAge {
		return c.host, true
	}
	s, err := check.Read(ctx, check.Sources{HTTP: c.cfg.HTTP}, declare.Topology{})
	if err != nil {
		log.Debug("hopback: topology check: management API unreachable, RabbitMQ policies not taken into account; check CentralConfig.HTTP", "error", err)
		return s, false
	}
	c.host, c.hostAt = s, time.Now()
	return s, true
}

// arrives checks that dead letters of a work queue reach the failed queue, and no other. A queue
// that dead-letters to another system's exchange is assumed to be right.
func (c *central) arrives(g *guardCheck, s check.Snapshot, work declare.QueueInfo) {
	pl := c.plan()
	exchange, _ := work.Arguments["x-dead-letter-exchange"].(string)
	key, _ := work.Arguments["x-dead-letter-routing-key"].(string)
	has := func(b declare.Binding) bool {
		return slices.ContainsFunc(s.Bindings, func(o declare.Binding) bool { return o.Source == b.Source && o.Queue == b.Queue && o.Key == b.Key })
	}
	if slices.ContainsFunc(s.Refused, func(u check.UnreadResource) bool { return u.Resource.Kind == "binding" }) {
		return // it is logged as not checked
	}
	switch {
	case exchange == "" && key != "" && key != c.cfg.FailedQueue && work.Arguments["x-dead-letter-exchange"] != nil:
		g.add(GuardFailedQueue, work.Name, fmt.Sprintf("it dead-letters to queue %.100q, not to the failed queue %.100q", key, c.cfg.FailedQueue), "set CentralConfig.FailedQueue to that queue")
	case exchange != pl.names.DeadLetterExchange:
	case key != work.Name:
		g.add(GuardFailedQueue, work.Name, fmt.Sprintf("its x-dead-letter-routing-key is %.100q, and should be its own name", key), "set it with the policy that retry.CentralPolicies returns, or declare the queue with retry.CentralTopology")
	case !has(pl.failedBinding(work.Name)):
		g.add(GuardFailedQueue, work.Name, fmt.Sprintf("no binding routes its dead letters from %.100q to the failed queue %.100q, so rejected messages don't reach Central", pl.names.GivenUpExchange, c.cfg.FailedQueue), "apply retry.CentralTopology of this policy, and call retry.TakeOver or run hopback retry take-over")
	case has(pl.deadBinding(work.Name)):
		g.add(GuardFailedQueue, work.Name, "a binding routes its dead letters to the dead-letter queue as well, so each rejected message would be dead-lettered and retried at the same time", "call retry.TakeOver, which removes it, or run hopback retry take-over")
	}
}

// failedQueueGuard checks the failed queue itself.
func (c *central) failedQueueGuard(ctx context.Context, s client.Start) error {
	info, err := declare.Inspect(ctx, s.Management, c.cfg.FailedQueue)
	if errors.Is(err, declare.ErrForbidden) {
		return nil
	}
	if err != nil {
		return err
	}
	if all, whole := c.virtualHost(ctx, logOf(s)); whole {
		info.Arguments = all.Effective(info)
	}
	var found []error
	add := func(g Guard, problem, remedy string) {
		e := &GuardError{Guard: g, Queue: info.Name, Problem: problem, Remedy: remedy}
		if c.retries.plan.waived[g] {
			logOf(s).Warn("hopback: topology check: a disabled check found a fault", "check", string(g), "at", e.Queue, "problem", problem, "remedy", remedy)
			return
		}
		found = append(found, e)
	}
	const declared = "declare it with retry.CentralTopology, or disable this check with Policy.Waive"
	if _, ok := info.Arguments["x-dead-letter-exchange"]; !ok {
		add(GuardFailedQueue, "it has no dead-letter exchange, so the broker drops messages that can't be copied", declared)
	}
	if limit, set := info.Arguments["x-delivery-limit"].(int64); info.Type == "quorum" && (!set || limit >= 0) {
		add(GuardDeliveryLimit, "it has a delivery limit, and failed messages keep their delivery count: the broker may dead-letter them while Central restarts", declared)
	}
	return errors.Join(found...)
}
