package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/startcheck"
)

// ErrWrongGroup means that a queue of the group wasn't declared with the fields of the worker's
// [Group]. A worker with another window would change the order of messages, so it doesn't start.
var ErrWrongGroup = errors.New("the queue was declared for another group")

// Consume handles messages of the partitions that belong to this worker, and shares the others
// with the group's other workers, until ctx ends. Then it hands its partitions over, and returns
// nil. The group's topology must exist.
//
// Handlers run as they do with [client.Conn.Consume], with these differences:
//
//   - Messages of one key are handled one after the other.
//   - After an error or a client.Requeue, the worker keeps the message, instead of returning it to
//     its queue.
//   - The ctx of a handler ends at once when the connection is lost.
//   - client.Start.Control is nil, so middleware can't pause the consumers, except for middleware/pause.
//
// Don't use retry.With in h: set [Config.Retry]. A later generation of a group handles nothing
// before [Reshard] is done.
//
// During a memory or disk alarm the broker answers no requests. A worker that starts during one
// uses g unchecked, and returns an error about it only after the alarm. A worker of a later
// generation waits for the end of the alarm.
//
// The errors are those of Conn.Consume. [*argument.Error] also means that RabbitMQ is older than
// 4.3, and [ErrWrongGroup] that the queues were declared for another Group.
func Consume(ctx context.Context, conn *client.Conn, g Group, h client.Handler, cfg Config) error {
	if conn == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	if h == nil {
		return argument.New("handler", nil, "is nil", "pass a Handler, such as client.JSON(func(ctx, order) error {...})")
	}
	g, err := g.withDefaults()
	if err != nil {
		return err
	}
	if cfg, err = cfg.withDefaults(); err != nil {
		return err
	}
	in := inside.Of(conn)
	version, err := in.AwaitVersion(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return &client.Error{Op: "consume", Target: g.Name, Kind: client.ErrClosed, Err: err}
	}
	if err := supported(version); err != nil {
		return err
	}
	lines := loglines.NewRepeats(in.Log().Handler())
	defer lines.Flush()
	w := newWorker(g, h, cfg, slog.New(lines).With("group", g.Name, "worker", cfg.Worker))
	w.clock = newClock(brokerclock.OwnClock(ctx))
	parent := ctx
	ctx, fail := context.WithCancelCause(parent)
	defer fail(nil)
	var pending *startcheck.Pending[limits]
	err = in.Start(ctx, g.Name, func() error {
		var found limits
		found, pending, err = startcheck.Check[limits]{
			Run:    func(ctx context.Context) (limits, error) { return g.check(ctx, conn) },
			Alarms: in, Stop: fail, Log: w.log,
		}.Start(ctx, w.learn)
		if err == nil && pending == nil {
			w.learn(found)
		}
		return err
	})
	if err != nil && ctx.Err() == nil {
		return err
	}
	if pending != nil {
		w.log.Warn("hopback: the broker answers no requests during its memory or disk alarm. The worker starts without a check of the group's queues and without hearing other workers; the check runs after the alarm")
	}
	if ctx.Err() == nil {
		err = w.run(ctx, fail, conn)
	} else {
		err = failure(ctx)
	}
	if parent.Err() != nil && err == context.Cause(parent) {
		return nil
	}
	return err
}

// supported refuses a broker that doesn't report which consumer is the active one.
func supported(version string) error {
	if version != "" && oldbroker.Of(client.Broker{Version: version}.AtLeast).LacksActiveState {
		return argument.New("conn", version, "needs RabbitMQ 4.3 or later, and the broker is "+version, "upgrade RabbitMQ, or use one queue with a single active consumer and middleware/ordered")
	}
	return nil
}

// consumerTimeout is RabbitMQ's default, which can't be read over AMQP. The consumers ask for what
// they believe, so an operator's other default has no effect.
const consumerTimeout = 30 * time.Minute

// maxConsumerTimeout is the longest that a consumer can ask for. A queue can have a longer one.
const maxConsumerTimeout = math.MaxUint32 * time.Millisecond

// limits are what the arguments of a group's queues say.
type limits struct {
	timeout    time.Duration // the shortest consumer timeout
	deliveries int64         // the lowest delivery limit; -1: none
	counts     bool          // RabbitMQ itself has a delivery limit
}

