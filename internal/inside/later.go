package inside

import "context"

// Later is what a handler returns for a delivery about which it can't decide yet. Its consumer keeps
// the delivery, and room for others, until Ready is closed. Then it uses the result of Then in place
// of this error. If the consumer drains before, the message is requeued.
type Later struct {
	Ready <-chan struct{}
	Then  func() error
	Err   error // why the handler failed; nil: it hasn't
}

func (l *Later) Error() string {
	if l.Err == nil {
		return "the decision about the message waits"
	}
	return l.Err.Error()
}

func (l *Later) Unwrap() error { return l.Err }

type alarmKey struct{}

// WithAlarm returns the ctx for a Prepare. await waits until the broker answers no requests because
// of a memory or disk alarm, and returns false if it can't tell, or ctx ends before.
func WithAlarm(ctx context.Context, await func(ctx context.Context) bool) context.Context {
	return context.WithValue(ctx, alarmKey{}, await)
}

// AwaitAlarm calls the await of the Prepare that ctx belongs to. Without one, it returns false.
func AwaitAlarm(ctx context.Context) bool {
	await, ok := ctx.Value(alarmKey{}).(func(context.Context) bool)
	return ok && await(ctx)
}
