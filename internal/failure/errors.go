// Package failure defines the errors of connections, publishers, and consumers. Package client
// exports them.
package failure

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/condition"
)

// The kinds of failure. See package client for when each one is returned.
var (
	// ErrUnreachable: no connection to the endpoint could be made.
	ErrUnreachable = errors.New("broker unreachable")
	// ErrAuthentication: the broker refused the credentials.
	ErrAuthentication = errors.New("authentication failed")
	// ErrVirtualHost: the virtual host doesn't exist, or the user has no access to it.
	ErrVirtualHost = errors.New("virtual host refused")
	// ErrTLS: the TLS handshake failed.
	ErrTLS = errors.New("TLS handshake failed")
	// ErrUnauthorized: the user lacks a permission for this queue, exchange or operation.
	ErrUnauthorized = condition.ErrUnauthorized
	// ErrNotFound: the queue or exchange doesn't exist.
	ErrNotFound = condition.ErrNotFound
	// ErrUnroutable: the exchange exists, but no queue is bound for the routing
	// key. The message is stored nowhere.
	ErrUnroutable = errors.New("unroutable")
	// ErrRefused: the broker refused the message, for instance because a queue with
	// overflow reject-publish is full. If several queues are bound, some may have
	// stored it. Or the broker refused a publisher or consumer, for instance a second
	// consumer of an exclusive queue.
	ErrRefused = condition.ErrRefused
	// ErrUserID: the message has another user's user-id, and the connection's user isn't an
	// impersonator. The message is stored nowhere. See PublisherConfig.Copies.
	ErrUserID = condition.ErrUserID
	// ErrTooLarge: the message is larger than the broker accepts. Nothing was sent.
	ErrTooLarge = condition.ErrTooLarge
	// ErrNotSent: the call ended before the message was sent. It is stored nowhere.
	ErrNotSent = errors.New("not sent")
	// ErrOutcomeUnknown: the message or request was sent, and no answer came. It may
	// have taken effect, so repeating it may make a duplicate.
	ErrOutcomeUnknown = errors.New("outcome unknown")
	// ErrClosed: the connection, publisher or consumer was closed by its user.
	ErrClosed = errors.New("closed")
	// ErrConnectionLost: the connection, session or link ended; it is being rebuilt.
	ErrConnectionLost = condition.ErrConnectionLost
	// ErrSessionLimit: all sessions are taken, and no further connection may be opened,
	// by Config.MaxConnections or by the broker. Nothing was sent.
	ErrSessionLimit = errors.New("no session left on the connection")
)

// Error is a failure of the broker, of the network, or of a call that ended too early. Package
// client exports it as client.Error, whose comment lists these fields: keep both in step.
type Error struct {
	// Op is the operation: "connect", "connection", "open session", "publish", "forward",
	// "consume", "manage", or "call".
	Op string
	// Kind is one of the package's Err values.
	Kind error
	// Target is what the operation was for: an endpoint (without its password), an address, a
	// queue, or the method and path of a management request. It may be empty.
	Target string
	// Condition is the AMQP error condition, such as "amqp:not-found", if the broker sent one.
	Condition string
	// Text is the broker's explanation, or hopback's, in one line of at most 500 bytes. Err has
	// the broker's explanation in full.
	Text string
	// Queue is the queue that rejected a message, and Reason its reason, such as "maxlen". They
	// are empty if the broker doesn't report them. RabbitMQ 4.3 and later do, for rejections by
	// a queue; if several queues rejected the message, they report one.
	Queue, Reason string
	// Err is the cause, if there is one.
	Err error

	unsent           bool // nothing was sent, for any Kind
	passing, lasting bool // it is worth retrying, or isn't, for any Kind
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
	// An error of package declare in it ends with the same remedy.
	if remedy := e.remedy(); remedy != "" && !strings.HasSuffix(b.String(), remedy) {
		b.WriteString("; ")
		b.WriteString(remedy)
	}
	return b.String()
}

