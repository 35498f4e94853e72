package declare

import (
	"errors"
	"fmt"
	"strings"
)

// What an [*Error] is about; match with errors.Is.
var (
	// ErrConflict: the thing exists, declared in another way. Error.Conflict
	// says which argument differs, where the broker says so.
	ErrConflict = errors.New("it exists, declared in another way")
	// ErrInUse: the queue isn't empty or has consumers, see [DeleteQueueIf].
	ErrInUse = errors.New("in use")
	// ErrNotFound: the queue, or an end of the binding, doesn't exist.
	ErrNotFound = errors.New("not found")
	// ErrForbidden: the name is reserved, or a limit is reached. A missing
	// permission is ErrNoReply: RabbitMQ ends the session for it.
	ErrForbidden = errors.New("forbidden")
	// ErrInvalid: the broker doesn't accept the declaration.
	ErrInvalid = errors.New("invalid")
	// ErrUnavailable: the broker can't do it now; try again later.
	ErrUnavailable = errors.New("unavailable")
	// ErrNoReply: no reply came, so it isn't known whether it was done.
	// Error.Err is what the Requester said.
	ErrNoReply = errors.New("no reply")
	// ErrBadReply: a reply came that can't be understood.
	ErrBadReply = errors.New("reply not understood")
)

// Error says that the broker refused a request, or gave no answer. It matches
// one of this package's sentinels by errors.Is, and Err, if there is one.
//
// Bad input isn't an *Error but an *[argument.Error], which is found before
// anything is sent.
type Error struct {
	// Op is what was tried: "declare", "delete", "purge", "inspect" or "list".
	Op string
	// Thing that it was tried on.
	Thing Thing
	// Method and Path of the request.
	Method, Path string
	// Status of the reply; 0 when none came.
	Status int
	// Text is the broker's own explanation, cut to 1,000 bytes.
	Text string
	// Reason is one of this package's sentinels.
	Reason error
	// Conflict is what differs, for most ErrConflict; nil otherwise.
	Conflict *Conflict
	// Differences are all that differs, and WaysOut what can be done about it,
	// for an ErrConflict of [Apply].
	Differences []Conflict
	WaysOut     []string
	// Err is the Requester's error, for ErrNoReply; for ErrBadReply it says what
	// was wrong with the reply.
	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "hopback: %s %s: %v", e.Op, e.Thing, e.Reason)
	switch {
	case len(e.Differences) > 0:
		for i, d := range e.Differences {
			fmt.Fprintf(&b, "%s %s", [2]string{":", ","}[min(i, 1)], d)
		}
	case e.Conflict != nil:
		fmt.Fprintf(&b, ": %s", e.Conflict)
	case e.Text != "":
		// Quoted: the text may repeat a name with anything in it.
		fmt.Fprintf(&b, ": the broker said %q", e.Text)
	}
	if e.Status != 0 {
		fmt.Fprintf(&b, " (status %d)", e.Status)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	if len(e.WaysOut) > 0 {
		fmt.Fprintf(&b, "; ways out: %s", strings.Join(e.WaysOut, "; or "))
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

// SafeToRetry reports whether the same call may be made again without doing
// anything twice. Declaring, deleting, listing and inspecting can always be
// repeated; a purge of which no reply came would also remove what has arrived
// since.
func (e *Error) SafeToRetry() bool {
	return e.Op != opPurge || e.Reason != ErrNoReply && e.Reason != ErrBadReply
}

const (
	opDeclare = "declare"
	opDelete  = "delete"
	opPurge   = "purge"
	opInspect = "inspect"
	opList    = "list"
)

const (
	// textLimit keeps a hostile or huge explanation out of logs.
	textLimit = 1000
	// conflictLimit is as long as a conflict's text gets, with two routing keys
	// of the largest size in it.
	conflictLimit = 10_000
)

// refused turns a reply that isn't a success into an *Error.
func refused(op string, thing Thing, method, path string, status int, reply any) *Error {
	e := &Error{Op: op, Thing: thing, Method: method, Path: path, Status: status}
	text, _ := reply.(string)
	text = strings.ToValidUTF8(cut(text, conflictLimit), "�")
	e.Text = cut(text, textLimit)
	e.Reason = reason(status, text)
	if e.Reason == ErrConflict {
		if c, ok := parseConflict(text); ok {
			e.Conflict = &c
		}
	}
	return e
}

// reason goes by the status and, where RabbitMQ's statuses are too coarse, by
// the text: 4.0 answers 400 where 4.3 answers 404 when a missing queue is
// purged, both answer 400 to a binding with a missing end, and 409 also stands
// for an argument that is invalid in itself.
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
	case status >= 400 && status < 500:
		return ErrInvalid
	case status >= 500 && status < 600:
		return ErrUnavailable
	}
	return ErrBadReply
}

func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "�") + "…"
}
