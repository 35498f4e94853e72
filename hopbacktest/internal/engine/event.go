package engine

import "github.com/hopback/hopback/internal/frames"

// Scope is what a Fault ends.
type Scope uint8

// What ends by a fault.
const (
	ScopeLink Scope = iota
	ScopeSession
	ScopeConnection
)

// Fault is an error that ends something. It has ended already in the engine.
type Fault struct {
	Ends Scope
	Err  *frames.Error
}

// Error is condition and description.
func (f *Fault) Error() string { return f.Err.Error() }

// EventKind is what has happened.
type EventKind uint8

// The kinds of events, and which fields they have.
const (
	// Delivered: Consumer is to get Delivery.
	EventDelivered EventKind = iota
	// Confirmed: the message ID of Publisher has the outcome State. It is settled.
	EventConfirmed
	// Flowed: Consumer's flow state is DeliveryCount, Credit and Available. It answers
	// a flow with drain or echo set, or Active has changed. Flow has the frame to send,
	// without handle and session fields.
	EventFlowed
	// Revoked: RabbitMQ sends released, not settled, for Delivery, whose consumer has
	// held it too long. It still counts as unsettled until the client settles it.
	EventRevoked
	// Detached: the link of Consumer or Publisher has ended with Err.
	EventDetached
	// Ended: Session has ended with Err.
	EventEnded
	// Closed: the connection has ended with Err. Nothing comes after it.
	EventClosed
	// EventBlocked and Unblocked: an alarm has begun, or the last one has ended. RabbitMQ
	// closes the incoming window of each session, and opens it again.
	EventBlocked
	EventUnblocked
)

// Event is something that a client must be notified of.
type Event struct {
	Kind      EventKind
	Session   *Session
	Consumer  *Consumer
	Publisher *Publisher
	Delivery  *Delivery
	ID        uint32
	// State is a *frames.Accepted, *frames.Released or *frames.Rejected; or nil for a message
	// that was settled when it came, and waited for its queue.
	State any
	Flow  *frames.Flow
	Err   *frames.Error

	written bool // it outlives its link
}
