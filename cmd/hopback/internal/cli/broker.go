package cli

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/httpapi"
)

const (
	urlVariable        = "HOPBACK_URL"
	managementVariable = "HOPBACK_MANAGEMENT_URL"
	defaultURL         = "amqp://guest:guest@localhost:5672/"
	noManagement       = "none"
	closePatience      = 5 * time.Second
)

// broker is the broker of a command: its URL is checked, and the connection may not be open yet.
type broker struct {
	c     *command
	url   string
	shown string // without the password
	vhost string
	api   *httpapi.Reader // nil without
	noAPI string          // why it is nil
	conn  *client.Conn
	level slog.Level // of the log

	patience time.Duration // of close
}

// broker takes the URLs from flags, the environment and the defaults.
func (c *command) broker() (*broker, error) { return c.brokerFor("") }

// brokerFor is broker with an HTTP API for a virtual host that may not be the URL's.
func (c *command) brokerFor(vhost string) (*broker, error) {
	b := &broker{c: c, url: c.url, level: slog.LevelWarn, patience: closePatience}
	named := "--url"
	if b.url == "" {
		b.url, named = c.io.Env(urlVariable), urlVariable
	}
	if b.url == "" {
		b.url, named = defaultURL, "the default URL"
	}
	const form = "write it as amqp://user:password@host:5672/vhost, or amqps:// for TLS, with reserved characters percent-encoded"
	b.url = strings.TrimSpace(b.url) // a file or a secret often ends with a newline
	if _, hosts, _ := strings.Cut(b.url, "://"); strings.Contains(hosts[strings.LastIndexByte(hosts, '@')+1:], ",") {
		return nil, usage("%s names several hosts; name one: any node of the cluster will do", named)
	}
	u, err := url.Parse(b.url)
	// Errors don't repeat the URL: it may contain a password anywhere.
	if err != nil || u.Opaque != "" || strings.Count(b.url, "@") > 1 || u.Scheme != "amqp" && u.Scheme != "amqps" || u.Hostname() == "" {
		if err == nil && (u.Scheme == "http" || u.Scheme == "https") {
			return nil, usage("%s isn't an AMQP URL: its scheme is %s; %s. The URL of the HTTP API is --management-url", named, u.Scheme, form)
		}
		return nil, usage("%s isn't an AMQP URL; %s", named, form)
	}
	path := strings.TrimPrefix(u.EscapedPath(), "/")
	own, err := url.PathUnescape(path)
	if err != nil || strings.Contains(path, "/") {
		return nil, usage("%s has more than one path segment; name one virtual host, with \"/\" in it written as %%2F", named)
	}
	b.vhost = cmp.Or(vhost, own, "/")
	b.shown = fmt.Sprintf("%s://%s, virtual host %q", u.Scheme, u.Host, b.vhost)
	return b, b.management(u)
}

// management is the HTTP API: configured, or on the default port of the broker's host. If
// the broker listens on another port, the host may run several, and the default port may be
// the API of another one.
func (b *broker) management(amqp *url.URL) error {
	raw, named := b.c.managementURL, "--management-url"
	if raw == "" {
		raw, named = b.c.io.Env(managementVariable), managementVariable
	}
	raw = strings.TrimSpace(raw)
	switch port := amqp.Port(); {
	case raw == noManagement:
		b.noAPI = "the HTTP API is turned off by " + named
		return nil
	case raw == "" && port != "" && port != map[string]string{"amqp": "5672", "amqps": "5671"}[amqp.Scheme]:
		b.noAPI = fmt.Sprintf("the broker listens on port %s, so the URL of its HTTP API can't be guessed; set --management-url", port)
		return nil
	}
	user := amqp.User
	if user == nil {
		user = url.UserPassword("guest", "guest")
	}
	u := &url.URL{Scheme: "http", Host: net.JoinHostPort(amqp.Hostname(), "15672"), User: user}
	if amqp.Scheme == "amqps" {
		u.Scheme, u.Host = "https", net.JoinHostPort(amqp.Hostname(), "15671")
	}
	if raw != "" {
		var err error
		if u, err = url.Parse(raw); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || strings.Count(raw, "@") > 1 {
			return usage("%s isn't the URL of an HTTP API; write it as http://user:password@host:15672, with reserved characters percent-encoded, or %s", named, noManagement)
		}
		if u.User == nil {
			u.User = user
		}
	}
	conf, err := b.c.login.tls()
	if err != nil {
		return err
	}
	api, err := httpapi.New(u.String(), b.vhost, httpapi.Config{TLS: conf, Token: b.c.apiToken()})
	b.api = api
	return err
}

