// Package httpapi reads RabbitMQ's management HTTP API. Use it for what AMQP doesn't show:
// exchanges, policies, nodes, and messages that are blocked. It never writes.
//
// Pass a [Reader] to check.Read:
//
//	api, err := httpapi.New("http://user:password@localhost:15672", "/", httpapi.Config{})
//	live, err := check.Read(ctx, check.Sources{AMQP: conn.Management(), HTTP: api}, topology)
//
// The user needs the tag "management" to see queues, exchanges, and bindings, "policymaker" for
// policies, and "monitoring" for nodes.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package httpapi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
)

// Config configures a [Reader]. The zero value is ready to use.
type Config struct {
	// Timeout limits one request and its reply. Default: 30 s.
	Timeout time.Duration
	// TLS is the TLS configuration for https URLs. Default: nil, Go's default.
	TLS *tls.Config
	// Token returns the OAuth 2 token to log in with. It replaces the URL's user and password,
	// and is called before each request. Default: nil, no token.
	Token func(context.Context) (string, error)
	// MaxBody is the largest accepted reply, in bytes. Default: 256 MiB. The reply for a virtual
	// host with 10,000 queues has some 15 MB.
	MaxBody int64
}

// Reader reads the API for one virtual host. It is safe for concurrent use and keeps no idle
// connections.
type Reader struct {
	base     string // without user and password, without a slash at its end
	user     string
	password string
	token    func(context.Context) (string, error)
	vhost    string
	maxBody  int64
	client   *http.Client
}

var _ check.Reader = (*Reader)(nil)

// New returns a Reader. rawURL is an http or https URL with user and password, without the path
// "/api". vhost is the name of a virtual host, such as "/". New sends nothing. The error is an
// *[argument.Error] and never contains the password.
func New(rawURL, vhost string, cfg Config) (*Reader, error) {
	rawURL = strings.TrimSpace(rawURL) // a file or a secret often ends with a newline
	u, err := url.Parse(rawURL)
	switch {
	case strings.ContainsFunc(rawURL, unicode.IsControl):
		return nil, argument.New("URL", nil, "has a line break or another control character in it", "remove it, or percent-encode it if it belongs to the user or the password")
	case err != nil, strings.Count(rawURL, "@") > 1, u.User == nil && strings.Contains(rawURL, "@"):
		// The parser's error repeats the URL, password and all. With an @ too many, or behind the
		// host, the host or the path is a part of the password.
		return nil, argument.New("URL", nil, "isn't a URL", "write it as http://user:password@host:15672, with special characters in the user and the password percent-encoded")
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return nil, argument.New("URL", u.Scheme+"://"+u.Host, "isn't an http or https URL with a host", "write it as http://user:password@host:15672")
	case u.User.Username() == "" && cfg.Token == nil:
		return nil, argument.New("URL", u.Scheme+"://"+u.Host, "has no user, and the API refuses requests without one", "write it as http://user:password@host:15672")
	case vhost == "":
		return nil, argument.New("vhost", nil, "is empty", `pass the name of the virtual host; the default one is "/"`)
	case cfg.Timeout < 0:
		return nil, argument.New("Config.Timeout", cfg.Timeout, "is negative", "leave it out for 30 seconds")
	case cfg.MaxBody < 0:
		return nil, argument.New("Config.MaxBody", cfg.MaxBody, "is negative", "leave it out for 256 MiB")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 30 * time.Second
	}
	if cfg.MaxBody == 0 {
		cfg.MaxBody = 256 << 20
	}
	password, _ := u.User.Password()
	r := &Reader{user: u.User.Username(), password: password, vhost: vhost, maxBody: cfg.MaxBody}
	if cfg.Token != nil {
		r.user, r.token = "token", cfg.Token // RabbitMQ ignores the name
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	r.base = strings.TrimSuffix(strings.TrimSuffix(u.String(), "/"), "/api")
	r.client = &http.Client{
		Timeout:   cfg.Timeout,
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true, TLSClientConfig: cfg.TLS},
		// A redirect could send the password to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return r, nil
}

// VHost returns the name of the virtual host.
func (r *Reader) VHost() string { return r.vhost }

// String returns the URL without user and password.
func (r *Reader) String() string { return r.base }

// GoString keeps the password out of %#v as well.
func (r *Reader) GoString() string { return fmt.Sprintf("httpapi.Reader(%q, %q)", r.base, r.vhost) }

// Get requests a percent-encoded path below /api, such as "/queues/%2F", and returns the body of
// the reply. The error is an *[Error].
func (r *Reader) Get(ctx context.Context, path string) ([]byte, error) {
	fail := func(status int, reason, err error) ([]byte, error) {
		return nil, &Error{URL: r.base + "/api" + path, Status: status, User: r.user, VHost: r.vhost, Reason: reason, Err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.base+"/api"+path, nil)
	if err != nil {
		return fail(0, declare.ErrInvalid, err)
	}
	password := r.password
	if r.token != nil {
		if password, err = r.token(ctx); err != nil {
			return fail(0, declare.ErrForbidden, fmt.Errorf("no token: %w", err))
		}
	}
	req.SetBasicAuth(r.user, password)
	req.Header.Set("Accept", "application/json")
	resp, err := r.client.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // the rest repeats the URL
		}
		return fail(0, declare.ErrUnavailable, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, r.maxBody+1))
	switch {
	case err != nil:
		return fail(resp.StatusCode, declare.ErrUnavailable, err)
	case int64(len(body)) > r.maxBody:
		return fail(resp.StatusCode, declare.ErrBadReply, fmt.Errorf("the reply has more than %d bytes; raise Config.MaxBody", r.maxBody))
	case resp.StatusCode/100 == 2:
		return body, nil
	case resp.StatusCode == http.StatusUnauthorized, resp.StatusCode == http.StatusForbidden:
		return fail(resp.StatusCode, declare.ErrForbidden, nil)
	case resp.StatusCode == http.StatusNotFound:
		return fail(resp.StatusCode, declare.ErrNotFound, nil)
	case resp.StatusCode >= 500:
		return fail(resp.StatusCode, declare.ErrUnavailable, nil)
	}
	return fail(resp.StatusCode, declare.ErrBadReply, nil)
}

