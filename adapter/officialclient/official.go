package officialclient

import (
	"fmt"
	"runtime/debug"
)

// panicError is a panic in the official client.
type panicError struct {
	Call  string // the call that panicked, such as "receive"
	Value any    // of the panic
	Stack []byte // as of runtime/debug.Stack
}

func (e *panicError) Error() string {
	return fmt.Sprintf("hopback: the official client panicked in %s: %v", e.Call, e.Value)
}

// guarded calls into the official client, and makes an error of its panics.
func guarded[T any](call string, f func() (T, error)) (v T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicError{Call: call, Value: p, Stack: debug.Stack()}
		}
	}()
	return f()
}
