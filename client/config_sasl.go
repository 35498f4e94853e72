package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// SASL is a way to log in: [Plain], [External], or [OAuth2]. The zero value logs in with the
// user and password of the URL.
type SASL struct{ login link.Credentials }

// Plain logs in with a user name and a password. Use it to keep the password out of the URL.
func Plain(user, password string) SASL {
	return SASL{link.PlainLogin(user, password)}
}

// External logs in with the client certificate of [Config.TLS]. The broker needs the plugin
// rabbitmq_auth_mechanism_ssl.
func External() SASL { return SASL{link.Credentials{Mechanism: "EXTERNAL"}} }

// Token is an OAuth 2.0 access token. A [TokenSource] returns it.
type Token struct {
	// Value is the token itself, usually a JWT.
	Value string
	// Expires is when the token expires. If it is zero, the client never renews the token.
	Expires time.Time
}

// TokenSource returns a token that is valid now. The client calls it whenever it connects, and
// before a token expires. It may return the same token again while that token is valid, as the
// sources of golang.org/x/oauth2 do.
type TokenSource func(ctx context.Context) (Token, error)

// OAuth2 logs in with access tokens from source. The broker needs the plugin
// rabbitmq_auth_backend_oauth2.
//
// After four fifths of a token's lifetime, the client asks source for the next token, and keeps
// trying until it gets one. RabbitMQ 4.1 and later accept the new token on the open connection.
// RabbitMQ 4.0 closes the connection when the token expires; the client then reconnects with a
// new token.
func OAuth2(source TokenSource) SASL {
	login := link.Credentials{Mechanism: "PLAIN", Oauth2: true}
	if source != nil {
		login.Source = tokens(source)
	}
	return SASL{login}
}

// tokens is a TokenSource for package link.
type tokens TokenSource

func (s tokens) Token(ctx context.Context) (value string, expires time.Time, err error) {
	t, err := s(ctx)
	return t.Value, t.Expires, err
}
