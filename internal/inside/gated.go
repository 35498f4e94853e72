package inside

import (
	"context"
	"time"
)

// Gated configures a consumer that has a queue with a single active consumer in turns, as package
// partition does. See consumer_gate.go in package client.
type Gated[Delivery any] struct {
	// Window is how many deliveries the consumer holds. All consumers of a queue have the same.
	Window int
	// Concurrency is how many handlers run at once.
	Concurrency int
	Grace       time.Duration
	// ConsumerTimeout is how long the broker lets it hold a delivery. It steps back shortly before,
	// so that what it holds returns in its order and with its annotations.
	// 0: it isn't known.
	ConsumerTimeout time.Duration
	Handler         GatedHandler[Delivery]
}

// GatedHandler is what a gated consumer calls.
type GatedHandler[Delivery any] interface {
	// Handle is a client.Handler's. Its error may be an *Again. A client.Start that the handler gets has no
	// Control.
	Handle(context.Context, Delivery) error
	// Key returns the key whose deliveries are handled one after the other. It is called as a delivery comes.
	Key(Delivery) string
	// Attached is called when the consumer is in line for the first time.
	Attached()
	// Turn is called when the broker makes the consumer the active one, and Over when its turn is
	// over and none of its handlers runs: before the next turn, and before another consumer's,
	// unless the link was lost.
	Turn(Turn[Delivery])
	Over(Turn[Delivery])
}

// Turn is a time in which a gated consumer is the active one of its queue. Its methods are safe
// for concurrent use, and do nothing once it is over.
type Turn[Delivery any] interface {
	// Serve grants the window.
	Serve()
	// StepBack lets running handlers finish, returns the other deliveries in their order, and goes
	// to the end of the line.
	StepBack()
	// Before returns what the consumer holds of the deliveries that came before d: the keys that have a delivery in
	// hand, and how many deliveries all other keys have.
	Before(d Delivery) (inHand []string, others int)
}

// Again is what a gated consumer's handler returns for a delivery that stays in hand: its handler
// is called again after Delay. Deliveries of the same key wait that long.
type Again struct {
	Delay time.Duration
	// Annotations go into the message if the consumer returns it to the queue before.
	Annotations map[string]any
	// Retries is how often the message was retried, for retry.Attempt.
	Retries int
	// State is what AgainFrom returns in the next call.
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

// AgainKey is the key for which a handler's ctx has the delivery's last *Again.
type AgainKey struct{}

// AgainFrom returns what the handler has returned for this delivery before; nil: it is called for
// the first time.
func AgainFrom(ctx context.Context) *Again {
	a, _ := ctx.Value(AgainKey{}).(*Again)
	return a
}
