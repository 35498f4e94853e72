package client

import (
	"log/slog"
	"time"

	"github.com/hopback/hopback/internal/event"
)

// Event is a change in the state of a connection, a publisher or a consumer.
type Event struct {
	Kind EventKind
	// Time is when it happened, which may be before Config.OnEvent is called.
	Time time.Time
	// Op is what the event is about: "connection", "publish", "forward" or "consume".
	Op string
	// Target is the endpoint (without its password), the address or the queue.
	Target string
	// Generation is the number of the AMQP connection: 1 for the first, and the next for
	// each that is rebuilt or opened in addition. A connection that is being rebuilt has
	// the number of the lost one. It is 0 if a further connection couldn't be opened.
	Generation uint64
	// Node is the broker's node that the connection is to. It is empty if there is none.
	Node string
	// Attempt is the number of the attempt that failed or succeeded, from 1.
	Attempt int
	// Down is how long the outage lasted: until EventUp, EventUnblocked or
	// EventForwardResumed.
	Down time.Duration
	// Unsettled is how many deliveries were unsettled when a consumer's link was lost.
	// The broker delivers them again. For a publisher it is how many messages were sent
	// and not answered.
	Unsettled int
	// Err is the reason, for EventLost, EventRefused, EventForwardStalled, EventTokenRefused and EventStarved.
	Err error
	// Ahead is how far the broker's clock is ahead of this host's, for EventClockDiffers.
	// It is negative if the broker's clock is behind.
	Ahead time.Duration
	// Dropped is how many events before this one were dropped because Config.OnEvent was
	// too slow.
	Dropped int
}

// EventKind is the kind of an Event.
type EventKind string

// The kinds of events. Each is about the connection, a publisher, a consumer or
// a consumer's forwards, as the event's Op says.
const (
	// EventUp: it works, for the first time or again after an outage.
	EventUp EventKind = "up"
	// EventLost: it ended, and is being rebuilt.
	EventLost EventKind = "lost"
	// EventRefused: an attempt to build or rebuild it failed; another follows.
	EventRefused EventKind = "refused"
	// EventBlocked: the broker accepts no messages, because of a memory or disk alarm.
	// Publish waits within its ctx.
	EventBlocked EventKind = "blocked"
	// EventUnblocked: the broker accepts messages again. A blockage also ends with the
	// connection, which only EventLost or EventEnded reports.
	EventUnblocked EventKind = "unblocked"
	// EventLate: a handler's result came when its link was gone or the broker had taken
	// the delivery back. The broker delivers the message again.
	EventLate EventKind = "late"
	// EventTokenRenewed: the broker has accepted a new token for the connection.
	EventTokenRenewed EventKind = "token-renewed"
	// EventTokenRefused: there was no new token, or the broker refused it; another
	// attempt follows. When the old one expires the broker ends the connection.
	EventTokenRefused EventKind = "token-refused"
	// EventForwardStalled: an address accepts no forwards of a consumer. Their deliveries
	// wait, and others go on. Err is why, and Unsettled is how many wait so far.
	EventForwardStalled EventKind = "forward-stalled"
	// EventForwardResumed: the address accepts forwards again. Down is how long it didn't.
	EventForwardResumed EventKind = "forward-resumed"
	// EventEnded: Close is done, or Consume has returned. Or a further connection was
	// closed after a minute without use.
	EventEnded EventKind = "ended"
	// EventStarved: a consumer has credit and has received nothing for a while (30 s at
	// first), though its queue has messages ready; or RabbitMQ below 4.3 may have lost
	// its settlements. Its session is replaced. A consumer of lower priority and one
	// that stands by for a single active consumer starve by design: for them this is
	// repeated less and less often, in the end every 16 minutes or so.
	EventStarved EventKind = "starved"
	// EventClockDiffers: the broker's clock differs from this host's. A handler has
	// reported it with Start.OnClockDiffers. The event comes once for each Conn.
	EventClockDiffers EventKind = "clock-differs"
)

// String returns the event as one line of text.
func (e Event) String() string {
	return event.StateEvent{Kind: event.EventKind(e.Kind), Op: e.Op, Target: e.Target, Err: e.Err, Down: e.Down, Ahead: e.Ahead}.String()
}

// publicEvent converts an event for Config.OnEvent.
func publicEvent(e event.StateEvent) Event {
	return Event{
		Kind: EventKind(e.Kind), Time: e.Time, Op: e.Op, Target: e.Target, Generation: e.Generation, Node: e.Node,
		Attempt: e.Attempt, Down: e.Down, Unsettled: e.Unsettled, Err: e.Err, Ahead: e.Ahead, Dropped: e.Dropped,
	}
}

// newObserver makes an observer that calls observe, which may be nil.
func newObserver(observe func(Event), log *slog.Logger) *event.Observer {
	o := &event.Observer{Log: log}
	if observe != nil {
		o.Call = func(e event.StateEvent) { observe(publicEvent(e)) }
	}
	return o
}
