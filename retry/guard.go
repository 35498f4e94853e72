package retry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// Guard is a check that With makes when a consumer starts: topology that would
// lose messages or stall them is refused, rather than found out later. Each can be
// waived by naming it in Policy.Waive, for instance where a policy of the broker's
// sets what the queue's arguments don't show: the checks see arguments only.
type Guard string

const (
	// GuardDeadLetter: the work queue has no dead-letter exchange, so whatever is
	// given up, or exceeds the delivery limit, would be dropped in silence.
	GuardDeadLetter Guard = "dead-letter"
	// GuardAtMostOnce: the work queue, or a delay queue, dead-letters at most once,
	// so that a message is lost when what comes next is missing or full.
	GuardAtMostOnce Guard = "at-most-once"
	// GuardDeliveryLimit: the dead-letter queue has a delivery limit. A dead letter
	// brings the delivery count of its work queue along, and would be ended there
	// when it is first looked at. (The work queue's own limit can't cut a policy
	// short: no strategy's retry counts as a failed delivery.)
	GuardDeliveryLimit Guard = "delivery-limit"
	// GuardDelayQueue: a delay queue that the policy needs is missing, or isn't
	// bound, or the work queue isn't bound for the way back.
	GuardDelayQueue Guard = "delay-queue"
	// GuardMaxLength: the work queue has a max-length. When it is full, messages
	// that come back can't leave their delay queue, and after 32 of them nor can
	// those of other work queues.
	GuardMaxLength Guard = "max-length"
	// GuardNative: the broker or the queue can't do the strategy Native. It can't
	// be waived: messages would come back at once, for ever.
	GuardNative Guard = "native"
)

var allGuards = []Guard{GuardDeadLetter, GuardAtMostOnce, GuardDeliveryLimit, GuardDelayQueue, GuardMaxLength}

// AllGuards returns every guard that can be waived: for a topology that others
// have made and that can't be changed, such as one from another system.
func AllGuards() []Guard { return slices.Clone(allGuards) }

// GuardError is what a Guard found.
type GuardError struct {
	Guard Guard
	// Queue that it found it at.
	Queue string
	// Problem and Remedy are sentences without a full stop.
	Problem, Remedy string
}

func (e *GuardError) Error() string {
	return fmt.Sprintf("hopback: guard %q at queue %q: %s; %s", string(e.Guard), e.Queue, e.Problem, e.Remedy)
}

// prepare chooses the strategy and runs the guards. Everything that they find is
// returned, joined.
func (pl *plan) prepare(ctx context.Context, s client.Start) (Strategy, error) {
	if s.Management == nil {
		if pl.strategy == Native || pl.strategy == Auto {
			return Republish, nil // an unknown broker: the way that works on all
		}
		return pl.strategy, nil
	}
	look := sync.OnceValues(func() (declare.QueueInfo, error) { return declare.Inspect(ctx, s.Management, s.Queue) })
	strategy, err := pl.choose(ctx, s, func(context.Context) (declare.QueueInfo, error) { return look() })
	if err != nil {
		return 0, err
	}
	var checks []func() error
	add := func(g Guard, check func() error) {
		if !pl.waived[g] {
			checks = append(checks, check)
		}
	}
	ofWork := func(check func(declare.QueueInfo) error) func() error {
		return func() error {
			info, err := look()
			if err != nil {
				return err
			}
			return check(info)
		}
	}
	add(GuardDeadLetter, ofWork(pl.guardDeadLetter))
	add(GuardAtMostOnce, ofWork(guardAtMostOnce))
	add(GuardMaxLength, ofWork(guardMaxLength))
	add(GuardDeliveryLimit, func() error { return pl.guardDeliveryLimit(ctx, s) })
	if strategy != Native && (len(pl.rungs) > 0 || pl.ladder != nil) {
		checks = append(checks, pl.wayThere(ctx, s, strategy)...)
	}
	return strategy, errors.Join(inParallel(checks)...)
}

// inParallel keeps a start from waiting for one answer at a time.
func inParallel(checks []func() error) []error {
	errs := make([]error, len(checks))
	turns := make(chan struct{}, 8)
	var wg sync.WaitGroup
	for i, check := range checks {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			errs[i] = check()
		})
	}
	wg.Wait()
	// The same finding, say a failed request, may come from several checks.
	seen := map[string]bool{}
	return slices.DeleteFunc(errs, func(err error) bool {
		if err == nil {
			return true
		}
		known := seen[err.Error()]
		seen[err.Error()] = true
		return known
	})
}

func (pl *plan) guardDeadLetter(q declare.QueueInfo) error {
	if _, ok := q.Arguments["x-dead-letter-exchange"]; ok || q.Type == "stream" {
		return nil
	}
	return &GuardError{Guard: GuardDeadLetter, Queue: q.Name,
		Problem: "it has no dead-letter exchange, so messages that are given up or exceed the delivery limit are dropped",
		Remedy:  "declare it with retry.Topology; or waive this guard if a broker policy sets one"}
}

func guardAtMostOnce(q declare.QueueInfo) error {
	if _, ok := q.Arguments["x-dead-letter-exchange"]; !ok {
		return nil // guardDeadLetter says so
	}
	if q.Arguments["x-dead-letter-strategy"] == "at-least-once" && q.Arguments["x-overflow"] == "reject-publish" {
		return nil
	}
	return &GuardError{Guard: GuardAtMostOnce, Queue: q.Name,
		Problem: "it dead-letters at most once: a message is lost when the exchange, the binding or the queue behind it is missing or full",
		Remedy:  "give it x-dead-letter-strategy at-least-once and x-overflow reject-publish, as retry.Topology does"}
}

