// Package live shows what workers do right now: which handlers run, for how long, and how many
// messages each worker has handled in the last hour.
//
//	handler = retry.With(policy)(live.With(conn, live.Config{})(handler)) // in each worker
//
//	fleet, err := live.Ask(ctx, conn) // the live workers, and their handlers
//	err = live.Watch(ctx, conn, show) // again and again
//
// The command hopback workers and the page of the desk show the same.
//
// # What it costs
//
// A handler call costs two short locks. Workers send nothing until Ask publishes a question to the
// exchange hopback.workers. Then each worker sends one answer of at most 64 kB, or with Watch
// several for up to a minute. An answer has the IDs, types, and tenants of messages, but no bodies.
//
// If the broker can't be reached, has an alarm, or refuses a permission, the worker isn't shown. Its handlers
// aren't affected.
//
// # Permissions
//
// Workers, and those who ask, need the permissions to configure, write, and read names that begin with
// hopback.workers, and workers also to write to the default exchange, amq.default. Everyone who has them can ask.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package live

import (
	"cmp"
	"context"
	"crypto/rand"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/middleware/internal/config"
)

// Config configures [With]. The zero value is ready to use.
type Config struct {
	// Host is where the worker runs: up to 255 bytes of UTF-8. Default: the host's name, which is that of the pod
	// in Kubernetes.
	Host string
	// Version is the program's: up to 255 bytes of UTF-8. Default: that of its main module, or its commit.
	Version string
	// StuckAfter is after how long a running handler counts as stuck. Default: 10 minutes.
	StuckAfter time.Duration
}

// Worker is a worker that has answered. Its texts are valid UTF-8, but anybody with the permissions may have sent them.
type Worker struct {
	ID      string `json:"id"` // a random text
	Host    string `json:"host"`
	Version string `json:"version,omitempty"`
	// Since is when the worker called With, by the clock of the process that asks.
	Since time.Time `json:"since"`
	// Queues are those from which it consumes or has consumed, at most 200.
	Queues []Queue `json:"queues"`
	// Running are its running handlers, the longest first, and More is how many others didn't fit in the answer.
	Running []Running `json:"running"`
	More    int       `json:"more,omitempty"`
}

// Queue is what a worker does with the messages of a queue.
type Queue struct {
	Name string `json:"name"`
	// Running is how many handlers run, and Stuck how many of them have run for Config.StuckAfter or longer.
	Running int `json:"running"`
	Stuck   int `json:"stuck"`
	// Handled is how many handlers have returned within the last hour, and Failed how many of them with an error.
	Handled uint64 `json:"handled"`
	Failed  uint64 `json:"failed"`
}

// Running is a running handler with its message. Texts longer than 255 bytes are cut.
type Running struct {
	Queue string `json:"queue"`
	// ID is the message-id, Type the subject or the type of AMQP 0-9-1, and Tenant the group-id or the tenant of
	// package fair. Each is "" if the message has none.
	ID     string `json:"id,omitempty"`
	Type   string `json:"type,omitempty"`
	Tenant string `json:"tenant,omitempty"`
	// Attempt is that of retry.Attempt.
	Attempt int `json:"attempt"`
	// Since is when the handler started, by the clock of the process that asks.
	Since time.Time `json:"since"`
	Stuck bool      `json:"stuck"`
}

const (
	exchange = "hopback.workers"
	// questions and answers start the names of queues: a worker's for questions, and those for the answers to a
	// question. A worker answers to no other queue, or else a question could write to any.
	questions = exchange + ".questions."
	answers   = exchange + ".answers."

	maxText    = 255
	stuckAfter = 10 * time.Minute
)

// With returns the Middleware that lets [Ask] find this worker. Call it once in a process, and wrap all handlers with the
// result. Put it inside retry.With, so that it counts the errors of the handler.
//
// The worker can be found while one of its consumers runs. If cfg is invalid or conn is nil, Consume returns an
// *argument.Error when it starts.
func With(conn *client.Conn, cfg Config) client.Middleware {
	w, err := newWorker(conn, cfg)
	return func(h client.Handler) client.Handler {
		if refused := config.Refused("live", h, err); refused != nil {
			return refused
		}
		return &handler{h, w}
	}
}

