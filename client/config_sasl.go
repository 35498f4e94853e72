package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// SASL is a way to log in: Plain, External or OAuth2.
type SASL struct{ login link.Credentials }

// Plain logs in with a user name and a password.
func Plain(user, password string) SASL {
	return SASL{link.PlainLogin(user, password)}
}

// External logs in with the client certificate of Config.TLS. The broker needs
// the plugin rabbitmq_auth_mechanism_ssl.
func External() SASL { return SASL{link.Credentials{Mechanism: "EXTERNAL"}} }

// Token is an OAuth 2 access token.
type Token struct {
	// Value is the token itself, usually a JWT.
	Value string
	// Expires is when the token expires. If it is zero, the token is never renewed.
	Expires time.Time
}

// TokenSource returns a token that is valid now. It is called whenever a connection is
// made, and before a token expires. It may return the same token again while that is
// valid, as the sources of golang.org/x/oauth2 do.
type TokenSource func(ctx context.Context) (Token, error)

// OAuth2 logs in with tokens of source. The broker needs the plugin
// rabbitmq_auth_backend_oauth2.
//
// When four fifths of a token's time are over, the client asks source for the next one,
// and tries again until it has one. RabbitMQ 4.1 and later accept it on the open
// connection. RabbitMQ 4.0 can't: it ends the connection when the token expires, and the
// client rebuilds it with a new token.
func OAuth2(source TokenSource) SASL {
	login := link.Credentials{Mechanism: "PLAIN", Oauth2: true}
	if source != nil {
		login.Source = func(ctx context.Context) (link.AccessToken, error) {
			t, err := source(ctx)
			return link.AccessToken(t), err
		}
	}
	return SASL{login}
}
