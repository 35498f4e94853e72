package client

import (
	"fmt"
	"slices"

	"github.com/hopback/hopback/internal/failure"
)

// BatchError lists the messages of a [Publisher.PublishAll] that were not accepted. The broker
// accepted all others. errors.Is and errors.As search the errors of all listed messages.
type BatchError struct {
	// Of is the number of messages passed to PublishAll.
	Of int
	// Failed holds the messages that were not accepted, ordered by Index.
	Failed []BatchFailure
}

// BatchFailure is one message that was not accepted.
type BatchFailure struct {
	// Index is the index of the value in the slice passed to PublishAll.
	Index int
	// ID is the message-id. It is nil if the value couldn't be encoded.
	ID any
	// Err is the error that [Publisher.Publish] would have returned. [SafeToRetry] of it reports
	// whether you can publish the value again without a duplicate.
	Err error
}

// batchError returns nil if none of n messages failed.
func batchError(n int, failed []BatchFailure) error {
	if len(failed) == 0 {
		return nil
	}
	return &BatchError{Of: n, Failed: failed}
}

func (e *BatchError) Error() string {
	first := e.Failed[0]
	return fmt.Sprintf("hopback: publish: %d of %d messages were not accepted, the first at index %d: %v", len(e.Failed), e.Of, first.Index, first.Err)
}

// Unwrap returns the error of each message in Failed.
func (e *BatchError) Unwrap() []error {
	errs := make([]error, len(e.Failed))
	for i, f := range e.Failed {
		errs[i] = f.Err
	}
	return errs
}

// SafeToRetry reports whether you can publish the whole batch again without a duplicate, because
// the broker stored none of its messages. If it returns false, check the errors in Failed one by
// one.
func (e *BatchError) SafeToRetry() bool {
	if len(e.Failed) < e.Of {
		return false
	}
	return !slices.ContainsFunc(e.Failed, func(f BatchFailure) bool { return !failure.SafeToRetry(f.Err) })
}

// WorthRetrying reports whether some of the failed messages can be accepted later. Use the function
// [WorthRetrying] with each Err in Failed to find out which.
func (e *BatchError) WorthRetrying() bool {
	return slices.ContainsFunc(e.Failed, func(f BatchFailure) bool { return failure.WorthRetrying(f.Err) })
}
