// Package health reports the health of a service's connections and consumers, for the probes of
// Kubernetes or another orchestrator, and for people.
//
//	http.Handle("/health/", health.Handler(health.Config{}, conn))
//
// Each probe has its own path, because each failure needs a different reaction:
//
//   - /live: would a restart help? It fails only if the Conn is closed, or if
//     [Config.StuckForGood] is set and all handlers of a consumer hang. Use it as the liveness
//     probe.
//   - /ready: can the service work? It fails if a connection is down, or a consumer has no link
//     to its queue. A memory or disk alarm blocks publishers, but doesn't make a service with
//     consumers unready, because consumers free memory and disk. Use it as the readiness probe.
//   - /progress: is the service working? It fails if a handler has run for longer than
//     [Config.StuckAfter], a consumer has no link to its queue, or a connection is blocked. Use
//     it for alerts.
//
// Each path answers with 200 or 503, and with a [Report] that lists the problems: which queue,
// since when, and why. The handler reads counts that the client keeps anyway, and sends nothing
// to the broker. So a probe is cheap, and doesn't hang when the broker does.
//
// This package is stable: see docs/versions.md#stability.
package health

import (
	"encoding/json"
	"errors"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/inside"
)

// Config defines what counts as a problem. The zero value is ready to use.
type Config struct {
	// StuckAfter is how long a handler may run before it counts as stuck. Default: 5 min.
	StuckAfter time.Duration
	// DownAfter is how long a connection or a consumer's link may be down before the service
	// counts as not ready. A shorter outage is listed as a problem, but the service stays ready.
	// Default: 10 s.
	DownAfter time.Duration
	// StuckForGood is how long all handlers of a consumer may run before the service counts as
	// not live, so that the orchestrator restarts it. The broker then delivers their messages
	// again, and a message that hangs its handler hangs the next one, too. Default: 0, which
	// never restarts.
	StuckForGood time.Duration
}

func (c Config) withDefaults() (Config, error) {
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"StuckAfter", c.StuckAfter}, {"DownAfter", c.DownAfter}, {"StuckForGood", c.StuckForGood}} {
		if f.d < 0 {
			return c, argument.New("health.Config."+f.name, f.d, "is negative", "use a positive duration, or 0 for the default")
		}
	}
	if c.StuckAfter == 0 {
		c.StuckAfter = 5 * time.Minute
	}
	if c.DownAfter == 0 {
		c.DownAfter = 10 * time.Second
	}
	return c, nil
}

// Report is the health of connections at one moment. [Check] returns it, and [Handler] writes it
// as JSON.
type Report struct {
	// Live, Ready, and Progress are the results of the three probes.
	Live     bool `json:"live"`
	Ready    bool `json:"ready"`
	Progress bool `json:"progress"`
	// Problems are sorted by connection, and then by queue. Some are only notes: all three
	// probes may succeed despite them.
	Problems []Problem `json:"problems"`
	// Consumers are all consumers, sorted by queue.
	Consumers []Consumer `json:"consumers"`
}

// Problem is one thing that is wrong, or a note.
type Problem struct {
	// Kind is one of these:
	//
	//   - "closed": Close was called on the Conn. The service is neither live nor ready.
	//   - "disconnected": a connection was lost and is being rebuilt. The service isn't ready
	//     after [Config.DownAfter], and makes no progress.
	//   - "blocked": the broker accepts no messages because of a memory or disk alarm. A service
	//     without consumers isn't ready; one with consumers is, also while they wait for the end of
	//     the alarm to start. Neither makes progress.
	//   - "queue-missing": a consumer's queue was deleted. The service isn't ready after
	//     Config.DownAfter, and makes no progress.
	//   - "no-link": a consumer has no link to its queue for another reason. The service isn't
	//     ready after Config.DownAfter, and makes no progress.
	//   - "no-replies": a requester of package rpc can't receive replies. The service isn't
	//     ready after Config.DownAfter, and makes no progress.
	//   - "stuck": a handler has run for longer than [Config.StuckAfter]. The service makes no
	//     progress. It isn't live once all handlers have run for longer than
	//     [Config.StuckForGood].
	//   - "forwards-wait": retry copies wait because their address doesn't accept messages. This
	//     is a note: other messages keep flowing.
	Kind string `json:"kind"`
	// Connection is the endpoint, without its password, for problems of a connection.
	Connection string `json:"connection,omitempty"`
	// Queue is the consumer's queue, for problems of a consumer, or the address that a requester
	// sends to.
	Queue string `json:"queue,omitempty"`
	// Handlers is how many handlers are running, for "stuck".
	Handlers int `json:"handlers,omitempty"`
	// Since is when the problem began.
	Since time.Time `json:"since"`
	// Error is the reason, if it is known.
	Error string `json:"error,omitempty"`
}

// What Problem.Kind may be.
const (
	// The values of Problem.Kind.
	kindClosed       = "closed"
	kindDisconnected = "disconnected"
	kindBlocked      = "blocked"
	kindQueueMissing = "queue-missing"
	kindNoLink       = "no-link"
	kindNoReplies    = "no-replies"
	kindStuck        = "stuck"
	kindForwardsWait = "forwards-wait"
)