// remedy is what a user can do, where the broker's text doesn't say it.
func (e *Error) remedy() string {
	kind := e.Kind
	if kind == ErrOutcomeUnknown && errors.Is(e.Err, ErrUnauthorized) {
		kind = ErrUnauthorized
	}
	switch {
	case kind == ErrNotFound && e.Op != "manage":
		return "declare it first, or correct its name or the URL's virtual host"
	case kind != ErrUnauthorized:
		return ""
	case strings.Contains(e.Text, " access to topic '"):
		return "grant the permission for this routing key, for example with rabbitmqctl set_topic_permissions"
	case strings.HasPrefix(e.Text, "forbidden to publish to internal exchange"):
		return "publish to another exchange: no permission allows this"
	}
	return "grant the permission, for example with rabbitmqctl set_permissions"
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

// SafeToRetry reports whether the operation certainly had no effect. If so, repeating it can't
// create a duplicate.
func (e *Error) SafeToRetry() bool {
	if e.unsent {
		return true
	}
	switch e.Kind {
	case ErrOutcomeUnknown, ErrRefused, ErrConnectionLost:
		return false
	}
	return true
}

// SafeToRetry reports whether the operation that failed with err certainly had no effect. It
// returns false for nil, and for errors of other packages.
func SafeToRetry(err error) bool {
	var s interface{ SafeToRetry() bool }
	return errors.As(err, &s) && s.SafeToRetry()
}

// NewError returns an *Error for what the engine returned. Its Kind is kind, unless the broker's
// condition is more specific.
func NewError(op, target string, kind, err error) *Error {
	e := &Error{Op: op, Target: target, Kind: kind, Err: err}
	if cause, ok := err.(*Error); ok && cause.Kind == kind {
		e.Text, e.Condition = cause.Text, cause.Condition // don't repeat the kind
		e.passing, e.lasting = cause.passing, cause.lasting
	}
	var remote *amqp.Error
	if errors.As(err, &remote) && remote != nil {
		e.Condition, e.Text = string(remote.Condition), Readable(remote.Description)
		if k := KindOf(remote); k != nil {
			e.Kind = k
		}
	}
	return e
}

// maxText is how much of the broker's text an Error repeats: after an internal failure, RabbitMQ
// sends a screenful of Erlang terms.
const maxText = 500

// Readable turns the broker's text into one line and cuts it short. Err has the full text.
func Readable(s string) string {
	const far = 16 * maxText // of white space, mostly
	if len(s) > far {
		s = s[:far]
	}
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxText {
		s = Clip(s, maxText-3) + "..."
	}
	return Clip(s, maxText)
}

func KindOf(e *amqp.Error) error { return condition.Kind(string(e.Condition), e.Description) }

// Final reports whether a retry can only succeed after somebody has changed something on the
// broker.
func Final(err error) bool {
	return errors.Is(err, ErrNotFound) || errors.Is(err, ErrUnauthorized) || errors.Is(err, ErrRefused)
}

// ErrBlocked is why nothing is sent during an alarm.
var ErrBlocked = errors.New("the broker accepts no messages, probably because of a memory or disk alarm")

// interrupted is the cause of a call whose ctx ended during an outage.
type interrupted struct {
	by     error // the ctx's cause
	outage error
}

func (i *interrupted) Error() string   { return i.by.Error() + ": " + i.outage.Error() }
func (i *interrupted) Unwrap() []error { return []error{i.by, i.outage} }

// During adds the outage during which e occurred. nil means that there was none.
func During(e *Error, outage error) *Error {
	if outage != nil {
		e.Err = &interrupted{e.Err, outage}
	}
	return e
}

// MarkUnsent marks e as the error of an operation that certainly had no effect, for any Kind.
func MarkUnsent(e *Error) *Error {
	e.unsent = true
	return e
}

// Uncertain returns a copy of e for an operation that may have had an effect.
func Uncertain(e *Error) *Error {
	c := *e
	c.Kind, c.unsent = ErrOutcomeUnknown, false
	return &c
}

// Ended returns the error of a wait that ctx ended.
func Ended(op, target string, kind error, ctx context.Context) *Error {
	return &Error{Op: op, Target: target, Kind: kind, Err: context.Cause(ctx)}
}

// PanicError is a panic of a handler as an error.
type PanicError struct {
	// Value is the panic's value. It is nil if the handler ended its goroutine with
	// runtime.Goexit.
	Value any
	// Stack is the goroutine's stack at the panic.
	Stack []byte
}

func (e *PanicError) Error() string {
	if e.Value == nil {
		return "handler ended its goroutine"
	}
	return fmt.Sprintf("handler panicked: %v", e.Value)
}

// Unwrap returns the panic's value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
