package fair

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/loglines"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/startcheck"
	"github.com/hopback/hopback/retry"
)

// Consume handles messages of q, and shares the slots of this worker among tenants, until ctx ends.
// Then it drains and returns nil. The queue's topology must exist.
//
// Handlers run as they do with [client.Conn.Consume] and retry.With: h is wrapped with cfg.Retry. h
// is prepared once for the main queue and once for each lane, so [client.Delivery.Queue] may be the name of a
// lane, and each has a client.Control.
//
// During a memory or disk alarm the broker answers no requests. A worker that starts then returns an error
// about q only after the alarm.
//
// The errors are those of Conn.Consume. [*argument.Error] also means that RabbitMQ is older than
// 4.3, or that q.Lanes isn't the number of lanes that was declared.
func Consume(ctx context.Context, conn *client.Conn, q Queue, h client.Handler, cfg Config) error {
	if conn == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	if h == nil {
		return argument.New("handler", nil, "is nil", "pass a Handler, such as client.JSON(func(ctx, order) error {...})")
	}
	q, err := q.withDefaults()
	if err != nil {
		return err
	}
	if cfg, err = cfg.withDefaults(q); err != nil {
		return err
	}
	in := inside.Of(conn)
	version, err := in.AwaitVersion(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return &client.Error{Op: "consume", Target: q.Name, Kind: client.ErrClosed, Err: err}
	}
	if err := supported(version); err != nil {
		return err
	}
	lines := loglines.NewRepeats(in.Log().Handler())
	defer lines.Flush()
	now := time.Now()
	w := &worker{
		queue: q, cfg: cfg, conn: conn, inner: retry.With(cfg.Retry)(h), log: slog.New(lines).With("queue", q.Name),
		slots: newSlots(cfg.Concurrency, cfg.Reserve, q.Lanes, now), tenants: newTenants(cfg.Weight, cfg.Concurrency, q.Lanes),
		wake: make(chan struct{}, 1), jobs: make(chan job, maxJobs),
	}
	parent := ctx
	ctx, fail := context.WithCancelCause(parent)
	defer fail(nil)
	var pending *startcheck.Pending[struct{}]
	err = in.Start(ctx, q.Name, func() (err error) {
		_, pending, err = startcheck.Check[struct{}]{
			Run:    func(ctx context.Context) (struct{}, error) { return struct{}{}, q.check(ctx, conn) },
			Alarms: in, Stop: fail, Log: w.log,
		}.Start(ctx, func(struct{}) {})
		return err
	})
	if parent.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	if pending != nil {
		defer pending.Cancel()
	}
	err = w.run(ctx, fail)
	if cause := context.Cause(ctx); err == nil && parent.Err() == nil && cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	return err
}

// supported refuses a broker that doesn't prefer messages of a higher priority strictly.
func supported(version string) error {
	if version != "" && oldbroker.Of(client.Broker{Version: version}.AtLeast).LacksStrictPriorities {
		return argument.New("conn", version, "needs RabbitMQ 4.3 or later, and the broker is "+version, "upgrade RabbitMQ, or use a queue and workers for each kind of tenant")
	}
	return nil
}

// check refuses another number of lanes than was declared.
func (q Queue) check(ctx context.Context, conn *client.Conn) error {
	info, err := declare.Inspect(ctx, conn.Management(), q.lane(0))
	if err := supported(conn.Broker().Version); err != nil {
		return err
	}
	if err != nil {
		return err
	}
	if n, _ := info.Arguments[argLanes].(int64); n != int64(q.Lanes) {
		return argument.New("Queue.Lanes", q.Lanes, "isn't the number of lanes that was declared", "use the same Queue in all programs; to change it, declare a queue of another name")
	}
	return nil
}

// worker is one call of Consume.
type worker struct {
	queue   Queue
	cfg     Config
	conn    *client.Conn
	inner   client.Handler
	log     *slog.Logger
	slots   *slots
	tenants *tenants

	wake chan struct{} // has the upkeep run, if it rests
	jobs chan job
	// stays says that lanes accept no copies, or not as fast, so noisy messages stay in the main queue.
	stays    atomic.Bool
	moving   atomic.Int64 // when a message was last moved, in ns since epoch
	moves    atomic.Int64 // since the last check
	checking sync.Mutex
	stalled  bool // guarded by checking
}

