package retry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/audit"
	"github.com/hopback/hopback/internal/workerclock"
)

// Guard is a check that With makes when a consumer starts. The consumer doesn't start
// on topology that would lose messages or stall them; the error is a *GuardError. The
// checks are rules of package declare, applied to the part of the topology that AMQP
// shows: queues with their arguments, and bindings. AMQP shows neither exchanges nor
// policies. The guards assume that exchanges are as Topology declares them and that no
// policy applies.
//
// Policy.Waive waives guards, for example where a policy on the broker sets an argument
// that the queue itself doesn't have. A waived guard still checks, and the consumer logs
// what it finds when it starts.
//
// RabbitMQ 4.3 and later ask for permissions: any one on a queue, and for a binding
// write on its queue and read on its exchange. The guards skip what the user may not
// see. The consumer logs that, and starts.
//
// The guards check again while the consumer runs and messages fail: at most once a
// minute, or every ten seconds while retries come back early or not at all. They log
// what they find as an error. A delay queue that has begun to lose messages gets no more
// of them: they wait in another delay queue, or are dead-lettered with
// client.ReasonUnforwardable. They don't see policies, but log an error if retries come back
// early for no reason that they can see, or if the dead-letter queue is gone.
type Guard string

const (
	// GuardDeadLetter: the work queue has no dead-letter exchange. The broker would drop
	// messages that are given up or exceed the delivery limit, and nothing would show it.
	GuardDeadLetter Guard = "dead-letter"
	// GuardAtMostOnce: the work queue or a delay queue dead-letters at most once. A
	// message would be lost when the next exchange or queue is missing or full.
	GuardAtMostOnce Guard = "at-most-once"
	// GuardDeliveryLimit: the dead-letter queue has a delivery limit. A dead letter keeps
	// the delivery count of its work queue, so the first look at it could exceed the
	// limit and drop it. The work queue's own limit does no harm: no strategy's retry
	// counts as a failed delivery.
	GuardDeliveryLimit Guard = "delivery-limit"
	// GuardDelayQueue: messages would not return after their delay. A delay queue that
	// the policy needs is missing, isn't bound, holds messages for another time than the
	// policy's or for ever, or dead-letters them elsewhere; or the work queue isn't
	// bound to the exchange that returns them. Or StrategyNative is to wait in a work queue
	// whose own message TTL is shorter than all delays of the policy together: messages
	// would be dead-lettered as expired.
	GuardDelayQueue Guard = "delay-queue"
	// GuardMaxLength: a queue that receives dead-lettered messages has a max-length. While
	// the work queue is full, returning messages can't leave their delay queue. Once 32
	// of them wait so, messages of other work queues can't leave it either. With
	// StrategyDeadLetter the dead-letter queue matters, too: while it is full, the work
	// queue's retries stop. With StrategyNative a work queue with a limit needs overflow
	// reject-publish: one that drops its oldest messages hangs for ever, with all that it
	// holds, once more messages than the limit wait for their retry (RabbitMQ 4.3.6).
	GuardMaxLength Guard = "max-length"
	// GuardLadder: a ladder of another number of levels is bound to the exchanges of this
	// policy's AnyDelay, so each message that waits there becomes several, and more with
	// every retry.
	GuardLadder Guard = "ladder"
	// GuardStrategy: the broker or the queue doesn't support the policy's strategy. This
	// guard can't be waived. With StrategyNative, messages would come back at once, for
	// ever; with StrategyDeadLetter, none would be retried.
	GuardStrategy Guard = "strategy"
)

var allGuards = []Guard{GuardDeadLetter, GuardAtMostOnce, GuardDeliveryLimit, GuardDelayQueue, GuardMaxLength, GuardLadder, GuardFailedQueue}

// AllGuards returns every guard that can be waived. It is for Policy.Waive with topology
// that can't be changed, such as another system's.
func AllGuards() []Guard { return slices.Clone(allGuards) }

