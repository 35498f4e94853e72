package pause

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/internal/startcheck"
	"github.com/hopback/hopback/middleware/internal/config"
)

// Config configures [With]. The zero value is ready to use.
type Config struct {
	// Queue is whose pauses apply. Default: the queue of the consumer. Workers of a fair queue need it, because they
	// consume from its lanes, too. It has no effect in workers of package partition: pauses of their group apply.
	Queue string
	// OnChange, if not nil, is called when a consumer notices a pause or a change of it, and with nil when it is
	// over. The calls of a consumer come one at a time, and must be quick.
	OnChange func(*State)
}

const (
	// every is how often a consumer asks, and patience how long the broker has to answer.
	every, patience = time.Second, 5 * time.Second
)

// With returns the Middleware that pauses its consumer while the queue is paused. Its place among others doesn't
// matter. A consumer that starts knows whether the queue is paused before it handles the first message.
//
// If cfg is invalid, or the consumer can't be paused, because it isn't one of Conn.Consume or of a package that uses
// that, Consume returns an *argument.Error when it starts.
func With(cfg Config) client.Middleware {
	var err error
	if cfg.Queue != "" {
		err = names.Check(argument.Root("pause.Config").Field("Queue"), cfg.Queue)
	}
	return func(h client.Handler) client.Handler {
		if refused := config.Refused("pause", h, err); refused != nil {
			return refused
		}
		return &handler{inner: h, cfg: cfg, watchers: map[any]*watcher{}}
	}
}

type handler struct {
	inner client.Handler
	cfg   Config

	mu       sync.Mutex
	watchers map[any]*watcher // by *refusal.Consumer, or *inside.Group
}

// Handle calls the handler.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	return h.inner.Handle(ctx, d)
}

// Prepare pauses a consumer from the start if its queue is paused.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if err := client.Prepare(ctx, h.inner, s); err != nil {
		return err
	}
	group := inside.GroupOf(ctx)
	switch {
	case s.Control == nil && s.Management == nil:
		return nil // a test without a broker
	case s.Control == nil && group == nil || s.Management == nil:
		return argument.New("handler", s.Queue, "can't be paused here", "use package pause with Conn.Consume, or with a package that uses it, such as fair or partition")
	}
	w, life := h.watcher(ctx, s, group)
	if w.begun.Load() && group != nil {
		return nil // a consumer of another partition has asked, and the watcher continues to
	}
	_, alarm, err := startcheck.Check[struct{}]{
		Run: func(ctx context.Context) (struct{}, error) { return struct{}{}, w.ask(ctx) }, Alarms: inside.AlarmsOf(ctx),
	}.Start(ctx, func(struct{}) {})
	if alarm != nil {
		alarm.Cancel()
	}
	if err == nil && w.begun.CompareAndSwap(false, true) {
		go w.run(life)
	}
	return err
}

// watcher returns the one of the consumer, or of all consumers of a group's worker, and the ctx that ends with them. It is
// there already if Prepare is called again because a connection was lost.
func (h *handler) watcher(ctx context.Context, s client.Start, group *inside.Group) (w *watcher, life context.Context) {
	consumer := refusal.Of(ctx)
	w = &watcher{Start: s, changed: h.cfg.OnChange}
	var of any = group
	if group != nil {
		w.of, w.pause, life = target{group: group.Name, exchange: inside.NowExchange(group.Name)}, group.Pausing.Pause, group.Life
	} else {
		of = consumer
		w.of, w.pause, life = target{queue: cmp.Or(h.cfg.Queue, s.Queue)}, s.Control.Pause, ctx
	}
	if w.Log == nil {
		w.Log = slog.New(slog.DiscardHandler)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if known := h.watchers[of]; known != nil {
		return known, life
	}
	h.watchers[of] = w
	forget := func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.watchers, of)
	}
	if group != nil {
		context.AfterFunc(life, forget)
	} else {
		consumer.OnEnd(forget)
	}
	return w, life
}

// watcher has a consumer paused while its queue is, or the consumers of a worker while its group is.
type watcher struct {
	client.Start
	of      target
	pause   func() (resume func())
	changed func(*State)
	begun   atomic.Bool // run has been called

	mu     sync.Mutex // Prepare's ask may end late, next to run's
	known  State      // what the broker has said last
	found  bool       // that there is one
	shown  State      // what the consumer is paused for
	resume func()     // nil: it isn't
}

// ask has the consumer do what the broker says.
func (w *watcher) ask(ctx context.Context) error {
	s, found, err := find(ctx, w.Management, w.of)
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.known, w.found = s, found
	w.mu.Unlock()
	w.follow(ctx)
	return nil
}

// follow pauses or resumes the consumer by what the broker has said last, and the time.
func (w *watcher) follow(ctx context.Context) {
	var now time.Time
	w.mu.Lock()
	timed := w.found && !w.known.Until.IsZero()
	w.mu.Unlock()
	if timed {
		now = timeOf(ctx, w.BrokerTime)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	paused := w.found && !w.known.over(now)
	switch {
	case paused && w.resume == nil:
		w.resume = w.pause()
	case paused && w.shown == w.known:
		return
	case paused:
	case w.resume == nil:
		return
	default:
		w.resume()
		w.resume, w.shown = nil, State{}
		w.Log.Info("hopback: resumed for all workers", w.of.kind(), w.of.name())
		w.notify(nil)
		return
	}
	w.shown = w.known
	shown := w.shown
	log := w.Log.With(w.of.kind(), w.of.name(), "since", shown.Since, "by", shown.By, "why", shown.Why)
	if !shown.Until.IsZero() {
		log = log.With("until", shown.Until)
	}
	log.Info("hopback: paused for all workers")
	w.notify(&shown)
}

// notify calls Config.OnChange.
func (w *watcher) notify(s *State) {
	if w.changed == nil {
		return
	}
	defer func() {
		if v := recover(); v != nil {
			w.Log.Error("hopback: pause.Config.OnChange panicked", w.of.kind(), w.of.name(), "panic", v)
		}
	}()
	w.changed(s)
}

// run asks until the consumer ends.
func (w *watcher) run(ctx context.Context) {
	for failing := false; backoff.Sleep(ctx, every); {
		asking, done := context.WithTimeout(ctx, patience)
		err := w.ask(asking)
		done()
		if err != nil && ctx.Err() == nil {
			if !failing && !errors.Is(err, client.ErrConnectionLost) {
				w.Log.Warn("hopback: the broker doesn't answer whether the queue is paused; nothing changes until it does", w.of.kind(), w.of.name(), "error", err)
			}
			w.follow(ctx) // its time may be over
		}
		failing = err != nil
	}
}