// connect opens the AMQP connection, unless it is open.
func (b *broker) connect(ctx context.Context) error {
	if b.conn != nil {
		return nil
	}
	conf, err := b.c.login.tls()
	if err != nil {
		return err
	}
	sasl, err := b.c.sasl()
	if err != nil {
		return err
	}
	conn, err := client.Connect(ctx, b.url, client.Config{TLS: conf, SASL: sasl, Logger: b.logger()})
	b.conn = conn
	if err != nil && b.c.interrupted() {
		return context.Cause(b.c.ctx)
	}
	switch {
	case errors.As(err, new(x509.UnknownAuthorityError)):
		err = fmt.Errorf("%w: name its PEM file with --ca", err)
	case errors.As(err, new(x509.HostnameError)):
		err = fmt.Errorf("%w with --server-name", err)
	}
	return timedOut(ctx, err)
}

// logger writes to stderr.
func (b *broker) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(b.c.stderr.w, &slog.HandlerOptions{Level: b.level}))
}

// close closes the connection, if it is open.
func (b *broker) close() {
	if b.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), b.patience)
	defer cancel()
	_ = b.conn.Close(ctx)
}

// snapshot reads the live topology: over the HTTP API, and over AMQP where that doesn't
// answer. It connects in any case: workers can't use a broker that AMQP doesn't reach, even
// if its HTTP API answers.
func (b *broker) snapshot(ctx context.Context, of declare.Topology) (check.Snapshot, error) {
	if err := b.connect(ctx); err != nil {
		return check.Snapshot{}, err
	}
	if len(of.Queues)+len(of.Bindings) > 0 {
		return b.readBoth(ctx, of)
	}
	const why = "AMQP can only read queues and bindings that a file names, and this command names none"
	if b.api == nil {
		return check.Snapshot{}, errors.New(why + "; without the HTTP API: " + b.noAPI)
	}
	s, err := check.Read(ctx, check.Sources{HTTP: b.api}, of)
	if err != nil {
		return s, timedOut(ctx, errors.Join(err, errors.New(why)))
	}
	return s, b.same(s)
}

func (b *broker) readBoth(ctx context.Context, of declare.Topology) (check.Snapshot, error) {
	s, err := check.Read(ctx, b.sources(), of)
	if err == nil {
		err = b.same(s)
	}
	for i := range s.Unread {
		if b.noAPI != "" {
			s.Unread[i].Why += "; " + b.noAPI
		}
	}
	return s, timedOut(ctx, err)
}

// same refuses the HTTP API of another broker. It compares nodes and versions: those of a
// cluster may differ during an upgrade.
func (b *broker) same(s check.Snapshot) error {
	is := b.conn.Broker()
	if is.Node == "" || len(s.Nodes) == 0 {
		return nil
	}
	if slices.Contains(s.Nodes, is.Node) && (len(s.Nodes) > 1 || s.Version == "" || s.Version == is.Version) {
		return nil
	}
	return usage("%s is node %s with RabbitMQ %s, but the HTTP API is node %s with %s: --management-url belongs to another broker; nothing was done",
		b.shown, is.Node, is.Version, strings.Join(s.Nodes, ", "), s.Version)
}

// sources are both ways to read.
func (b *broker) sources() check.Sources {
	src := check.Sources{AMQP: b.conn.Management()}
	if b.api != nil {
		src.HTTP = b.api
	}
	return src
}

// timedOut adds why ctx ended, if the error doesn't contain it. A socket has ctx's deadline, and
// can time out a moment before ctx ends.
func timedOut(ctx context.Context, err error) error {
	var late *timeoutError
	if err == nil || errors.As(err, &late) {
		return err
	}
	var n net.Error
	if deadline, ok := ctx.Deadline(); ok && errors.As(err, &n) && n.Timeout() && time.Until(deadline) < time.Second {
		<-ctx.Done()
	}
	if !errors.As(context.Cause(ctx), &late) {
		return err
	}
	return errors.Join(late, err)
}

type timeoutError struct{ after time.Duration }

func (e *timeoutError) Error() string {
	return fmt.Sprintf("not done within %v; --timeout sets the limit", e.after)
}

// counting counts replies, for progress. It embeds the Management and not a Requester, so that package declare
// finds its other methods: the version, and more sessions for many declarations.
type counting struct {
	*client.Management
	replies atomic.Int64
}

func (r *counting) Request(ctx context.Context, method, path string, body any) (int, any, error) {
	defer r.replies.Add(1)
	return r.Management.Request(ctx, method, path, body)
}

func (r *counting) Parallel(n int) (request func(ctx context.Context, method, path string, body any) (int, any, error), done func()) {
	several, done := r.Management.Parallel(n)
	return func(ctx context.Context, method, path string, body any) (int, any, error) {
		defer r.replies.Add(1)
		return several(ctx, method, path, body)
	}, done
}
