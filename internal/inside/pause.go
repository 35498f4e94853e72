package inside

import "context"

// PauseKey is the key of a delivery's Pauses in a handler's ctx.
type PauseKey struct{}

// Pauses are those of a delivery's consumer. The consumer checks them before it calls the handler. A middleware in which a
// delivery then waits for something else has to check again: the consumer may have been paused since.
type Pauses interface {
	Paused() bool
	AwaitResume(ctx context.Context) bool
}

// Paused reports whether the consumer of a handler's ctx is paused. A middleware asks that frees what the delivery has waited
// for before it calls AwaitResume.
func Paused(ctx context.Context) bool {
	p, _ := ctx.Value(PauseKey{}).(Pauses)
	return p != nil && p.Paused()
}

// AwaitResume returns true if the consumer isn't paused, and otherwise waits until it is resumed. It returns false at once if
// returning the message to its queue costs nothing, and later if the consumer drains or ctx ends: then return a client.Requeue.
func AwaitResume(ctx context.Context) bool {
	p, _ := ctx.Value(PauseKey{}).(Pauses)
	return p == nil || p.AwaitResume(ctx)
}
