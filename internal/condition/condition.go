// Package condition says what the AMQP conditions mean by which a broker refuses or ends
// something. It has the errors that package client exports, so that streams and the desk,
// which have connections of their own, report the same.
package condition

import (
	"errors"
	"strings"
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
		if _, ok := UserID(description); ok {
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
	if strings.Contains(description, noReplica) {
		return ErrConnectionLost
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

// noReplica is in RabbitMQ's refusal to read a stream over a node whose replica doesn't run. That
// passes when the replica is started again, or another node serves the consumer. Depending on the
// version, the condition is amqp:precondition-failed or amqp:internal-error
// (TestAStreamWithoutAReplicaIsTriedAgain).
const noReplica = "does not have a running replica on the local node"

// CredentialExpired reports whether the broker refuses everything on this connection because
// the token that it was opened with has expired. RabbitMQ 4.0 ends the connection, but it
// may refuse a link or end a session in this way before
// (TestOAuth2TokensAreRenewedAheadOfTime). The next connection has the next token.
func CredentialExpired(condition, description string) bool {
	return condition == "amqp:unauthorized-access" && description == "credential expired"
}

// UserID reports whether the description of an error amqp:unauthorized-access is about a
// user-id, and returns the connection's user. The user-id in it is the sender's: it may look
// like the rest of the description.
func UserID(description string) (user string, ok bool) {
	const before, between = "user_id property set to '", "' but authenticated user was '"
	i := strings.LastIndex(description, between)
	if !strings.HasPrefix(description, before) || i < 0 || !strings.HasSuffix(description, "'") {
		return "", false
	}
	if i += len(between); i >= len(description) {
		return "", false
	}
	return description[i : len(description)-1], true
}

// NotPermitted reports whether err is about a missing permission for a management request. RabbitMQ has no
// status for that: it closes the session, so the text is the only sign.
func NotPermitted(err error) bool {
	return err != nil && strings.Contains(err.Error(), "refused for user")
}
