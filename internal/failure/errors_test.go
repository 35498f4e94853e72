package failure

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestErrorsMatchTheirKindAndTheirCause(t *testing.T) {
	safe := map[error]bool{
		ErrUnreachable: true, ErrAuthentication: true, ErrVirtualHost: true, ErrTLS: true, ErrUnauthorized: true, ErrNotFound: true,
		ErrUnroutable: true, ErrTooLarge: true, ErrNotSent: true, ErrClosed: true, ErrSessionLimit: true,
		ErrRefused: false, ErrOutcomeUnknown: false, ErrConnectionLost: false,
	}
	for kind, want := range safe {
		err := fmt.Errorf("wrapped: %w", &Error{Op: "publish", Target: "/queues/q", Kind: kind, Err: io.EOF})
		require.ErrorIs(t, err, kind)
		require.ErrorIs(t, err, io.EOF)
		assert.ErrorContains(t, err, kind.Error())
		assert.Equal(t, want, SafeToRetry(err), "%v", kind)
		for other := range safe {
			assert.Equal(t, other == kind, errors.Is(err, other), "%v is %v", kind, other)
		}
	}
	assert.False(t, SafeToRetry(nil))
	assert.False(t, SafeToRetry(io.EOF))
	assert.EqualError(t, &Error{Op: "x"}, "hopback: x")
	assert.EqualError(t, &Error{Op: "x", Kind: ErrRefused, Condition: "amqp:c", Err: io.EOF}, "hopback: x: refused by the broker: amqp:c")
	assert.EqualError(t, &Error{Op: "x", Kind: ErrRefused, Condition: "amqp:c", Text: "why", Err: io.EOF}, "hopback: x: refused by the broker: why")
	assert.EqualError(t, &Error{Op: "x", Kind: ErrRefused, Err: io.EOF}, "hopback: x: refused by the broker: EOF")

	e := NewError("consume", "q", ErrConnectionLost, fmt.Errorf("attach: %w", &amqp.Error{Condition: amqp.ErrCondNotFound}))
	require.ErrorIs(t, e, ErrNotFound)
	assert.Equal(t, "amqp:not-found", e.Condition)
	require.ErrorIs(t, NewError("consume", "q", ErrConnectionLost, &amqp.SessionError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess}}), ErrUnauthorized)
	require.ErrorIs(t, NewError("consume", "q", ErrConnectionLost, &amqp.LinkError{}), ErrConnectionLost)
	require.ErrorIs(t, NewError("consume", "q", ErrConnectionLost, nil), ErrConnectionLost)
}

func TestErrorsRepeatOneLineOfTheBrokersWords(t *testing.T) {
	remote := &amqp.Error{Condition: amqp.ErrCondInternalError, Description: "failed: {shutdown,\n" + strings.Repeat(" ", 80) + "delete} " + strings.Repeat("{badmatch,[1,2]}\n", 10_000) + "\xff"}
	e := NewError("consume", "q", ErrConnectionLost, remote)
	assert.True(t, strings.HasPrefix(e.Text, "failed: {shutdown, delete} {badmatch"), e.Text)
	assert.LessOrEqual(t, len(e.Text), maxText)
	assert.NotContains(t, e.Error(), "\n")
	assert.Equal(t, "short", NewError("consume", "q", nil, &amqp.Error{Description: "short"}).Text)
	assert.Same(t, remote, e.Err)
}

func FuzzReadable(f *testing.F) {
	f.Add("failed: {shutdown,\n     delete}")
	f.Add(strings.Repeat("\xff", 600))
	f.Add(strings.Repeat("ä", 300))
	f.Fuzz(func(t *testing.T, s string) {
		text := Readable(s)
		require.LessOrEqual(t, len(text), maxText)
		require.True(t, utf8.ValidString(text))
		require.NotContains(t, text, "\n")
		require.Equal(t, strings.TrimSpace(text), text)
	})
}

func TestUncertainCopiesLeaveTheErrorAsItIs(t *testing.T) {
	e := MarkUnsent(&Error{Op: "publish", Kind: ErrConnectionLost})
	require.True(t, e.SafeToRetry())
	u := Uncertain(e)
	require.ErrorIs(t, u, ErrOutcomeUnknown)
	assert.False(t, u.SafeToRetry())
	assert.True(t, e.SafeToRetry())
}

// The remedy is in the text once, and fits what is missing.
func TestTheRemedyFits(t *testing.T) {
	for text, want := range map[string]string{
		"write access to topic 'a' in exchange 'x' in vhost '/' refused for user 'u'": "set_topic_permissions",
		"write access to exchange 'x' in vhost '/' refused for user 'u'":              "rabbitmqctl set_permissions",
		"forbidden to publish to internal exchange 'x' in vhost '/'":                  "no permission allows this",
	} {
		e := &Error{Op: "publish", Kind: ErrUnauthorized, Text: text}
		assert.ErrorContains(t, e, want)
		unknown := NewError("publish", "q", ErrOutcomeUnknown, e)
		unknown.Text = text
		assert.ErrorContains(t, unknown, want)
	}
	inner := errors.New("hopback: inspect queue \"q\": not found (status 404); declare it first, or correct its name or the URL's virtual host")
	assert.Equal(t, 1, strings.Count((&Error{Op: "consume", Kind: ErrNotFound, Err: inner}).Error(), "declare it first"))
}
