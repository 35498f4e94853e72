// Package lastword is how a middleware tells the consumer what should become of a
// delivery whose handler ends its goroutine with runtime.Goexit: nothing that it
// returns then arrives anywhere.
package lastword

import "context"

// Key finds the *error in a handler's ctx that Leave sets.
type Key struct{}

// Leave says what the handler would return if it still could. It must be called on
// the handler's goroutine.
func Leave(ctx context.Context, err error) {
	if word, ok := ctx.Value(Key{}).(*error); ok {
		*word = err
	}
}
