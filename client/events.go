package client

import (
	"log/slog"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// Event is a state change of a connection, a publisher, or a consumer. [Config.OnEvent] receives
// it.
type Event struct {
	Kind EventKind
	// Time is when it happened. OnEvent may be called later.
	Time time.Time
	// Op is what the event is about: "connection", "publish", "forward", or "consume".
	Op string
	// Target is the endpoint (without its password), the address, or the queue.
	Target string
	// Generation is the number of the AMQP connection. The first is 1, and each one that is
	// rebuilt or added gets the next number. While a connection is being rebuilt, events have
	// the number of the lost one. Generation is 0 if an additional connection couldn't be
	// opened.
	Generation uint64
	// Node is the broker node at the other end of the connection. It is empty if there is none.
	Node string
	// Attempt is the number of the attempt that failed or succeeded, from 1.
	Attempt int
	// Down is how long the outage lasted, for [EventUp], [EventUnblocked], and
	// [EventForwardResumed].
	Down time.Duration
	// Unsettled is how many deliveries were unsettled when a consumer's link was lost. The
	// broker delivers them again. For a publisher, it is how many messages were sent and not yet
	// confirmed.
	Unsettled int
	// Err is the reason, for [EventLost], [EventRefused], [EventForwardStalled],
	// [EventTokenRefused], and [EventStarved].
	Err error
	// Ahead is how far the broker's clock is ahead of this host's, for [EventClockDiffers]. It
	// is negative if the broker's clock is behind.
	Ahead time.Duration
	// Dropped is how many events were dropped before this one because OnEvent was too slow.
	Dropped int
}

// EventKind is the kind of an Event.
type EventKind string

// The kinds of events. The event's Op says whether it is about the connection, a publisher, a
// consumer, or the copies that a consumer forwards.
const (
	// EventUp: it is connected, for the first time or again after an outage.
	EventUp EventKind = "up"
	// EventLost: it lost its connection or link, and the client is rebuilding it.
	EventLost EventKind = "lost"
	// EventRefused: an attempt to connect or reconnect failed. The client tries again.
	EventRefused EventKind = "refused"
	// EventBlocked: the broker stopped accepting messages because of a memory or disk alarm.
	// Publish waits for as long as its ctx allows.
	EventBlocked EventKind = "blocked"
	// EventUnblocked: the broker accepts messages again. If the connection ends while it is
	// blocked, only EventLost or EventEnded reports it.
	EventUnblocked EventKind = "unblocked"
	// EventLate: a handler returned after its link was lost or the broker had revoked the
	// delivery. The broker delivers the message again.
	EventLate EventKind = "late"
	// EventTokenRenewed: the broker accepted a new token for the connection.
	EventTokenRenewed EventKind = "token-renewed"
	// EventTokenRefused: the token source returned no new token, or the broker refused it. The
	// client tries again. When the old token expires, the broker closes the connection.
	EventTokenRefused EventKind = "token-refused"
	// EventForwardStalled: an address doesn't accept the copies that a consumer forwards.
	// Deliveries that need this address wait; others continue. Err is the cause, and Unsettled
	// is how many wait so far.
	EventForwardStalled EventKind = "forward-stalled"
	// EventForwardResumed: the address accepts copies again. Down is how long it didn't.
	EventForwardResumed EventKind = "forward-resumed"
	// EventEnded: Close is done, or Consume has returned, or an additional connection was closed
	// after a minute without use.
	EventEnded EventKind = "ended"
	// EventStarved: a consumer has credit, but received nothing for a while (at first 30 s)
	// although its queue has messages ready. Or RabbitMQ below 4.3 may have lost its
	// settlements. The client replaces the consumer's session. A consumer of lower priority and
	// a standby of a single active consumer starve by design; for them the event repeats less
	// and less often, down to about every 16 minutes.
	EventStarved EventKind = "starved"
	// EventClockDiffers: the broker's clock differs from this host's. A handler reported it with
	// [Start.OnClockDiffers]. The event comes once per Conn.
	EventClockDiffers EventKind = "clock-differs"
)

// String returns the event as one line of text.
func (e Event) String() string {
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

// observer passes events to a callback, one at a time and in order, on a goroutine that lives
// while events wait. A callback that blocks costs events. It never delays the recovery that
// they report.
type observer struct {
	call  func(Event) // nil: nobody listens
	log   *slog.Logger
	hooks *instrumentHooks

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
	o.hooks.Connected(at.Address)
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
	conn   *Conn
	queue  string
	notify func(Event)
}

func (o claimObserver) event(e Event) {
	e.Op, e.Target = "claim", o.queue
	o.notify(e)
}

func (o claimObserver) Now() (time.Time, bool) { return o.conn.certainNow() }

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
