package link

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/oldbroker"

	"github.com/hopback/hopback/internal/failure"
)

// DialConfig is what a connection is made with. Config documents what users can set.
type DialConfig struct {
	Name           string
	TLS            *tls.Config
	Dial           func(ctx context.Context, network, address string) (net.Conn, error)
	ConnectTimeout time.Duration
	IdleTimeout    time.Duration
	Impersonator   bool
	Log            *slog.Logger
	Settled        func(n int) // reports ranges of settlements; nil: nobody listens
}

// Dial makes one connection to one endpoint.
func Dial(ctx context.Context, ep Endpoint, cfg DialConfig) (*Wire, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
	defer cancel()

	sasl, t, err := ep.sasl.login(ctx)
	if err != nil {
		return nil, &failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrAuthentication, Err: err}
	}
	raw, err := dialEndpoint(ctx, ep, cfg)
	if err != nil {
		return nil, err
	}
	conn, err := engine.Open(ctx, raw, engine.Config{
		ContainerID: cfg.Name,
		Hostname:    "vhost:" + ep.vhost,
		Mechanism:   sasl.Mechanism,
		Response:    sasl.response(),
		IdleTimeout: cfg.IdleTimeout,
		MaxSessions: MaxSessions,
		Settled:     cfg.Settled,
		Properties: frames.Map{
			{Key: frames.Symbol("connection_name"), Value: cfg.Name},
			{Key: frames.Symbol("product"), Value: "hopback"},
			{Key: frames.Symbol("platform"), Value: "Go"},
		},
	})
	if err != nil {
		return nil, connectError(ep, err)
	}
	peer := conn.Peer()
	text := func(key string) string {
		v, _ := peer.Properties.Get(key)
		s, _ := v.(string)
		return s
	}
	w := &Wire{
		Limit: peer.Sessions, endpoint: ep, AMQP: conn, Net: raw, login: ep.user(cfg.Impersonator), token: t,
		Blockage: &Blockage{Log: cfg.Log, endpoint: ep.Shown},
		Broker:   BrokerInfo{Product: text("product"), Version: text("version"), Node: text("node"), Cluster: text("cluster_name")},
	}
	w.intakes.notify = w.Blockage.Notify
	w.Spare = make(chan struct{}, spareSessions(w.Limit))
	w.Ctx, w.Cancel = context.WithCancel(context.Background())
	context.AfterFunc(w.Ctx, w.Blockage.end)
	w.Old = oldbroker.Of(w.Broker.AtLeast)
	restChannels(conn, w.Old)
	go w.watchLife(patience(cfg.IdleTimeout, peer.IdleTimeout))
	return w, nil
}

// patience is how long a broker may leave the client without an answer: idle, or less if the broker
// is quicker to close a silent connection. asked is its idle-time-out. RabbitMQ asks for half of its
// setting heartbeat, and closes the connection after two to three times that setting. Then other
// consumers get what this one held, so this end must have noticed before. It takes up to 1.5 times the
// patience for that, and up to 2.5 times if a large message is stuck. So the patience is two thirds of
// heartbeat at most.
func patience(idle, asked time.Duration) time.Duration {
	const least = 2 * time.Second
	if asked <= 0 {
		return idle // RabbitMQ never closes the connection
	}
	return min(idle, max(asked*4/3, least))
}

// dialEndpoint makes the network connection to an endpoint, with TLS if it has that.
func dialEndpoint(ctx context.Context, ep Endpoint, cfg DialConfig) (net.Conn, error) {
	raw, err := dialNetwork(ctx, ep.address, cfg)
	if err != nil {
		return nil, &failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrUnreachable, Text: withRemedy(err), Err: err}
	}
	if ep.tls {
		conf := cfg.TLS.Clone()
		if conf == nil {
			conf = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		if conf.ServerName == "" {
			conf.ServerName = ep.host
		}
		t := tls.Client(raw, conf)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, &failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrTLS, Text: withRemedy(err), Err: err}
		}
		raw = t
	}
	return raw, nil
}

// dialNetwork opens the network connection. It returns when ctx ends, even if Config.Dial
// doesn't.
func dialNetwork(ctx context.Context, address string, cfg DialConfig) (net.Conn, error) {
	if cfg.Dial == nil {
		return (&net.Dialer{Timeout: min(tcpTimeout, cfg.ConnectTimeout)}).DialContext(ctx, "tcp", address)
	}
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		defer func() {
			if v := recover(); v != nil {
				r = result{nil, fmt.Errorf("Config.Dial panicked: %v", v)}
			}
			done <- r // also after runtime.Goexit
		}()
		r.conn, r.err = cfg.Dial(ctx, "tcp", address)
	}()
	select {
	case r := <-done:
		if r.err == nil && r.conn == nil {
			r.err = errors.New("Config.Dial returned no connection")
		}
		return r.conn, r.err
	case <-ctx.Done():
		go func() {
			if r := <-done; r.conn != nil {
				_ = r.conn.Close()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// connectError distinguishes the reasons why opening a connection fails.
func connectError(ep Endpoint, err error) error {
	e := failure.NewError("connect", ep.Shown, failure.ErrUnreachable, err)
	handshake, _ := errors.AsType[*engine.HandshakeError](err)
	switch {
	case handshake != nil && handshake.Refused:
		e.Kind = failure.ErrAuthentication
		e.Text = fmt.Sprintf("the broker refused %s for user %q; check the user and the password, percent-encoded in the URL. By default, RabbitMQ accepts guest only from its own host", ep.sasl.Mechanism, ep.sasl.user)
		if ep.sasl.Source != nil {
			e.Text = "the broker refused the OAuth 2 token; check its audience, scopes, and expiry"
		}
	case remoteAlert(err):
		// With TLS 1.3 the broker's verdict on our certificate comes behind the
		// handshake.
		e.Kind, e.Text = failure.ErrTLS, err.Error()+"; check the client certificate in the TLS configuration"
	case handshake != nil && handshake.Phase == engine.PhaseOpen && !errors.Is(err, context.DeadlineExceeded):
		// RabbitMQ may close the socket behind an open that it refuses without a reason.
		e.Kind = failure.ErrVirtualHost
		e.Text = fmt.Sprintf("the broker closed the connection when asked for virtual host %q as user %q: it doesn't exist, or the user has no access to it", ep.vhost, ep.sasl.user)
		if handshake.Remote != nil {
			e.Text += " (" + failure.Clip(failure.Readable(handshake.Remote.Error()), 200) + ")"
		}
		e.Text += "; correct the path of the URL, create the virtual host, or grant the user access to it"
	case errors.Is(err, frames.ErrProtocol):
		e.Text = anotherProtocol(err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		e.Text = "the connection ended in the handshake, so this may not be an AMQP 1.0 port; " + remedyPort
	case errors.Is(err, context.DeadlineExceeded):
		e.Text = "no answer to the AMQP handshake in time; " + remedyPort
	case e.Condition == "":
		e.Text = withRemedy(err)
	}
	return e
}

const remedyPort = "correct the port of the URL: by default it is 5672 for amqp://, and 5671 for amqps://"

// anotherProtocol names the protocol of a port that doesn't speak AMQP 1.0.
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

// withRemedy is the text of an error of the network or of TLS, with what a user can do.
func withRemedy(err error) string {
	remedy := "correct the host and the port of the URL, or check the network"
	dns, _ := errors.AsType[*net.DNSError](err)
	switch {
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
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		remedy = remedyPort
	}
	return err.Error() + "; " + remedy
}

// remoteAlert says whether the broker has refused something in TLS: crypto/tls has no
// type for that.
func remoteAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}
