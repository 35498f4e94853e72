package fair

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
)

const (
	// maxCopied is above how many bytes a message isn't moved: that costs more than it brings.
	maxCopied = 1 << 20
	// defaultPriority is that of messages without one, and maxPriority the highest that RabbitMQ tells
	// apart.
	defaultPriority, maxPriority = 4, 31
	// tick is how often a worker looks at its tenants.
	tick = 100 * time.Millisecond
	// watched is for how long after a move a worker looks whether lanes accept copies.
	watched = 5 * time.Second
	// movesPerCheck is after how many moves it checks at the latest, and maxUnconfirmed how many copies may be
	// without a confirm.
	movesPerCheck, maxUnconfirmed = 256, 512
	// maxJobs is how many tenants wait to be bound or unbound. Others are again after their next moves.
	maxJobs = 64
	// requestLimit is how long the broker has for a tenant's requests, and refused for how long a
	// worker asks for nothing after a failure.
	requestLimit, refused = 5 * time.Second, 30 * time.Second
	// straggling is how long a tenant stays bound to a lane in which it wasn't seen, but others were.
	straggling = 30 * time.Second
)

// copyOf returns the copy to move a message by; nil: it can't be moved. It has a higher priority than what RabbitMQ
// routes to the lane: a message of a misjudged tenant would otherwise wait behind the backlog of a noisy one.
func (h *handler) copyOf(x *tenant, d *client.Delivery) *client.Message {
	m := d.Message()
	// A delivery count of more than zero may be that of a copy that couldn't be stored.
	if d.DeliveryCount() > 0 || sizeOf(m) > maxCopied {
		return nil
	}
	c := client.Copy(m)
	c.Header.Priority = defaultPriority + 1
	if m.Header != nil {
		c.Header.Priority = min(m.Header.Priority+1, maxPriority)
	}
	if c.Properties == nil || c.Properties.GroupID == nil {
		if c.Annotations == nil {
			c.Annotations = make(map[any]any, 1)
		}
		c.Annotations[annotation.Tenant] = x.name
	}
	if client.Validate(c) != nil {
		return nil
	}
	return c
}

// move returns the outcome that moves a noisy message to its tenant's lane by its copy; nil: lanes accept
// nothing.
func (h *handler) move(x *tenant, c *client.Message, now time.Time) error {
	if h.moves.Add(1) >= movesPerCheck {
		h.checkCopies()
	}
	if h.stays.Load() {
		return nil
	}
	lane, bind := h.tenants.move(x, now)
	h.moving.Store(int64(now.Sub(epoch)))
	if bind {
		h.submit(job{x, true})
	}
	return client.Forward{To: address.Queue(h.queue.lane(lane)), Message: c, Else: client.Requeue{Failed: true}}
}

func sizeOf(m *client.Message) (n int) {
	for _, part := range m.Data {
		n += len(part)
	}
	return n
}

// rouse has the upkeep run.
func (w *worker) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// upkeep looks at the tenants, as long as there are any.
func (w *worker) upkeep(ctx context.Context) {
	t := time.NewTimer(tick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		now := time.Now()
		w.slots.adapt(now)
		unbind, changes, idle := w.tenants.review(now)
		for _, c := range changes {
			w.notify(c)
		}
		for _, x := range unbind {
			w.submit(job{x, false})
		}
		w.watch(now)
		if idle {
			select {
			case <-w.wake:
			case <-ctx.Done():
				return
			}
		}
		t.Reset(tick)
	}
}

func (w *worker) notify(c change) {
	w.log.Debug("hopback: a tenant's load has changed", "tenant", c.tenant, "noisy", c.noisy)
	if w.cfg.OnNoisy == nil {
		return
	}
	defer func() {
		if v := recover(); v != nil {
			w.log.Error("hopback: Config.OnNoisy panicked", "panic", v)
		}
	}()
	w.cfg.OnNoisy(c.tenant, c.noisy)
}

// watch looks whether copies are stored, as long as there are any.
func (w *worker) watch(now time.Time) {
	if w.stays.Load() || now.Sub(epoch)-time.Duration(w.moving.Load()) <= watched {
		w.checkCopies()
	}
}

