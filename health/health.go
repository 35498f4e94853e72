// Package health tells how a service's connections and consumers are, for the probes of
// an orchestrator and for people.
//
//	http.Handle("/health/", health.Handler(health.Config{}, conn))
//
// It answers three questions, each with its own path, since each asks for another remedy:
//
//   - /live: would a restart help? No, unless the Conn is closed or, if Config.StuckForGood
//     is set, every handler of a consumer hangs.
//   - /ready: can it work? Its connections are up, and its consumers have their queues. An
//     alarm of the broker, which stops publishers, doesn't make a service with consumers
//     unready: these relieve the broker.
//   - /progress: does it work? No handler has run for longer than Config.StuckAfter, no
//     consumer is without its queue, and no connection is blocked.
//
// Each answers 200 or 503, and lists what is wrong, with the queue, since when, and why.
// The handler looks at numbers that the client has anyway, and asks no broker. So a probe
// costs nothing and doesn't hang when the broker does.
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
)

// Config defines what counts as a problem. The zero value is ready to use.
type Config struct {
	// StuckAfter is how long a handler may run. Default: 5 min.
	StuckAfter time.Duration
	// DownAfter is how long a connection or a consumer's link may be down before the
	// service isn't ready. A shorter outage is a problem, but only a note. Default: 10 s.
	DownAfter time.Duration
	// StuckForGood, if not 0, is how long all handlers of a consumer may run before the
	// service isn't live, so that it is restarted. Its messages are then delivered again,
	// and a message that hangs every handler hangs the next ones, too. Default: 0, never.
	StuckForGood time.Duration
}

func (c Config) withDefaults() (Config, error) {
	if c.StuckAfter < 0 || c.DownAfter < 0 || c.StuckForGood < 0 {
		return c, argument.New("health.Config", nil, "has a negative duration", "use positive ones, or 0 for the default")
	}
	if c.StuckAfter == 0 {
		c.StuckAfter = 5 * time.Minute
	}
	if c.DownAfter == 0 {
		c.DownAfter = 10 * time.Second
	}
	return c, nil
}

// Report is the health of connections at one moment.
type Report struct {
	// Live, Ready and Progress are the answers to the three questions.
	Live     bool `json:"live"`
	Ready    bool `json:"ready"`
	Progress bool `json:"progress"`
	// Problems are what is wrong, connections first, and then by queue. Some are notes only:
	// all three answers may be true beside them.
	Problems []Problem `json:"problems"`
	// Consumers are the consumers, by queue.
	Consumers []Consumer `json:"consumers"`
}

// Problem is one thing that is wrong.
type Problem struct {
	// Kind is one of these:
	//
	//	"closed"         Close was called on the Conn. It is neither live nor ready
	//	"disconnected"   a connection was lost, and is being rebuilt. It isn't ready after
	//	                 Config.DownAfter, and makes no progress
	//	"blocked"        the broker accepts no messages, because of a memory or disk alarm. A
	//	                 service without consumers isn't ready; one with consumers is.
	//	                 Neither makes progress
	//	"queue-missing"  a consumer's queue was deleted. It isn't ready after
	//	                 Config.DownAfter, and makes no progress
	//	"no-link"        a consumer has no link to its queue for another reason. It isn't
	//	                 ready after Config.DownAfter, and makes no progress
	//	"no-replies"     a requester of package rpc can't receive replies. It isn't ready
	//	                 after Config.DownAfter, and makes no progress
	//	"stuck"          a handler has run for longer than Config.StuckAfter. It makes no
	//	                 progress. It isn't live once all handlers have run for longer than
	//	                 Config.StuckForGood
	//	"forwards-wait"  retry copies wait, because their address accepts nothing. It is a
	//	                 note: other messages keep flowing
	Kind string `json:"kind"`
	// Connection is the endpoint, without its password, for problems of a connection.
	Connection string `json:"connection,omitempty"`
	// Queue is the consumer's queue, for problems of a consumer, or the address that a
	// requester sends to.
	Queue string `json:"queue,omitempty"`
	// Handlers is how many handlers run, for "stuck".
	Handlers int `json:"handlers,omitempty"`
	// Since is since when it is so.
	Since time.Time `json:"since"`
	// Error is the reason, if one is known.
	Error string `json:"error,omitempty"`
}

// What Problem.Kind may be.
const (
	kindClosed       = "closed"
	kindDisconnected = "disconnected"
	kindBlocked      = "blocked"
	kindQueueMissing = "queue-missing"
	kindNoLink       = "no-link"
	kindNoReplies    = "no-replies"
	kindStuck        = "stuck"
	kindForwardsWait = "forwards-wait"
)

// Consumer is what a consumer does now.
type Consumer struct {
	Queue string `json:"queue"`
	// Up reports whether it has a link to its queue, and Since since when that is so.
	Up    bool      `json:"up"`
	Since time.Time `json:"since"`
	// Handling is how many handlers run, Ready how many deliveries wait for one, and
	// Unsettled how many deliveries it holds.
	Handling  int `json:"handling"`
	Ready     int `json:"ready"`
	Unsettled int `json:"unsettled"`
	// Delivered is when the last delivery came. It is nil if none has come on this link.
	Delivered *time.Time `json:"delivered,omitempty"`
}

// Check returns the health of conns. Without any, it is live and not ready. The only
// error is an *argument.Error, for cfg or a nil Conn.
func Check(cfg Config, conns ...*client.Conn) (Report, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return Report{}, err
	}
	r := Report{Live: true, Ready: len(conns) > 0, Progress: len(conns) > 0, Problems: []Problem{}, Consumers: []Consumer{}}
	now := time.Now()
	for i, c := range conns {
		if c == nil {
			return Report{}, argument.New("conns", i, "is nil", "give connections of client.Connect")
		}
		r.add(cfg, now, c.State(), c.Stats())
	}
	return r, nil
}

// add adds the health of one connection.
func (r *Report) add(cfg Config, now time.Time, state client.State, stats instrument.Stats) {
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
		if len(stats.Consumers) == 0 {
			r.Ready = false
		}
		problem(Problem{Kind: kindBlocked, Connection: state.Endpoint, Since: state.BlockedSince, Error: "the broker has a memory or disk alarm"})
	}
	for _, c := range stats.Consumers {
		one := Consumer{Queue: c.Queue, Up: c.Up, Since: c.Since, Handling: c.Handling, Ready: c.Ready, Unsettled: c.Unsettled}
		if !c.Delivered.IsZero() {
			one.Delivered = &c.Delivered
		}
		r.Consumers = append(r.Consumers, one)
		// A consumer's link ends with its connection, which is told of already.
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

// Handler shows the health of conns over HTTP, as JSON. The last element of the path
// selects the question: live, ready or progress. So it works under any prefix. Any other
// path answers with the whole report, and with the status of ready. Methods other than GET
// and HEAD are refused.
//
// A fault of cfg or a nil Conn is a panic, as with http.Handle.
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