func guardMaxLength(q declare.QueueInfo) error {
	for _, arg := range []string{"x-max-length", "x-max-length-bytes"} {
		if _, ok := q.Arguments[arg]; ok {
			return &GuardError{Guard: GuardMaxLength, Queue: q.Name,
				Problem: "it has " + arg + ": while it is full, messages on their way back block the delay queues that all work queues share",
				Remedy:  "leave the limit out, and bound what is published instead"}
		}
	}
	return nil
}

// guardDeliveryLimit looks at the dead-letter queue that Topology gives a work
// queue; one by another name isn't known here.
func (pl *plan) guardDeliveryLimit(ctx context.Context, s client.Start) error {
	name := pl.names.DeadLetterQueue(s.Queue)
	if address.Queue(name).Validate() != nil {
		return nil
	}
	q, err := declare.Inspect(ctx, s.Management, name)
	switch {
	case errors.Is(err, declare.ErrNotFound):
		return nil
	case err != nil:
		return err
	case q.Type != "quorum":
		return nil
	}
	if limit, ok := q.Arguments["x-delivery-limit"].(int64); ok && limit < 0 {
		return nil
	}
	return &GuardError{Guard: GuardDeliveryLimit, Queue: name,
		Problem: "it has a delivery limit, and a dead letter brings along the deliveries that it has had",
		Remedy:  "give it x-delivery-limit -1, as retry.Topology does"}
}

// wayThere checks every queue and binding that a retried message comes through.
func (pl *plan) wayThere(ctx context.Context, s client.Start, strategy Strategy) []func() error {
	n := pl.names
	var checks []func() error
	queue := func(name string) {
		checks = append(checks, func() error {
			info, err := declare.Inspect(ctx, s.Management, name)
			switch {
			case errors.Is(err, declare.ErrNotFound):
				return pl.unlessWaived(&GuardError{Guard: GuardDelayQueue, Queue: s.Queue,
					Problem: fmt.Sprintf("the delay queue %q is missing", name), Remedy: "apply retry.Topology of this policy"})
			case err != nil:
				return err
			}
			if err := guardAtMostOnce(info); err != nil {
				return pl.unlessWaived(err.(*GuardError))
			}
			return nil
		})
	}
	bound := func(b declare.Binding) {
		checks = append(checks, func() error {
			if b.Source == "" || address.Exchange(b.Source, b.Key).Validate() != nil {
				return nil
			}
			found, err := declare.Bindings(ctx, s.Management, b)
			if err != nil && !errors.Is(err, declare.ErrNotFound) {
				return err
			}
			for _, f := range found {
				if sameHeaders(b, f) {
					return nil
				}
			}
			to := b.Queue
			if to == "" {
				to = b.Exchange
			}
			return pl.unlessWaived(&GuardError{Guard: GuardDelayQueue, Queue: s.Queue,
				Problem: fmt.Sprintf("%q isn't bound to the exchange %q with key %q", to, b.Source, b.Key), Remedy: "apply retry.Topology of this policy"})
		})
	}
	switch {
	case pl.waived[GuardDelayQueue] && pl.waived[GuardAtMostOnce]:
	case pl.ladder != nil:
		t := pl.ladder.topology(n)
		for _, q := range t.Queues {
			queue(q.Address().QueueName())
		}
		for _, b := range t.Bindings {
			bound(b)
		}
		bound(pl.ladder.home(n, s.Queue))
	case strategy == Republish:
		for _, d := range pl.rungs {
			queue(n.DelayQueue(d))
			bound(declare.Binding{Source: n.RetryExchange, Queue: n.DelayQueue(d), Key: delayKey(d)})
		}
		bound(declare.Binding{Source: n.RequeueExchange, Queue: s.Queue, Key: "*.*." + s.Queue})
	case strategy == DeadLetter:
		for _, d := range pl.rungs {
			queue(n.HoldQueue(d))
			bound(pl.holdBinding(d))
		}
		bound(declare.Binding{Source: n.ReturnExchange, Queue: s.Queue, Key: s.Queue})
		checks = append(checks, func() error {
			info, err := declare.Inspect(ctx, s.Management, s.Queue)
			if err != nil {
				return err
			}
			if info.Arguments["x-dead-letter-exchange"] == n.DeadLetterExchange && info.Arguments["x-dead-letter-routing-key"] == s.Queue {
				return nil
			}
			return pl.unlessWaived(&GuardError{Guard: GuardDelayQueue, Queue: s.Queue,
				Problem: fmt.Sprintf("the strategy DeadLetter needs it to dead-letter to %q with its own name as key", n.DeadLetterExchange),
				Remedy:  "declare it with retry.Topology, or use Republish"})
		})
	}
	return checks
}

func (pl *plan) unlessWaived(e *GuardError) error {
	if pl.waived[e.Guard] {
		return nil
	}
	return e
}

// sameHeaders compares what a headers binding matches, if it is one.
func sameHeaders(want, have declare.Binding) bool {
	for k, v := range want.Headers {
		if fmt.Sprint(have.Headers[k]) != fmt.Sprint(v) {
			return false
		}
	}
	return true
}
