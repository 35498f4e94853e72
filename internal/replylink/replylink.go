// Package replylink is how package rpc receives replies on a client.Conn. It needs links
// that no consumer has: with an address that the broker makes up, and without a handler.
package replylink

import (
	"context"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/oldbroker"
)

// Source is where the links of a Session receive from.
type Source struct {
	// Queue is a queue's address. "" stands for direct reply-to: each link gets a separate
	// address from the broker, and its messages come settled.
	Queue string
	// Links is how many links there are.
	Links int
	// Credit is how many messages the broker may send ahead on each link.
	Credit uint32
}

// Place is a place for one session at a time on the connections of a Conn.
type Place interface {
	// Open opens a session with its links, and waits while the connection is being
	// rebuilt. source is called with the broker's quirks.
	Open(ctx context.Context, source func(oldbroker.Quirks) (Source, error)) (Session, error)
	// Pause is how long to wait before a session is opened again: see package backoff.
	Pause(failures int) time.Duration
	// Leave gives the place back. Sessions must be closed before.
	Leave()
}

// Reply is a message that was received.
type Reply struct {
	*amqp.Message
	ID uint32 // of the delivery
	// TooLarge is the size of a reply that is larger than Config.MaxMessageSize: Message has no
	// body then. Otherwise it is 0.
	TooLarge uint64
}

// Session is a session with links. It isn't rebuilt.
type Session interface {
	// Address is that of a link, by its index: the broker's, or the queue's.
	Address(link int) string
	// Receive waits for the next reply on a link. One goroutine may call it for each link. Its
	// error is the end of the session, or of ctx.
	Receive(ctx context.Context, link int) (Reply, error)
	// Accept settles a delivery of a link, if it came unsettled.
	Accept(link int, id uint32) error
	Close()
}
