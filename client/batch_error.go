package client

import (
	"fmt"
	"slices"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/publish"
)

// BatchError lists the messages of a PublishAll that were not accepted. All others
// were.
type BatchError struct {
	// Of is how many messages PublishAll was called with.
	Of int
	// Failed holds the messages that were not accepted, ordered by Index.
	Failed []BatchFailure
}

// BatchFailure is one message that wasn't accepted.
type BatchFailure struct {
	// Index is the index of the value in PublishAll's vs.
	Index int
	// ID is the message-id. It is nil if the value was never encoded.
	ID any
	// Err is the error that Publish would have returned. SafeToRetry(Err) reports
	// whether sending the value again can't make a duplicate.
	Err error
}

// batchError is nil if none of n messages failed.
func batchError(n int, failed []publish.BatchFailure) error {
	if len(failed) == 0 {
		return nil
	}
	e := &BatchError{Of: n, Failed: make([]BatchFailure, len(failed))}
	for i, f := range failed {
		e.Failed[i] = BatchFailure(f)
	}
	return e
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

// SafeToRetry reports whether no message of the batch can have been stored. If so,
// sending the whole batch again makes no duplicate. If not, look at the errors in
// Failed.
func (e *BatchError) SafeToRetry() bool {
	if len(e.Failed) < e.Of {
		return false
	}
	return !slices.ContainsFunc(e.Failed, func(f BatchFailure) bool { return !failure.SafeToRetry(f.Err) })
}
