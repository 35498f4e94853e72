package inside

import "context"

// Group is a worker of package partition, whose consumers package pause pauses together.
type Group struct {
	Name    string
	Pausing Pausing
	// Life ends with the worker.
	Life context.Context
}

// NowExchange is the exchange that all generations of a group have. A binding to it from hopback.pauses is a pause of the
// group.
func NowExchange(name string) string { return name + ".now" }

// Pausing pauses the consumers of a Group.
type Pausing interface {
	// Pause has no handler begin until resume is called.
	Pause() (resume func())
	Paused() bool
}

type groupKey struct{}

// WithGroup returns the ctx for the Prepare of a worker's handler.
func WithGroup(ctx context.Context, g *Group) context.Context {
	return context.WithValue(ctx, groupKey{}, g)
}

// GroupOf returns the Group of the Prepare that ctx belongs to; nil: the consumer has none.
func GroupOf(ctx context.Context) *Group {
	g, _ := ctx.Value(groupKey{}).(*Group)
	return g
}
