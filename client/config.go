package client

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client/instrument"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// Config configures a Conn. The zero value is ready to use.
type Config struct {
	// Endpoints are further URLs of the same cluster. They are tried in turn, after
	// Connect's own, whenever a connection is made or rebuilt.
	Endpoints []string
	// Name is the AMQP container-id, which the broker shows with the connection: UTF-8
	// of at most 255 bytes. Further connections get a number: "orders-2". Default: the
	// program's name and a random suffix.
	Name string
	// MaxConnections is the most AMQP connections that the Conn opens. Consumers and
	// publishers that find no session left fail with ErrSessionLimit. Default: 64, which
	// is enough for 1,900 consumers.
	MaxConnections int
	// SASL is how to log in. Default: Plain with the URL's user and password, or guest
	// and guest.
	SASL SASL
	// TLS configures amqps URLs. An empty ServerName means the URL's host. Default: the
	// system's certificate authorities, and TLS 1.2 or later.
	TLS *tls.Config
	// Dial, if not nil, makes the network connection, for instance through a proxy or a
	// tunnel. network is "tcp" and address the endpoint's host:port. For amqps URLs the
	// client runs TLS on the result. ctx ends with ConnectTimeout or with the caller's
	// ctx; a connection that comes later is closed. An error is ErrUnreachable and is
	// tried again like any other. Dial must be safe for concurrent use. Default: a
	// net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// ConnectTimeout bounds one attempt to connect to one endpoint, from TCP to
	// AMQP open. The TCP connect alone takes at most 4 s of it, unless Dial is set.
	// Default: 15 s.
	ConnectTimeout time.Duration
	// Reconnect is the pause between attempts to rebuild a lost connection or link. The
	// number of attempts is unlimited.
	Reconnect ReconnectBackoff
	// IdleTimeout is how long the broker may stay silent, or answer nothing, before the
	// connection is considered lost. It is at least 2 s. After half of it without an
	// answer the client opens and closes a session, to see whether the broker answers.
	// Default: 30 s.
	IdleTimeout time.Duration
	// PreferLeaderOf is the name of a queue, or empty. Of several endpoints the client
	// prefers the one whose node leads this queue, which saves its messages a hop between
	// nodes. The leader is looked up whenever a connection is made, and not followed
	// later. If the queue is missing, or the user may not see it, any endpoint is used.
	PreferLeaderOf string
	// Impersonator says that the broker's user has the tag "impersonator". Then copies of
	// messages, such as retry copies, keep the user-id of the user who published the message.
	// RabbitMQ accepts another user's user-id only from an impersonator. By default a copy
	// has another user's user-id in AnnotationUserID instead.
	Impersonator bool
	// Observe, if not nil, is called for each change in the state of the connection,
	// its publishers and its consumers: one event at a time, in order. Nothing waits for
	// it. When more than 1,024 events wait, the oldest are dropped, and Event.Dropped
	// counts them. Observe may be called after Close has returned.
	OnEvent func(Event)
	// Instrument, if not nil, follows each message that is sent and handled, for traces and
	// metrics. Package hopbackotel has one for OpenTelemetry. Without one it costs nothing.
	Instrument instrument.Instrument
	// Logger receives what no call returns, such as lost connections and deliveries
	// that couldn't be settled. What is about a delivery is logged with the ctx that an
	// Instrument has given its handler. Default: slog.Default().
	Logger *slog.Logger
}

// minIdleTimeout: the engine tells the broker half of it, as the standard advises, and
// RabbitMQ closes a connection that asks for half a second, without a word why.
const minIdleTimeout = 2 * time.Second

func (c Config) withDefaults() (Config, error) {
	if c.ConnectTimeout < 0 || c.IdleTimeout < 0 || c.Reconnect.Min < 0 || c.Reconnect.Max < 0 {
		return c, argument.New("Config", nil, "has a negative duration", "use positive ones, or 0 for the default")
	}
	if c.IdleTimeout != 0 && c.IdleTimeout < minIdleTimeout {
		return c, argument.New("Config.IdleTimeout", c.IdleTimeout, "is below 2 s", "use at least 2 s: RabbitMQ refuses less")
	}
	if c.MaxConnections < 0 {
		return c, argument.New("Config.MaxConnections", c.MaxConnections, "is negative", "use 1 or more, or 0 for the default of 64")
	}
	if c.MaxConnections == 0 {
		c.MaxConnections = 64
	}
	if !utf8.ValidString(c.Name) || len(c.Name) > link.MaxName {
		return c, argument.New("Config.Name", c.Name, "is over 255 bytes or not valid UTF-8", "use a short name")
	}
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = 15 * time.Second
	}
	if c.IdleTimeout == 0 {
		c.IdleTimeout = 30 * time.Second
	}
	if c.Reconnect.Min == 0 {
		c.Reconnect.Min = 100 * time.Millisecond
	}
	if c.Reconnect.Max == 0 {
		c.Reconnect.Max = 10 * time.Second
	}
	if c.Reconnect.Max < c.Reconnect.Min {
		c.Reconnect.Max = c.Reconnect.Min
	}
	if c.Name == "" {
		c.Name = defaultName()
	}
	if c.SASL.login.Oauth2 && c.SASL.login.Source == nil {
		return c, argument.New("Config.SASL", "OAuth2", "has no token source", "give client.OAuth2 a function")
	}
	if c.PreferLeaderOf != "" {
		if _, err := address.Queue(c.PreferLeaderOf).Build(); err != nil {
			return c, argument.New("Config.PreferLeaderOf", c.PreferLeaderOf, "is not a queue's name", "name a queue, or leave it empty").Because(err)
		}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

// dialing is what a connection is made with.
func (c Config) dialing(settled func(n int)) link.DialConfig {
	return link.DialConfig{
		Name: c.Name, TLS: c.TLS, Dial: c.Dial, ConnectTimeout: c.ConnectTimeout, IdleTimeout: c.IdleTimeout,
		Impersonator: c.Impersonator, Log: c.Logger, Settled: settled,
	}
}

func (c Config) endpoints(first string) ([]link.Endpoint, error) {
	eps := make([]link.Endpoint, 0, 1+len(c.Endpoints))
	for i, raw := range append([]string{first}, c.Endpoints...) {
		name := "url"
		if i > 0 {
			name = fmt.Sprintf("Config.Endpoints[%d]", i-1)
		}
		ep, err := link.ParseEndpoint(name, raw, c.SASL.login)
		if err != nil {
			return nil, err
		}
		eps = append(eps, ep)
	}
	return eps, nil
}

func defaultName() string {
	program := "hopback"
	if len(os.Args) > 0 && os.Args[0] != "" {
		program = filepath.Base(os.Args[0])
	}
	return failure.Clip(program, 100) + "-" + strings.ToLower(rand.Text()[:8])
}
