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
	"github.com/hopback/hopback/declare/audit"
	"github.com/hopback/hopback/internal/workerclock"
)

// GuardFailedQueue is a guard of Central alone. Messages that a work queue's workers reject
// wouldn't arrive in the failed queue, or would arrive in the dead-letter queue as well. Or
// the failed queue has no dead-letter exchange, so it would drop the rare message of which no
// copy can be made.
const GuardFailedQueue Guard = "failed-queue"

// CentralTopology returns what Central needs beside what Topology returns for the work
// queues. Work queues dead-letter as those of Topology do. The binding of
// given_up_exchange leads to the failed queue in place of the dead-letter queue:
//
//	given_up_exchange  direct   routes by the work queue's name to
//	failed_queue       queue    without a delivery limit; dead-letters through given_up_exchange to
//	failed_exchange    headers  routes what Central moves: by the delay to hold_<n>s, then back
//	                            to the work queue; or to a dead-letter queue
//	failed_queue.dead  queue    for messages of unknown work queues
//
// With Policy.AnyDelay, CentralConfig.Counter or another CentralConfig.FailedQueue, Central
// copies messages, and failed_exchange isn't there.
//
// So a live queue can move from Topology to CentralTopology and back: its arguments stay.
// TakeOver and HandBack change its bindings. Policy.Strategy is that of workers with With.
//
// Queues of cfg that aren't among work exist already. They get a dead-letter queue and
// their bindings, and are left as they are: see CentralPolicies. With
// CentralConfig.CounterExchange, all exists already, and the topology has the work queues
// alone.
func CentralTopology(p Policy, cfg CentralConfig, work ...declare.QuorumQueue) (declare.Topology, error) {
	pl, cfg, err := centralPlan(p, cfg, work)
	if err != nil {
		return declare.Topology{}, err
	}
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
			// A failed message brings its delivery count along.
			Name: cfg.FailedQueue, DeliveryLimit: declare.Unlimited,
			DeadLetter: declare.DeadLetterTarget{Exchange: n.GivenUpExchange, RoutingKey: cfg.FailedQueue},
		})
	}
	t.Queues = append(t.Queues, pl.deadLetterQueue(cfg.FailedQueue))
	if pl.canMove(cfg) {
		exits := pl.failedExits()
		exits.Exchanges = pl.failedExchanges()
		t = join(t, exits)
	} else {
		t.Bindings = append(t.Bindings, pl.copiedExit(cfg))
	}
	for i, q := range work {
		w, err := pl.workQueue(argument.Root("work").Index(i), pl.strategy, q)
		if err != nil {
			return declare.Topology{}, err
		}
		if !q.DeadLetter.IsZero() {
			w.Queues = append(w.Queues, pl.deadLetterQueue(q.Name))
		}
		t = join(t, pl.toFailed(cfg, q.Name, w))
		t = join(t, pl.moving(cfg, q.Name))
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
		t = join(t, pl.toFailed(cfg, name, w))
		t = join(t, pl.moving(cfg, name))
	}
	return t, t.Validate()
}

// centralPlan makes the plan for a topology. Its strategy is one that has delay queues for
// copies.
func centralPlan(p Policy, cfg CentralConfig, work []declare.QuorumQueue) (*plan, CentralConfig, error) {
	if err := p.Validate(); err != nil {
		return nil, cfg, err
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
		return nil, cfg, err
	}
	cfg, err = cfg.withDefaults(&pl)
	return &pl, cfg, err
}

// toFailed turns the binding of a work queue's dead letters to the failed queue.
func (pl *plan) toFailed(cfg CentralConfig, queue string, t declare.Topology) declare.Topology {
	dead, failed := pl.deadBinding(queue), pl.failedBinding(cfg, queue)
	t.Bindings = slices.DeleteFunc(t.Bindings, func(b declare.Binding) bool { return b.Source == dead.Source && b.Queue == dead.Queue })
	t.Bindings = append(t.Bindings, failed)
	return t
}

func (pl *plan) deadBinding(queue string) declare.Binding {
	return declare.Binding{Source: pl.names.GivenUpExchange, Queue: pl.names.DeadLetterQueue(queue), Key: queue}
}

func (pl *plan) failedBinding(cfg CentralConfig, queue string) declare.Binding {
	return declare.Binding{Source: pl.names.GivenUpExchange, Queue: cfg.FailedQueue, Key: queue}
}

