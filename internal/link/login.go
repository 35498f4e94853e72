package link

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Credentials are what a connection logs in with. SASL is the public form.
type Credentials struct {
	Mechanism      string
	user, password string
	Oauth2         bool
	Source         func(ctx context.Context) (AccessToken, error) // OAuth 2 only: the password comes from it
}

// AccessToken is an OAuth 2 access token. Token documents the fields.
type AccessToken struct {
	Value   string
	Expires time.Time
}

// PlainLogin are the credentials of a user with a password.
func PlainLogin(user, password string) Credentials {
	return Credentials{Mechanism: "PLAIN", user: user, password: password}
}

// response is the initial response of the mechanism.
func (c Credentials) response() []byte {
	if c.Mechanism == "EXTERNAL" {
		return []byte{} // the certificate identifies the user
	}
	return []byte("\x00" + c.user + "\x00" + c.password)
}

// maxToken is about what fits into the frame that logs in, which RabbitMQ 4.3 takes
// up to 64 KiB of.
const maxToken = 60_000

var errNoToken = errors.New("the token source returned no token")

// next asks the source for a token. It returns when ctx ends, even if the source hangs.
func (c Credentials) next(ctx context.Context) (AccessToken, error) {
	type result struct {
		token AccessToken
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
		t, err := c.Source(ctx)
		r = result{t, err}
	}()
	select {
	case r := <-done:
		switch {
		case r.err != nil:
			return AccessToken{}, r.err
		case r.token.Value == "":
			return AccessToken{}, errNoToken
		case !utf8.ValidString(r.token.Value) || strings.ContainsRune(r.token.Value, 0):
			return AccessToken{}, errors.New("the token source returned a token with a NUL or invalid UTF-8")
		case len(r.token.Value) > maxToken:
			return AccessToken{}, fmt.Errorf("the token source returned a token of %d bytes, which is over %d", len(r.token.Value), maxToken)
		case !r.token.Expires.IsZero() && !time.Now().Before(r.token.Expires):
			return AccessToken{}, fmt.Errorf("the token source returned a token that expired at %s", r.token.Expires.Format(time.RFC3339))
		}
		return r.token, nil
	case <-ctx.Done():
		return AccessToken{}, context.Cause(ctx)
	}
}

// login returns the credentials with a token in them, if they need one.
func (c Credentials) login(ctx context.Context) (Credentials, AccessToken, error) {
	if c.Source == nil {
		return c, AccessToken{}, nil
	}
	t, err := c.next(ctx)
	if err != nil {
		return c, AccessToken{}, err
	}
	c.password = t.Value
	return c, t, nil
}
