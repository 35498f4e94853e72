package link

import (
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"unicode"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/userid"
)

// Endpoint is a parsed URL.
type Endpoint struct {
	address string // host:port
	host    string
	vhost   string
	tls     bool
	sasl    Credentials
	Shown   string // for people: without the password
	// raw is what is known about the user on the connections of package dedicated.
	raw *userid.Login
	// worked is set once a connection to this endpoint was opened. From then on, errors don't suggest
	// that the URL may be wrong. It is nil outside of a pool.
	worked *atomic.Bool
}

// hasWorked reports whether a connection to this endpoint was opened before.
func (ep Endpoint) hasWorked() bool { return ep.worked != nil && ep.worked.Load() }

// ParseEndpoint parses a URL, or returns an *argument.Error for the argument with this name. sasl, unless it is
// zero, is used in place of the URL's user and password.
func ParseEndpoint(name, raw string, sasl Credentials) (Endpoint, error) {
	const remedy = "use amqp://user:password@host:5672/vhost, or amqps:// for TLS, with reserved characters percent-encoded"
	raw = strings.TrimSpace(raw) // a file or a secret often ends with a newline
	if strings.ContainsFunc(raw, unicode.IsControl) {
		return Endpoint{}, argument.New(name, nil, "has a line break or another control character in it", "remove it, or percent-encode it if it belongs to the user or the password")
	}
	if severalHosts(raw) {
		return Endpoint{}, argument.New(name, nil, "names several hosts", "pass a URL with one host, and list URLs of the others in Config.Endpoints")
	}
	u, err := url.Parse(raw)
	if err != nil {
		// The error isn't kept, because it repeats the URL with its password.
		return Endpoint{}, argument.New(name, nil, "isn't a URL", remedy)
	}
	// An unescaped "/", "?", "#", or "@" moves a part of the password into the path, the query, or the
	// host, and without a scheme it is in the opaque part. So errors repeat none of these.
	if u.Opaque != "" || strings.Count(raw, "@") > 1 || (u.User == nil && strings.Contains(raw, "@")) {
		return Endpoint{}, argument.New(name, nil, "isn't an AMQP URL", remedy)
	}
	query := u.RawQuery != "" || u.ForceQuery || u.Fragment != ""
	u.RawQuery, u.Fragment, u.RawFragment = "", "", ""
	ep := Endpoint{host: u.Hostname(), Shown: u.Redacted(), sasl: sasl}
	port := u.Port()
	switch u.Scheme {
	case "amqp":
		if port == "" {
			port = "5672"
		}
	case "amqps":
		ep.tls = true
		if port == "" {
			port = "5671"
		}
	default:
		return Endpoint{}, argument.New(name, nil, "isn't an AMQP URL: it begins with neither amqp:// nor amqps://", remedy)
	}
	if ep.host == "" {
		return Endpoint{}, argument.New(name, ep.Shown, "has no host", remedy)
	}
	if query {
		return Endpoint{}, argument.New(name, ep.Shown, "has a query or a fragment", "set options in client.Config")
	}
	ep.address = net.JoinHostPort(ep.host, port)
	path := strings.TrimPrefix(u.EscapedPath(), "/")
	vhost, err := url.PathUnescape(path)
	if err != nil || strings.Contains(path, "/") || !utf8.ValidString(vhost) {
		return Endpoint{}, argument.New(name, ep.Shown, "has more than one path segment", `name one virtual host, with "/" in it written as %2F`)
	}
	if vhost == "" {
		vhost = "/"
	}
	ep.vhost = vhost
	if ep.sasl.Mechanism == "" {
		ep.sasl = PlainLogin("guest", "guest")
		if u.User != nil {
			password, _ := u.User.Password()
			ep.sasl = PlainLogin(u.User.Username(), password)
		}
	}
	if ep.sasl.Mechanism == "EXTERNAL" && !ep.tls {
		return Endpoint{}, argument.New(name, ep.Shown, "has no TLS, which External needs", "use an amqps:// URL")
	}
	if strings.ContainsRune(ep.sasl.user+ep.sasl.password, 0) || !utf8.ValidString(ep.sasl.user+ep.sasl.password) {
		return Endpoint{}, argument.New(name, ep.Shown, "has a user or password with a NUL or invalid UTF-8", "remove it: SASL PLAIN can't carry it")
	}
	return ep, nil
}

// severalHosts reports whether raw lists several hosts or URLs, separated by commas, which other clients accept.
func severalHosts(raw string) bool {
	_, rest, found := strings.Cut(raw, "://")
	if !found {
		return false
	}
	authority, path, _ := strings.Cut(rest, "/")
	host := authority[strings.LastIndexByte(authority, '@')+1:]
	return strings.Contains(host, ",") || strings.Contains(path, ",amqp://") || strings.Contains(path, ",amqps://")
}

// user returns what is known about the user before the broker has answered: nothing if the user is in a token or a
// certificate.
func (ep Endpoint) user(impersonator bool) *userid.Login {
	name := ep.sasl.user
	if ep.sasl.Mechanism != "PLAIN" || ep.sasl.Oauth2 {
		name = ""
	}
	return userid.NewLogin(name, impersonator)
}
