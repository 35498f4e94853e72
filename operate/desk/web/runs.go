package web

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/operate/desk"
)

const (
	// maxRuns bounds the runs in progress, and maxKept those that are kept.
	maxRuns = 8
	maxKept = 100
)

// runs are the dry runs, replays, edits, and discards in progress, and those that finished lately.
type runs struct {
	mu  sync.Mutex
	all []*run // oldest first
}

// verb is what a run does.
type verb string

const (
	verbReplay  verb = "replay"
	verbDiscard verb = "discard"
	verbEdit    verb = "edit"
)

// selection are the messages that a run is about.
type selection struct {
	Queue  string
	Filter desk.Filter
	All    bool // the filter selects everything, and that is meant
	Words  string
	Back   template.URL // the query of the page that it was selected on
	Accept []desk.WarningCode
}

// run is a dry run, a replay, an edit or a discard.
type run struct {
	id   string
	verb verb
	dry  bool
	who  string
	// browser is the token of the person's browser.
	browser string
	sel     selection
	replay  desk.ReplayConfig // for replays and edits
	edit    func(*desk.Edit) error
	rate    float64
	most    uint64
	headers bool // the person accepts desk.WarningHeaders

	began  time.Time
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	waiting  bool // for the queue
	stopping string
	started  time.Time // when it had the queue
	ended    time.Time // zero: not yet
	progress desk.Progress
	replayed *desk.ReplayReport
	discard  *desk.DiscardReport
	file     string
	err      error
	noticed  noticed
}

// action is what an authorizer is asked for.
func (r *run) action() Action {
	switch {
	case r.dry:
		return ActionDryRun
	case r.verb == verbDiscard:
		return ActionDiscard
	case r.verb == verbEdit:
		return ActionEdit
	}
	return ActionReplay
}

// begin starts a run.
func (h *Handler) begin(r *run) *refusal {
	s := &h.runs
	s.mu.Lock()
	defer s.mu.Unlock()
	open := 0
	for _, o := range s.all {
		if !o.over() {
			open++
		}
	}
	if open >= maxRuns {
		return refuse(http.StatusServiceUnavailable, "Too many runs", fmt.Sprintf("%d runs are in progress. Stop one, or wait until one has finished.", open))
	}
	r.id, r.began, r.waiting = strings.ToLower(rand.Text()[:10]), time.Now(), true
	if r.replay.ID == "" {
		r.replay.ID = "replay-" + r.began.UTC().Format("20060102-150405-") + r.id[:6]
	}
	ctx, cancel := context.WithCancelCause(h.ctx)
	r.cancel = cancel
	ok := h.spawn(func() {
		defer cancel(nil)
		err := h.carryOut(ctx, r)
		r.mu.Lock()
		r.err, r.ended, r.waiting = err, time.Now(), false
		args := r.logged()
		r.mu.Unlock()
		if err != nil && !errors.Is(err, errStopped) {
			h.log.Warn("hopback desk: run failed", append(args, "error", err)...)
		} else {
			h.log.Info("hopback desk: run finished", args...)
		}
	})
	if !ok {
		cancel(nil)
		return errEnding
	}
	if len(s.all) >= maxKept {
		if i := slices.IndexFunc(s.all, (*run).over); i >= 0 {
			s.all = slices.Delete(s.all, i, i+1)
		}
	}
	s.all = append(s.all, r)
	return nil
}

// logged is what the log says of a run that has ended.
func (r *run) logged() []any {
	args := []any{"action", r.action(), "who", r.who, "run", r.id, "queue", r.sel.Queue, "took", r.ended.Sub(r.began).Round(time.Millisecond)}
	if p := r.replayed; p != nil {
		args = append(args, "replay", p.ID, "matched", p.Matched, "replayed", p.Replayed, "failed", p.Failed, "unknown", p.Unknown)
	}
	if p := r.discard; p != nil {
		args = append(args, "matched", p.Matched, "discarded", p.Discarded, "file", r.file)
	}
	if r.stopping != "" {
		args = append(args, "stopped-by", r.stopping)
	}
	return args
}

