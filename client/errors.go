package client

import (
	"context"
	"errors"
	"strings"

	"github.com/Azure/go-amqp"
)

// The kinds of failure. Match them with errors.Is; errors.As with *Error gives
// the broker's own words. Bad input is none of these: it is an
// *argument.Error, and nothing was sent.
var (
	// ErrUnreachable: no endpoint took the connection.
	ErrUnreachable = errors.New("broker unreachable")
	// ErrAuthentication: the broker refused the credentials.
	ErrAuthentication = errors.New("authentication failed")
	// ErrVirtualHost: the virtual host doesn't exist, or the user has no access to it.
	ErrVirtualHost = errors.New("virtual host refused")
	// ErrTLS: the TLS handshake failed.
	ErrTLS = errors.New("TLS handshake failed")
	// ErrUnauthorized: the user lacks a permission for this queue, exchange or operation.
	ErrUnauthorized = errors.New("permission refused")
	// ErrNotFound: the queue or exchange doesn't exist.
	ErrNotFound = errors.New("not found")
	// ErrUnroutable: the exchange exists, but no queue is bound for the routing
	// key. The message is stored nowhere.
	ErrUnroutable = errors.New("unroutable")
	// ErrRefused: the broker refused the message, for instance because a queue
	// with overflow reject-publish is full; with several queues bound, some may
	// have taken it. Or it refused a publisher or consumer, such as a second one
	// of an exclusive queue.
	ErrRefused = errors.New("refused by the broker")
	// ErrTooLarge: the message is larger than the broker takes. Nothing was sent.
	ErrTooLarge = errors.New("message too large")
	// ErrNotSent: the call ended before the message left; it is stored nowhere.
	ErrNotSent = errors.New("not sent")
	// ErrOutcomeUnknown: the message or request left, and no answer came. It may
	// or may not have taken effect; repeating it may make a duplicate.
	ErrOutcomeUnknown = errors.New("outcome unknown")
	// ErrClosed: the connection, publisher or consumer was closed by its user.
	ErrClosed = errors.New("closed")
	// ErrConnectionLost: the connection, session or link ended; it is being rebuilt.
	ErrConnectionLost = errors.New("connection lost")
	// ErrSessionLimit: the connection holds as many sessions as the broker allows.
	ErrSessionLimit = errors.New("no session left on the connection")
)

// Error is a failure that the broker or the network answered with.
type Error struct {
	// Op is what was tried: "connect", "publish", "forward", "consume", "manage".
	Op string
	// Kind is one of the package's Err values.
	Kind error
	// Target is what it was tried on: an endpoint (without its password), an
	// address, a queue or a management path.
	Target string
	// Condition is the AMQP error condition, such as "amqp:not-found", where the
	// broker gave one.
	Condition string
	// Text is the broker's own words, where it gave any: one line, and no more than
	// 500 bytes of it. Err has all.
	Text string
	// Err is the cause, if there is one.
	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("hopback: ")
	b.WriteString(e.Op)
	if e.Target != "" {
		b.WriteString(" ")
		b.WriteString(e.Target)
	}
	if e.Kind != nil {
		b.WriteString(": ")
		b.WriteString(e.Kind.Error())
	}
	switch {
	case e.Text != "":
		b.WriteString(": ")
		b.WriteString(e.Text)
	case e.Condition != "":
		b.WriteString(": ")
		b.WriteString(e.Condition)
	case e.Err != nil:
		b.WriteString(": ")
		b.WriteString(e.Err.Error())
	}
	return b.String()
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error {
	var errs []error
	if e.Kind != nil {
		errs = append(errs, e.Kind)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

// SafeToRetry says whether the operation certainly had no effect, so that
// repeating it makes no duplicate.
func (e *Error) SafeToRetry() bool {
	switch e.Kind {
	case ErrOutcomeUnknown, ErrRefused, ErrConnectionLost:
		return false
	}
	return true
}

// SafeToRetry says whether the operation that err comes from certainly had no
// effect. It is false for nil, and for errors that hopback knows nothing about.
func SafeToRetry(err error) bool {
	var s interface{ SafeToRetry() bool }
	return errors.As(err, &s) && s.SafeToRetry()
}

// newError makes an *Error out of what go-amqp returned. kind is used unless
// the broker's condition tells it more exactly.
func newError(op, target string, kind, err error) *Error {
	e := &Error{Op: op, Target: target, Kind: kind, Err: err}
	var remote *amqp.Error
	if errors.As(err, &remote) && remote != nil {
		e.Condition, e.Text = string(remote.Condition), readable(remote.Description)
		if k := kindOf(remote); k != nil {
			e.Kind = k
		}
	}
	return e
}

// maxText is how much of the broker's words an Error repeats: RabbitMQ sends a
// screenful of Erlang terms where something of its own has failed.
const maxText = 500

// readable makes one line of the broker's words, and cuts them short. Err has them
// whole.
func readable(s string) string {
	const far = 16 * maxText // of white space, mostly
	if len(s) > far {
		s = s[:far]
	}
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxText {
		s = clip(s, maxText-3) + "..."
	}
	return clip(s, maxText)
}

func kindOf(e *amqp.Error) error {
	switch e.Condition {
	case amqp.ErrCondNotFound, amqp.ErrCondResourceDeleted:
		return ErrNotFound
	case amqp.ErrCondUnauthorizedAccess:
		return ErrUnauthorized
	case amqp.ErrCondMessageSizeExceeded:
		return ErrTooLarge
	}
	// RabbitMQ 4.0 answers an attach to a missing exchange or queue with
	// amqp:not-found too; a refused virtual host comes as amqp:not-allowed
	// only while the connection opens, where dial looks at it.
	return nil
}

// final says whether trying the same again can only help after somebody has
// changed something on the broker.
func final(err error) bool {
	return errors.Is(err, ErrNotFound) || errors.Is(err, ErrUnauthorized) || errors.Is(err, ErrRefused)
}

// ended is the error for a wait that ctx ended.
func ended(op, target string, kind error, ctx context.Context) *Error {
	return &Error{Op: op, Target: target, Kind: kind, Err: context.Cause(ctx)}
}
