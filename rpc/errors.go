package rpc

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
)

// Application properties of an error reply. A caller that doesn't use this package can read them
// too; over AMQP 0-9-1 they are headers. The reply's body is the error text.
const (
	// propertyError holds an Error's Code.
	propertyError = "x-rpc-error"
	// propertyGivenUp holds a GivenUpError's Reason.
	propertyGivenUp = "x-rpc-given-up"
)

// The reasons for a failed call, in addition to those of package client. Match them with
// errors.Is.
var (
	// ErrNoReply means that the request was sent, and no reply came. Its handler may have run,
	// may be running, or may still run. The error also matches client.ErrOutcomeUnknown and its
	// cause: the ctx's error, client.ErrConnectionLost, or client.ErrClosed.
	ErrNoReply = errors.New("no reply")
	// ErrUndecodable means that the handler has run, and the codec can't decode its reply.
	ErrUndecodable = errors.New("undecodable reply")
)

// ReasonExpired is the reason of a [GivenUpError] for a request that reached its handler after it
// had expired.
const ReasonExpired client.Reason = "expired"

// ReasonDiscarded is the reason of a [GivenUpError] for a request that failed with retry.Discard.
const ReasonDiscarded client.Reason = "discarded"

// Error is an error reply: the handler has handled the request, and refuses it. Return one from
// the handler, alone or wrapped, and Call returns it. It counts as a reply: the request is
// acknowledged, and not retried.
type Error struct {
	// Code says what is wrong, for programs. The handler chooses it. Empty means "error".
	Code string
	// Text says what is wrong, for people.
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

// GivenUpError means that the responder has dead-lettered the request, or ended it otherwise,
// without a reply: see Reason. The handler may have done a part of its work.
type GivenUpError struct {
	// Reason is the reason of the dead letter, such as retry.ReasonExhausted,
	// retry.ReasonPermanent, client.ReasonUndecodable, or client.ReasonUnsendable. For [ReasonExpired]
	// and [ReasonDiscarded] there is no dead letter.
	Reason client.Reason
	// Text is the text of the handler's last error.
	Text string
}

func (e *GivenUpError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("hopback: the responder dead-lettered or dropped the request (%s)", e.Reason)
	}
	return fmt.Sprintf("hopback: the responder dead-lettered or dropped the request (%s): %s", e.Reason, e.Text)
}

// maxCode is how many bytes of a code or a reason are sent and read.
const maxCode = 256

// word makes s valid for an application property.
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