// run consumes from all queues until ctx ends or one of the consumers can't.
func (w *worker) run(ctx context.Context, fail context.CancelCauseFunc) error {
	aside, stop := context.WithCancel(context.WithoutCancel(ctx))
	var others, consumers sync.WaitGroup
	others.Go(func() { w.upkeep(aside) })
	others.Go(func() { w.divert(aside) })
	defer others.Wait()
	defer stop()
	var first error
	var once sync.Once
	consume := func(queue string, lane int) {
		// There are more handlers than slots: some wait for a slot, and some of the main queue move a
		// message. The window of a consumer adapts to its handlers.
		cfg := client.ConsumerConfig{Concurrency: w.cfg.Concurrency + max(8, w.cfg.Concurrency/2), Grace: w.cfg.Grace, PrefetchBytes: link.PrefetchBytes / (2 * w.queue.Lanes)}
		if lane < 0 {
			cfg.PrefetchBytes = link.PrefetchBytes / 2
		}
		consumers.Go(func() {
			err := w.conn.Consume(ctx, queue, &handler{w, lane}, cfg)
			once.Do(func() {
				if ctx.Err() == nil || err != nil {
					first = err
				}
				fail(err)
			})
		})
	}
	consume(w.queue.Name, -1)
	for i := range w.queue.Lanes {
		consume(w.queue.lane(i), i)
	}
	consumers.Wait()
	return first
}

// handler handles the messages of the main queue, or of a lane.
type handler struct {
	*worker
	lane int // -1: the main queue
}

func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if h.lane < 0 && s.Forwards != nil {
		s.Forwards(address.Queue(h.queue.lane(0)))
	}
	if raise := s.Handlers; raise != nil {
		s.Handlers = func(n int) error {
			if n > h.cfg.Concurrency {
				return argument.New("Config.Concurrency", h.cfg.Concurrency, "is less than the handler needs at once", "use a higher one")
			}
			return raise(n)
		}
	}
	return client.Prepare(ctx, h.inner, s)
}

func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	x := h.tenants.of(h.cfg.Key(d))
	key, routed := publishedTo(h.queue, d)
	routed = routed && key == x.name && key != ""
	h.rouse()
	now := time.Now()
	if h.lane >= 0 {
		h.slots.shift(h.tenants.enter(x, h.lane, routed, now))
		if !h.take(ctx, h.lane) {
			return h.leave(x)
		}
		return h.run(ctx, d, x, h.lane)
	}
	noisy, shift := h.tenants.arrive(x, routed, now)
	h.slots.shift(shift)
	if !noisy {
		if !h.take(ctx, quiet) {
			return h.leave(x)
		}
		if began := time.Now(); h.tenants.begin(x, quiet, began) {
			return h.call(ctx, d, x, quiet, began)
		}
		// Its tenant has become noisy while it waited.
		if h.slots.demote() {
			return h.run(ctx, d, x, h.slots.stay())
		}
	}
	return h.sieve(ctx, d, x)
}

// sieve handles a noisy message of the main queue if nobody else needs the slot, or moves it to a lane.
func (h *handler) sieve(ctx context.Context, d *client.Delivery, x *tenant) error {
	stay := h.slots.stay()
	got := h.slots.try()
	for c := h.copyOf(x, d); !got && c != nil; {
		if o := h.move(x, c, time.Now()); o != nil {
			return o
		}
		// It waits for a slot, but not for longer than lanes accept nothing: it may wait behind handlers
		// that are stuck.
		waiting, stop := context.WithTimeout(ctx, tick)
		got = h.take(waiting, stay)
		stop()
		if !got && (h.stops(ctx) || inside.Paused(ctx)) {
			return h.leave(x)
		}
	}
	if !got && !h.take(ctx, stay) {
		return h.leave(x)
	}
	return h.run(ctx, d, x, stay)
}

// take waits for a slot. It returns false if the consumer stops before, or is paused.
func (h *handler) take(ctx context.Context, from int) bool {
	if !h.slots.take(ctx, from) {
		return false
	}
	if inside.Paused(ctx) {
		h.slots.cancel(from)
		return false
	}
	return true
}

// leave is the outcome of a message that gets no slot before its consumer stops.
func (h *handler) leave(x *tenant) error {
	h.tenants.leave(x, h.lane)
	return client.Requeue{}
}

// stops reports whether the consumer of a handler's ctx stops.
func (h *handler) stops(ctx context.Context) bool {
	select {
	case <-client.Draining(ctx):
		return true
	default:
		return ctx.Err() != nil
	}
}

// run calls the handler with the slot of a noisy message.
func (h *handler) run(ctx context.Context, d *client.Delivery, x *tenant, from int) error {
	began := time.Now()
	h.tenants.begin(x, from, began)
	return h.call(ctx, d, x, from, began)
}

// call calls the handler, which has a slot, and was counted at began.
func (h *handler) call(ctx context.Context, d *client.Delivery, x *tenant, from int, began time.Time) error {
	defer func() { // also if it panics
		now := time.Now()
		from = h.tenants.end(x, from, began, now)
		h.slots.give(from, now.Sub(began), x.weight)
	}()
	return h.inner.Handle(ctx, d)
}
