package inside

import (
	"context"
	"time"
)

// Gated configures a consumer for package partition. Its queue has a single active consumer, and consumers take
// turns at being it. See consumer_gate.go in package client.
type Gated[Delivery any] struct {
	// Window is how many deliveries the consumer holds at most. All consumers of a queue must have the same.
	Window int
	// Concurrency is how many handlers run at once.
	Concurrency int
	Grace       time.Duration
	// ConsumerTimeout is how long the broker lets the consumer hold a delivery; 0: it isn't known. The
	// consumer steps back shortly before, so that its deliveries return to the queue in their order and
	// with their annotations.
	ConsumerTimeout time.Duration
	// Control is the *client.Control that pauses the consumer. Paused, it keeps its deliveries, with their places.
	Control Pausing
	Handler GatedHandler[Delivery]
}

// GatedHandler is what a gated consumer calls.
type GatedHandler[Delivery any] interface {
	// Handle is that of a client.Handler. Its error may be an *Again. The client.Start for the handler
	// has no Control.
	Handle(context.Context, Delivery) error
	// Key is called when a delivery arrives. Deliveries with the same key are handled one after the
	// other.
	Key(Delivery) string
	// Unpausable reports whether d's handler is called though the consumer is paused.
	Unpausable(d Delivery) bool
	// Attached is called when the consumer's link is attached for the first time.
	Attached()
	// Turn is called when the broker makes the consumer the active one. Over is called when the turn is
	// over and no handler runs: before the consumer's next turn, and, unless the link was lost, before
	// another consumer's.
	Turn(Turn[Delivery])
	Over(Turn[Delivery])
}

// Turn is a time in which a gated consumer is the active one of its queue. Its methods are safe
// for concurrent use, and do nothing once it is over.
type Turn[Delivery any] interface {
	// Serve grants the link credit for Gated.Window deliveries.
	Serve()
	// StepBack waits for the handlers that run, requeues the other deliveries in their order, and
	// attaches the consumer again, behind all others.
	StepBack()
	// Before returns what the consumer holds of the deliveries that came before d: the keys with a delivery
	// that waits for another attempt (see Again), and how many deliveries all other keys have.
	Before(d Delivery) (inHand []string, others int)
	// Taken returns a channel that is closed when RabbitMQ has taken d's settlement, so that no crash
	// undoes it, or the turn is over. It is called while d's handler runs.
	Taken(d Delivery) <-chan struct{}
}

// Again is the error with which a gated consumer's handler keeps a delivery: the handler is called again after
// Delay, and deliveries with the same key wait until then. Without a Delay, the consumer keeps the delivery until
// its link session ends.
type Again struct {
	Delay time.Duration
	// Annotations are added to the message if the consumer requeues it before that.
	Annotations map[string]any
	// Retries is how many retries the message has had, for retry.Attempt.
	Retries int
	// State is for the handler's next call, which gets this Again from AgainFrom.
	State any
	Err   error // nil: it hasn't failed
}

func (a *Again) Error() string {
	if a.Err == nil {
		return "the delivery stays in hand"
	}
	return a.Err.Error()
}

func (a *Again) Unwrap() error { return a.Err }

// AgainKey is the key of the delivery's last *Again in a handler's ctx.
type AgainKey struct{}

// AgainFrom returns the Again that the handler returned for this delivery last; nil in the first call.
func AgainFrom(ctx context.Context) *Again {
	a, _ := ctx.Value(AgainKey{}).(*Again)
	return a
}
