package link

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"

	"github.com/hopback/hopback/internal/failure"
)

// connectError distinguishes the reasons why opening a connection fails.
func connectError(ep Endpoint, err error) error {
	e := failure.NewError("connect", ep.Shown, failure.ErrUnreachable, err)
	handshake, _ := errors.AsType[*engine.HandshakeError](err)
	switch {
	case handshake != nil && handshake.Refused:
		e.Kind, e.Text = failure.ErrAuthentication, refusedLogin(ep.sasl, handshake)
	case remoteAlert(err):
		// With TLS 1.3 the broker refuses a client certificate only after the handshake.
		e.Kind, e.Text = failure.ErrTLS, withRemedy(ep, err)
	case handshake != nil && handshake.Phase == engine.PhaseOpen && !errors.Is(err, context.DeadlineExceeded):
		openError(e, ep, handshake)
	case errors.Is(err, frames.ErrProtocol):
		e.Text = anotherProtocol(err)
		failure.MarkLasting(e)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		if e.Text = "the connection ended in the handshake, so this may not be an AMQP 1.0 port; " + remedyPort; ep.hasWorked() {
			e.Text = "the connection ended in the handshake; " + remedyBroker
		}
	case errors.Is(err, context.DeadlineExceeded):
		if e.Text = "no answer to the AMQP handshake in time; " + remedyPort; ep.hasWorked() {
			e.Text = "no answer to the AMQP handshake in time; " + remedyBroker
		}
	case e.Condition == "":
		e.Text = withRemedy(ep, err)
	}
	return e
}

// refusedLogin returns the text for a login that the broker refuses, with what the user can do.
func refusedLogin(login Credentials, why *engine.HandshakeError) string {
	switch {
	case len(why.Offered) > 0 && login.Mechanism == "EXTERNAL":
		return fmt.Sprintf("the broker offers %s and not EXTERNAL, which logs in with the client certificate; enable its plugin rabbitmq_auth_mechanism_ssl, add EXTERNAL to auth_mechanisms, and set a client certificate in the TLS configuration", strings.Join(why.Offered, ", "))
	case len(why.Offered) > 0:
		return fmt.Sprintf("the broker offers %s and not %s; add %[2]s to its setting auth_mechanisms, or log in with a client certificate (client.External)", strings.Join(why.Offered, ", "), login.Mechanism)
	case login.Mechanism == "EXTERNAL":
		return "the broker refused EXTERNAL: no user has the name in the client certificate; create that user, or choose the part of the certificate that names it with the broker's setting ssl_cert_login_from"
	case login.Source != nil:
		return "the broker refused the OAuth 2 token; check its audience, scopes, and expiry"
	}
	text := fmt.Sprintf("the broker refused %s for user %q; check the user and the password, percent-encoded in the URL. By default, RabbitMQ accepts guest only from its own host", login.Mechanism, login.user)
	if login.user != strings.TrimSpace(login.user) || login.password != strings.TrimSpace(login.password) {
		text += ". The user or the password begins or ends with white space, such as the newline that echo adds to a secret: remove it if it isn't meant"
	}
	return text
}

// silentClose is a second less than RabbitMQ waits before it closes the socket because it refuses the open frame,
// which is 3 s. A socket that is closed earlier has another reason (TestABrokerTakesItsTimeToRefuseAVirtualHost).
const silentClose = 2 * time.Second

// openError sets the kind and the text of e, for a connection that the broker doesn't open after the login.
func openError(e *failure.Error, ep Endpoint, why *engine.HandshakeError) {
	cause := failure.Clip(failure.Readable(why.Unwrap().Error()), 200)
	ended := hasEnded(why.Err) || errors.Is(why.Err, engine.ErrNoReason)
	switch {
	case why.Remote != nil && why.Remote.Condition == "amqp:connection:redirect":
		e.Condition = string(why.Remote.Condition)
		e.Text = "the broker wants the client to connect to " + redirectedTo(why.Remote) + "; hopback doesn't follow redirects: name that host in the URL"
		failure.MarkLasting(e)
	case why.Remote != nil && !refusesVirtualHost(why.Remote):
		e.Condition = string(why.Remote.Condition)
		e.Text = "the broker didn't open the connection (" + cause + "); look into its log"
	case errors.As(why.Err, new(engine.FrameLimitError)):
		e.Text = cause + "; set the broker's frame_max to 131072, its default (0 doesn't mean that there is no limit)"
		failure.MarkLasting(e)
	case why.Remote == nil && !ended:
		e.Text = "the answer to the open frame isn't one of AMQP 1.0 (" + cause + "); check what is between the client and the broker, and " + remedyPort
		failure.MarkLasting(e)
	case why.Remote == nil && why.Waited < silentClose && !errors.Is(why.Err, engine.ErrNoReason):
		e.Text = "the connection ended while it was being opened (" + cause + "); try again, and check the network, proxies, and the broker's log"
	default:
		e.Kind = failure.ErrVirtualHost
		if ep.hasWorked() {
			e.Text = fmt.Sprintf("the broker closed the connection when asked for virtual host %q as user %q, which it accepted before: it is still starting, or the virtual host was deleted, the user's access to it was revoked, or a limit of connections is reached (%s)", ep.vhost, ep.sasl.user, cause)
			return
		}
		e.Text = fmt.Sprintf("the broker closed the connection when asked for virtual host %q as user %q: it doesn't exist, or the user has no access to it, or has reached a limit of connections (%s); correct the path of the URL, create the virtual host, or grant the user access to it", ep.vhost, ep.sasl.user, cause)
	}
}

