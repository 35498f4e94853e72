package link

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

	"github.com/hopback/hopback/internal/failure"
)

// DialConfig configures how connections are opened. client.Config documents what users can set.
type DialConfig struct {
	Name           string
	TLS            *tls.Config
	Dial           func(ctx context.Context, network, address string) (net.Conn, error)
	Resolver       *net.Resolver // for host names, if Dial is nil; nil: the default
	ConnectTimeout time.Duration
	IdleTimeout    time.Duration
	Impersonator   bool
	MaxMessageSize uint64 // of messages that are kept whole: see Arrival.Size; 0: 512 MiB
	Log            *slog.Logger
	Settlements    engine.Settlements // nil: nobody listens

	addresses *addresses // of the pool, which all its connections share
	fresh     bool       // skip all addresses that have failed
}

// Dial opens a connection to an endpoint.
func Dial(ctx context.Context, ep Endpoint, cfg DialConfig) (*Wire, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
	defer cancel()

	sasl, expires, err := ep.sasl.login(ctx)
	if err != nil {
		return nil, noToken(ep, err)
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
		Settlements: cfg.Settlements,
		Properties: frames.Map{
			{Key: frames.Symbol("connection_name"), Value: cfg.Name},
			{Key: frames.Symbol("product"), Value: "hopback"},
			{Key: frames.Symbol("platform"), Value: "Go"},
		},
	})
	if err != nil {
		err = connectError(ep, err)
		if atAddress(err) {
			cfg.fail(raw)
		}
		return nil, err
	}
	cfg.addresses.work(raw.RemoteAddr())
	if ep.worked != nil {
		ep.worked.Store(true)
	}
	peer := conn.Peer()
	w := &Wire{
		Limit: peer.Sessions, maxMessage: cfg.MaxMessageSize, endpoint: ep, AMQP: conn, Net: raw, login: ep.user(cfg.Impersonator), expires: expires,
		Blockage: &Blockage{Log: cfg.Log},
	}
	w.Version, w.Node = w.Says("version"), w.Says("node")
	w.intakes.notify = w.Blockage.Notify
	w.Spare = make(chan struct{}, spareSessions(w.Limit))
	w.Ctx, w.cancel = context.WithCancel(context.Background())
	context.AfterFunc(w.Ctx, w.Blockage.end)
	w.Old = oldbroker.Of(oldbroker.Version(w.Version).AtLeast)
	restChannels(conn, w.Old)
	go w.watchLife(patience(cfg.IdleTimeout, peer.IdleTimeout))
	return w, nil
}

// noToken returns the error of a connection whose token source failed.
func noToken(ep Endpoint, err error) error {
	return failure.MarkPassing(&failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrAuthentication, Text: "no OAuth 2 token: " + failure.Readable(err.Error()), Err: err})
}

// patience is how long a broker may leave the client without an answer: idle, or less if the broker
// is quicker to close a silent connection. asked is the broker's idle-time-out: RabbitMQ asks for half of its
// setting heartbeat, and closes the connection after two to three times that setting. Other consumers then
// get what this one held, so this end must notice first. That takes up to 1.5 times the patience, and up
// to 2.5 times if a large message is stuck. So the patience is at most two thirds of heartbeat.
func patience(idle, asked time.Duration) time.Duration {
	const least = 2 * time.Second
	if asked <= 0 {
		return idle // RabbitMQ never closes the connection
	}
	return min(idle, max(asked*4/3, least))
}

// dialEndpoint opens the network connection to an endpoint, with TLS for amqps.
func dialEndpoint(ctx context.Context, ep Endpoint, cfg DialConfig) (net.Conn, error) {
	raw, err := dialNetwork(ctx, ep.address, cfg)
	if err != nil {
		return nil, &failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrUnreachable, Text: withRemedy(ep, err), Err: err}
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
			cfg.fail(raw)
			e := &failure.Error{Op: "connect", Target: ep.Shown, Kind: failure.ErrTLS, Text: withRemedy(ep, err), Err: err}
			if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, context.DeadlineExceeded) {
				failure.MarkPassing(e) // the network's doing
			}
			return nil, e
		}
		raw = t
	}
	return raw, nil
}

// fail notes that no broker answered on a connection, so that other addresses of its host are tried first.
// It does nothing with Config.Dial, which chooses addresses itself.
func (cfg DialConfig) fail(raw net.Conn) {
	if cfg.Dial == nil && raw != nil {
		cfg.addresses.fail(raw.RemoteAddr(), cfg.Log)
	}
}

// dialNetwork opens a network connection. It returns when ctx ends, even if Config.Dial doesn't; a connection
// that Config.Dial returns later is closed.
func dialNetwork(ctx context.Context, address string, cfg DialConfig) (net.Conn, error) {
	if cfg.Dial == nil {
		return cfg.addresses.dial(ctx, net.Dialer{Timeout: min(tcpTimeout, cfg.ConnectTimeout), Resolver: cfg.Resolver}, address, cfg.fresh)
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
