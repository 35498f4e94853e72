package inside

import "context"

// Later is the error of a handler that can't decide about a delivery yet. The consumer keeps the delivery, without
// blocking others, until Ready is closed. Then it calls Then, and uses its result in place of the Later. If the
// consumer drains before that, it requeues the message.
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

// Alarms notices memory and disk alarms.
type Alarms interface {
	// AwaitAlarm waits until the broker answers no requests because of a memory or disk alarm. It
	// returns false if it can't tell, or ctx ends before.
	AwaitAlarm(ctx context.Context) bool
}

type alarmsKey struct{}

// WithAlarms returns the ctx for a Prepare.
func WithAlarms(ctx context.Context, a Alarms) context.Context {
	return context.WithValue(ctx, alarmsKey{}, a)
}

// AlarmsOf returns the Alarms of the Prepare that ctx belongs to; nil: there is none.
func AlarmsOf(ctx context.Context) Alarms {
	a, _ := ctx.Value(alarmsKey{}).(Alarms)
	return a
}