// TakeOver leads what the work queues dead-letter to the failed queue, and no longer to the
// dead-letter queues. Apply CentralTopology first. Both ways are open for a moment: no
// message is lost, and one that dies then is in both queues. Workers keep running. It also
// removes the binding of an older CentralTopology that keeps Central from moving messages.
func TakeOver(ctx context.Context, r declare.Requester, p Policy, cfg CentralConfig) error {
	return turn(ctx, r, p, cfg, (*plan).takenOf, (*plan).copiedOf)
}

// HandBack undoes TakeOver: what the work queues dead-letter goes to the dead-letter queues
// again. Let Central run until the failed queue is empty.
func HandBack(ctx context.Context, r declare.Requester, p Policy, cfg CentralConfig) error {
	return turn(ctx, r, p, cfg, (*plan).deadOf, (*plan).failedOf)
}

func (pl *plan) failedOf(cfg CentralConfig) (t declare.Topology) {
	for _, q := range cfg.Queues {
		t.Bindings = append(t.Bindings, pl.failedBinding(cfg, q))
	}
	return t
}

func (pl *plan) deadOf(cfg CentralConfig) (t declare.Topology) {
	for _, q := range cfg.Queues {
		t.Bindings = append(t.Bindings, pl.deadBinding(q))
	}
	return t
}

// takenOf is failedOf, with what leads out of the failed queue where Central moves messages.
func (pl *plan) takenOf(cfg CentralConfig) declare.Topology {
	t := pl.failedOf(cfg)
	if pl.canMove(cfg) {
		t.Bindings = append(t.Bindings, declare.Binding{Source: pl.names.GivenUpExchange, Exchange: pl.names.FailedExchange, Key: cfg.FailedQueue})
	}
	return t
}

// copiedOf is deadOf, with what led out of the failed queue before Central moved messages.
func (pl *plan) copiedOf(cfg CentralConfig) declare.Topology {
	t := pl.deadOf(cfg)
	if pl.canMove(cfg) {
		t.Bindings = append(t.Bindings, pl.copiedExit(cfg))
	}
	return t
}

// turn opens one way, and then closes the other.
func turn(ctx context.Context, r declare.Requester, p Policy, cfg CentralConfig, open, shut func(*plan, CentralConfig) declare.Topology) error {
	pl, cfg, err := centralPlan(p, cfg, nil)
	if err != nil {
		return err
	}
	if cfg.CounterExchange != "" {
		return argument.At(centralPath.Field("CounterExchange"), argument.CodeConflict, cfg.CounterExchange, "is set, so the messages go the other system's way",
			"start Central in the place of the other system's process, or stop it")
	}
	if _, err := declare.Apply(ctx, r, open(pl, cfg)); err != nil {
		return err
	}
	_, err = declare.Delete(ctx, r, shut(pl, cfg))
	return err
}

