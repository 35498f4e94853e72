package chaos

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/middleware/ratelimit"
)

// Limited is a service whose workers share a limit of calls at once: of all messages or, with half of the seeds, of
// each key. An operator pauses its queue now and then.
const Limited = "limited"

// What an operator pauses.
const (
	Paused      Kind = "paused"       // the queue of lane "limited"
	GroupPaused Kind = "group-paused" // the group, and one of its workers may be killed or stop
)

const (
	Exceeded   ViolationKind = "exceeded"    // a limit was exceeded for longer than it may be
	PauseBroke ViolationKind = "pause broke" // a call began in a pause
)

const (
	limitOfAll, limitOfKey = 3, 1
	limitedKeys            = 4
	// callOfAll and callOfKey are the longest calls.
	callOfAll, callOfKey = 1500 * time.Millisecond, 800 * time.Millisecond
	// exceededFor is how long a limit may be exceeded by calls of workers that are connected.
	exceededFor = 2 * time.Second
	// pausedWithin is how long after a pause has begun, or ended, calls may begin, or none.
	pausedWithin = 2 * time.Second
)

// simLimit is the limit of lane "limited", and the calls that run.
type simLimit struct {
	lane *simLane
	cfg  ratelimit.Config
	call time.Duration // the longest

	mu      sync.Mutex
	running map[string]map[*simCall]struct{}
	since   map[string]time.Time // by key, if more run than may
}

// simCall is a call of a worker whose connection wasn't lost since it began.
type simCall struct{ w *simWorker }

// makeLimited prepares the lane.
func (s *simulation) makeLimited(l *simLane) {
	l.limit = &simLimit{lane: l, call: callOfAll, running: map[string]map[*simCall]struct{}{}, since: map[string]time.Time{}}
	s.view = &simView{lives: map[*simShown]struct{}{}}
	l.limit.cfg = ratelimit.Config{AtOnce: limitOfAll, Shared: true}
	if s.Seed%4 < 2 {
		l.limit.call, l.limit.cfg.AtOnce, l.limit.cfg.Key = callOfKey, limitOfKey, l.limit.key
	}
}

// key is what a message counts toward. The stranger's messages aren't limited.
func (c *simLimit) key(d *client.Delivery) (key string, ok bool) {
	of, id, err := c.lane.read(d.Message())
	if err != nil || of != c.lane {
		return "", false
	}
	return fmt.Sprint(id % limitedKeys), true
}

// of returns the handler of one life of a worker: each call takes a while, and then plays the message's fate.
func (c *simLimit) of(w *simWorker) client.Handler {
	return ratelimit.With(c.cfg)(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		key, limited := "", true
		if c.cfg.Key != nil {
			key, limited = c.key(d)
		}
		if limited {
			end := c.begin(key, w)
			_, id, _ := c.lane.read(d.Message()) // the stranger's have calls, too, if all do
			backoff.Sleep(ctx, time.Duration(c.lane.script.dice(c.lane.n, id, 800)%uint64(c.call)))
			end()
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		return w.handle(ctx, d)
	}))
}

// begin notes that a call runs until end is called.
func (c *simLimit) begin(key string, w *simWorker) (end func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running[key] == nil {
		c.running[key] = map[*simCall]struct{}{}
	}
	c.lane.begins()
	call := &simCall{w}
	c.running[key][call] = struct{}{}
	c.compare(key)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.running[key], call)
		c.compare(key)
	}
}

// begins notes that a call of the lane begins.
func (l *simLane) begins() {
	if from := l.paused.Load(); from != nil && time.Now().After(*from) {
		l.wrong(PauseBroke, l.n, "a call began at %v, which is %v after none should", time.Since(l.began), time.Since(*from))
	}
}

// pause pauses the lane's queue, or its group, until resume is called.
func (l *simLane) pause(ctx context.Context) (resume func()) {
	start, end := pause.Pause, pause.Resume
	if l.group != nil {
		start, end = pause.PauseGroup, pause.ResumeGroup
	}
	l.step("%s is paused", l.queue)
	if err := start(ctx, l.admin, l.queue, pause.PauseConfig{Why: "the simulation"}); err != nil {
		l.wrong(ViolationStuck, l.n, "pause: %v", err)
	}
	l.paused.Store(new(time.Now().Add(pausedWithin)))
	return func() {
		l.paused.Store(nil)
		if err := end(ctx, l.admin, l.queue); err != nil {
			l.wrong(ViolationStuck, l.n, "resume: %v", err)
		}
		l.step("%s is resumed", l.queue)
	}
}

// pauseOne pauses what a fault is about, until heal is called.
func (s *simulation) pauseOne(ctx context.Context, f simFault) (heal func()) {
	i := slices.IndexFunc(s.lanes, func(l *simLane) bool {
		return f.kind == Paused && l.limit != nil || f.kind == GroupPaused && l.group != nil
	})
	if i < 0 {
		return nil
	}
	l := s.lanes[i]
	if last := s.quiet[len(s.quiet)-1]; l.group != nil { // a worker whose connection fell silent notices no pause, and may retry
		backoff.Sleep(ctx, last.from-time.Since(s.began))
	}
	from := time.Since(s.began)
	l.breaks(from, f.lasts)
	resume := l.pause(ctx)
	if l.group != nil {
		w := l.workers[f.dice.IntN(len(l.workers))]
		backoff.Sleep(ctx, time.Duration(f.dice.Int64N(int64(f.lasts/2))))
		switch f.dice.IntN(3) {
		case 0:
			s.step("worker %d is killed", w.n)
			w.kill(0)
		case 1:
			s.step("worker %d is stopped", w.n)
			w.drain(0)
		}
	}
	return func() {
		resume()
		ended := time.Since(s.began)
		s.owed = append(s.owed, owed{l.n, span{from, ended}, ended + time.Minute})
	}
}

// lost notes that a connection of a worker was lost. Calls may outlive that.
func (c *simLimit) lost(w *simWorker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, calls := range c.running {
		maps.DeleteFunc(calls, func(call *simCall, _ struct{}) bool { return call.w == w })
		c.compare(key)
	}
}

// compare is called with mu held.
func (c *simLimit) compare(key string) {
	over, since := len(c.running[key]) > c.cfg.AtOnce, c.since[key]
	switch {
	case over && since.IsZero():
		c.since[key] = time.Now()
	case !over && !since.IsZero():
		c.since[key] = time.Time{}
		if above := time.Since(since); above > exceededFor {
			c.lane.wrong(Exceeded, c.lane.n, "more than %d calls ran for %v until %v, of key %q", c.cfg.AtOnce, above, time.Since(c.lane.began), key)
		}
	}
}
