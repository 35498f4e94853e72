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
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/refusal"
)

// Guard is the name of one part of the topology check. [With] and [Central] check the topology
// when a consumer starts. If it would lose or block messages, the consumer doesn't start, and the
// error is a [*GuardError].
//
// Disable a check with [Policy.Waive], for example if a RabbitMQ policy sets an argument that the
// queue itself doesn't have. A disabled check still runs, and logs its findings as warnings.
//
// The check reads what AMQP shows: queues with their arguments, and bindings. It assumes that
// exchanges are declared as [Topology] declares them and that no RabbitMQ policy applies.
//
//   - RabbitMQ 4.3 and later require permissions: any permission on a queue; for a binding, write
//     on its queue and read on its exchange. The consumer logs what the user isn't permitted to
//     see, skips those checks, and starts.
//   - During a memory or disk alarm, the broker can't be asked. The consumer starts, and is checked
//     when the alarm is over. Until then it acknowledges messages that were handled, and holds those
//     that must be retried or dead-lettered. If the check then finds a fault, the consumer stops.
//   - While the consumer runs and messages fail, the checks run again: at most once a minute, or
//     every ten seconds while retries come back early or not at all, and within a minute of the last
//     failure. They log findings as errors.
//   - A delay queue that starts to lose messages gets no more of them. They wait in another delay
//     queue, or are dead-lettered with [client.ReasonUnforwardable].
//   - The consumer also logs an error if retries come back early without a visible cause, or if
//     the dead-letter queue is gone. A RabbitMQ policy, which the check can't see, may be the
//     cause.
type Guard string

const (
	// GuardDeadLetter checks that the work queue has a dead-letter exchange. Without one, the
	// broker silently drops messages that are dead-lettered or exceed the delivery limit.
	GuardDeadLetter Guard = "dead-letter"
	// GuardAtMostOnce checks that the work queue and the delay queues dead-letter at least once.
	// If one dead-letters at most once, a message is lost when the next exchange or queue is
	// missing or full.
	GuardAtMostOnce Guard = "at-most-once"
	// GuardDeliveryLimit checks that the dead-letter queue has no delivery limit. A dead letter
	// keeps the delivery count of its work queue, so reading it once could exceed the limit, and
	// the broker would drop it. The work queue may have a limit: no strategy's retry counts as a
	// failed delivery.
	GuardDeliveryLimit Guard = "delivery-limit"
	// GuardDelayQueue checks that messages return after their delay. It finds one of these
	// faults:
	//
	//   - A delay queue that the policy needs is missing or isn't bound.
	//   - A delay queue delays messages for another time than the policy's, or forever, or
	//     dead-letters them to another exchange.
	//   - The work queue isn't bound to the exchange that returns messages.
	//   - With StrategyNative, the work queue's message TTL is shorter than all delays of the
	//     policy together, so waiting messages would be dead-lettered as expired.
	GuardDelayQueue Guard = "delay-queue"
	// GuardMaxLength checks that queues that receive dead-lettered messages have no maximum
	// length.
	//
	//   - While the work queue is full, returning messages can't leave their delay queue. Once 32
	//     of them are blocked, messages of other work queues can't leave it either.
	//   - With StrategyDeadLetter, the work queue's retries stop while its dead-letter queue is
	//     full.
	//   - With StrategyNative, a work queue with a limit needs overflow reject-publish. One that
	//     drops its oldest messages hangs permanently, with all messages in it, once more
	//     messages than the limit wait for their retry (RabbitMQ 4.3.6).
	//   - From RabbitMQ 4.4 on, anyone who may publish can make such a queue hang, with messages
	//     that wait for their delivery time. With other strategies the consumer starts, and logs a
	//     warning for the work queue, its dead-letter queue, and delay queues.
	GuardMaxLength Guard = "max-length"
	// GuardLadder checks that no ladder with another number of levels is bound to the exchanges
	// of this policy's [Policy.AnyDelay]. If one is, each waiting message becomes several, and
	// more with every retry.
	GuardLadder Guard = "ladder"
	// GuardStrategy checks that the broker and the queue support the policy's strategy. It can't
	// be disabled. Otherwise messages with StrategyNative would come back at once, again and
	// again; with StrategyDeadLetter, none would be retried.
	GuardStrategy Guard = "strategy"
)