// CentralPolicies returns the RabbitMQ policies by which queues that exist already
// dead-letter to the failed queue: one for each queue of cfg that is a quorum queue, and
// one for a classic queue of that name. A queue's own arguments go before a policy, and
// only one policy applies to a queue: merge these into one that it has. Classic queues
// dead-letter at most once.
func CentralPolicies(p Policy, cfg CentralConfig) ([]declare.Policy, error) {
	pl, cfg, err := centralPlan(p, cfg, nil)
	if err != nil {
		return nil, err
	}
	var all []declare.Policy
	for _, q := range cfg.Queues {
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

// guards runs the guards of every work queue, a few at a time, and joins what they find.
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
		w := newWatch(s.Log, name, workerclock.From(ctx), func(ctx context.Context) (inspection, error) { return c.inspect(ctx, s, name) })
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

// inspect runs the guards of a work queue.
func (c *central) inspect(ctx context.Context, start client.Start, queue string) (inspection, error) {
	pl := c.retries.plan
	own := c.cfg.CounterExchange != ""
	t := declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: queue, DeadLetter: declare.Drop()}}}
	if !own {
		t = pl.toFailed(c.cfg, queue, pl.way(queue, StrategyRepublish))
		t.Bindings = append(t.Bindings, pl.deadBinding(queue)) // which should be missing
	}
	s, whole := c.virtualHost(ctx, logOf(start))
	if !whole {
		var err error
		if s, err = audit.Read(ctx, audit.Sources{AMQP: start.Management}, t); err != nil {
			return inspection{}, err
		}
	}
	g := guardCheck{
		plan: pl, queue: queue, strategy: StrategyRepublish, in: inspection{losing: make([]error, len(pl.levels)), copies: errUnchecked},
		at: map[string]*GuardError{}, seen: map[string]declare.QueueInfo{},
	}
	for _, q := range s.Queues {
		g.seen[q.Name] = q
	}
	work, found := g.seen[queue]
	if !found {
		if !slices.ContainsFunc(s.Refused, func(u audit.UnreadResource) bool { return u.Resource.Name == queue }) {
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
	for _, f := range audit.Check(s.Assume(t), t).Findings {
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

// hostAge is how long what the HTTP API has shown is valid: all work queues are looked at at
// once.
const hostAge = 5 * time.Second

// virtualHost returns all that the HTTP API shows, if it can be asked.
func (c *central) virtualHost(ctx context.Context, log *slog.Logger) (s audit.Snapshot, whole bool) {
	if c.cfg.HTTP == nil {
		return s, false
	}
	c.hostMu.Lock()
	defer c.hostMu.Unlock()
	if time.Since(c.hostAt) < hostAge {
		return c.host, true
	}
	s, err := audit.Read(ctx, audit.Sources{HTTP: c.cfg.HTTP}, declare.Topology{})
	if err != nil {
		log.Debug("hopback: the HTTP API doesn't answer the guards; policies don't count", "error", err)
		return s, false
	}
	c.host, c.hostAt = s, time.Now()
	return s, true
}

// arrives checks that dead letters of a work queue arrive in the failed queue, and nowhere
// else. A queue that dead-letters to another system's exchange is believed to know.
func (c *central) arrives(g *guardCheck, s audit.Snapshot, work declare.QueueInfo) {
	pl := c.retries.plan
	exchange, _ := work.Arguments["x-dead-letter-exchange"].(string)
	key, _ := work.Arguments["x-dead-letter-routing-key"].(string)
	has := func(b declare.Binding) bool {
		return slices.ContainsFunc(s.Bindings, func(o declare.Binding) bool { return o.Source == b.Source && o.Queue == b.Queue && o.Key == b.Key })
	}
	if slices.ContainsFunc(s.Refused, func(u audit.UnreadResource) bool { return u.Resource.Kind == "binding" }) {
		return // it is told as not checked
	}
	switch {
	case exchange == "" && key != "" && key != c.cfg.FailedQueue && work.Arguments["x-dead-letter-exchange"] != nil:
		g.add(GuardFailedQueue, work.Name, fmt.Sprintf("it dead-letters to queue %.100q, not to the failed queue %.100q", key, c.cfg.FailedQueue), "name that queue as the failed queue")
	case exchange != pl.names.DeadLetterExchange:
	case key != work.Name:
		g.add(GuardFailedQueue, work.Name, fmt.Sprintf("its x-dead-letter-routing-key is %.100q, and should be its own name", key), "set it by the policy that CentralPolicies returns, or declare the queue with retry.CentralTopology")
	case !has(pl.failedBinding(c.cfg, work.Name)):
		g.add(GuardFailedQueue, work.Name, fmt.Sprintf("no binding leads its dead letters from %.100q to the failed queue %.100q, so what is rejected doesn't arrive there", pl.names.GivenUpExchange, c.cfg.FailedQueue), "apply retry.CentralTopology of this policy, and call retry.TakeOver or run hopback retry take-over")
	case has(pl.deadBinding(work.Name)):
		g.add(GuardFailedQueue, work.Name, "a binding leads its dead letters to the dead-letter queue as well, so each rejected message would be there and be retried, too", "call retry.TakeOver, which removes it, or run hopback retry take-over")
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
			logOf(s).Warn("hopback: a waived guard found a fault in the topology", "guard", string(g), "at", e.Queue, "problem", problem, "remedy", remedy)
			return
		}
		found = append(found, e)
	}
	const declared = "declare it with retry.CentralTopology, or waive this guard"
	if _, ok := info.Arguments["x-dead-letter-exchange"]; !ok {
		add(GuardFailedQueue, "it has no dead-letter exchange, so the broker drops a message of which no copy can be made", declared)
	}
	if limit, set := info.Arguments["x-delivery-limit"].(int64); info.Type == "quorum" && (!set || limit >= 0) {
		add(GuardDeliveryLimit, "it has a delivery limit, and failed messages bring their delivery count along: the broker may give them up while Central restarts", declared)
	}
	return errors.Join(found...)
}
