package pause

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
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
	// consume from its lanes, too.
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
		return &handler{inner: h, cfg: cfg, watchers: map[*refusal.Consumer]*watcher{}}
	}
}

type handler struct {
	inner client.Handler
	cfg   Config

	mu       sync.Mutex
	watchers map[*refusal.Consumer]*watcher
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
	switch {
	case s.Control == nil && s.Management == nil:
		return nil // a test without a broker
	case s.Control == nil || s.Management == nil:
		return argument.New("handler", s.Queue, "can't be paused here", "use package pause with Conn.Consume, or with a package that uses it, such as fair")
	}
	w := h.watcher(ctx, s)
	_, alarm, err := startcheck.Check[struct{}]{
		Run: func(ctx context.Context) (struct{}, error) { return struct{}{}, w.ask(ctx) }, Alarms: inside.AlarmsOf(ctx),
	}.Start(ctx, func(struct{}) {})
	if alarm != nil {
		alarm.Cancel()
	}
	if err == nil && !w.begun {
		w.begun = true
		go w.run(ctx)
	}
	return err
}

// watcher returns the consumer's, which is there already if Prepare is called again because a connection was lost.
func (h *handler) watcher(ctx context.Context, s client.Start) *watcher {
	consumer := refusal.Of(ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	if w := h.watchers[consumer]; w != nil {
		return w
	}
	w := &watcher{Start: s, queue: cmp.Or(h.cfg.Queue, s.Queue), changed: h.cfg.OnChange}
	if w.Log == nil {
		w.Log = slog.New(slog.DiscardHandler)
	}
	h.watchers[consumer] = w
	consumer.OnEnd(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.watchers, consumer)
	})
	return w
}

// watcher has a consumer paused while its queue is.
type watcher struct {
	client.Start
	queue   string
	changed func(*State)
	begun   bool // run has been called; only Prepare uses it

	mu     sync.Mutex // Prepare's ask may end late, next to run's
	known  State      // what the broker has said last
	found  bool       // that there is one
	shown  State      // what the consumer is paused for
	resume func()     // nil: it isn't
}

// ask has the consumer do what the broker says.
func (w *watcher) ask(ctx context.Context) error {
	s, found, err := find(ctx, w.Management, w.queue)
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
	paused := w.found && (w.known.Until.IsZero() || w.known.Until.After(now))
	switch {
	case paused && w.resume == nil:
		w.resume = w.Control.Pause()
	case paused && w.shown == w.known:
		return
	case paused:
	case w.resume == nil:
		return
	default:
		w.resume()
		w.resume, w.shown = nil, State{}
		w.Log.Info("hopback: the queue is resumed", "queue", w.queue)
		w.notify(nil)
		return
	}
	w.shown = w.known
	shown := w.shown
	log := w.Log.With("queue", w.queue, "since", shown.Since, "by", shown.By, "why", shown.Why)
	if !shown.Until.IsZero() {
		log = log.With("until", shown.Until)
	}
	log.Info("hopback: the queue is paused")
	w.notify(&shown)
}

// notify calls Config.OnChange.
func (w *watcher) notify(s *State) {
	if w.changed == nil {
		return
	}
	defer func() {
		if v := recover(); v != nil {
			w.Log.Error("hopback: pause.Config.OnChange panicked", "queue", w.queue, "panic", v)
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
				w.Log.Warn("hopback: the broker doesn't answer whether the queue is paused; nothing changes until it does", "queue", w.queue, "error", err)
			}
			w.follow(ctx) // its time may be over
		}
		failing = err != nil
	}
}
