package link

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Credentials are what a connection logs in with. client.SASL is the public form.
type Credentials struct {
	Mechanism      string
	user, password string
	Oauth2         bool
	Source         TokenSource // OAuth 2 only: the password comes from it
}

// TokenSource returns OAuth 2 access tokens. A zero expires means that the time isn't known.
type TokenSource interface {
	Token(ctx context.Context) (value string, expires time.Time, err error)
}

// PlainLogin returns the Credentials of a user with a password.
func PlainLogin(user, password string) Credentials {
	return Credentials{Mechanism: "PLAIN", user: user, password: password}
}

// response returns the initial response of the mechanism.
func (c Credentials) response() []byte {
	if c.Mechanism == "EXTERNAL" {
		return []byte{} // the certificate identifies the user
	}
	return []byte("\x00" + c.user + "\x00" + c.password)
}

// maxToken is about what fits into the frame that logs in: RabbitMQ 4.3 accepts up to 64 KiB.
const maxToken = 60_000

var errNoToken = errors.New("the token source returned no token")

// next returns a token of the source. It returns when ctx ends, even if the source hangs.
func (c Credentials) next(ctx context.Context) (token string, expires time.Time, err error) {
	type result struct {
		token   string
		expires time.Time
		err     error
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
		token, expires, err := c.Source.Token(ctx)
		r = result{strings.TrimSpace(token), expires, err} // a file often ends with a newline, and no token does
	}()
	select {
	case r := <-done:
		switch {
		case r.err != nil:
			return "", time.Time{}, r.err
		case r.token == "":
			return "", time.Time{}, errNoToken
		case !utf8.ValidString(r.token) || strings.ContainsRune(r.token, 0):
			return "", time.Time{}, errors.New("the token source returned a token with a NUL or invalid UTF-8")
		case len(r.token) > maxToken:
			return "", time.Time{}, fmt.Errorf("the token source returned a token of %d bytes, which is over %d", len(r.token), maxToken)
		case !r.expires.IsZero() && !time.Now().Before(r.expires):
			return "", time.Time{}, fmt.Errorf("the token source returned a token that expired at %s", r.expires.Format(time.RFC3339))
		}
		return r.token, r.expires, nil
	case <-ctx.Done():
		return "", time.Time{}, context.Cause(ctx)
	}
}

// login returns the credentials with a new token as the password, if they have a Source, and when it expires.
func (c Credentials) login(ctx context.Context) (_ Credentials, expires time.Time, err error) {
	if c.Source != nil {
		c.password, expires, err = c.next(ctx)
	}
	return c, expires, err
}
