package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"syscall"
	"time"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/oldbroker"
)

// dialConfig is what a connection is made with. Config documents what users can set.
type dialConfig struct {
	name           string
	tls            *tls.Config
	dial           func(ctx context.Context, network, address string) (net.Conn, error)
	connectTimeout time.Duration
	idleTimeout    time.Duration
	impersonator   bool
	log            *slog.Logger
	settled        func(n int) // reports ranges of settlements; nil: nobody listens
}

// dial makes one connection to one endpoint.
func dial(ctx context.Context, ep endpoint, cfg dialConfig) (*wire, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.connectTimeout)
	defer cancel()

	sasl, t, err := ep.sasl.login(ctx)
	if err != nil {
		return nil, &Error{Op: "connect", Target: ep.shown, Kind: ErrAuthentication, Err: err}
	}
	raw, err := dialEndpoint(ctx, ep, cfg)
	if err != nil {
		return nil, err
	}
	conn, err := engine.Open(ctx, raw, engine.Config{
		ContainerID: cfg.name,
		Hostname:    "vhost:" + ep.vhost,
		Mechanism:   sasl.mechanism,
		Response:    sasl.response(),
		IdleTimeout: cfg.idleTimeout,
		MaxSessions: maxSessions,
		Settled:     cfg.settled,
		Properties: frames.Map{
			{Key: frames.Symbol("connection_name"), Value: cfg.name},
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
	w := &wire{
		limit: peer.Sessions, endpoint: ep, amqp: conn, net: raw, login: ep.user(cfg.impersonator), token: t,
		blockage: &blockage{log: cfg.log, endpoint: ep.shown},
		broker:   brokerInfo{Product: text("product"), Version: text("version"), Node: text("node"), Cluster: text("cluster_name")},
	}
	w.intakes.tell = w.blockage.tell
	w.spare = make(chan struct{}, spareSessions(w.limit))
	w.ctx, w.cancel = context.WithCancel(context.Background())
	context.AfterFunc(w.ctx, w.blockage.end)
	w.old = oldbroker.Of(w.broker.AtLeast)
	restChannels(conn, w.old)
	go w.watchLife(cfg.idleTimeout)
	return w, nil
}

// dialEndpoint makes the network connection to an endpoint, with TLS if it has that.
func dialEndpoint(ctx context.Context, ep endpoint, cfg dialConfig) (net.Conn, error) {
	raw, err := dialNetwork(ctx, ep.address, cfg)
	if err != nil {
		return nil, &Error{Op: "connect", Target: ep.shown, Kind: ErrUnreachable, Err: err}
	}
	if ep.tls {
		conf := cfg.tls.Clone()
		if conf == nil {
			conf = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		if conf.ServerName == "" {
			conf.ServerName = ep.host
		}
		t := tls.Client(raw, conf)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, &Error{Op: "connect", Target: ep.shown, Kind: ErrTLS, Err: err}
		}
		raw = t
	}
	return raw, nil
}

// dialNetwork makes the network connection. It returns when ctx ends, whatever
// Config.Dial does.
func dialNetwork(ctx context.Context, address string, cfg dialConfig) (net.Conn, error) {
	if cfg.dial == nil {
		return (&net.Dialer{Timeout: min(tcpTimeout, cfg.connectTimeout)}).DialContext(ctx, "tcp", address)
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
		r.conn, r.err = cfg.dial(ctx, "tcp", address)
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

// connectError tells the reasons apart for which the opening of a connection fails.
func connectError(ep endpoint, err error) error {
	e := newError("connect", ep.shown, ErrUnreachable, err)
	handshake, _ := errors.AsType[*engine.HandshakeError](err)
	switch {
	case handshake != nil && handshake.Refused:
		e.Kind = ErrAuthentication
		e.Text = fmt.Sprintf("the broker refused %s for user %q", ep.sasl.mechanism, ep.sasl.user)
		if ep.sasl.source != nil {
			e.Text = "the broker refused the OAuth 2 token"
		}
	case remoteAlert(err):
		// With TLS 1.3 the broker's verdict on our certificate comes behind the
		// handshake.
		e.Kind = ErrTLS
	case handshake != nil && handshake.Phase == engine.PhaseOpen && !errors.Is(err, context.DeadlineExceeded):
		// RabbitMQ may close the socket behind an open that it refuses without a reason.
		e.Kind = ErrVirtualHost
		e.Text = fmt.Sprintf("the broker closed the connection when asked for virtual host %q as user %q: it doesn't exist, or the user has no access to it", ep.vhost, ep.sasl.user)
		if handshake.Remote != nil {
			e.Text += " (" + clip(readable(handshake.Remote.Error()), 200) + ")"
		}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		e.Text = "the connection ended in the handshake: is this an AMQP 1.0 port? One with TLS needs an amqps:// URL"
	}
	return e
}

// remoteAlert says whether the broker has refused something in TLS: crypto/tls has no
// type for that.
func remoteAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}
