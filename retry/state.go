package retry

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/internal/startcheck"
)

// queueState is what a consumer knows about a queue. It is computed once.
type queueState struct {
	queue    string
	strategy Strategy
	targets  []address.Address // StrategyRepublish: where messages go, by level
	noKey    error             // why there are no targets
	unusable error             // why this queue's messages can't be retried
	watch    *watch            // nil: the broker can't be asked
	clock    *clock
	log      *slog.Logger
	level    slog.Level // of the line about an attempt that will be retried
	// holdsMessages says that the broker holds messages until their delivery time.
	holdsMessages bool
	// canHold says that this queue is one of those. capped is logged once.
	canHold bool
	capped  sync.Once
	// tokens says that waiting messages can have tokens.
	tokens bool
	// pending is set while the check waits for the end of an alarm.
	pending *startcheck.Pending[*queueState]
	// prepared says that the consumer of this queue has called Prepare.
	prepared bool
	// consumer is whose state this is; nil if the handler is called without a consumer.
	consumer *refusal.Consumer
}

// states has the states of all consumers that use a decorator. Consumers of different
// brokers or virtual hosts may have queues of the same name, so each has its own state.
type states struct {
	last atomic.Pointer[queueState] // the one used last
	mu   sync.Mutex                 // protects changes of all
	all  atomic.Pointer[map[stateKey]*queueState]
}

type stateKey struct {
	consumer *refusal.Consumer
	queue    string
}

// put stores the state of a consumer's queue, and forgets consumers that have ended.
func (s *states) put(q *queueState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[stateKey]*queueState{}
	if old := s.all.Load(); old != nil {
		maps.Copy(all, *old)
		maps.DeleteFunc(all, func(k stateKey, _ *queueState) bool { return k.consumer != nil && k.consumer.Ended() })
	}
	all[stateKey{q.consumer, q.queue}] = q
	s.all.Store(&all)
	s.last.Store(q)
}

// get returns the state of a consumer's queue, or nil.
func (s *states) get(consumer *refusal.Consumer, queue string) *queueState {
	if q := s.last.Load(); q != nil && q.consumer == consumer && q.queue == queue {
		return q
	}
	all := s.all.Load()
	if all == nil {
		return nil
	}
	q := (*all)[stateKey{consumer, queue}]
	if q != nil {
		s.last.Store(q)
	}
	return q
}

// only returns the state of queue, if exactly one consumer has one, and otherwise nil.
// several reports whether more than one has.
func (s *states) only(queue string) (only *queueState, several bool) {
	all := s.all.Load()
	if all == nil {
		return nil, false
	}
	for k, q := range *all {
		switch {
		case k.queue != queue || k.consumer != nil && k.consumer.Ended():
		case only != nil:
			return nil, true
		default:
			only = q
		}
	}
	return only, false
}

// errOtherCtx is the failure of a delivery that can't be assigned to a consumer.
var errOtherCtx = argument.New("ctx", nil, "isn't derived from the one that the consumer passed in, and several consumers of queues with this name share the handler",
	"let the middleware around retry.With pass on the ctx it gets, or give each consumer its own handler")

// stateFor computes what is known about a queue without asking the broker.
func (pl *plan) stateFor(queue string, strategy Strategy) *queueState {
	q := &queueState{queue: queue, strategy: strategy, clock: &clock{own: time.Now}, log: noLog, level: pl.level}
	if q.unusable = checkQueue(argument.Root("queue"), queue); q.unusable != nil {
		return q
	}
	if pl.ladder != nil {
		_, q.noKey = pl.ladder.address(argument.Root("queue"), pl.names, maxDelay, queue)
		return q
	}
	for _, delay := range pl.levels {
		key, err := RoutingKey(delay, queue)
		if err != nil {
			// Only StrategyRepublish has routing keys.
			q.targets, q.noKey = nil, err
			return q
		}
		q.targets = append(q.targets, address.Exchange(pl.names.RetryExchange, key))
	}
	return q
}

// copiesTo returns an address for copies of q's messages, or false if there is none. Copies with
// other delays go to the same exchange, or to those of the same ladder.
func (pl *plan) copiesTo(q *queueState) (address.Address, bool) {
	if pl.ladder != nil {
		to, err := pl.ladder.address(argument.Root("queue"), pl.names, pl.longest(), q.queue)
		return to, err == nil
	}
	if len(q.targets) == 0 {
		return address.Address{}, false
	}
	return q.targets[0], true
}

var noLog = slog.New(slog.DiscardHandler)

// logOf returns the consumer's logger, or one that discards.
func logOf(s client.Start) *slog.Logger {
	if s.Log == nil {
		return noLog
	}
	return s.Log
}

// state returns what the consumer with this ctx knows about a queue. The consumer has prepared
// it. If a test calls Handle without a consumer, the state isn't prepared, and the strategy is
// the one that needs no knowledge of the broker. The error is errOtherCtx.
func (d *decorator) state(ctx context.Context, queue string) (*queueState, error) {
	consumer := refusal.Of(ctx)
	if q := d.states.get(consumer, queue); q != nil {
		return q, nil
	}
	if consumer != nil {
		if q := d.states.get(nil, queue); q != nil && q.prepared {
			return q, nil // a middleware's Prepare has passed on another ctx
		}
	} else if q, several := d.states.only(queue); q != nil {
		return q, nil
	} else if several {
		return nil, errOtherCtx
	}
	strategy := d.plan.strategy
	if strategy == StrategyNative || strategy == StrategyAuto {
		strategy = StrategyRepublish
	}
	q := d.plan.stateFor(queue, strategy)
	q.consumer, q.clock.own = consumer, brokerclock.OwnClock(ctx)
	d.states.put(q)
	return q, nil
}