// check refuses a broker or queues that can't keep the order.
func (g Group) check(ctx context.Context, conn *client.Conn) (found limits, err error) {
	found = limits{timeout: maxConsumerTimeout, deliveries: -1}
	for i := range g.Partitions {
		info, err := declare.Inspect(ctx, conn.Management(), g.queue(i))
		if err := supported(conn.Broker().Version); err != nil {
			return found, err
		}
		if err != nil {
			return found, err
		}
		for key, want := range map[string]any{argPartitions: int64(g.Partitions), argWindow: int64(g.Window), "x-single-active-consumer": true} {
			if got := info.Arguments[key]; got != want {
				return found, fmt.Errorf("hopback: consume %q: %w: its %s is %v, and the worker's group has %v; use the same Group in all workers, and Reshard to change it", info.Name, ErrWrongGroup, key, got, want)
			}
		}
		timeout := consumerTimeout
		if ms, ok := info.Arguments["x-consumer-timeout"].(int64); ok {
			timeout = min(time.Duration(min(ms, math.MaxUint32))*time.Millisecond, maxConsumerTimeout)
		}
		found.timeout = min(found.timeout, timeout)
		limit, set := info.Arguments[argLimit].(int64)
		if !set {
			limit = defaultLimit
		}
		if limit >= 0 && (found.deliveries < 0 || limit < found.deliveries) {
			found.deliveries = limit
		}
		found.counts = found.counts || info.Arguments["x-delivery-limit"] != int64(declare.Unlimited)
		for _, key := range []string{"x-message-ttl", "x-expires", "x-delayed-retry-type"} {
			if got, set := info.Arguments[key]; set {
				return found, fmt.Errorf("hopback: consume %q: %w: its %s is %v, which breaks the order of its messages; declare it without", info.Name, ErrWrongGroup, key, got)
			}
		}
	}
	return found, nil
}

// learn takes over what the check has found. Before, during an alarm, no message reaches the group's
// delivery limit.
func (w *worker) learn(found limits) {
	w.timeout.Store(int64(found.timeout))
	w.limit.Store(found.deliveries)
	if found.counts {
		w.log.Warn("hopback: RabbitMQ has a delivery limit for the group's queues, and dead-letters what a worker holds when its connection was lost that often; declare the queues by Group.Topology")
	}
}

// run consumes until ctx ends, or one of the consumers can't, and calls fail.
func (w *worker) run(ctx context.Context, fail context.CancelCauseFunc, conn *client.Conn) error {
	in := inside.Of(conn)
	heard, hangUp := context.WithCancel(context.WithoutCancel(ctx))
	defer hangUp()
	w.waits.Store(w.group.Generation > 1)
	var leave func()
	err := in.Start(ctx, w.group.Name, func() (err error) {
		leave, err = w.join(ctx, heard, conn, fail)
		return err
	})
	if err != nil {
		if ctx.Err() != nil {
			return failure(ctx)
		}
		return err
	}
	if w.group.Generation > 1 && !w.awaitOpen(ctx, conn, in) {
		leave()
		return failure(ctx)
	}
	w.waits.Store(false)
	w.ctx, w.fail = ctx, fail
	w.pausable = &inside.Group{Name: w.group.Name, Pausing: &w.control, Life: ctx}
	w.seals.ask = func() (string, error) {
		ctx, cancel := context.WithTimeout(ctx, sealLimit)
		defer cancel()
		return w.group.markerSeal(ctx, conn)
	}
	w.seals.failed = func(err error) {
		if ctx.Err() == nil {
			w.log.Warn("hopback: the broker hasn't answered whether a message is a marker of Reshard; the message waits", "error", err)
		}
		backoff.Sleep(ctx, sealPause)
	}
	w.consume = func(ctx context.Context, p *part) error {
		return in.ConsumeGated(ctx, p.queue, inside.Gated[*client.Delivery]{
			Window: w.group.Window, Concurrency: min(w.cfg.Concurrency, w.group.Window), Grace: w.cfg.Grace, ConsumerTimeout: time.Duration(w.timeout.Load()),
			Control: &w.control, Handler: handler{p},
		})
	}
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() { w.clock.run(ctx, in.ReadClock) })
	stop := make(chan struct{})
	go w.loop(ctx, stop)
	<-w.left
	w.consumers.Wait()
	close(stop)
	<-w.ended
	w.lastReports()
	leave()
	return failure(ctx)
}

// failure is why ctx has ended; nil: its parent has.
func failure(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}
