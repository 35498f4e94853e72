package link

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	engine "github.com/hopback/hopback/internal/amqp"
)

// A secret that was made with echo ends with a newline, which no URL and no token does.
func TestWhiteSpaceAroundASecretIsLeftOut(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{"amqp://ada:secret@h/shop\n", "amqp://ada:secret@h/shop\r\n", " \tamqp://ada:secret@h/shop "} {
		ep, err := ParseEndpoint("url", raw, Credentials{})
		require.NoError(t, err, "%q", raw)
		assert.Equal(t, "amqp://ada:xxxxx@h/shop", ep.Shown)
		assert.Equal(t, "shop", ep.vhost)
		assert.Equal(t, "h:5672", ep.address)
	}
	token, _, err := Credentials{Source: source("token\n")}.next(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "token", token)
	_, _, err = Credentials{Source: source("\n")}.next(t.Context())
	require.ErrorIs(t, err, errNoToken)
}

func TestAURLThatIsWrongSaysHow(t *testing.T) {
	t.Parallel()
	for raw, text := range map[string]string{
		"amqp://ada:se\ncret@h/shop":                      "line break",
		"amqp://ada:secret@h/sh\x00op":                    "control character",
		"amqp://ada:secret@h1:5672,h2:5672":               "Config.Endpoints",
		"amqp://h1,h2/shop":                               "Config.Endpoints",
		"amqp://ada:secret@h1/shop,amqp://ada:secret@h2/": "Config.Endpoints",
	} {
		_, err := ParseEndpoint("url", raw, Credentials{})
		require.ErrorContains(t, err, text, "%q", raw)
		assert.NotContains(t, err.Error(), "cret")
	}
	_, err := ParseEndpoint("url", "amqp://ada:a,b@h/x,y", Credentials{})
	require.NoError(t, err, "a comma elsewhere")
}

// A password may end with white space, so it is sent unchanged. If it is refused, the error says so.
func TestARefusedPasswordThatEndsWithANewline(t *testing.T) {
	t.Parallel()
	why := &engine.HandshakeError{Phase: engine.PhaseSASL, Refused: true}
	assert.Contains(t, refusedLogin(PlainLogin("ada", "secret\n"), why), "newline")
	assert.NotContains(t, refusedLogin(PlainLogin("ada", "secret"), why), "newline")
}

// source returns one token that never expires.
type source string

func (s source) Token(context.Context) (string, time.Time, error) { return string(s), time.Time{}, nil }
