// Package event has the changes in the state of connections, publishers, and consumers, and hands
// them to Config.OnEvent in order, without making anything else wait.
package event

import (
	"log/slog"
	"sync"
	"time"
)

// StateEvent is a change in the state of a connection, a publisher, or a consumer. client.Event
// documents the fields.
type StateEvent struct {
	Kind       EventKind
	Time       time.Time
	Op         string
	Target     string
	Generation uint64
	Node       string
	Attempt    int
	Down       time.Duration
	Unsettled  int
	Err        error
	Ahead      time.Duration
	Dropped    int
}

// EventKind is the kind of a StateEvent. client.EventKind documents the kinds.
type EventKind string

const (
	EventUp             EventKind = "up"
	EventLost           EventKind = "lost"
	EventRefused        EventKind = "refused"
	EventBlocked        EventKind = "blocked"
	EventUnblocked      EventKind = "unblocked"
	EventLate           EventKind = "late"
	EventTokenRenewed   EventKind = "token-renewed"
	EventTokenRefused   EventKind = "token-refused"
	EventForwardStalled EventKind = "forward-stalled"
	EventForwardResumed EventKind = "forward-resumed"
	EventEnded          EventKind = "ended"
	EventStarved        EventKind = "starved"
	EventClockDiffers   EventKind = "clock-differs"
)

// String returns the event as one line of text.
func (e StateEvent) String() string {
	s := e.Op + " " + e.Target + ": " + string(e.Kind)
	switch {
	case e.Err != nil:
		s += ": " + e.Err.Error()
	case e.Down > 0:
		s += " after " + e.Down.Round(time.Millisecond).String()
	case e.Ahead != 0:
		s += " by " + e.Ahead.Round(time.Millisecond).String()
	}
	return s
}

// maxEvents is how many events may wait for the observer's callback.
const maxEvents = 1024

// Observer passes events to a callback, one at a time and in order, on a goroutine that lives
// while events wait. A callback that blocks costs events. It never delays the recovery that
// they report.
type Observer struct {
	Call func(StateEvent) // nil: nobody listens
	Log  *slog.Logger

	mu      sync.Mutex
	waiting []StateEvent
	dropped int
	running bool
}

// Notify never blocks. It may be called with locks held.
func (o *Observer) Notify(e StateEvent) {
	if !o.Listens() {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.waiting) == maxEvents {
		// Drop the oldest: the newest events describe the current state.
		copy(o.waiting, o.waiting[1:])
		o.waiting[len(o.waiting)-1] = e
		o.dropped++
		return
	}
	o.waiting = append(o.waiting, e)
	if !o.running {
		o.running = true
		go o.run()
	}
}

// Listens reports whether there is a callback.
func (o *Observer) Listens() bool { return o != nil && o.Call != nil }

func (o *Observer) run() {
	for {
		o.mu.Lock()
		if len(o.waiting) == 0 {
			o.running = false
			o.waiting = nil
			o.mu.Unlock()
			return
		}
		e := o.waiting[0]
		o.waiting = o.waiting[1:]
		e.Dropped, o.dropped = o.dropped, 0
		o.mu.Unlock()
		o.one(e)
	}
}

func (o *Observer) one(e StateEvent) {
	finished := false
	defer func() {
		if p := recover(); p != nil {
			o.Log.Error("hopback: Config.OnEvent panicked", "event", e.String(), "panic", p)
		} else if !finished { // runtime.Goexit: it ends this goroutine
			o.Log.Error("hopback: Config.OnEvent ended its goroutine", "event", e.String())
			go o.run()
		}
	}()
	o.Call(e)
	finished = true
}