// GuardError is a fault that a guard found. errors.As finds it in the error of Consume,
// which joins several.
type GuardError struct {
	Guard Guard
	// Queue is the name of the queue with the fault.
	Queue string
	// Problem says what is wrong, Remedy what to do. Both are clauses without a full
	// stop.
	Problem, Remedy string
}

func (e *GuardError) Error() string {
	return fmt.Sprintf("hopback: guard %q at queue %q: %s; %s", string(e.Guard), e.Queue, e.Problem, e.Remedy)
}

// inspection is the result of one look.
type inspection struct {
	found, waived []*GuardError
	// unseen lists what the user may not look at, and the guards that were skipped.
	// needs lists the permissions that they need.
	unseen, needs []string
	// losing has, for each delay queue by rung, why it mustn't be used, or nil.
	losing []error
	// copies is why Central copies messages of the queue; nil if it moves them.
	copies error
	// dead is the dead-letter queue; nil if it isn't known. gone says that it doesn't exist.
	dead *declare.QueueInfo
	gone bool
}

func (in *inspection) err() error {
	errs := make([]error, len(in.found))
	for i, e := range in.found {
		errs[i] = e
	}
	return errors.Join(errs...)
}

// prepare chooses the strategy and runs the guards. It returns all their refusals,
// joined. The watch is nil if the broker can't be asked.
func (pl *plan) prepare(ctx context.Context, s client.Start) (Strategy, *watch, error) {
	if s.Management == nil {
		if pl.strategy == StrategyNative || pl.strategy == StrategyAuto {
			return StrategyRepublish, nil, nil // the strategy that works on every broker
		}
		return pl.strategy, nil, nil
	}
	work, err := declare.Inspect(ctx, s.Management, s.Queue)
	if err != nil {
		return "", nil, err
	}
	strategy, err := pl.choose(s.Broker, work)
	if err != nil {
		return "", nil, err
	}
	w := newWatch(s.Log, s.Queue, workerclock.From(ctx), func(ctx context.Context) (inspection, error) {
		return pl.inspect(ctx, s.Management, s.Queue, strategy)
	})
	return strategy, w, w.start(ctx)
}

// inspect reads the path of a retry from queue and back, and of a dead letter.
func (pl *plan) inspect(ctx context.Context, ask declare.Requester, queue string, strategy Strategy) (inspection, error) {
	t := pl.way(queue, strategy)
	s, err := audit.Read(ctx, audit.Sources{AMQP: ask}, t)
	if err != nil {
		return inspection{}, err
	}
	if pl.ladder != nil && len(s.Refused) == 0 { // each refusal costs the session
		others, err := audit.Read(ctx, audit.Sources{AMQP: ask}, declare.Topology{Bindings: pl.ladder.others(pl.names)})
		if err != nil {
			return inspection{}, err
		}
		s.Bindings = append(s.Bindings, others.Bindings...)
	}
	c := guardCheck{plan: pl, queue: queue, strategy: strategy, in: inspection{losing: make([]error, len(pl.levels))}, at: map[string]*GuardError{}, seen: map[string]declare.QueueInfo{}}
	for _, q := range s.Queues {
		c.seen[q.Name] = q
		switch q.Name {
		case queue:
			c.work(q)
		case pl.names.DeadLetterQueue(queue):
			c.in.dead = &q
		}
	}
	for _, f := range audit.Check(s.Assume(t), t).Findings {
		if f.Rule == "unseen" {
			c.unseen(f)
		} else {
			c.finding(f)
		}
	}
	return c.in, nil
}

// way returns the part of the topology that messages of a queue pass through.
func (pl *plan) way(queue string, strategy Strategy) declare.Topology {
	if len(pl.levels) == 0 && pl.ladder == nil {
		strategy = StrategyNative // no delay queue is needed
	}
	t := pl.ends()
	t.Queues, t.Bindings = nil, nil // messages don't pass the parking queue
	if strategy != StrategyNative {
		t = join(t, pl.waiting(strategy))
	}
	work := declare.QuorumQueue{Name: queue}
	if address.Queue(pl.names.DeadLetterQueue(queue)).Validate() != nil && strategy != StrategyDeadLetter {
		work.DeadLetter = declare.Drop() // it can't have that dead-letter queue
	}
	// The queue's name has been checked before, so there is no error.
	w, _ := pl.workQueue(argument.Root("queue"), strategy, work)
	return join(t, w)
}

