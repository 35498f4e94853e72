// Package outcome is the one place that knows what a handler's result is: it reads errors,
// which may be hostile, and catches panics and runtime.Goexit, for every consumer and
// middleware. It also has the errors by which a handler says how its failure is to be
// retried. Package retry makes and obeys them; other middleware reads them to tell a bad
// message from an outage.
//
// Package client has the outcomes themselves. DESIGN.md has the rule.
package outcome

import (
	"fmt"
	"time"
)

// Permanent is retry.Permanent's error.
type Permanent struct{ Err error }

func (e *Permanent) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *Permanent) Unwrap() error { return e.Err }

// After is the error of retry.After, and of retry.Snooze if Snooze is set.
type After struct {
	Delay  time.Duration
	Err    error
	Snooze bool
}

func (e *After) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("retry after %v", e.Delay)
	}
	return e.Err.Error()
}

// Unwrap returns Err.
func (e *After) Unwrap() error { return e.Err }

// Discard is retry.Discard's error.
type Discard struct{ Err error }

func (e *Discard) Error() string {
	if e.Err == nil {
		return "discarded"
	}
	return "discarded: " + e.Err.Error()
}

// Unwrap returns Err.
func (e *Discard) Unwrap() error { return e.Err }
