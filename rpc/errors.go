package rpc

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
)

// Application properties of a reply that is an error. A caller that isn't written with this
// package finds them, too; over AMQP 0-9-1 they are headers. The reply's body is the text.
const (
	// propertyError holds an Error's Code.
	propertyError = "x-rpc-error"
	// propertyGivenUp holds a GivenUpError's Reason.
	propertyGivenUp = "x-rpc-given-up"
)

// The kinds of failure of a call, beside those of package client. Match them with
// errors.Is.
var (
	// ErrNoReply: the request was sent, and no reply came. Its handler may have run, may be
	// running, and may run yet. The error also matches client.ErrOutcomeUnknown and its
	// cause: the ctx's error, client.ErrConnectionLost or client.ErrClosed.
	ErrNoReply = errors.New("no reply")
	// ErrUndecodable: the handler has run, and the codec can't read its reply.
	ErrUndecodable = errors.New("undecodable reply")
)

// ReasonExpired is the reason of a GivenUpError for a request that came to its handler after
// its expiry.
const ReasonExpired client.Reason = "expired"

// ReasonDiscarded is the reason of a GivenUpError for a request whose failure
// retry.Discard has accepted.
const ReasonDiscarded client.Reason = "discarded"

// ReasonUnsendable is the reason of a GivenUpError, and of the dead letter, for a request
// whose reply can't be encoded or is larger than the broker accepts. The handler has run.
const ReasonUnsendable client.Reason = "unsendable-reply"

// Error is an answer of the handler: it has handled the request, and refuses it. A handler
// returns one as its error, alone or wrapped, and Call returns it. It is a reply like any
// other: the request is accepted, and not retried.
type Error struct {
	// Code says what is wrong, for programs: a word of the handler's choice. An empty one
	// counts as "error".
	Code string
	// Text says it for people.
	Text string
}

func (e *Error) Error() string {
	if e == nil {
		return "<nil>"
	}
	if e.Text == "" {
		return e.Code
	}
	return e.Code + ": " + e.Text
}

// GivenUpError is the end of a request at the responder's side. Its handler has failed, and
// retry.With or an Outcome has dead-lettered the message. Parts of the work may be done.
type GivenUpError struct {
	// Reason is that of the dead letter, such as retry.ReasonExhausted, retry.ReasonPermanent,
	// client.ReasonUndecodable or ReasonUnsendable. It may be ReasonExpired or ReasonDiscarded: then there is
	// no dead letter.
	Reason client.Reason
	// Text is the text of the handler's last error.
	Text string
}

func (e *GivenUpError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("hopback: the responder has given up the request (%s)", e.Reason)
	}
	return fmt.Sprintf("hopback: the responder has given up the request (%s): %s", e.Reason, e.Text)
}

// maxCode is how many bytes of a code or a reason are sent and read.
const maxCode = 256

// word makes s fit for an application property.
func word(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	if len(s) > maxCode {
		n := maxCode
		for n > maxCode-utf8.UTFMax && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}

// errorOf returns the error that a reply is, or nil.
func errorOf(m *client.Message) error {
	text := func() string {
		b, err := client.Body(m)
		if err != nil {
			return ""
		}
		return client.ErrorText(errors.New(string(b)))
	}
	if code, ok := m.ApplicationProperties[propertyError].(string); ok {
		return &Error{Code: word(code, "error"), Text: text()}
	}
	if reason, ok := m.ApplicationProperties[propertyGivenUp].(string); ok {
		return &GivenUpError{Reason: client.Reason(word(reason, "unknown")), Text: text()}
	}
	return nil
}
