package link

import (
	"net"
	"net/url"
	"strings"
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
	// raw holds what the client knows about the user on the connections of package dedicated.
	raw *userid.Login
}

func ParseEndpoint(name, raw string, sasl Credentials) (Endpoint, error) {
	const remedy = "use amqp://user:password@host:5672/vhost, or amqps:// for TLS, with reserved characters percent-encoded"
	u, err := url.Parse(raw)
	if err != nil {
		// The error repeats the URL, password and all: keep its kind only.
		return Endpoint{}, argument.New(name, nil, "isn't a URL", remedy)
	}
	// A password with a bare "/", "?", "#" or "@" ends up in the path, the query or
	// the host; without a scheme, it is the opaque part: none of them is repeated.
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

// user is what the client knows about the user before the broker has answered anything. It
// doesn't know the user of a token or a certificate.
func (ep Endpoint) user(impersonator bool) *userid.Login {
	name := ep.sasl.user
	if ep.sasl.Mechanism != "PLAIN" || ep.sasl.Oauth2 {
		name = ""
	}
	return userid.NewLogin(name, impersonator)
}