var allGuards = []Guard{GuardDeadLetter, GuardAtMostOnce, GuardDeliveryLimit, GuardDelayQueue, GuardMaxLength, GuardLadder, GuardFailedQueue}

// AllGuards returns every check that can be disabled. Use it for [Policy.Waive] if you can't
// change the topology, for example another system's.
func AllGuards() []Guard { return slices.Clone(allGuards) }

// GuardError is a fault that the topology check found. Find it with errors.As in the error of
// Consume, which joins all findings.
type GuardError struct {
	Guard Guard
	// Queue is the name of the queue with the fault.
	Queue string
	// Problem is the fault, and Remedy how to fix it. Both are clauses without a full stop.
	Problem, Remedy string
}

func (e *GuardError) Error() string {
	return fmt.Sprintf("hopback: topology check %q failed at queue %q: %s; %s", string(e.Guard), e.Queue, e.Problem, e.Remedy)
}

// inspection is the result of one run of the checks.
type inspection struct {
	found, waived []*GuardError
	// hangs lists queues that work as long as nobody publishes for later: see hang.
	hangs []*GuardError
	// unsorted says that the topology is older than the exchange that sorts dead letters.
	unsorted bool
	// unseen lists what the user isn't permitted to see, and the checks that were skipped. needs
	// lists the permissions for them.
	unseen, needs []string
	// losing has, for each delay queue by level, why no message may be sent to it, or nil.
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

// prepare chooses the strategy and runs the checks. It returns all findings, joined. The watch is
// nil if the broker can't be asked. canHold reports whether the queue can hold a message for a delay.
func (pl *plan) prepare(ctx context.Context, s client.Start) (by Strategy, w *watch, canHold bool, err error) {
	if s.Management == nil {
		if pl.strategy == StrategyNative || pl.strategy == StrategyAuto {
			return StrategyRepublish, nil, false, nil // the strategy that works on every broker
		}
		return pl.strategy, nil, false, nil
	}
	work, err := declare.Inspect(ctx, s.Management, s.Queue)
	if err != nil {
		return "", nil, false, err
	}
	strategy, err := pl.choose(s.Broker, work)
	if err != nil {
		return "", nil, false, err
	}
	w = newWatch(s.Log, s.Queue, brokerclock.OwnClock(ctx), func(ctx context.Context) (inspection, error) {
		return pl.inspect(ctx, s, strategy)
	})
	refusal.Of(ctx).OnEnd(w.end)
	return strategy, w, holds(s.Broker, work), w.start(ctx)
}

// inspect reads the path of a retry from the consumer's queue and back, and of a dead letter.
func (pl *plan) inspect(ctx context.Context, start client.Start, strategy Strategy) (inspection, error) {
	ask, queue := start.Management, start.Queue
	t := pl.way(queue, strategy)
	s, err := check.Read(ctx, check.Sources{AMQP: ask}, t)
	if err != nil {
		return inspection{}, err
	}
	if pl.ladder != nil && len(s.Refused) == 0 { // each refusal costs the session
		others, err := check.Read(ctx, check.Sources{AMQP: ask}, declare.Topology{Bindings: pl.ladder.others(pl.names)})
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
	s.Version = start.Broker.Version
	findings := check.Verify(s.Assume(t), t).Findings
	c.in.unsorted = slices.ContainsFunc(findings, c.lacksSort)
	for _, f := range findings {
		if f.Rule == "unseen" {
			c.unseen(f)
		} else {
			c.finding(f)
		}
	}
	return c.in, nil
}

// lacksSort reports whether the binding is missing that leads the queue's dead letters to the exchange
// that sorts them. A topology of an older version has neither, and works as long as nobody else binds a
// queue to the dead-letter exchange.
func (c *guardCheck) lacksSort(f check.Finding) bool {
	n := c.plan.names
	return f.Rule == "missing" && f.Resource.Kind == "binding" && strings.HasPrefix(f.Resource.Name, fmt.Sprintf("%.64q to exchange %.64q", n.DeadLetterExchange, n.sortExchange()))
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

// guardCheck turns the findings of rules into those of checks.
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
		c.add(GuardDeadLetter, q.Name, "it has no dead-letter exchange, so the broker drops messages that are dead-lettered or exceed the delivery limit",
			"declare it with retry.Topology, or disable this check with Policy.Waive if a RabbitMQ policy sets one")
	}
	_, length := q.Arguments["x-max-length"]
	_, bytes := q.Arguments["x-max-length-bytes"]
	if c.strategy == StrategyNative && (length || bytes) && q.Arguments["x-overflow"] != "reject-publish" {
		c.add(GuardMaxLength, q.Name, "it has a limit and drops its oldest messages; such a queue hangs once it delays more messages than the limit allows",
			"give it x-overflow reject-publish, or remove the limit")
	}
	if c.strategy == StrategyNative && c.plan.outlasts(q) {
		c.add(GuardDelayQueue, q.Name, fmt.Sprintf("its x-message-ttl of %v ms keeps running while a message waits in it, and the policy's delays add up to %v: the broker dead-letters waiting messages as expired", q.Arguments["x-message-ttl"], c.plan.together()),
			"use StrategyAuto, StrategyDeadLetter, or StrategyRepublish, or a queue with a longer TTL or none")
	}
}

const (
	remedyApply = "apply retry.Topology of this policy"
	remedyTwice = "give it x-dead-letter-strategy at-least-once and x-overflow reject-publish, as retry.Topology does"
	remedyLeft  = "remove the limit, and limit the publishers instead"
)

// finding handles the finding of a rule. Rules find more than is checked here.
func (c *guardCheck) finding(f check.Finding) {
	dead := c.plan.names.DeadLetterQueue(c.queue)
	switch name := f.Resource.Name; {
	case c.lacksSort(f), c.in.unsorted && f.Resource.Kind == "binding" && strings.HasPrefix(name, fmt.Sprintf("%.64q to ", c.plan.names.sortExchange())):
		// See inspection.unsorted.
	case f.Resource.Kind == "binding":
		if f.Rule == "missing" && !strings.Contains(name, fmt.Sprintf("to queue %.64q", dead)) {
			c.add(GuardDelayQueue, c.queue, f.Resource.String()+" is missing", remedyApply)
			if i := c.level(func(q string) bool { return strings.Contains(name, fmt.Sprintf("to queue %.64q", q)) }); i >= 0 && c.strategy == StrategyDeadLetter {
				c.loses(i, f)
			}
		}
	case f.Rule == "shared-ladder":
		c.add(GuardLadder, c.queue, fmt.Sprintf("the exchange %.80q of its ladder has bindings of another ladder, so each waiting message becomes several", name),
			"delete those bindings, or set another Names.LadderPrefix; hopback topology verify lists them")
	case f.Rule == "delayed-drop-head":
		c.hang(f)
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

// delayQueue handles the finding of a rule about a delay queue.
func (c *guardCheck) delayQueue(f check.Finding) {
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
				c.loses(i, f) // it holds messages forever
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

// hang records a queue that anyone who may publish can make hang (RabbitMQ 4.4). The consumer
// starts all the same, unless its own strategy could cause it: the queue worked before the broker
// was upgraded.
func (c *guardCheck) hang(f check.Finding) {
	name := f.Resource.Name
	if name == c.queue && c.strategy != StrategyNative || name == c.plan.names.DeadLetterQueue(c.queue) || c.level(func(q string) bool { return q == name }) >= 0 {
		c.in.hangs = append(c.in.hangs, &GuardError{Guard: GuardMaxLength, Queue: name, Problem: f.Problem, Remedy: f.Remedy})
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

func (c *guardCheck) loses(level int, f check.Finding) {
	if level >= 0 && !c.plan.waived[GuardDelayQueue] {
		c.in.losing[level] = &GuardError{Guard: GuardDelayQueue, Queue: f.Resource.Name, Problem: f.Problem, Remedy: remedyApply}
	}
}

// add records a finding. Several findings at one queue are one error of their check.
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

// unseen records something that the user isn't permitted to see.
func (c *guardCheck) unseen(f check.Finding) {
	guards := []Guard{GuardDelayQueue, GuardAtMostOnce}
	needs := fmt.Sprintf("configure, write, or read on %s", f.Resource)
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
