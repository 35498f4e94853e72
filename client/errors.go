package client

import (
	"fmt"
	"slices"

	"github.com/hopback/hopback/internal/failure"
)

// The kinds of failure, for errors.Is. Use errors.As with *[Error] to get the broker's own
// words. Invalid arguments are none of these: they are an *argument.Error, and nothing was sent.
//
// To decide what to do next, ask two questions. [SafeToRetry]: can a repeated call create a
// duplicate? [WorthRetrying]: can it succeed at all?
//
//	kind                SafeToRetry  WorthRetrying
//	ErrUnreachable      yes          yes, unless the port speaks another protocol
//	ErrAuthentication   yes          no, unless the token source failed
//	ErrVirtualHost      yes          no
//	ErrTLS              yes          no, unless the network failed
//	ErrUnauthorized     yes          no
//	ErrNotFound         yes          no
//	ErrUnroutable       yes          no
//	ErrRefused          no           yes for a full queue, and for one that is in use
//	ErrUserID           yes          no
//	ErrTooLarge         yes          no
//	ErrNotSent          yes          yes, unless its cause is one with a no
//	ErrOutcomeUnknown   no           yes, unless its cause is one with a no
//	ErrClosed           yes          no
//	ErrConnectionLost   no           yes
//	ErrSessionLimit     yes          yes, unless the broker allows one session
//	*argument.Error     yes          no
var (
	// ErrUnreachable: no connection to the endpoint could be made. Check host, port, and scheme.
	ErrUnreachable = failure.ErrUnreachable
	// ErrAuthentication: the broker refused the credentials. Check user, password, or token.
	ErrAuthentication = failure.ErrAuthentication
	// ErrVirtualHost: the virtual host doesn't exist, or the user has no access to it.
	ErrVirtualHost = failure.ErrVirtualHost
	// ErrTLS: the TLS handshake failed.
	ErrTLS = failure.ErrTLS
	// ErrUnauthorized: the user lacks a permission for this queue, exchange, or operation.
	ErrUnauthorized = failure.ErrUnauthorized
	// ErrNotFound: the queue or exchange doesn't exist in this virtual host.
	ErrNotFound = failure.ErrNotFound
	// ErrUnroutable: the exchange exists, but no queue is bound for the routing key. The broker
	// didn't store the message.
	ErrUnroutable = failure.ErrUnroutable
	// ErrRefused: the broker refused the message, for instance because a queue with overflow
	// reject-publish is full. If several queues are bound, some may have stored it. Or the
	// broker refused a publisher or consumer, for instance a second consumer of an exclusive
	// queue.
	ErrRefused = failure.ErrRefused
	// ErrUserID: the message has another user's user-id, and the connection's user isn't an
	// impersonator. The broker didn't store the message. See [PublisherConfig.Copies].
	ErrUserID = failure.ErrUserID
	// ErrTooLarge: the message exceeds the broker's maximum size. Nothing was sent.
	ErrTooLarge = failure.ErrTooLarge
	// ErrNotSent: the call ended before the message was sent. The broker didn't store it.
	ErrNotSent = failure.ErrNotSent
	// ErrOutcomeUnknown: the message or request was sent, but no answer came. It may have taken
	// effect, so repeating it may create a duplicate.
	ErrOutcomeUnknown = failure.ErrOutcomeUnknown
	// ErrClosed: your program closed the connection, publisher, or consumer.
	ErrClosed = failure.ErrClosed
	// ErrConnectionLost: the connection, session, or link was lost. The client is rebuilding it.
	ErrConnectionLost = failure.ErrConnectionLost
	// ErrSessionLimit: all sessions are in use, and [Config.MaxConnections] or the broker allows
	// no further connection. Nothing was sent.
	ErrSessionLimit = failure.ErrSessionLimit
)

// Error is a failure of the broker, of the network, or of a call that ended too early. Get it
// with errors.As, or check its kind with errors.Is. Its fields:
//
//   - Op (string) is the operation: "connect", "connection", "open session", "publish",
//     "forward", "consume", "manage", or "call" (of package rpc).
//   - Kind (error) is one of the package's Err values, such as [ErrNotFound].
//   - Target (string) is what the operation was for: an endpoint (without its password), an
//     address, a queue, or the method and path of a management request. It may be empty.
//   - Condition (string) is the AMQP error condition, such as "amqp:not-found", if the broker
//     sent one.
//   - Text (string) is the broker's explanation, or hopback's, in one line of at most 500 bytes.
//     Err has the broker's explanation in full.
//   - Queue (string) is the queue that rejected a message, if the broker reports it. RabbitMQ
//     4.3 and later do, for rejections by a queue; if several queues rejected it, they report
//     one.
//   - Reason (string) is why that queue rejected the message, such as "maxlen".
//   - Err (error) is the cause, if there is one.
//
// Its method SafeToRetry reports whether the operation certainly had no effect. If so, repeating
// it can't create a duplicate. Its method WorthRetrying reports whether repeating it can succeed.
// errors.Is matches Kind and Err.
type Error = failure.Error

// SafeToRetry reports whether the operation that failed with err certainly had no effect. If so,
// repeating it can't create a duplicate. It returns false for nil, and for errors of other
// packages.
func SafeToRetry(err error) bool { return failure.SafeToRetry(err) }

// WorthRetrying reports whether the operation that failed with err can succeed later, although
// nobody changes the program, its configuration, the message, or the broker's settings. So a
// service answers "try again later" only if it returns true. It is false for what is too large,
// can't be encoded, is sent to a missing queue, or lacks a permission: see the table at
// [ErrUnreachable].
//
// It doesn't say whether repeating is safe; that is [SafeToRetry]. If errors are joined, or err is
// a *[BatchError], it reports whether one of them is worth retrying. It also knows the errors of
// the other hopback packages. It returns false for nil, and for errors of anyone else.
func WorthRetrying(err error) bool { return failure.WorthRetrying(err) }

// PanicError is a handler's panic as an error. Its field Value is the panic's value, or nil if
// the handler ended its goroutine with runtime.Goexit. Its field Stack is the goroutine's stack.
// errors.Is matches Value if it is an error.
type PanicError = failure.PanicError

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
