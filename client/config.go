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
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// Config configures a [Conn]. The zero value is ready to use.
type Config struct {
	// Endpoints are URLs of further nodes of the same cluster. [Connect] tries its own URL first
	// and then these, in order. To reconnect, the Conn tries all of them in turn.
	Endpoints []string
	// Name is the AMQP container-id, which identifies the connection on the broker, for instance
	// in the management UI. It is at most 255 bytes of UTF-8. Additional connections get a
	// number, such as "orders-2". Default: the program's name and a random suffix.
	Name string
	// MaxConnections limits how many AMQP connections the Conn opens. When no session is left on
	// them, new consumers and publishers fail with [ErrSessionLimit]. Default: 64, which is
	// enough for 1,900 consumers.
	MaxConnections int
	// SASL is how to log in: see [Plain], [External], and [OAuth2]. Default: Plain with the
	// URL's user and password, or guest and guest if the URL has none.
	SASL SASL
	// TLS configures connections to amqps URLs: certificate authorities, client certificates,
	// versions. If ServerName is empty, the URL's host is used. Default: the system's
	// certificate authorities, and TLS 1.2 or later.
	TLS *tls.Config
	// Dial, if not nil, opens the network connection, for instance through a proxy or a tunnel.
	// network is "tcp" and address is the endpoint's host:port. Default: a [net.Dialer].
	//
	//   - For amqps URLs, the client runs TLS on the returned connection.
	//   - ctx ends after ConnectTimeout, or when the caller's ctx ends. If Dial returns a
	//     connection after that, the client closes it.
	//   - An error counts as [ErrUnreachable], and the client tries again.
	//   - Dial must be safe for concurrent use.
	//   - Without Dial, the client uses all addresses of the endpoint's host. It first tries those
	//     at which no connection has failed for lack of an answer. With Dial, the choice among them is
	//     Dial's.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// ConnectTimeout limits one attempt to connect to one endpoint, from TCP to AMQP open. The
	// TCP connect may use at most 4 s of it, unless Dial is set. If the endpoint's host has several
	// addresses, [Connect] makes an attempt at each until a broker answers. Default: 15 s.
	ConnectTimeout time.Duration
	// Reconnect is the backoff between attempts to rebuild a lost connection or link. The number
	// of attempts is unlimited. Default: 100 ms to 10 s.
	Reconnect ReconnectBackoff
	// IdleTimeout is how long the broker may stay silent, or leave the client without an answer,
	// before the client treats the connection as lost. After half of that time, the client opens
	// and closes a session to check whether the broker still responds. Default: 30 s. Minimum: 2
	// s. RabbitMQ closes a silent connection after two to three times its setting heartbeat (60 s
	// by default), and gives the messages to others. To notice first, the client waits for an answer
	// no longer than two thirds of heartbeat, even if IdleTimeout is longer.
	IdleTimeout time.Duration
	// PreferLeaderOf is the name of a queue. With several endpoints, the client then prefers the
	// node that leads this queue, which saves a network hop per message. The client finds the
	// leader whenever it connects; it doesn't follow later changes. If the queue doesn't exist,
	// or the user can't see it, the client uses any endpoint. Default: no preference.
	PreferLeaderOf string
	// Impersonator declares that the broker's user has the tag "impersonator". Then copies of
	// messages, such as retry copies, keep the user-id of the original publisher. RabbitMQ
	// accepts a foreign user-id only from an impersonator. Default: false, so the original
	// user-id moves to [AnnotationUserID].
	Impersonator bool
	// MaxMessageSize limits the encoded size, in bytes, of one message that the client holds in
	// memory. Use it to limit memory where publishers aren't trusted. A consumer dead-letters a
	// larger message with [ReasonTooLarge], unchanged, after keeping only its first 64 KiB. If
	// the queue isn't known to have a dead-letter exchange, it holds the message until it stops.
	// A call of package rpc fails if its reply is larger. In package stream, Config.Failed decides
	// about a larger message, with the same reason; it can't be copied, so FailedForward stops the
	// consumer. Package desk doesn't apply the limit. Default: 512 MiB, the most that RabbitMQ can be configured to accept; its own
	// limit is 16 MiB by default. See also [ConsumerConfig.PrefetchBytes].
	MaxMessageSize int
	// OnEvent, if not nil, is called for each state change of the connection, its publishers,
	// and its consumers. Calls come one at a time, in order. Nothing waits for them: if more
	// than 1,024 events are queued, the oldest are dropped, and [Event.Dropped] counts them.
	// OnEvent may still be called after Close has returned.
	OnEvent func(Event)
	// Instrument, if not nil, observes each message that is sent and handled, for traces and
	// metrics. Package hopbackotel has one for OpenTelemetry. Default: none, which costs
	// nothing.
	Instrument instrument.Instrument
	// Logger receives what no call returns as an error, such as lost connections and deliveries
	// that couldn't be settled. Log records about a delivery use the ctx that the Instrument
	// returned for its handler. Default: [slog.Default].
	//
	// Consumers limit lines about single messages, which have the attribute message_id. The first
	// of each kind is logged at once, and then every 10 s a line without message_id says how many
	// more there were: more=147 in=10s. A kind is level, message, queue, reason, and the error
	// without numbers and quoted texts. Nothing is left out: a consumer that stops logs the last
	// counts. Lines at debug level aren't limited.
	Logger *slog.Logger
}