func newWorker(conn *client.Conn, cfg Config) (*worker, error) {
	if conn == nil {
		return nil, argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	at := argument.Root("live.Config")
	for _, f := range []struct{ name, text string }{{"Host", cfg.Host}, {"Version", cfg.Version}} {
		if len(f.text) > maxText || !utf8.ValidString(f.text) {
			return nil, argument.At(at.Field(f.name), argument.CodeMalformed, f.text, "isn't up to 255 bytes of UTF-8", "use a shorter text")
		}
	}
	if cfg.StuckAfter < 0 {
		return nil, argument.At(at.Field("StuckAfter"), argument.CodeOutOfRange, cfg.StuckAfter, "is negative", "use a positive duration, or 0 for 10 minutes")
	}
	cfg.StuckAfter = cmp.Or(cfg.StuckAfter, stuckAfter)
	if cfg.Host == "" {
		name, _ := os.Hostname()
		cfg.Host = text(name)
	}
	cfg.Version = cmp.Or(cfg.Version, text(version()))
	return &worker{conn: conn, cfg: cfg, id: rand.Text(), tracker: newTracker(time.Now()), consumers: map[*refusal.Consumer]struct{}{}}, nil
}

// version is that of the main module, or else the commit that it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value[:min(len(s.Value), 12)]
		}
	}
	return ""
}

// text bounds a text that anybody may have written.
func text(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), maxText)], "�")
}

// handler is a handler of a worker.
type handler struct {
	inner  client.Handler
	worker *worker
}

// Prepare lets the worker be found. It doesn't wait for the broker, and no error of that is one of the consumer.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if err := client.Prepare(ctx, h.inner, s); err != nil {
		return err
	}
	if s.Control != nil || s.Management != nil { // otherwise it is a test without a broker
		h.worker.join(refusal.Of(ctx))
	}
	return nil
}

// Handle calls the handler, and notes that it runs.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	if d == nil {
		return h.inner.Handle(ctx, d)
	}
	r := h.worker.tracker.begin(ctx, d)
	failing := true // also if it panics
	defer func() { h.worker.tracker.end(r, failing) }()
	err := h.inner.Handle(ctx, d)
	failing = failed(err)
	return err
}

// failed reports whether an attempt counts as failed.
func failed(err error) bool {
	switch o := client.OutcomeOf(err).(type) {
	case client.Requeue:
		return o.Failed
	case client.DeadLetter:
		return true
	case client.Modify:
		return o.Failed || o.DeadLetter
	}
	return false
}

// worker is the result of a call of With.
type worker struct {
	conn    *client.Conn
	cfg     Config
	id      string
	tracker *tracker

	mu        sync.Mutex
	consumers map[*refusal.Consumer]struct{} // that run
	answering *answerer                      // nil: there is no consumer
}

// join notes a consumer. The first one starts the answers, and the end of the last one stops them.
func (w *worker) join(c *refusal.Consumer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, known := w.consumers[c]; known { // its connection was lost, so it is prepared again
		return
	}
	w.consumers[c] = struct{}{}
	c.OnEnd(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.consumers, c)
		if len(w.consumers) == 0 && w.answering != nil {
			w.answering.cancel()
			w.answering = nil
		}
	})
	if w.answering == nil {
		w.answering = w.answer()
	}
}

// count adds the worker's numbers to those of its Conn.
func (w *worker) count(s *instrument.Stats) {
	for _, q := range w.tracker.snapshot(time.Now(), w.cfg.StuckAfter, 0).queues {
		s.Stuck = append(s.Stuck, instrument.StuckStats{Queue: q.Name, Handlers: q.Stuck})
	}
}

func (w *worker) log() *slog.Logger { return inside.Of(w.conn).Log() }