// guardCheck turns the findings of rules into those of guards.
type guardCheck struct {
	plan     *plan
	queue    string
	strategy Strategy
	seen     map[string]declare.QueueInfo
	in       inspection
	at       map[string]*GuardError // by guard and queue: one finding for each
}

// work checks what no rule does: this worker rejects messages, so its queue needs a
// dead-letter exchange.
func (c *guardCheck) work(q declare.QueueInfo) {
	if _, ok := q.Arguments["x-dead-letter-exchange"]; !ok && q.Type != "stream" {
		c.add(GuardDeadLetter, q.Name, "it has no dead-letter exchange, so the broker drops messages that are given up or exceed the delivery limit",
			"declare it with retry.Topology, or waive this guard if a policy on the broker sets one")
	}
	_, length := q.Arguments["x-max-length"]
	_, bytes := q.Arguments["x-max-length-bytes"]
	if c.strategy == StrategyNative && (length || bytes) && q.Arguments["x-overflow"] != "reject-publish" {
		c.add(GuardMaxLength, q.Name, "it has a limit and drops its oldest messages; RabbitMQ 4.3 hangs over such a queue once it delays more messages than the limit allows",
			"give it x-overflow reject-publish, or remove the limit")
	}
	if c.strategy == StrategyNative && c.plan.outlasts(q) {
		c.add(GuardDelayQueue, q.Name, fmt.Sprintf("its x-message-ttl of %v ms keeps running while a message waits in it, and the policy's delays add up to %v: the broker dead-letters waiting messages as expired", q.Arguments["x-message-ttl"], c.plan.together()),
			"use StrategyAuto, StrategyDeadLetter or StrategyRepublish, or a queue with a longer TTL or none")
	}
}

const (
	remedyApply = "apply retry.Topology of this policy"
	remedyTwice = "give it x-dead-letter-strategy at-least-once and x-overflow reject-publish, as retry.Topology does"
	remedyLeft  = "remove the limit, and limit what is published instead"
)

// finding takes the finding of a rule. Rules find more than guards need.
func (c *guardCheck) finding(f audit.Finding) {
	dead := c.plan.names.DeadLetterQueue(c.queue)
	switch name := f.Resource.Name; {
	case f.Resource.Kind == "binding":
		if f.Rule == "missing" && !strings.Contains(name, fmt.Sprintf("to queue %.64q", dead)) {
			c.add(GuardDelayQueue, c.queue, f.Resource.String()+" is missing", remedyApply)
			if i := c.level(func(q string) bool { return strings.Contains(name, fmt.Sprintf("to queue %.64q", q)) }); i >= 0 && c.strategy == StrategyDeadLetter {
				c.loses(i, f)
			}
		}
	case f.Rule == "shared-ladder":
		c.add(GuardLadder, c.queue, fmt.Sprintf("the exchange %.80q of its ladder has bindings of another ladder, so each message that waits there becomes several", name),
			"delete those bindings, or set another Names.LadderPrefix; hopback topology verify lists them")
	case f.Resource.Kind != "queue":
	case name == c.queue:
		switch {
		case f.Rule == "at-most-once":
			c.add(GuardAtMostOnce, name, f.Problem, remedyTwice)
		case f.Rule == "max-length":
			c.add(GuardMaxLength, name, f.Problem, remedyLeft)
		case f.Rule == "different" && c.strategy == StrategyDeadLetter && strings.HasPrefix(f.Argument, "x-dead-letter-") && f.Argument != "x-dead-letter-strategy":
			c.add(GuardDelayQueue, name, f.Problem+", for StrategyDeadLetter", "declare it with retry.Topology, or use StrategyRepublish")
		}
	case name == dead:
		switch {
		case f.Rule == "missing":
			c.in.gone = true // a queue may have another
		case f.Rule == "delivery-limit":
			c.add(GuardDeliveryLimit, name, f.Problem, f.Remedy+", as retry.Topology does")
		case f.Rule == "max-length" && c.strategy == StrategyDeadLetter:
			c.add(GuardMaxLength, name, f.Problem, remedyLeft)
		}
	default:
		c.delayQueue(f)
	}
}

