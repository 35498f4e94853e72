package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// SASL is a way to log in: Plain, External or OAuth2.
type SASL struct {
	mechanism      string
	user, password string
	oauth2         bool
	source         TokenSource // OAuth2 only: the password comes from it
}

// Plain logs in with a user name and a password.
func Plain(user, password string) SASL {
	return SASL{mechanism: "PLAIN", user: user, password: password}
}

// External logs in with the client certificate of Config.TLS. The broker needs
// the plugin rabbitmq_auth_mechanism_ssl.
func External() SASL { return SASL{mechanism: "EXTERNAL"} }

// response is the initial response of the mechanism.
func (s SASL) response() []byte {
	if s.mechanism == "EXTERNAL" {
		return []byte{} // the certificate says who it is
	}
	return []byte("\x00" + s.user + "\x00" + s.password)
}

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
func OAuth2(source TokenSource) SASL { return SASL{mechanism: "PLAIN", oauth2: true, source: source} }

// maxToken is about what fits into the frame that logs in, which RabbitMQ 4.3 takes
// up to 64 KiB of.
const maxToken = 60_000

var errNoToken = errors.New("the token source returned no token")

// token asks the source, within ctx, whatever the source does.
func (s SASL) token(ctx context.Context) (Token, error) {
	type result struct {
		token Token
		err   error
	}
	done := make(chan result, 1)
	go func() {
		r := result{err: errors.New("the token source ended its goroutine")}
		defer func() {
			if p := recover(); p != nil {
				r = result{err: fmt.Errorf("the token source panicked: %v", p)}
			}
			done <- r
		}()
		t, err := s.source(ctx)
		r = result{t, err}
	}()
	select {
	case r := <-done:
		switch {
		case r.err != nil:
			return Token{}, r.err
		case r.token.Value == "":
			return Token{}, errNoToken
		case !utf8.ValidString(r.token.Value) || strings.ContainsRune(r.token.Value, 0):
			return Token{}, errors.New("the token source returned a token with a NUL or invalid UTF-8")
		case len(r.token.Value) > maxToken:
			return Token{}, fmt.Errorf("the token source returned a token of %d bytes, which is over %d", len(r.token.Value), maxToken)
		case !r.token.Expires.IsZero() && !time.Now().Before(r.token.Expires):
			return Token{}, fmt.Errorf("the token source returned a token that expired at %s", r.token.Expires.Format(time.RFC3339))
		}
		return r.token, nil
	case <-ctx.Done():
		return Token{}, context.Cause(ctx)
	}
}

// login is the SASL with the token in it.
func (s SASL) login(ctx context.Context) (SASL, Token, error) {
	if s.source == nil {
		return s, Token{}, nil
	}
	t, err := s.token(ctx)
	if err != nil {
		return s, Token{}, err
	}
	s.password = t.Value
	return s, t, nil
}
