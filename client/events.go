package client

import (
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Event is a change in the state of a connection, or of what lives on it.
type Event struct {
	Kind EventKind
	// Time is when it happened, which may be before Config.Observe is called.
	Time time.Time
	// Op is whose state it is: "connection", "publish", "forward" or "consume".
	Op string
	// Target is the endpoint (without its password), the address or the queue.
	Target string
	// Generation counts the connections that were made: 1 for the first. Events of
	// an earlier generation are about a connection that is gone.
	Generation uint64
	// Node is the broker's node that the connection is to, where there is one.
	Node string
	// Attempt is which one in a row failed or succeeded, from 1.
	Attempt int
	// Down is how long it was gone, for Up; how long it was blocked, for Unblocked.
	Down time.Duration
	// Unsettled is how many deliveries were unsettled when a consumer's link was
	// lost: the broker delivers them again. For a publisher, how many messages
	// were sent and not answered.
	Unsettled int
	// Err is the reason, for Lost, Refused and TokenRefused.
	Err error
	// Dropped is how many events before this one were dropped, since Config.Observe
	// didn't return in time.
	Dropped int
}

// EventKind is what an Event tells.
type EventKind uint8

// The kinds of events. Each is about the connection, a publisher, a consumer or
// a consumer's forwards, as the event's Op says.
const (
	// Up: it works, for the first time or again.
	Up EventKind = iota + 1
	// Lost: it ended, and is being rebuilt.
	Lost
	// Refused: an attempt to build or rebuild it failed; another follows.
	Refused
	// Blocked: the broker takes no messages for the time being, as it does while
	// it has a memory or disk alarm. What is published waits within its ctx.
	Blocked
	// Unblocked: the broker takes messages again.
	Unblocked
	// Late: a handler's result came when its link was gone or the broker had taken
	// the delivery back. The broker delivers the message again.
	Late
	// TokenRenewed: the broker has taken a new token for the connection.
	TokenRenewed
	// TokenRefused: there was no new token, or the broker refused it; another
	// attempt follows. When the old one expires the broker ends the connection.
	TokenRefused
	// Ended: Close was called and is done, or Consume has returned.
	Ended
)

var eventNames = [...]string{
	Up: "up", Lost: "lost", Refused: "refused", Blocked: "blocked", Unblocked: "unblocked", Late: "late",
	TokenRenewed: "token renewed", TokenRefused: "token refused", Ended: "ended",
}

func (k EventKind) String() string {
	if int(k) < len(eventNames) && eventNames[k] != "" {
		return eventNames[k]
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// String is the event in a line, for people.
func (e Event) String() string {
	s := e.Op + " " + e.Target + ": " + e.Kind.String()
	switch {
	case e.Err != nil:
		s += ": " + e.Err.Error()
	case e.Down > 0:
		s += " after " + e.Down.Round(time.Millisecond).String()
	}
	return s
}

// maxEvents is how many events may wait for Config.Observe.
const maxEvents = 1024

// observer calls Config.Observe, one event at a time and in order, on a goroutine
// of its own that lives while there is something to tell. A callback that blocks
// costs events, never the recovery that they tell of.
type observer struct {
	call func(Event) // nil: nobody listens
	log  *slog.Logger

	mu      sync.Mutex
	waiting []Event
	dropped int
	running bool
}

// tell never blocks. It may be called with locks held.
func (o *observer) tell(e Event) {
	if o == nil || o.call == nil {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.waiting) == maxEvents {
		// What is newest tells the state; the oldest are history.
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

func (o *observer) run() {
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

func (o *observer) one(e Event) {
	finished := false
	defer func() {
		if p := recover(); p != nil {
			o.log.Error("hopback: Config.Observe panicked", "event", e.String(), "panic", p)
		} else if !finished { // runtime.Goexit: it ends this goroutine
			o.log.Error("hopback: Config.Observe ended its goroutine", "event", e.String())
			go o.run()
		}
	}()
	o.call(e)
	finished = true
}
