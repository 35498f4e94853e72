package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// credentials are what a connection logs in with. SASL is the public form.
type credentials struct {
	mechanism      string
	user, password string
	oauth2         bool
	source         func(ctx context.Context) (accessToken, error) // OAuth 2 only: the password comes from it
}

// accessToken is an OAuth 2 access token. Token documents the fields.
type accessToken struct {
	Value   string
	Expires time.Time
}

// plainLogin are the credentials of a user with a password.
func plainLogin(user, password string) credentials {
	return credentials{mechanism: "PLAIN", user: user, password: password}
}

// response is the initial response of the mechanism.
func (c credentials) response() []byte {
	if c.mechanism == "EXTERNAL" {
		return []byte{} // the certificate identifies the user
	}
	return []byte("\x00" + c.user + "\x00" + c.password)
}

// maxToken is about what fits into the frame that logs in, which RabbitMQ 4.3 takes
// up to 64 KiB of.
const maxToken = 60_000

var errNoToken = errors.New("the token source returned no token")

// next asks the source for a token. It returns when ctx ends, even if the source hangs.
func (c credentials) next(ctx context.Context) (accessToken, error) {
	type result struct {
		token accessToken
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
		t, err := c.source(ctx)
		r = result{t, err}
	}()
	select {
	case r := <-done:
		switch {
		case r.err != nil:
			return accessToken{}, r.err
		case r.token.Value == "":
			return accessToken{}, errNoToken
		case !utf8.ValidString(r.token.Value) || strings.ContainsRune(r.token.Value, 0):
			return accessToken{}, errors.New("the token source returned a token with a NUL or invalid UTF-8")
		case len(r.token.Value) > maxToken:
			return accessToken{}, fmt.Errorf("the token source returned a token of %d bytes, which is over %d", len(r.token.Value), maxToken)
		case !r.token.Expires.IsZero() && !time.Now().Before(r.token.Expires):
			return accessToken{}, fmt.Errorf("the token source returned a token that expired at %s", r.token.Expires.Format(time.RFC3339))
		}
		return r.token, nil
	case <-ctx.Done():
		return accessToken{}, context.Cause(ctx)
	}
}

// login returns the credentials with a token in them, if they need one.
func (c credentials) login(ctx context.Context) (credentials, accessToken, error) {
	if c.source == nil {
		return c, accessToken{}, nil
	}
	t, err := c.next(ctx)
	if err != nil {
		return c, accessToken{}, err
	}
	c.password = t.Value
	return c, t, nil
}
