package amqp

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// Scope is what an [Error] has ended.
type Scope uint8

// The scopes, from the smallest.
const (
	ScopeLink Scope = iota + 1
	ScopeSession
	ScopeConnection
)

func (s Scope) String() string {
	switch s {
	case ScopeLink:
		return "link"
	case ScopeSession:
		return "session"
	}
	return "connection"
}

// Error is why a link, a session or a connection has ended.
type Error struct {
	Scope Scope
	// Remote is the error that the peer sent with its detach, end or close; nil if it sent
	// none, or if this end has ended it.
	Remote *frames.Error
	// Err is the cause if Remote is nil: [ErrClosed], an error of the network, or what the
	// peer did wrong. It is nil if the peer gave no reason.
	Err error
}

func (e *Error) Error() string {
	switch {
	case e.Remote != nil:
		return fmt.Sprintf("the peer ended the %v: %v", e.Scope, e.Remote)
	case e.Err != nil:
		return fmt.Sprintf("the %v ended: %v", e.Scope, e.Err)
	}
	return fmt.Sprintf("the peer ended the %v without a reason", e.Scope)
}

// Unwrap returns Remote, or else Err.
func (e *Error) Unwrap() error {
	if e.Remote != nil {
		return e.Remote
	}
	return e.Err
}

// Causes of a connection's end, in addition to network errors.
var (
	// ErrClosed is the cause if this end has closed the link, the session or the connection.
	ErrClosed = errors.New("closed")
	// ErrSilent is the cause if nothing came from the peer for [Config.IdleTimeout]. Package link has other kinds
	// of silence, which are this error, too: see "Silence" in DESIGN.md.
	ErrSilent = errors.New("the peer is silent")
	// ErrNoReason is in a [HandshakeError] if the peer closed the connection without one.
	ErrNoReason = errors.New("the peer closed the connection without a reason")
	// ErrTooManySessions is returned by Begin if all channels are in use.
	ErrTooManySessions = errors.New("all channels of the connection are in use")
	// ErrTooManyLinks is returned if a session has no free handle.
	ErrTooManyLinks = errors.New("all handles of the session are in use")
	// ErrTooLarge is returned for a frame that is larger than the peer accepts. Nothing of it
	// was sent.
	ErrTooLarge = errors.New("larger than the peer's maximum frame size")
)

// Phase is how far a handshake got.
type Phase string

// The phases, in their order.
const (
	PhaseSASL Phase = "login"
	PhaseOpen Phase = "open"
)

// HandshakeError is why a connection couldn't be opened.
type HandshakeError struct {
	Phase Phase
	// Refused is set if the peer refused the credentials, or offers no such mechanism. In that
	// case, Offered are those that it does.
	Refused bool
	Offered []string
	// Remote is the error of the peer's close, if it sent one.
	Remote *frames.Error
	Err    error
	// Waited is how long the peer had the open, in PhaseOpen.
	Waited time.Duration
}

func (e *HandshakeError) Error() string {
	if e.Remote != nil {
		return fmt.Sprintf("%s: %v", e.Phase, e.Remote)
	}
	return fmt.Sprintf("%s: %v", e.Phase, e.Err)
}

// Unwrap returns Remote, or else Err.
func (e *HandshakeError) Unwrap() error {
	if e.Remote != nil {
		return e.Remote
	}
	return e.Err
}

// FrameLimitError is in a [HandshakeError] if the peer accepts only frames that are too small for AMQP 1.0.
// Its value is their maximum size in bytes.
type FrameLimitError uint32

func (e FrameLimitError) Error() string {
	return fmt.Sprintf("the peer accepts frames of at most %d bytes, and AMQP 1.0 needs %d", uint32(e), minFrame)
}

// violation is a breach of the protocol by the peer, with the condition that this end answers.
type violation struct {
	scope     Scope
	condition frames.Symbol
	text      string
}

func (v *violation) Error() string { return v.text }

// maxViolation bounds the text of a violation, which may quote the peer: it has to fit into the
// smallest frame that a peer may ask for.
const maxViolation = 256

func broken(scope Scope, condition frames.Symbol, format string, args ...any) *violation {
	text := fmt.Sprintf(format, args...)
	return &violation{scope, condition, strings.ToValidUTF8(text[:min(len(text), maxViolation)], "")}
}

// The conditions that this end sends, of AMQP 1.0, part 2.8.
const (
	condFraming     = "amqp:connection:framing-error"
	condWindow      = "amqp:session:window-violation"
	condHandle      = "amqp:session:unattached-handle"
	condHandleInUse = "amqp:session:handle-in-use"
	condErrant      = "amqp:session:errant-link"
	condCredit      = "amqp:link:transfer-limit-exceeded"
	condSize        = "amqp:link:message-size-exceeded"
	condInvalid     = "amqp:invalid-field"
)