// checkCopies has noisy messages stay in the main queue if lanes accept no copies, because one is full or missing,
// or because of an alarm: the copies would be held here until then. It costs little.
func (w *worker) checkCopies() {
	w.checking.Lock()
	defer w.checking.Unlock()
	w.moves.Store(0)
	stats := w.conn.Stats()
	stalled, many := stats.BlockedNow > 0, false
	var why error
	for _, c := range stats.Consumers {
		if c.Queue == w.queue.Name {
			many = many || c.Forwarding > maxUnconfirmed
			if !c.StalledSince.IsZero() {
				stalled, why = true, c.StalledErr
			}
		}
	}
	w.stays.Store(stalled || many)
	if stalled && !w.stalled {
		w.log.Warn("hopback: lanes accept no copies, so messages of noisy tenants stay in the main queue, and may delay others", "error", why)
	}
	w.stalled = stalled
}

// job is a tenant to bind to a lane, or to unbind.
type job struct {
	tenant *tenant
	bind   bool
}

func (w *worker) submit(j job) {
	select {
	case w.jobs <- j:
	default:
	}
}

// divert binds and unbinds tenants until ctx ends.
func (w *worker) divert(ctx context.Context) {
	for {
		var j job
		select {
		case <-ctx.Done():
			return
		case j = <-w.jobs:
		}
		asking, done := context.WithTimeout(ctx, requestLimit)
		var err error
		if j.bind {
			err = w.bind(asking, j.tenant)
		} else {
			err = w.unbind(asking, j.tenant)
		}
		done()
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.As(err, new(*argument.Error)): // its name can't be a binding's key
			w.tenants.settle(j.tenant, -1)
		default:
			w.log.Warn("hopback: a noisy tenant's messages can't be routed to or from its lane; they are moved one by one, or pass the lane for longer", "tenant", j.tenant.name, "error", err)
			if !backoff.Sleep(ctx, refused) {
				return
			}
		}
	}
}

// bind has RabbitMQ route a tenant's messages to the lane with the least backlog, unless another
// worker has bound it already. If two workers bind it at once to different lanes, the first of these
// lanes gets its messages, because each exchange passes on only what matches no binding.
func (w *worker) bind(ctx context.Context, x *tenant) error {
	m, n := w.conn.Management(), w.queue.Lanes
	bound, waiting := make([]bool, n), make([]uint64, n)
	err := each(n, func(i int) error {
		found, err := declare.Bindings(ctx, m, w.queue.diversion(x.name, i))
		bound[i] = len(found) > 0
		return err
	}, func(i int) error {
		info, err := declare.Inspect(ctx, m, w.queue.lane(i))
		waiting[i] = info.Messages
		return err
	})
	if err != nil {
		return err
	}
	w.tenants.mu.Lock()
	crowd := w.tenants.crowd(x, time.Now())
	w.tenants.mu.Unlock()
	lane := 0
	for i := range n {
		if bound[i] {
			w.tenants.settle(x, i)
			return nil
		}
		if waiting[i] < waiting[lane] || waiting[i] == waiting[lane] && crowd[i] < crowd[lane] {
			lane = i
		}
	}
	if _, err := declare.Apply(ctx, m, declare.Topology{Bindings: []declare.Binding{w.queue.diversion(x.name, lane)}}); err != nil {
		return err
	}
	w.tenants.settle(x, lane)
	w.log.Debug("hopback: a noisy tenant's messages are routed to a lane", "tenant", x.name, "lane", w.queue.lane(lane))
	return nil
}

// unbind has RabbitMQ route a tenant's messages to the main queue again, unless its lane has a
// backlog, in which there may be some of its messages.
func (w *worker) unbind(ctx context.Context, x *tenant) error {
	m := w.conn.Management()
	now := time.Now()
	w.tenants.mu.Lock()
	lane, calm := x.lane, now.Sub(x.bulk)
	w.tenants.mu.Unlock()
	if calm < episode || lane < 0 {
		return nil
	}
	if calm < straggling {
		info, err := declare.Inspect(ctx, m, w.queue.lane(lane))
		if err != nil && !errors.Is(err, declare.ErrNotFound) {
			return err
		}
		if info.Messages > 0 {
			return nil // review comes back to it
		}
	}
	err := each(w.queue.Lanes, func(i int) error { return declare.DeleteBinding(ctx, m, w.queue.diversion(x.name, i)) })
	if err == nil {
		w.tenants.settle(x, -1)
	}
	return err
}

// each calls functions for each lane, all at the same time.
func each(lanes int, calls ...func(lane int) error) error {
	errs := make([]error, lanes*len(calls))
	var running sync.WaitGroup
	for i := range lanes {
		for k, call := range calls {
			running.Go(func() { errs[i*len(calls)+k] = call(i) })
		}
	}
	running.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
