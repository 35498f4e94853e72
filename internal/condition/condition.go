// Package condition says what the AMQP conditions mean by which a broker refuses or ends
// something. It has the errors that package client exports, so that streams and the desk,
// which have connections of their own, report the same.
package condition

import (
	"errors"
	"strings"

	"github.com/hopback/hopback/internal/userid"
)

// The kinds; package client documents them.
var (
	ErrUnauthorized   = errors.New("permission refused")
	ErrNotFound       = errors.New("not found")
	ErrRefused        = errors.New("refused by the broker")
	ErrUserID         = errors.New("user-id refused")
	ErrTooLarge       = errors.New("message too large")
	ErrConnectionLost = errors.New("connection lost")
)

// Kind returns what a condition means wherever it comes from, or nil if that depends on what
// the broker was asked for.
//
// RabbitMQ 4.0 answers an attach to a missing exchange or queue with amqp:not-found, too. It
// refuses a virtual host with amqp:not-allowed, but only while a connection opens.
func Kind(condition, description string) error {
	switch condition {
	case "amqp:not-found", "amqp:resource-deleted":
		return ErrNotFound
	case "amqp:unauthorized-access":
		if _, ok := userid.Refusal(description); ok {
			return ErrUserID
		}
		if !CredentialExpired(condition, description) {
			return ErrUnauthorized
		}
	case "amqp:link:message-size-exceeded":
		return ErrTooLarge
	}
	return nil
}

// OfLink returns what it means that the broker has refused a link, or ended it: another
// attempt helps after ErrConnectionLost, and after ErrRefused only once somebody has changed
// something.
func OfLink(condition, description string) error {
	if kind := Kind(condition, description); kind != nil {
		return kind
	}
	switch condition {
	case "amqp:link:detach-forced", "amqp:connection:forced", "amqp:internal-error":
		return ErrConnectionLost // that passes
	}
	if CredentialExpired(condition, description) || strings.HasPrefix(condition, "amqp:connection:") {
		return ErrConnectionLost
	}
	return ErrRefused
}

// CredentialExpired reports whether the broker refuses everything on this connection because
// the token that it was opened with has expired. RabbitMQ 4.0 ends the connection, but it
// may refuse a link or end a session in this way before
// (TestOAuth2TokensAreRenewedAheadOfTime). The next connection has the next token.
func CredentialExpired(condition, description string) bool {
	return condition == "amqp:unauthorized-access" && description == "credential expired"
}