// Consumer describes what a consumer is doing.
type Consumer struct {
	Queue string `json:"queue"`
	// Up reports whether the consumer has a link to its queue. Since is when Up last changed.
	Up    bool      `json:"up"`
	Since time.Time `json:"since"`
	// Handling is how many handlers are running, Ready how many deliveries wait for a handler,
	// and Unsettled how many deliveries the consumer holds.
	Handling  int `json:"handling"`
	Ready     int `json:"ready"`
	Unsettled int `json:"unsettled"`
	// Paused reports whether the consumer is paused, by package pause, a circuit breaker, a limit without a free slot, or the program.
	Paused bool `json:"paused,omitempty"`
	// Delivered is when the last delivery arrived. It is nil if none has arrived on this link.
	Delivered *time.Time `json:"delivered,omitempty"`
	// Owner is set for consumers of package partition: whether the partition belongs to this
	// worker now.
	Owner *bool `json:"owner,omitempty"`
}

// Check returns the health of conns. Use it to put the report into your own endpoint; [Handler]
// serves it over HTTP. Without conns, the report is live but not ready. The only error is an
// *argument.Error, for an invalid cfg or a nil Conn.
func Check(cfg Config, conns ...*client.Conn) (Report, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return Report{}, err
	}
	r := Report{Live: true, Ready: len(conns) > 0, Progress: len(conns) > 0, Problems: []Problem{}, Consumers: []Consumer{}}
	now := time.Now()
	for i, c := range conns {
		if c == nil {
			return Report{}, argument.New("conns", i, "is nil", "pass connections from client.Connect")
		}
		starting := inside.Of(c).Starting() // before Stats: one of them may start now
		r.add(cfg, now, c.State(), c.Stats(), starting)
	}
	return r, nil
}

// add adds the health of one connection, on which so many consumers are starting.
func (r *Report) add(cfg Config, now time.Time, state client.State, stats instrument.Stats, starting int) {
	problem := func(p Problem) { r.Problems = append(r.Problems, p) }
	// down is for what must be up.
	down := func(p Problem) {
		r.Progress = false
		if now.Sub(p.Since) >= cfg.DownAfter {
			r.Ready = false
		}
		problem(p)
	}
	if state.Closed {
		r.Live, r.Ready, r.Progress = false, false, false
		problem(Problem{Kind: kindClosed, Connection: state.Endpoint, Since: state.Since})
		return
	}
	if !state.Connected {
		down(Problem{Kind: kindDisconnected, Connection: state.Endpoint, Since: state.Since, Error: text(state.Err)})
	}
	if !state.BlockedSince.IsZero() {
		r.Progress = false
		if len(stats.Consumers)+starting == 0 {
			r.Ready = false
		}
		problem(Problem{Kind: kindBlocked, Connection: state.Endpoint, Since: state.BlockedSince, Error: "the broker has a memory or disk alarm"})
	}
	for _, c := range stats.Consumers {
		one := Consumer{Queue: c.Queue, Up: c.Up, Since: c.Since, Handling: c.Handling, Ready: c.Ready, Unsettled: c.Unsettled, Paused: c.Paused}
		if !c.Delivered.IsZero() {
			one.Delivered = &c.Delivered
		}
		if c.Partition {
			one.Owner = &c.Owner
		}
		r.Consumers = append(r.Consumers, one)
		// A consumer's link ends with its connection, which is already reported.
		if !c.Up && (state.Connected || errors.Is(c.Err, client.ErrNotFound)) {
			kind := kindNoLink
			if errors.Is(c.Err, client.ErrNotFound) {
				kind = kindQueueMissing
			}
			down(Problem{Kind: kind, Queue: c.Queue, Since: c.Since, Error: text(c.Err)})
		}
		if c.Handling > 0 && now.Sub(c.Oldest) >= cfg.StuckAfter {
			r.Progress = false
			problem(Problem{Kind: kindStuck, Queue: c.Queue, Handlers: c.Handling, Since: c.Oldest})
		}
		if cfg.StuckForGood > 0 && c.Handling >= c.Concurrency && now.Sub(c.Newest) >= cfg.StuckForGood {
			r.Live = false
		}
		if c.Stalled > 0 {
			problem(Problem{Kind: kindForwardsWait, Queue: c.Queue, Since: c.StalledSince, Error: text(c.StalledErr)})
		}
	}
	for _, q := range stats.Requesters {
		if !q.Up && state.Connected {
			down(Problem{Kind: kindNoReplies, Queue: q.To.String(), Since: q.Since, Error: text(q.Err)})
		}
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Handler returns an HTTP handler that serves the health of conns as JSON. The last element of
// the request's path selects the probe: live, ready, or progress. So it works under any prefix.
// Any other path returns the same report, with the status of ready. Methods other than GET and
// HEAD get 405.
//
// Handler panics if cfg is invalid or a Conn is nil, as http.Handle does for its arguments.
func Handler(cfg Config, conns ...*client.Conn) http.Handler {
	if _, err := Check(cfg, conns...); err != nil {
		panic(err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method != http.MethodGet && req.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "use GET", http.StatusMethodNotAllowed)
			return
		}
		r, _ := Check(cfg, conns...)
		ok := r.Ready
		switch strings.ToLower(path.Base(path.Clean("/" + req.URL.Path))) {
		case "live":
			ok = r.Live
		case "progress":
			ok = r.Progress
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(r)
	})
}