// delayQueue takes the finding of a rule about a delay queue.
func (c *guardCheck) delayQueue(f audit.Finding) {
	name := f.Resource.Name
	i := c.level(func(q string) bool { return q == name })
	switch f.Rule {
	case "missing":
		c.add(GuardDelayQueue, name, "it doesn't exist", remedyApply)
		if c.strategy == StrategyDeadLetter {
			c.loses(i, f)
		}
	case "different":
		switch f.Argument {
		case "x-message-ttl":
			c.add(GuardDelayQueue, name, f.Problem, remedyApply)
			if _, set := c.seen[name].Arguments["x-message-ttl"]; !set {
				c.loses(i, f) // it holds messages for ever
			}
		case "x-dead-letter-exchange", "x-dead-letter-routing-key":
			c.add(GuardDelayQueue, name, f.Problem, remedyApply)
			c.loses(i, f)
		}
	case "dead-letter":
		c.add(GuardDelayQueue, name, f.Problem, remedyApply)
		c.loses(i, f)
	case "delay-mismatch", "expires":
		c.add(GuardDelayQueue, name, f.Problem, remedyApply)
	case "at-most-once":
		c.add(GuardAtMostOnce, name, f.Problem, remedyTwice)
	case "max-length":
		c.add(GuardMaxLength, name, f.Problem, remedyLeft)
	}
}

// level returns the index of the delay queue, or -1.
func (c *guardCheck) level(is func(queue string) bool) int {
	return slices.IndexFunc(c.plan.levels, func(d time.Duration) bool {
		if c.strategy == StrategyDeadLetter {
			return is(c.plan.names.HoldQueue(d))
		}
		return is(c.plan.names.DelayQueue(d))
	})
}

func (c *guardCheck) loses(level int, f audit.Finding) {
	if level >= 0 && !c.plan.waived[GuardDelayQueue] {
		c.in.losing[level] = &GuardError{Guard: GuardDelayQueue, Queue: f.Resource.Name, Problem: f.Problem, Remedy: remedyApply}
	}
}

// add records a finding. Several findings at one queue are one error of its guard.
func (c *guardCheck) add(g Guard, queue, problem, remedy string) {
	key := string(g) + " " + queue
	if e := c.at[key]; e != nil && queue != c.queue {
		e.Problem += "; " + problem
		return
	}
	e := &GuardError{Guard: g, Queue: queue, Problem: problem, Remedy: remedy}
	c.at[key] = e
	if c.plan.waived[g] {
		c.in.waived = append(c.in.waived, e)
	} else {
		c.in.found = append(c.in.found, e)
	}
}

// unseen takes something that the user may not look at.
func (c *guardCheck) unseen(f audit.Finding) {
	guards := []Guard{GuardDelayQueue, GuardAtMostOnce}
	needs := fmt.Sprintf("configure, write or read on %s", f.Resource)
	switch {
	case f.Resource.Kind == "binding":
		guards = guards[:1]
		needs = fmt.Sprintf("write on the destination and read on the source of %s", f.Resource)
	case f.Resource.Name == c.plan.names.DeadLetterQueue(c.queue):
		guards = []Guard{GuardDeliveryLimit}
	}
	c.in.unseen = append(c.in.unseen, fmt.Sprintf("%q at %s", guards, f.Resource))
	c.in.needs = append(c.in.needs, needs)
}