// hasEnded reports whether err means that the network connection has ended.
func hasEnded(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.ErrClosedPipe) || errors.As(err, new(net.Error))
}

// refusesVirtualHost reports whether a close in place of an open is about the virtual host.
func refusesVirtualHost(remote *frames.Error) bool {
	switch remote.Condition {
	case "amqp:not-allowed", "amqp:not-found", "amqp:unauthorized-access", "amqp:resource-limit-exceeded":
		return true
	}
	return false
}

// redirectedTo returns the address that a redirect names.
func redirectedTo(remote *frames.Error) string {
	text := func(key frames.Symbol) string {
		v, _ := remote.Info.Get(string(key))
		return failure.Readable(fmt.Sprint(v))
	}
	host, port := text("network-host"), text("port")
	if host == "<nil>" {
		return "another host"
	}
	if port == "<nil>" {
		return failure.Quote(host)
	}
	return failure.Quote(net.JoinHostPort(host, port))
}

const remedyPort = "correct the port of the URL: by default it is 5672 for amqp://, and 5671 for amqps://"

// anotherProtocol returns the text for a port that doesn't speak AMQP 1.0, with the protocol that it speaks.
func anotherProtocol(err error) string {
	var got string
	if e, ok := errors.AsType[*frames.ProtocolError](err); ok {
		got = e.Got
	}
	switch {
	case strings.HasPrefix(got, "HTTP"):
		return "this isn't an AMQP 1.0 port: it answers in HTTP, as RabbitMQ's management API does; " + remedyPort
	case strings.HasPrefix(got, "AMQP"):
		return "this isn't an AMQP 1.0 port: it offers another version of AMQP, as RabbitMQ 3 does; use RabbitMQ 4, or correct the host and the port of the URL"
	}
	return "this isn't an AMQP 1.0 port: it answers in another protocol; " + remedyPort
}

// remedyBroker is for endpoints that have worked, so that the URL is right.
const remedyBroker = "check whether the broker is running, and the network"

// withRemedy returns the text of a network or TLS error, with what the user can do.
func withRemedy(ep Endpoint, err error) string {
	remedy := "correct the host and the port of the URL, or check the network"
	dns, _ := errors.AsType[*net.DNSError](err)
	switch {
	case ep.hasWorked() && aboutNetwork(err):
		remedy = remedyBroker
	case dns != nil:
		remedy = "correct the host of the URL"
	case errors.Is(err, syscall.ECONNREFUSED):
		remedy = "nothing listens there: start the broker, or correct the host and the port of the URL"
	case errors.As(err, new(tls.RecordHeaderError)):
		remedy = "the port answers without TLS: use amqp://, or the port for amqps://, which is 5671 by default"
	case errors.As(err, new(x509.UnknownAuthorityError)):
		remedy = "trust the authority of the broker's certificate in the TLS configuration"
	case errors.As(err, new(x509.HostnameError)):
		remedy = "use a host that the broker's certificate names, or set the server name in the TLS configuration"
	case errors.As(err, new(*tls.CertificateVerificationError)):
		remedy = "check the broker's certificate"
	case remoteAlert(err):
		remedy = alertRemedy(err.Error())
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		remedy = remedyPort
	}
	return err.Error() + "; " + remedy
}

// aboutNetwork reports whether err is about the network, and not about TLS.
func aboutNetwork(err error) bool {
	return !errors.As(err, new(tls.RecordHeaderError)) && !errors.As(err, new(*tls.CertificateVerificationError)) &&
		!errors.As(err, new(x509.UnknownAuthorityError)) && !errors.As(err, new(x509.HostnameError)) && !remoteAlert(err)
}

// alertRemedy returns what the user can do after the broker ended the TLS handshake with an alert. text is that of
// crypto/tls.
func alertRemedy(text string) string {
	switch {
	case strings.Contains(text, "certificate"):
		return "check the client certificate in the TLS configuration: the broker wants one that is valid, and signed by an authority that it trusts"
	case strings.Contains(text, "unrecognized name"):
		return "set the server name in the TLS configuration to one that the broker's certificate has"
	case strings.Contains(text, "protocol version"):
		return "allow the TLS version of the broker in the TLS configuration (MinVersion and MaxVersion), or change the broker's setting ssl_options.versions"
	case strings.Contains(text, "handshake failure"), strings.Contains(text, "insufficient security"):
		return "broker and client have no TLS version or cipher suite in common, or the broker wants a client certificate: compare the TLS configuration with the broker's ssl_options"
	}
	return "the broker refused the TLS handshake, and its log says why"
}

// remoteAlert reports whether the broker has refused something in TLS. crypto/tls has no type for that.
func remoteAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}
