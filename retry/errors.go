package retry

import (
	"errors"
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

// IsPermanent says whether err, or one in its chain, was marked by Permanent: for
// other middleware that has to tell such errors apart.
func IsPermanent(err error) bool {
	_, ok := errors.AsType[*permanentError](err)
	return ok
}

// After asks for the next retry of the message to come no sooner than in d,
// whatever the policy's back-off says; for a Retry-After from a service, say. It
// counts as a retry like any other, and ends in the dead-letter queue when those
// are used up.
//
// With Republish and DeadLetter the delay is rounded up to the next one that the
// policy has a queue for, and is at most the longest of those. err may be nil.
func After(d time.Duration, err error) error { return &afterError{max(d, 0), err, false} }

// Snooze brings the message back in d without using up a retry: nothing has
// failed, it only is too early. Only Policy.GiveUpAfter, if there was a failure
// before, ends that. Its delay is rounded as After's.
func Snooze(d time.Duration) error { return &afterError{max(d, 0), nil, true} }

// Discard gives the message up in words: it is accepted, and gone. err may say
// why, for a log in between; nil stays an error that discards.
func Discard(err error) error { return &discardError{err} }

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

type afterError struct {
	delay  time.Duration
	err    error
	snooze bool
}

func (e *afterError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("retry after %v", e.delay)
	}
	return e.err.Error()
}

func (e *afterError) Unwrap() error { return e.err }

type discardError struct{ err error }

func (e *discardError) Error() string {
	if e.err == nil {
		return "discarded"
	}
	return "discarded: " + e.err.Error()
}

func (e *discardError) Unwrap() error { return e.err }
