package instrument

import (
	"time"

	"github.com/hopback/hopback/address"
)

// Stats are the numbers of a Conn at one moment. See client.Conn.Stats and
// client.Conn.State.
type Stats struct {
	// Connections is how many AMQP connections are up, and Sessions how many sessions of
	// consumers, publishers and forwards are open on them.
	Connections, Sessions int
	// Lost counts the AMQP connections that were lost, and Rebuilt those that were made
	// again, since client.Connect.
	Lost, Rebuilt uint64
	// Blocked is for how long the broker has accepted no messages since client.Connect, because of
	// alarms: the sum over all connections. BlockedNow is how many are blocked now.
	Blocked    time.Duration
	BlockedNow int
	// Consumers, Publishers and Requesters are those that live, ordered by queue and by
	// address.
	Consumers  []ConsumerStats
	Publishers []PublisherStats
	Requesters []RequesterStats
}

// ConsumerStats are the numbers of a call of client.Conn.Consume, or of stream.Consume, at one moment.
type ConsumerStats struct {
	Queue string
	// Up reports whether the consumer has a link to its queue, and Since when that last
	// changed. A link that is moved to another session stays up.
	Up    bool
	Since time.Time
	// Err is why there is no link: first the error that ended it, then that of the last
	// attempt to open it again. client.ErrNotFound means that the queue is gone. It is nil while
	// Up is true, and while the first link is being opened.
	Err error
	// Handling is how many handlers run, of Concurrency at most. Oldest is when the first of
	// these began, and Newest when the last did. Both are zero if none runs.
	Handling, Concurrency int
	Oldest, Newest        time.Time
	// Window is the most deliveries that the consumer holds now: Prefetch, or less, if it is
	// slowed down.
	Window int
	// Unsettled is how many deliveries it holds. Ready is how many of them wait for a
	// handler.
	Unsettled, Ready int
	// Forwarding is how many copies wait for the broker's confirmation. Stalled is how many
	// of them wait because their address accepts nothing.
	Forwarding, Stalled int
	// StalledSince is since when such an address has accepted nothing, the longest of
	// several, and StalledErr why. It is zero if there is none.
	StalledSince time.Time
	StalledErr   error
	// Delivered is when the last delivery came. It is zero if none has come on this link.
	Delivered time.Time
}

// PublisherStats are the numbers of a client.Publisher at one moment.
type PublisherStats struct {
	// To is the publisher's address, or the zero Address if each message names its own.
	To address.Address
	// Queued is how many messages wait to be sent, and Unconfirmed how many were sent and
	// have no answer.
	Queued, Unconfirmed int
}

// RequesterStats are the numbers of an rpc.Requester at one moment. Its publisher is among
// Stats.Publishers.
type RequesterStats struct {
	// To is where it sends its requests to.
	To address.Address
	// Up reports whether it can receive replies, and Since when that last changed. Err is why
	// it can't.
	Up    bool
	Since time.Time
	Err   error
	// Waiting is how many calls wait for their replies.
	Waiting int
}