func (h *Handler) carryOut(ctx context.Context, r *run) error {
	release, err := h.queues.acquire(ctx, r.sel.Queue, r.name())
	if err != nil {
		return err
	}
	defer release()
	if err := h.there(ctx, r.sel.Queue); err != nil {
		return err
	}
	r.mu.Lock()
	r.waiting, r.started = false, time.Now()
	r.mu.Unlock()
	if !r.dry {
		defer h.changed(r.sel.Queue)
	}
	if r.verb == verbDiscard {
		return h.carryOutDiscard(ctx, r)
	}
	if r.verb == verbEdit {
		if err := h.single(ctx, r); err != nil {
			return err
		}
	}
	cfg := r.replay
	cfg.Queue, cfg.Filter, cfg.All, cfg.Accept, cfg.By = r.sel.Queue, r.sel.Filter, r.sel.All, r.sel.Accept, r.who
	cfg.DryRun, cfg.OnProgress, cfg.Rate, cfg.Max, cfg.Edit = r.dry, r.notify, r.rate, r.most, r.edit
	if r.headers {
		cfg.Accept = append(slices.Clone(cfg.Accept), desk.WarningHeaders)
	}
	report, err := h.desk.Replay(ctx, cfg)
	for i := range report.Groups {
		trimGroup(&report.Groups[i])
	}
	for i := range report.Failures {
		f := &report.Failures[i]
		f.MessageID, f.Target = short(f.MessageID), short(f.Target)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.replayed = &report
	if r.verb == verbEdit && err == nil && report.Matched == 0 {
		return errGone
	}
	return err
}

var errGone = errors.New("the message is no longer in the queue: somebody has replayed or discarded it")

// single makes sure that an edit is of one message.
func (h *Handler) single(ctx context.Context, r *run) error {
	found, err := h.desk.List(ctx, desk.ListConfig{Queue: r.sel.Queue, Filter: r.sel.Filter, Limit: 1, Count: true, Accept: r.sel.Accept, OnProgress: r.notify})
	switch {
	case err != nil:
		return err
	case found.Matched == 0:
		return errGone
	case found.Matched > 1:
		return fmt.Errorf("%d messages have this ID or message-id, so nothing was done", found.Matched)
	}
	return nil
}

func (h *Handler) carryOutDiscard(ctx context.Context, r *run) error {
	cfg := desk.DiscardConfig{
		Queue: r.sel.Queue, Filter: r.sel.Filter, All: r.sel.All, Accept: r.sel.Accept, DryRun: r.dry, Max: r.most, OnProgress: r.notify,
	}
	if r.headers {
		cfg.Accept = append(slices.Clone(cfg.Accept), desk.WarningHeaders)
	}
	if !r.dry {
		name := "discarded-" + r.began.UTC().Format("20060102-150405-") + r.id + ".jsonl"
		file, err := os.OpenFile(filepath.Join(h.cfg.DiscardDir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		r.mu.Lock()
		r.file = file.Name()
		r.mu.Unlock()
		cfg.To = file
	}
	report, err := h.desk.Discard(ctx, cfg)
	for i := range report.Groups {
		trimGroup(&report.Groups[i])
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.discard = &report
	return err
}

// changed forgets what was read of a queue.
func (h *Handler) changed(queue string) {
	h.peeks.forget(queue, "")
	h.survey.notify(func() { h.survey.stale = true })
}

func (r *run) notify(p desk.Progress) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress = p
}

// over reports whether the run has ended.
func (r *run) over() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.ended.IsZero()
}

// stop ends the run. Messages that weren't replayed stay where they are.
func (r *run) stop(who string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ended.IsZero() {
		return false
	}
	r.stopping = who
	r.cancel(errStopped)
	return true
}

// name is the run in words.
func (r *run) name() string {
	switch {
	case r.dry && r.verb == verbDiscard:
		return "a dry run of a discard"
	case r.dry:
		return "a dry run"
	case r.verb == verbEdit:
		return "an edit"
	}
	return "a " + string(r.verb)
}

func (s *runs) find(id string) *run {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.all {
		if r.id == id {
			return r
		}
	}
	return nil
}

// list returns the runs, the latest first.
func (s *runs) list() []*run {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Clone(s.all)
	slices.Reverse(all)
	return all
}