// minIdleTimeout exists because the engine sends the broker half of the timeout, as the AMQP
// standard advises, and RabbitMQ closes a connection that asks for half a second without giving
// a reason.
const minIdleTimeout = 2 * time.Second

func (c Config) withDefaults() (Config, error) {
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"ConnectTimeout", c.ConnectTimeout}, {"IdleTimeout", c.IdleTimeout}, {"Reconnect.Min", c.Reconnect.Min}, {"Reconnect.Max", c.Reconnect.Max}} {
		if f.d < 0 {
			return c, argument.New("Config."+f.name, f.d, "is negative", "use a positive duration, or 0 for the default")
		}
	}
	if c.IdleTimeout != 0 && c.IdleTimeout < minIdleTimeout {
		return c, argument.New("Config.IdleTimeout", c.IdleTimeout, "is below 2 s", "use at least 2 s: RabbitMQ refuses less")
	}
	if c.MaxMessageSize < 0 {
		return c, argument.New("Config.MaxMessageSize", c.MaxMessageSize, "is negative", "use a number of bytes, or 0 for the default of 512 MiB")
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
		return c, argument.New("Config.SASL", "OAuth2", "has no token source", "pass a function to client.OAuth2")
	}
	if c.PreferLeaderOf != "" {
		if _, err := address.Queue(c.PreferLeaderOf).Build(); err != nil {
			return c, argument.New("Config.PreferLeaderOf", c.PreferLeaderOf, "is not a queue's name", "set it to the name of a queue, or leave it empty").Because(err)
		}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

// dialing is what a connection is made with.
func (c Config) dialing() link.DialConfig {
	return link.DialConfig{
		Name: c.Name, TLS: c.TLS, Dial: c.Dial, ConnectTimeout: c.ConnectTimeout, IdleTimeout: c.IdleTimeout,
		Impersonator: c.Impersonator, MaxMessageSize: uint64(c.MaxMessageSize), Log: c.Logger,
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

// SASL is a way to log in: [Plain], [External], or [OAuth2]. The zero value logs in with the
// user and password of the URL.
type SASL struct{ login link.Credentials }

// Plain logs in with a user name and a password. Use it to keep the password out of the URL.
func Plain(user, password string) SASL {
	return SASL{link.PlainLogin(user, password)}
}

// External logs in with the client certificate of [Config.TLS]. The broker needs the plugin
// rabbitmq_auth_mechanism_ssl.
func External() SASL { return SASL{link.Credentials{Mechanism: "EXTERNAL"}} }

// Token is an OAuth 2.0 access token. A [TokenSource] returns it.
type Token struct {
	// Value is the token itself, usually a JWT.
	Value string
	// Expires is when the token expires. If it is zero, the client never renews the token.
	Expires time.Time
}

// TokenSource returns a token that is valid now. The client calls it whenever it connects, and
// before a token expires. It may return the same token again while that token is valid, as the
// sources of golang.org/x/oauth2 do.
type TokenSource func(ctx context.Context) (Token, error)

// OAuth2 logs in with access tokens from source. The broker needs the plugin
// rabbitmq_auth_backend_oauth2.
//
// After four fifths of a token's lifetime, the client asks source for the next token, and keeps
// trying until it gets one. RabbitMQ 4.1 and later accept the new token on the open connection.
// RabbitMQ 4.0 closes the connection when the token expires; the client then reconnects with a
// new token.
func OAuth2(source TokenSource) SASL {
	login := link.Credentials{Mechanism: "PLAIN", Oauth2: true}
	if source != nil {
		login.Source = tokens(source)
	}
	return SASL{login}
}

// tokens is a TokenSource for package link.
type tokens TokenSource

func (s tokens) Token(ctx context.Context) (value string, expires time.Time, err error) {
	t, err := s(ctx)
	return t.Value, t.Expires, err
}

// ReconnectBackoff is an exponential backoff with full jitter: the upper limit doubles from Min
// to Max, and each pause is a random time between 0 and that limit. The zero value means the
// defaults, 100 ms and 10 s. It is a struct with two fields, and its method Pause returns the pause after
// that many failures in a row, of a value whose fields are set:
//
//	Min, Max time.Duration
type ReconnectBackoff = backoff.Exponential
