package declare

import (
	"errors"
	"fmt"
	"strings"

	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/values"
)

// The reasons of an [*Error]. Match them with errors.Is.
var (
	// ErrConflict means that the exchange or queue exists with different settings.
	// Error.Differences lists them.
	ErrConflict = errors.New("it exists with different settings")
	// ErrInUse means that a queue has messages or consumers, or that something else needs the
	// resource. [DeleteIdle] returns it.
	ErrInUse = errors.New("in use")
	// ErrNotFound means that the queue, or an end of the binding, doesn't exist. It is the same
	// error as client.ErrNotFound.
	ErrNotFound = condition.ErrNotFound
	// ErrForbidden means that the name is reserved, or that a limit is reached. For a missing
	// permission the reason is [ErrNoReply], because RabbitMQ closes the session, and the Report
	// of [Apply] or [Delete] says "refused".
	ErrForbidden = errors.New("forbidden")
	// ErrInvalid means that the broker doesn't accept the declaration.
	ErrInvalid = errors.New("invalid")
	// ErrUnavailable means that the broker can't carry out the request now. Try again later.
	ErrUnavailable = errors.New("unavailable")
	// ErrNoReply means that no reply came. The broker may or may not have carried out the
	// request. [Error.Err] is the Requester's error.
	ErrNoReply = errors.New("no reply")
	// ErrBadReply means that the reply can't be parsed.
	ErrBadReply = errors.New("the reply can't be parsed")
)

// Error reports that the broker refused a request or didn't answer. errors.Is matches its Reason
// and its Err.
//
// Invalid input is an *[argument.Error] instead, which is returned before anything is sent.
type Error struct {
	// Op is the operation: "declare", "delete", "purge", "inspect", or "list".
	Op string
	// Resource is the exchange, queue, or binding of the operation.
	Resource Resource
	// Method and Path are those of the request.
	Method, Path string
	// Status is the status of the reply. It is 0 if none came.
	Status int
	// Text is the broker's explanation, cut to 1,000 bytes.
	Text string
	// Reason is one of this package's sentinel errors.
	Reason error
	// Conflict is the first difference, for most ErrConflict errors. Otherwise it is nil.
	Conflict *Conflict
	// Differences lists every argument that differs, for an ErrConflict of [Apply].
	Differences []Conflict
	// Remedies lists what you can do, for an ErrConflict of [Apply], and for an exchange type that
	// the broker doesn't have yet.
	Remedies []string
	// Err is the cause: the Requester's error for ErrNoReply, what is wrong with the reply for
	// ErrBadReply, and the reason for ErrInUse.
	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "hopback: %s %s: ", e.Op, e.Resource)
	if e.Reason == ErrNoReply && condition.NotPermitted(e.Err) {
		b.WriteString("a permission is missing") // and the session ended in place of a reply
	} else {
		fmt.Fprintf(&b, "%v", e.Reason)
	}
	switch {
	case len(e.Differences) > 0:
		for i, d := range e.Differences {
			fmt.Fprintf(&b, "%s %s", [2]string{":", ","}[min(i, 1)], d)
		}
	case e.Conflict != nil:
		fmt.Fprintf(&b, ": %s", e.Conflict)
	case e.Text != "":
		// Quoted: the text may repeat a name with anything in it.
		fmt.Fprintf(&b, ": the broker replied %q", e.Text)
	}
	if e.Status != 0 {
		fmt.Fprintf(&b, " (status %d)", e.Status)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	switch {
	case len(e.Remedies) > 0:
		fmt.Fprintf(&b, "; remedies: %s", strings.Join(e.Remedies, "; or "))
	case e.Reason == ErrNotFound:
		b.WriteString("; declare it first, or correct its name or the URL's virtual host")
	}
	return b.String()
}

// Unwrap returns Reason and Err.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Reason}
	}
	return []error{e.Reason, e.Err}
}

// SafeToRetry reports whether you can repeat the call without doing anything twice. It is false
// only for a purge without a reply: a second purge would also remove messages that have arrived
// since.
func (e *Error) SafeToRetry() bool {
	return e.Op != opPurge || e.Reason != ErrNoReply && e.Reason != ErrBadReply
}

// WorthRetrying reports whether the call can succeed later, although nobody changes it or the
// broker's settings: after ErrUnavailable and ErrInUse, and after ErrNoReply unless a permission is
// missing.
func (e *Error) WorthRetrying() bool {
	switch e.Reason {
	case ErrUnavailable, ErrInUse:
		return true
	case ErrNoReply:
		return !condition.NotPermitted(e.Err)
	}
	return false
}

const (
	opDeclare = "declare"
	opDelete  = "delete"
	opPurge   = "purge"
	opInspect = "inspect"
	opList    = "list"
)

// notFormed ends the broker's refusal of a quorum queue that had no leader after 5 seconds,
// because the disk or the broker is busy. The broker has then deleted what it had begun, so
// the queue can be declared again (TestApplyRepeatsAQueueThatHadNoLeaderInTime). The name of
// the queue comes before, so it can't look like that.
const notFormed = ": cluster_not_formed"

// isUnformed reports whether err is that refusal.
func isUnformed(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Reason == ErrUnavailable && strings.HasSuffix(e.Text, notFormed)
}

const (
	// textLimit keeps a hostile or huge explanation out of logs.
	textLimit = 1000
	// conflictLimit is as long as a conflict's text gets, with two routing keys
	// of the largest size in it.
	conflictLimit = 10_000
)

// refused turns a reply that isn't a success into an *Error.
func refused(op string, resource Resource, method, path string, status int, reply any) *Error {
	e := &Error{Op: op, Resource: resource, Method: method, Path: path, Status: status}
	text, _ := reply.(string)
	text = strings.ToValidUTF8(values.Cut(text, conflictLimit), "�")
	e.Text = values.Cut(text, textLimit)
	e.Reason = reason(status, text)
	if e.Reason == ErrConflict {
		if c, ok := parseConflict(text); ok {
			e.Conflict = &c
		}
	}
	if e.Reason == ErrInvalid && text == "unknown exchange type '"+string(ExchangeModulusHash)+"'" {
		e.Remedies = []string{remedyModulusHash}
	}
	return e
}

// remedyModulusHash is for brokers before RabbitMQ 4.3 (TestModulusHashRoutesAsComputed).
const remedyModulusHash = "upgrade to RabbitMQ 4.3 or later, which has this exchange type"

// reason goes by the status and, where RabbitMQ's statuses are too coarse, by
// the text: 4.0 answers 400 where 4.3 answers 404 when a missing queue is
// purged, both answer 400 to a binding with a missing end, and 409 also stands
// for an argument that is invalid in itself. 400 is also the answer of a broker that is
// too busy to start a quorum queue.
func reason(status int, text string) error {
	switch {
	case status == 409 && strings.HasPrefix(text, "invalid arg"):
		return ErrInvalid
	case status == 409, status == 400 && strings.Contains(text, "exclusive access to locked queue"):
		return ErrConflict
	case status == 404, status == 400 && (strings.HasPrefix(text, "no queue '") || strings.HasPrefix(text, "no exchange '")):
		return ErrNotFound
	case status == 403:
		return ErrForbidden
	case status == 400 && strings.HasSuffix(text, notFormed):
		return ErrUnavailable
	case status >= 400 && status < 500:
		return ErrInvalid
	case status >= 500 && status < 600:
		return ErrUnavailable
	}
	return ErrBadReply
}
