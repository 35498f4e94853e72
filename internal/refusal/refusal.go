// Package refusal lets a handler stop the consumer that calls it, for a fault of the
// program that no message is to blame for and that shows at the first delivery only.
package refusal

import "context"

type key struct{}

// Context returns the ctx of a consumer, and of its handlers. It ends with parent, and
// when a handler calls Stop. end must be called with the consumer's result. It returns
// the error that a handler stopped the consumer with, or else the result.
func Context(parent context.Context) (ctx context.Context, end func(result error) error) {
	inner, cancel := context.WithCancelCause(parent)
	s := &stop{cancel: cancel, refused: make(chan error, 1)}
	return context.WithValue(inner, key{}, s), func(result error) error {
		cancel(nil)
		select {
		case err := <-s.refused:
			return err
		default:
			return result
		}
	}
}

type stop struct {
	cancel  context.CancelCauseFunc
	refused chan error // holds the first refusal
}

// Stop ends the consumer with err. It reports whether ctx is of a consumer's handler;
// if not, nothing happens. The delivery is to be requeued as not failed.
func Stop(ctx context.Context, err error) bool {
	s, ok := ctx.Value(key{}).(*stop)
	if !ok {
		return false
	}
	select {
	case s.refused <- err:
	default: // another handler was first
	}
	s.cancel(err)
	return true
}
