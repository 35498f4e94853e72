package client

import "time"

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
