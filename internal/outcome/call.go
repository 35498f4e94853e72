package outcome

import (
	"context"
	"runtime/debug"
)

// Catch is deferred around a call of a user's function. If the function hasn't returned, ended
// gets the value of its panic. The value is nil after runtime.Goexit: then the goroutine ends
// in any case, and no result of its functions is used.
func Catch(returned *bool, ended func(value any, stack []byte)) {
	if !*returned {
		ended(recover(), debug.Stack())
	}
}

// LastWordKey finds the *error in a handler's ctx that LeaveLastWord sets. By it a middleware
// says what should become of a delivery whose handler ends its goroutine with runtime.Goexit.
type LastWordKey struct{}

// LeaveLastWord says what the handler would return if it still could. It must be called on
// the handler's goroutine.
func LeaveLastWord(ctx context.Context, err error) {
	if word, ok := ctx.Value(LastWordKey{}).(*error); ok {
		*word = err
	}
}

// LastWord returns what was left; nil: nothing.
func LastWord(ctx context.Context) error {
	if word, ok := ctx.Value(LastWordKey{}).(*error); ok {
		return *word
	}
	return nil
}
