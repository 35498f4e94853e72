package retry

import (
	"fmt"
	"time"
)

// Permanent marks err as one that no retry can help: the message is dead-lettered
// at once, with ReasonPermanent. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// After asks for the next retry of the message to come no sooner than in d,
// whatever the policy's back-off says; for a Retry-After from a service, say. It
// counts as a retry like any other, and ends in the dead-letter queue when those
// are used up.
//
// The delay is rounded up to the next one that the policy has a queue for, and is
// at most the policy's longest. err may be nil.
func After(d time.Duration, err error) error {
	return &afterError{d, err}
}

type afterError struct {
	delay time.Duration
	err   error
}

func (e *afterError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("retry after %v", e.delay)
	}
	return e.err.Error()
}

func (e *afterError) Unwrap() error { return e.err }
