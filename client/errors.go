package client

import "github.com/hopback/hopback/internal/failure"

// The kinds of failure. Match them with errors.Is; errors.As with *Error gives
// the broker's own words. Bad input is none of these: it is an
// *argument.Error, and nothing was sent.
var (
	// ErrUnreachable: no connection to the endpoint could be made.
	ErrUnreachable = failure.ErrUnreachable
	// ErrAuthentication: the broker refused the credentials.
	ErrAuthentication = failure.ErrAuthentication
	// ErrVirtualHost: the virtual host doesn't exist, or the user has no access to it.
	ErrVirtualHost = failure.ErrVirtualHost
	// ErrTLS: the TLS handshake failed.
	ErrTLS = failure.ErrTLS
	// ErrUnauthorized: the user lacks a permission for this queue, exchange or operation.
	ErrUnauthorized = failure.ErrUnauthorized
	// ErrNotFound: the queue or exchange doesn't exist.
	ErrNotFound = failure.ErrNotFound
	// ErrUnroutable: the exchange exists, but no queue is bound for the routing
	// key. The message is stored nowhere.
	ErrUnroutable = failure.ErrUnroutable
	// ErrRefused: the broker refused the message, for instance because a queue with
	// overflow reject-publish is full. If several queues are bound, some may have
	// stored it. Or the broker refused a publisher or consumer, for instance a second
	// consumer of an exclusive queue.
	ErrRefused = failure.ErrRefused
	// ErrUserID: the message has another user's user-id, and the connection's user isn't an
	// impersonator. The message is stored nowhere. See PublisherConfig.Copies.
	ErrUserID = failure.ErrUserID
	// ErrTooLarge: the message is larger than the broker accepts. Nothing was sent.
	ErrTooLarge = failure.ErrTooLarge
	// ErrNotSent: the call ended before the message was sent. It is stored nowhere.
	ErrNotSent = failure.ErrNotSent
	// ErrOutcomeUnknown: the message or request was sent, and no answer came. It may
	// have taken effect, so repeating it may make a duplicate.
	ErrOutcomeUnknown = failure.ErrOutcomeUnknown
	// ErrClosed: the connection, publisher or consumer was closed by its user.
	ErrClosed = failure.ErrClosed
	// ErrConnectionLost: the connection, session or link ended; it is being rebuilt.
	ErrConnectionLost = failure.ErrConnectionLost
	// ErrSessionLimit: all sessions are taken, and no further connection may be opened,
	// by Config.MaxConnections or by the broker. Nothing was sent.
	ErrSessionLimit = failure.ErrSessionLimit
)

// Error is a failure of the broker, of the network, or of a call that ended too early. It has
// these fields:
//
//	Op         string  the operation: "connect", "connection", "open session", "publish",
//	                   "forward", "consume", or "manage"
//	Kind       error   one of the package's Err values
//	Target     string  what the operation was for: an endpoint (without its password), an address,
//	                   a queue, or a method and path of the management; it may be empty
//	Condition  string  the AMQP error condition, such as "amqp:not-found", if the broker gave one
//	Text       string  the broker's explanation, or hopback's, in one line of at most 500 bytes;
//	                   Err has the broker's in full
//	Queue      string  the queue that rejected a message, if the broker reports it. RabbitMQ does
//	                   since 4.3, for rejections by a queue; of several queues it reports one
//	Reason     string  why that queue rejected it, such as "maxlen"
//	Err        error   the cause, if there is one
//
// Its method SafeToRetry reports whether the operation certainly had no effect. If so, repeating
// it makes no duplicate. errors.Is matches Kind and Err.
type Error = failure.Error

// SafeToRetry reports whether the operation that failed with err certainly had no effect. If so,
// repeating it makes no duplicate. It is false for nil, and for errors of other packages.
func SafeToRetry(err error) bool { return failure.SafeToRetry(err) }

// PanicError is a handler's panic as an error. Its field Value has the panic's value, or nil if
// the handler ended its goroutine with runtime.Goexit; Stack has the goroutine's stack. errors.Is
// matches Value if it is an error.
type PanicError = failure.PanicError
