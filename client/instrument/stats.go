package instrument

import (
	"time"

	"github.com/hopback/hopback/address"
)

// Stats are the counts of a Conn at one moment, for metrics. See client.Conn.Stats and
// client.Conn.State.
type Stats struct {
	// Connections is how many AMQP connections are up. Sessions is how many sessions of
	// consumers and publishers are open on them, including the sessions for retry copies.
	Connections, Sessions int
	// Lost counts the AMQP connections that were lost since client.Connect, and Rebuilt those
	// that were opened again.
	Lost, Rebuilt uint64
	// Blocked is how long the broker has accepted no messages since client.Connect because of
	// alarms, summed over all connections. BlockedNow is how many connections are blocked now.
	Blocked    time.Duration
	BlockedNow int
	// Consumers, Publishers, and Requesters are the running ones, sorted by queue and by
	// address.
	Consumers  []ConsumerStats
	Publishers []PublisherStats
	Requesters []RequesterStats
	// Stuck are the queues whose handlers middleware/live follows.
	Stuck []StuckStats
}

// StuckStats are the stuck handlers of a worker at one moment: see package middleware/live.
type StuckStats struct {
	Queue    string
	Handlers int
}

// ConsumerStats are the counts of one call of client.Conn.Consume or stream.Consume at one
// moment.
type ConsumerStats struct {
	Queue string
	// Up reports whether the consumer has a link to its queue. Since is when Up last changed.
	// Moving a link to another session doesn't change Up.
	Up    bool
	Since time.Time
	// Err is why there is no link: at first the error that ended it, later the error of the last
	// attempt to open it again. client.ErrNotFound means that the queue no longer exists. Err is
	// nil while Up is true, and while the first link is being opened.
	Err error
	// Handling is how many handlers are running, out of Concurrency. Oldest is when the
	// longest-running handler started, and Newest when the last one started. Both are zero if
	// none is running.
	Handling, Concurrency int
	Oldest, Newest        time.Time
	// Paused reports whether a client.Control has paused it, or package pause the workers of its partition.
	Paused bool
	// Window is how many deliveries the consumer may currently hold: Prefetch, or less if it is
	// slowed down.
	Window int
	// Unsettled is how many deliveries the consumer holds. Ready is how many of them wait for a
	// handler.
	Unsettled, Ready int
	// Forwarding is how many copies wait for the broker's confirmation. Stalled is how many of
	// them wait because their address doesn't accept messages.
	Forwarding, Stalled int
	// StalledSince is when such an address stopped accepting messages; if there are several, the
	// earliest time. StalledErr is the reason. StalledSince is zero if there is none.
	StalledSince time.Time
	StalledErr   error
	// Delivered is when the last delivery arrived. It is zero if none has arrived on this link.
	Delivered time.Time
	// Partition reports whether it is a consumer of package partition, and Owner whether its
	// partition belongs to this worker now. A worker has a consumer for each partition.
	Partition, Owner bool
}

// PublisherStats are the counts of a client.Publisher at one moment.
type PublisherStats struct {
	// To is the publisher's address, or the zero Address if each message names its own.
	To address.Address
	// Queued is how many messages wait to be sent. Unconfirmed is how many were sent and wait
	// for the broker's confirmation.
	Queued, Unconfirmed int
}

// RequesterStats are the counts of an rpc.Requester at one moment. Its publisher is one of
// Stats.Publishers.
type RequesterStats struct {
	// To is the address that it sends requests to.
	To address.Address
	// Up reports whether it can receive replies. Since is when Up last changed. Err is why it
	// can't.
	Up    bool
	Since time.Time
	Err   error
	// Waiting is how many calls wait for a reply.
	Waiting int
}