// Error reports that the HTTP API refused a request or didn't answer. errors.Is matches its
// Reason and its Err.
type Error struct {
	// URL is the URL of the request, without user and password.
	URL string
	// Status is the status of the reply. It is 0 if none came.
	Status int
	// User and VHost are those of the Reader.
	User, VHost string
	// Reason is declare.ErrForbidden, ErrNotFound, ErrUnavailable, ErrBadReply, or ErrInvalid.
	Reason error
	// Err is the cause, or nil.
	Err error
}

func (e *Error) Error() string {
	at, _, _ := strings.Cut(e.URL, "?") // a query can be a long list of columns
	if errors.Is(e.Err, context.Canceled) {
		// The caller has stopped it. That says nothing about the HTTP API.
		return fmt.Sprintf("hopback: GET %s: stopped before the reply: %v", at, e.Err)
	}
	s := fmt.Sprintf("hopback: GET %s: %v", at, e.Reason)
	switch {
	case e.Status == http.StatusUnauthorized, e.Status == http.StatusForbidden:
		s = fmt.Sprintf("%s (status %d): the password is wrong, or user %q lacks the required tag (management, policymaker for policies, monitoring for nodes) or a permission on the virtual host %q", s, e.Status, e.User, e.VHost)
	case e.Status == http.StatusNotFound:
		s = fmt.Sprintf("%s (status 404): the virtual host %q doesn't exist, or this isn't the management API; check the name and the URL", s, e.VHost)
	case errors.Is(e.Reason, declare.ErrForbidden): // for lack of a token
	case e.Status != 0:
		s = fmt.Sprintf("%s (status %d)", s, e.Status)
	default:
		s += "; check that the management plugin is enabled (rabbitmq-plugins enable rabbitmq_management) and that the port is right (15672 by default)"
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns Reason and Err.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Reason}
	}
	return []error{e.Reason, e.Err}
}

// SafeToRetry always returns true: a GET request changes nothing.
func (e *Error) SafeToRetry() bool { return true }

// WorthRetrying reports whether the request can succeed later: after declare.ErrUnavailable.
func (e *Error) WorthRetrying() bool { return errors.Is(e.Reason, declare.ErrUnavailable) }
