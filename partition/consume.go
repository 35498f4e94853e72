package partition

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
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
//   - What would return a message to its queue keeps it in hand: an error, or a client.Requeue.
//   - The ctx of a handler ends at once when the connection is lost.
//   - client.Start.Control is nil, so middleware can't pause the consumers.
//
// Don't use retry.With in h: set [Config.Retry]. A later generation of a group handles nothing
// before [Reshard] is done.
//
// The errors are those of Conn.Consume. [*argument.Error] also means that RabbitMQ is older than
// 4.3, and [ErrWrongGroup] that the queues don't fit.
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
	var timeout time.Duration
	if err := persist(ctx, conn, func() (err error) {
		timeout, err = g.check(ctx, conn)
		return err
	}); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	w := newWorker(g, h, cfg, conn.Internal().Log().With("group", g.Name, "worker", cfg.Worker))
	w.timeout = timeout
	return w.run(ctx, conn)
}

// persist calls f again as long as it fails because the connection was lost.
func persist(ctx context.Context, conn *client.Conn, f func() error) (err error) {
	for failures := 0; ; failures++ {
		if err = f(); err == nil || !errors.Is(err, client.ErrConnectionLost) || !link.Pause(ctx, conn.Internal().Pause(failures)) {
			return err
		}
	}
}

// consumerTimeout is RabbitMQ's default, which can't be read over AMQP. The consumers ask for what
// they believe, so an operator's other default has no effect.
const consumerTimeout = 30 * time.Minute

// maxConsumerTimeout is the longest that a consumer can ask for. A queue can have a longer one.
const maxConsumerTimeout = math.MaxUint32 * time.Millisecond

// check refuses a broker or queues that can't keep the order. It returns the shortest consumer
// timeout of the queues.
func (g Group) check(ctx context.Context, conn *client.Conn) (shortest time.Duration, err error) {
	shortest = maxConsumerTimeout
	for i := range g.Partitions {
		info, err := declare.Inspect(ctx, conn.Management(), g.queue(i))
		b := conn.Broker()
		if b.Version != "" && oldbroker.Of(b.AtLeast).LacksActiveState {
			return 0, argument.New("conn", b.Version, "needs RabbitMQ 4.3 or later, and the broker is "+b.Version, "upgrade RabbitMQ, or use one queue with a single active consumer and middleware/ordered")
		}
		if err != nil {
			return 0, err
		}
		for key, want := range map[string]any{argPartitions: int64(g.Partitions), argWindow: int64(g.Window), "x-single-active-consumer": true} {
			if got := info.Arguments[key]; got != want {
				return 0, fmt.Errorf("hopback: consume %q: %w: its %s is %v, and the worker's group has %v; use the same Group in all workers, and Reshard to change it", info.Name, ErrWrongGroup, key, got, want)
			}
		}
		timeout := consumerTimeout
		if ms, ok := info.Arguments["x-consumer-timeout"].(int64); ok {
			timeout = min(time.Duration(min(ms, math.MaxUint32))*time.Millisecond, maxConsumerTimeout)
		}
		shortest = min(shortest, timeout)
		for _, key := range []string{"x-message-ttl", "x-expires", "x-delayed-retry-type"} {
			if got, set := info.Arguments[key]; set {
				return 0, fmt.Errorf("hopback: consume %q: %w: its %s is %v, which breaks the order of its messages; declare it without", info.Name, ErrWrongGroup, key, got)
			}
		}
	}
	return shortest, nil
}

// run consumes until ctx ends, or one of the consumers can't.
func (w *worker) run(ctx context.Context, conn *client.Conn) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	in := conn.Internal()
	heard, hangUp := context.WithCancel(context.WithoutCancel(ctx))
	defer hangUp()
	var leave func()
	err := persist(ctx, conn, func() (err error) {
		leave, err = w.join(ctx, heard, conn, fail)
		return err
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	if w.group.Generation > 1 && !w.awaitOpen(ctx, conn, in) {
		leave()
		return failure(ctx)
	}
	w.ctx, w.fail = ctx, fail
	w.consume = func(ctx context.Context, p *part) error {
		return in.ConsumeGated(ctx, p.queue, inside.Gated[*client.Delivery]{
			Window: w.group.Window, Concurrency: min(w.cfg.Concurrency, w.group.Window), Grace: w.cfg.Grace, ConsumerTimeout: w.timeout,
			Key: p.key, Handler: &handler{w, p}, Turn: p.began, Over: p.ended, Attached: p.lineUp,
		})
	}
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
