package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"
)

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

// due is when a token with so much time left should be renewed.
func due(left time.Duration) time.Duration { return max(left/5*4, 0) }

// keepToken renews the token of w ahead of its end, for as long as w lives.
func (c *Conn) keepToken(w *wire) {
	expires := w.token.Expires
	if expires.IsZero() || !w.broker.AtLeast(4, 1) {
		return
	}
	failures := 0
	wait := due(time.Until(expires))
	for pause(w.ctx, wait) {
		next, err := w.endpoint.sasl.token(w.ctx)
		if err == nil && !next.Expires.IsZero() && !next.Expires.After(expires) {
			// The source keeps its token for longer than four fifths of its time.
			wait = max(due(time.Until(expires)), 50*time.Millisecond)
			continue
		}
		if err == nil {
			err = c.sendToken(w, next)
		}
		if w.ctx.Err() != nil {
			return
		}
		if err != nil {
			err = &Error{Op: "connection", Target: w.endpoint.shown, Kind: ErrAuthentication, Err: err}
			c.log.Warn("hopback: the token wasn't renewed, trying again", "endpoint", w.endpoint.shown, "expires", expires, "error", err)
			c.tell(w, Event{Kind: EventTokenRefused, Attempt: failures + 1, Err: err})
			wait = c.cfg.Reconnect.pause(failures)
			failures++
			continue
		}
		c.tell(w, Event{Kind: EventTokenRenewed, Attempt: failures + 1})
		failures = 0
		if next.Expires.IsZero() {
			return
		}
		expires = next.Expires
		wait = due(time.Until(expires))
	}
}

// sendToken gives the broker a new token for the connection w.
func (c *Conn) sendToken(w *wire, t Token) error {
	ctx, cancel := context.WithTimeout(w.ctx, linkTimeout)
	defer cancel()
	// The Conn's own may be on another connection.
	management := w.management(c.renewAfter)
	defer management.close(ctx)
	status, reply, err := management.Request(ctx, "PUT", "/auth/tokens", []byte(t.Value))
	if err != nil {
		return err
	}
	if status != http.StatusNoContent && status != http.StatusOK {
		return fmt.Errorf("the broker answered with %d: %s", status, clip(fmt.Sprint(reply), 200))
	}
	return nil
}
