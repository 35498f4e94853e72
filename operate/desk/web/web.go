package web

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/schedule"
)

// Config configures a Handler. The zero value is read-only and answers only browsers on this
// machine that have opened [Handler.LoginURL].
type Config struct {
	// Title names the broker at the top of every page. Optional.
	Title string
	// Writable allows replays, edits, discards, and scans whose side effects a person has
	// accepted. Authorize decides about each of them, too. Default: read-only.
	Writable bool
	// Authorize decides about every request. It returns the user's name, which is logged and
	// stored in replayed messages. An error refuses the request; its text is logged, not
	// shown. Pages about several queues leave out those for which it refuses ActionView.
	// Authorize is called concurrently, and may be called several times per request.
	// Default: browsers on this machine are allowed everything after they have opened
	// [Handler.LoginURL].
	Authorize func(r *http.Request, a Access) (who string, err error)
	// User names the person who opens LoginURL, in the log and in replayed messages. It has no
	// effect with Authorize. Default: "local".
	User string
	// DiscardDir is the directory of the files that messages are written to before they are
	// discarded. Without it nothing can be discarded.
	DiscardDir string
	// Queues are the names of the queues that the page shows, reads, and changes. No request
	// reaches another queue, except that a replay sends each message to where it failed.
	// Default: all queues of the virtual host. Required if the Desk has no HTTP API.
	Queues []string
	// Times returns the times of a schedule.Recurring.Spec, such as a cron expression, or nil. Anybody may have forged a
	// spec, which has at most 1,000 bytes. Times is called concurrently. Default: those of schedule.Every are known.
	Times func(spec string) schedule.Times
	// Logger receives a line for each action. Default: slog.Default().
	Logger *slog.Logger
}

// Access is what a request asks for.
type Access struct {
	Action Action
	// Queue is the queue that is read or changed. It is empty for pages about all queues,
	// surveys and their lists of runs, and where a request names no queue.
	Queue string
	// Target is the queue that the user named as the destination of a replay. Without it each
	// message returns to the queue in which it failed or, if ToExchange is set, to the
	// exchange that it was first published to. A dry run has neither.
	ToExchange bool
	Target     string
}

// Action is the kind of an Access.
type Action string

// The actions. ActionView and ActionBody need no Config.Writable.
const (
	// ActionView shows a page. It may read dead-letter and parking queues.
	ActionView Action = "view"
	// ActionBody shows or downloads the body of a message.
	ActionBody Action = "body"
	// ActionAccept reads a queue although that has a side effect, such as a counted delivery.
	ActionAccept Action = "accept"
	// ActionDryRun counts what a replay or a discard would select. It changes nothing.
	ActionDryRun Action = "dry-run"
	// ActionReplay replays messages.
	ActionReplay Action = "replay"
	// ActionEdit changes a message and replays it.
	ActionEdit Action = "edit"
	// ActionDiscard discards messages, after they were written to a file.
	ActionDiscard Action = "discard"
	// ActionStop stops any user's run.
	ActionStop Action = "stop"
	// ActionWaiting cancels, runs, or reschedules waiting messages by their token.
	ActionWaiting Action = "waiting"
	// ActionPause pauses or resumes a work queue for all of its workers, or a group of partitions. For a group, the page
	// asks once without a queue, and then for the queue of each partition, also of the generation to which a Reshard leads.
	ActionPause Action = "pause"
	// ActionRecurring pauses, resumes, runs, or removes recurring messages. Access.Queue is the queue with the state of
	// their group, schedule.Names.TokenQueue.
	ActionRecurring Action = "recurring"
)

// changes reports whether the action needs Config.Writable.
func (a Action) changes() bool { return a != ActionView && a != ActionBody }

// Handler serves the page. It is safe for concurrent use. Its state is bounded and in memory:
// the last survey, the results of recent scans, and the latest runs.
type Handler struct {
	desk   *desk.Desk
	cfg    Config
	log    *slog.Logger
	secret [32]byte // signs the tokens against forged requests
	login  *login   // nil with Config.Authorize

	pages  *template.Template
	static map[string]file
	paths  map[string]route

	ctx    context.Context // ends with Shutdown
	cancel context.CancelFunc
	life   sync.Mutex
	ended  bool
	work   sync.WaitGroup

	asking sync.Mutex    // held while a group's workers are asked
	tokens chan struct{} // has room for one that reads or changes recurring messages
	fleet  fleet
	queues queueLocks
	counts counts
	survey surveyor
	peeks  peeks
	runs   runs
}

//go:embed page/*.html
var pageFiles embed.FS

//go:embed static
var staticFiles embed.FS

// file is an embedded file that pages refer to.
type file struct {
	kind    string
	content []byte
	version string
}

// New returns a Handler that serves the page at the path "/" and below. Its links are
// relative, so it works under any prefix with http.StripPrefix:
//
//	http.Handle("/ops/dead/", http.StripPrefix("/ops/dead", handler))
//
// A nil d is an *argument.Error, and so is a DiscardDir that isn't a directory. Call
// Shutdown in the end.
func New(d *desk.Desk, cfg Config) (*Handler, error) {
	if d == nil {
		return nil, argument.At(argument.Root("d"), argument.CodeMissing, nil, "is nil", "use the Desk that desk.New returned")
	}
	if cfg.DiscardDir != "" {
		if info, err := os.Stat(cfg.DiscardDir); err != nil || !info.IsDir() {
			return nil, argument.At(argument.Root("Config").Field("DiscardDir"), argument.CodeUnsupported, cfg.DiscardDir, "isn't a directory", "create it, or name another one")
		}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	cfg.Queues = slices.Clone(cfg.Queues)
	h := &Handler{desk: d, cfg: cfg, log: cfg.Logger, static: map[string]file{}, tokens: make(chan struct{}, 1)}
	if _, err := rand.Read(h.secret[:]); err != nil {
		return nil, err
	}
	if cfg.Authorize == nil {
		h.login = &login{who: cmp.Or(cfg.User, "local"), secret: randomText(), session: randomText()}
		h.cfg.Authorize = h.login.authorize
	}
	err := fs.WalkDir(staticFiles, "static", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		content, err := staticFiles.ReadFile(path)
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, "static/")
		sum := sha256.Sum256(content)
		kind := map[string]string{"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}[name[strings.LastIndexByte(name, '.')+1:]]
		h.static[name] = file{kind, content, hex.EncodeToString(sum[:6])}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if h.pages, err = template.New("").Funcs(h.funcs()).ParseFS(pageFiles, "page/*.html"); err != nil {
		return nil, err
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.routes()
	return h, nil
}

// ServeHTTP serves a page, or carries out an action.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.serve(w, r) }

// Shutdown stops all runs and scans, and waits until they have returned their messages to the
// queues, or until ctx ends. Later requests are refused. To resume a replay that was stopped,
// use its ID.
func (h *Handler) Shutdown(ctx context.Context) error {
	h.life.Lock()
	h.ended = true
	h.life.Unlock()
	h.cancel()
	done := make(chan struct{})
	go func() {
		h.work.Wait()
		h.peeks.clear()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// spawn runs f in the background, unless the Handler has ended.
func (h *Handler) spawn(f func()) bool {
	h.life.Lock()
	defer h.life.Unlock()
	if h.ended {
		return false
	}
	h.work.Go(f)
	return true
}

// errEnding refuses what comes after Shutdown.
var errEnding = refuse(http.StatusServiceUnavailable, "This page is shutting down", "Open it again after its server has restarted.")
