package client

import (
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// maxEvents is how many events may wait for the observer's callback.
const maxEvents = 1024

// observer passes events to a callback, one at a time and in order, on a goroutine that lives
// while events wait. A callback that blocks costs events. It never delays the recovery that
// they report.
type observer struct {
	call func(Event) // nil: nobody listens
	log  *slog.Logger

	mu      sync.Mutex
	waiting []Event
	dropped int
	running bool
}

// notify never blocks. It may be called with locks held.
func (o *observer) notify(e Event) {
	if !o.listens() {
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

// listens reports whether there is a callback.
func (o *observer) listens() bool { return o != nil && o.call != nil }

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
			o.log.Error("hopback: Config.OnEvent panicked", "event", e.String(), "panic", p)
		} else if !finished { // runtime.Goexit: it ends this goroutine
			o.log.Error("hopback: Config.OnEvent ended its goroutine", "event", e.String())
			go o.run()
		}
	}()
	o.call(e)
	finished = true
}

// of reports an event of a consumer or a publisher that has this reservation.
func (o *observer) of(r *link.Reservation) func(Event) {
	return func(e Event) {
		if !o.listens() {
			return
		}
		at := r.Place()
		e.Generation, e.Node = at.Generation, at.Node
		o.notify(e)
	}
}

// connection reports an event of a connection.
func (o *observer) connection(at link.Place, e Event) {
	e.Op, e.Target, e.Generation, e.Node = "connection", at.Endpoint, at.Generation, at.Node
	o.notify(e)
}

// The methods of link.Observer.

func (o *observer) Up(at link.Place, attempt int, down time.Duration) {
	o.connection(at, Event{Kind: EventUp, Attempt: attempt, Down: down})
}

func (o *observer) Lost(at link.Place, why error) {
	o.connection(at, Event{Kind: EventLost, Err: why})
}

func (o *observer) Refused(at link.Place, attempt int, why error) {
	o.connection(at, Event{Kind: EventRefused, Attempt: attempt, Err: why})
}

func (o *observer) Blocked(at link.Place) { o.connection(at, Event{Kind: EventBlocked}) }

func (o *observer) Unblocked(at link.Place, after time.Duration) {
	o.connection(at, Event{Kind: EventUnblocked, Down: after})
}

func (o *observer) TokenRenewed(at link.Place, attempt int) {
	o.connection(at, Event{Kind: EventTokenRenewed, Attempt: attempt})
}

func (o *observer) TokenRefused(at link.Place, attempt int, why error) {
	o.connection(at, Event{Kind: EventTokenRefused, Attempt: attempt, Err: why})
}

func (o *observer) Ended(at link.Place) { o.connection(at, Event{Kind: EventEnded}) }

// claimObserver reports the events of a Claimer.
type claimObserver struct {
	queue  string
	notify func(Event)
}

func (o claimObserver) event(e Event) {
	e.Op, e.Target = "claim", o.queue
	o.notify(e)
}

func (o claimObserver) Up(attempt int, down time.Duration) {
	o.event(Event{Kind: EventUp, Attempt: attempt, Down: down})
}

func (o claimObserver) Lost(attempt int, why error) {
	o.event(Event{Kind: EventLost, Attempt: attempt, Err: why})
}

func (o claimObserver) Refused(attempt int, why error) {
	o.event(Event{Kind: EventRefused, Attempt: attempt, Err: why})
}

func (o claimObserver) Ended(attempt int) { o.event(Event{Kind: EventEnded, Attempt: attempt}) }
